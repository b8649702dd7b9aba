"""Claims about downloads, from a server on this machine."""
import gzip
import hashlib
import io
import os
import re
import shlex
import subprocess
import uuid
import zipfile
from pathlib import Path

import pytest
import requests
from conftest import complaint_of, run_tool
from http_server import Handler, serving
from strategies import tar

from open_clip_mdc import cli
from open_clip_mdc.cli import arguments as flags
from open_clip_mdc.cli import fetch

CONTENT = bytes(range(256)) * 20_000
CHECKSUM = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


class Server(Handler):
    """A server that breaks off the first `cuts` answers after `cut` bytes, and records all requests.

    With `signed` it redirects each request to another address. With `shift` it begins that many bytes too late.
    """

    cuts, cut, ranges, asked, etag, signed, shift = 0, 3_000_000, True, [], "one", False, 0

    def do_GET(self):
        kind = type(self)
        if self.path == "/none":
            return self.send_error(404)
        if kind.signed and "?" not in self.path:
            self.send_response(302)
            self.send_header("Location", f"{self.path}?signature={uuid.uuid4().hex}")
            self.send_header("Content-Length", 0)
            return self.end_headers()
        start = int(self.headers["Range"][6:-1]) if self.headers.get("Range") and kind.ranges else 0
        kind.asked.append(start)
        if start == len(CONTENT):
            return self.send_error(416)
        cut = kind.cut if kind.cuts else None  # before the answer, which lets the next question come
        kind.cuts -= bool(kind.cuts and len(kind.asked) > 1)  # the first question is about the headers
        self.send_response(206 if start else 200)
        if start:
            start = min(start + kind.shift, len(CONTENT))
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", len(CONTENT) - start)
        self.send_header("ETag", kind.etag)
        self.end_headers()
        try:
            self.wfile.write(CONTENT[start:][:cut])
        except ConnectionError:  # who only wants the headers closes
            pass


@pytest.fixture
def server(monkeypatch):
    """The handler, its address, and the row of a data set there."""
    handler = type("Handler", (Server,), {"asked": []})
    with serving(handler) as service:
        handler.url = f"{service.url}/file.zip"
        file = fetch.File(handler.url, "5 MB", CHECKSUM)
        monkeypatch.setitem(fetch.SOURCES, "coco", fetch.Source("CC BY 4.0", (file,), ("unzip OUT/file.zip",)))
        monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
        yield handler


def get(out, *argv) -> str | None:
    """The tool's complaint, None if it has none."""
    return complaint_of("fetch", "coco", "--out", out, *argv)


def get_whole(out: Path) -> None:
    assert get(out) is None
    assert (out / "file.zip").read_bytes() == CONTENT


def test_a_file_comes_whole_and_is_not_fetched_again(server, tmp_path, capsys):
    get_whole(tmp_path / "new/coco")
    printed = capsys.readouterr().out
    assert "licence: CC BY 4.0" in printed and f"unzip {tmp_path}/new/coco/file.zip" in printed
    asked = len(server.asked)
    assert get(tmp_path / "new/coco") is None and len(server.asked) == asked
    assert [p.name for p in (tmp_path / "new/coco").iterdir()] == ["file.zip"]


def test_a_connection_that_breaks_off_resumes_where_it_was(server, tmp_path):
    server.cuts, server.cut = 2, 2 ** 21
    get_whole(tmp_path)
    assert server.asked == [0, 0, 2 ** 21, 2 ** 22]


def test_what_came_is_kept_for_the_next_run_unless_the_servers_file_is_another(server, tmp_path, monkeypatch):
    server.cuts, server.cut = 100, 0
    assert "broke off 5 times at byte 0: run the same command to resume" in get(tmp_path)
    server.cut, server.asked = 2 ** 20, []
    monkeypatch.setattr(fetch, "TRIES", 1)
    monkeypatch.setattr(fetch, "append", cut_after(fetch.append, 3))
    complaint = get(tmp_path)
    assert "at byte 3145728" in complaint and "\n" not in complaint
    assert not (tmp_path / "file.zip").exists()
    monkeypatch.undo()
    file = fetch.File(server.url, "", CHECKSUM)
    server.cuts, server.asked = 0, []
    fetch.download(file, tmp_path)
    assert server.asked == [0, 3 * 2 ** 20] and (tmp_path / "file.zip").read_bytes() == CONTENT
    (tmp_path / "file.zip").rename(tmp_path / f".file.zip.{'0' * 12}.part")  # of another file
    server.etag, server.asked = "two", []
    fetch.download(file, tmp_path)
    assert server.asked == [0, 0] and (tmp_path / "file.zip").read_bytes() == CONTENT


def test_a_download_resumes_behind_an_address_that_is_signed_anew_each_time(server, tmp_path, monkeypatch):
    """As of GitHub's releases. What earlier runs left of the file goes when it is whole."""
    server.signed, server.cuts, server.cut = True, 1, 2 ** 20
    (tmp_path / f".file.zip.{'0' * 12}.part").write_bytes(b"left")
    (tmp_path / f".other.zip.{'0' * 12}.part").write_bytes(b"left")
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "TRIES", 1)
        patch.setattr(fetch, "append", cut_after(fetch.append, 1))
        assert "at byte 1048576" in get(tmp_path)
    server.asked.clear()
    get_whole(tmp_path)
    assert server.asked == [0, 2 ** 20]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".other.zip.{'0' * 12}.part", "file.zip"]


