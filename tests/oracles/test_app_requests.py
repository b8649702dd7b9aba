"""Claims about what `open_clip_mdc app` answers to raw requests that no page sends."""
import http.client
import json
import re
import socket
import struct
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import picture, png, run_folder, wait_for

import open_clip_mdc
from open_clip_mdc.cli import app

pytest.importorskip("gradio")
META = {"_type": "gradio.FileData"}


class Answer:
    """Status, headers and content of the answer to one request to port `port` of this machine."""

    def __init__(self, port: int, method: str, path: str, body: bytes = b"", **headers: str):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": f"127.0.0.1:{port}", "Content-Length": len(body), **headers}.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders(body)
        answer = connection.getresponse()
        self.status, self.headers, self.text = answer.status, answer.headers, answer.read().decode("latin-1")
        connection.close()


def ask(port: int, endpoint: str, *data, **headers) -> Answer:
    """Call an endpoint as gradio's own client does: two requests."""
    body = json.dumps({"data": data}).encode()
    first = Answer(port, "POST", f"/gradio_api/call/{endpoint}", body, Content_Type="application/json", **headers)
    if first.status != 200:
        return first
    return Answer(port, "GET", f"/gradio_api/call/{endpoint}/{json.loads(first.text)['event_id']}", **headers)


def upload(port: int, content: bytes) -> str:
    """Return the path of an upload."""
    body = (b'--X\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
            + content + b"\r\n--X--\r\n")
    answer = Answer(port, "POST", "/gradio_api/upload", body, Content_Type="multipart/form-data; boundary=X")
    return json.loads(answer.text)[0]


def header_of(width: int, height: int) -> bytes:
    """Return a PNG that promises so many pixels and has none."""
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)) + \
        chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return open_clip_mdc.load(run_folder(tmp_path_factory.mktemp("runs") / "run", "MDC-ViT-Ti-8"), device="cpu")


@contextmanager
def served(loaded, folder, host: str = "127.0.0.1"):
    """Yield the port of an app whose uploads go below `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder / "uploads"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        page = app.build(app.Demo(loaded, None))
        try:
            app.launch(page, server_name=host)
            yield page.server_port
        finally:
            page.close()


def changes_nothing(answer: str) -> bool:
    """Return True if an answer leaves the page as it was. The reader of the page gets the reason as a warning."""
    return "event: complete" in answer and set(re.findall(r'"([^"]*)"', answer)) <= {"__type__", "update", "props"}


@pytest.fixture(scope="module")
def port(loaded, tmp_path_factory):
    with served(loaded, tmp_path_factory.mktemp("app")) as port:
        yield port


@pytest.mark.parametrize("endpoint, more", [("caption", []), ("fill", ["a [MASK]"]), ("score", ["a red circle"])])
def test_only_an_upload_is_opened_whatever_the_request_says_of_its_path(port, tmp_path, endpoint, more):
    own = upload(port, png(3))
    uploads = own.rsplit("/", 2)[0]
    secret, link = tmp_path / "secret.png", tmp_path / "link.png"
    picture(secret, 5)
    link.symlink_to(own + "/none")
    for meta in {}, {"meta": META}:
        assert "event: complete" in ask(port, endpoint, {"path": own, **meta}, *more).text
    tried = (secret, f"{uploads}/../../{tmp_path.name}/secret.png", f"file://{secret}", "/dev/zero", "/",
             "/proc/self/mem", tmp_path, tmp_path / "none.png", link, uploads, f"{own}/x", f"{own}x", "", "a\0b",
             "x" * 9000, f"http://127.0.0.1:{port}/gradio_api/file={own}")
    others = ({"meta": {}}, {"meta": {"_type": "other"}}, {"url": "https://example.org/a.png"}, {"url": own, "size": 3},
              {"orig_name": "a.png", "mime_type": "image/png"}, {"is_stream": True})
    (said,) = {ask(port, endpoint, data, *more).text for data in (
        *({"path": str(path)} for path in tried), *({"path": str(secret), **other} for other in others))}
    assert changes_nothing(said)
    said = {ask(port, endpoint, {"path": str(path), "meta": META}, *more).text for path in tried}
    assert all("event: error" in text or changes_nothing(text) for text in said)
    assert not any("rrno" in text or str(tmp_path) in text for text in said)


def test_no_route_tells_whether_a_file_of_the_machine_exists(port, tmp_path):
    picture(tmp_path / "secret.png", 5)
    for route in "/gradio_api/file={}", "/gradio_api/file/{}", "/file={}", "/gradio_api/proxy={}", "/static/{}":
        there, absent = (Answer(port, "GET", route.format(tmp_path / name)) for name in ("secret.png", "absent.png"))
        assert there.status == absent.status >= 400 and there.text == absent.text.replace("absent", "secret")


@pytest.mark.parametrize("route", ["/", "/config", "/gradio_api/info", "/gradio_api/file=x", "/theme.css", "/none",
                                   "/gradio_api/call/caption"])
def test_the_page_answers_to_its_own_names_only(port, route):
    own = (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}")
    others = (f"evil.example:{port}", "evil.example", f"localhost.evil.example:{port}", f"127.0.0.1:{port + 1}",
              "127.0.0.1", f"10.0.0.1:{port}", f"evil@localhost:{port}", f"localhost:{port}:1", f"[::2]:{port}", "",
              f":{port}")
    assert len({Answer(port, "GET", route, **host).status for host in ({}, *({"Host": name} for name in own))}) == 1
    for host in others:
        refused = Answer(port, "GET", route, Host=host, Origin=f"http://{host}")
        assert refused.status == 400 and len(refused.text) < 100


def test_a_page_of_another_site_gets_no_answer(port):
    photo = {"path": upload(port, png(3))}
    for host in f"127.0.0.1:{port}", f"[::1]:{port}":
        assert "complete" in ask(port, "caption", photo, Host=host, Origin=f"http://{host}").text
        for origin in f"http://evil.example:{port}", "null", f"http://127.0.0.1:{port + 1}":
            assert ask(port, "caption", photo, Host=host, Origin=origin).status == 400


def test_an_app_of_all_addresses_answers_to_numbers_and_its_own_name(loaded, tmp_path):
    with served(loaded, tmp_path, "0.0.0.0") as port:
        hosts = {"192.168.7.7": 200, "[fe80::1]": 200, socket.gethostname(): 200, "localhost": 200,
                 "evil.example": 400, "192.168.7.7.evil.example": 400, "[evil]": 400}
        assert {host: Answer(port, "GET", "/config", Host=f"{host}:{port}").status for host in hosts} == hosts


def test_pixels_are_counted_before_they_are_decoded(port):
    assert changes_nothing(ask(port, "caption", {"path": upload(port, header_of(9000, 8000))}).text)


def test_no_command_decodes_more_pixels_than_a_camera_has(loaded, tmp_path):
    for side, said in (13_000, "13000 x 13000 pixels"), (12_000, "truncated|not enough|broken"):
        (tmp_path / "a.png").write_bytes(header_of(side, side))
        with pytest.raises(ValueError, match=said):
            loaded.caption([tmp_path / "a.png"])


def test_uploads_are_deleted_after_a_while(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(app, "KEPT", 2, raising=False)
    with served(loaded, tmp_path) as port:
        photo = upload(port, png(3))
        wait_for(lambda: not any(map(Path.is_file, (tmp_path / "uploads").rglob("*"))))
        assert changes_nothing(ask(port, "caption", {"path": photo}).text)