def test_an_answer_that_begins_elsewhere_is_not_appended(server, tmp_path):
    server.cuts, server.cut, server.shift = 1, 2 ** 20, 2 ** 10
    get_whole(tmp_path)
    assert server.asked == [0, 0, 2 ** 20, 0]


def cut_after(append, times: int):
    """`append`, which after so many answers finds the line dead."""
    calls = []

    def dying(*args):
        calls.append(args)
        if len(calls) > times:
            raise requests.ConnectionError("dead")
        append(*args)
    return dying


def test_a_server_without_ranges_sends_all_of_it_again(server, tmp_path):
    server.cuts, server.ranges = 1, False
    get_whole(tmp_path)
    assert server.asked == [0, 0, 0]


def test_a_wrong_checksum_and_a_missing_file_are_one_line_and_leave_nothing(server, tmp_path, monkeypatch):
    wrong = fetch.File(server.url, "", "md5:" + "0" * 32)
    missing = fetch.File(server.url.replace("file.zip", "none"))
    for file, words in ((wrong, "has the md5 "), (missing, "404")):
        monkeypatch.setitem(fetch.SOURCES, "coco", fetch.Source("any", (file,)))
        complaint = get(tmp_path)
        assert complaint.startswith("error: ") and words in complaint and "\n" not in complaint
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", fetch.SOURCES)
def test_print_says_what_there_is_and_fetches_nothing(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(requests, "get", lambda *args, **kwargs: pytest.fail("a download"))
    run_tool(["fetch", name, "--out", tmp_path / "x", "--print"])
    printed = capsys.readouterr().out
    assert printed.startswith("licence: ") and not list(tmp_path.iterdir())
    assert "OUT" not in printed and "{out}" not in printed
    for url in re.findall(r"https?://\S+", printed):
        assert re.fullmatch(r"https?://[\w.-]+/[\w./-]+[;,]?", url), url
    for command in re.findall(r"^open_clip_mdc (.*)", printed, re.MULTILINE):
        assert cli.parse(shlex.split(command)).tool == "prepare"


@pytest.mark.parametrize("out", ["my data; touch P", "a\ntouch P\n'b", "\x1b[2J\u202e \udcff"])
def test_the_commands_run_for_any_folder(out, tmp_path, capsys):
    run_tool(["fetch", "coco", "--out", out, "--print"])
    commands = capsys.readouterr().out.splitlines()[-2:]
    (tmp_path / out).mkdir()
    for name in "a.zip", "b c.zip":
        (tmp_path / out / name).touch()
    said = subprocess.run(["bash", "-c", 'unzip() { printf "%s\\0" "$@"; }; open_clip_mdc() { unzip "$@"; };' +
                           "\n".join(commands)], cwd=tmp_path, capture_output=True, check=True).stdout
    own = [os.fsdecode(word) for word in said.split(b"\0")]
    assert own[:8] == ["-q", "-d", out, f"{out}/a.zip", "-q", "-d", out, f"{out}/b c.zip"]
    assert own[8:13] == ["prepare", "coco", "--images", out, "--annotations"]
    assert [path.name for path in tmp_path.iterdir()] == [out]


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("a", "a")
    return buffer.getvalue()


@pytest.mark.parametrize("kind, right", [("zip", zipped()), ("tgz", gzip.compress(tar({"a": b""}))),
                                         ("json", b'[{"a": 1}]'), ("tsv", b"http://a/b.jpg\ta dog\n")],
                         ids=tuple(fetch.KINDS))
def test_an_answer_of_another_kind_is_no_file(kind, right, tmp_path):
    answers = {}

    class Answering(Handler):
        def do_GET(self):
            self.send_response(*answers["status"])
            for header in answers["headers"]:
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(answers["body"])

    def fetched(body: bytes, *headers: tuple, status: int = 200) -> Path:
        answers.update(body=body, headers=headers or [("Content-Length", len(body))], status=[status])
        return fetch.download(fetch.File(f"{service.url}/file.{kind}"), tmp_path)

    with serving(Answering) as service:
        for body in b"<html>\t<p>moved</p></html>", b"<!doctype html>\n", b"", b"quota exceeded", right[:5]:
            with pytest.raises(ValueError, match=rf"file.{kind} is no .{kind} file: it begins with b.*run the same"):
                fetched(body)
        with pytest.raises(ValueError, match=rf"{service.url}/file.{kind} answers with a Content-Length of 'abc'"):
            fetched(right, ("Content-Length", "abc"))
        for elsewhere in "file:///etc/passwd", "ftp://a/b", f"{service.url}/file.{kind}":  # the last for ever
            with pytest.raises(ValueError, match=rf"{service.url}/file.{kind} sends on to an address that cannot"):
                fetched(b"", ("Location", elsewhere), ("Content-Length", 0), status=302)
        assert not list(tmp_path.iterdir())
        assert fetched(right).read_bytes() == right
        (tmp_path / f"file.{kind}").write_bytes(b"<html>")
        with pytest.raises(ValueError, match=rf"file.{kind} is no .{kind} file.*remove it"):
            fetched(right)


def test_each_kind_of_file_of_the_table_is_known():
    assert {Path(file.name).suffix for source in fetch.SOURCES.values() for file in source.files} <= set(fetch.KINDS)


def test_the_flag_names_the_rows_of_the_table():
    assert tuple(fetch.SOURCES) == flags.FETCHED
    for source in fetch.SOURCES.values():
        for file in source.files:
            algorithm, _, checksum = (file.checksum or "md5:" + "0" * 32).partition(":")
            assert len(checksum) == 2 * hashlib.new(algorithm).digest_size and re.fullmatch("[0-9a-f]+", checksum)
