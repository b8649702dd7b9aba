"""A judge for tests: an HTTP server on this machine, with images and captions to judge."""
import base64
import json
import threading
import time
from pathlib import Path

from conftest import complaint_of, picture, read_json, write_json
from http_server import Handler, serving

KEY = "sk-judge-test-1234567890"


class Judge(Handler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: no waiting for the acknowledgement of the first

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = {"path": self.path, "key": self.headers.get("Authorization"), "time": time.monotonic(), **body}
        with self.server.lock:
            self.server.requests.append(request)
            status, headers, answer = self.server.reply(self.server, request)
        if status == 200 and not isinstance(answer, bytes):
            answer = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
        self.answer(answer, status, **headers)


def server(monkeypatch):
    """A fixture, as is `data`: its `reply(server, request) -> (status, headers, answer)` is set by the test."""
    with serving(Judge) as server:
        server.lock, server.requests = threading.Lock(), []
        server.url += "/v1"
        for name, value in {"OPENAI_BASE_URL": server.url, "OPENAI_MODEL": "the-judge", "OPENAI_API_KEY": KEY,
                            "NO_PROXY": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        yield server


def write_captions(path: Path, captions: dict) -> str:
    write_json(path, {"model": "x", "captions": captions})
    return f"{path.stem}={path}"


def data(tmp_path):
    """Images and captions of N ids by systems: the arguments of the command."""

    def make(count, *names, caption="{name} {i}"):
        for i in range(count):
            picture(tmp_path / f"images/{i}.png", i)
        files = [write_captions(tmp_path / f"{name}.json",
                                {str(i): caption.format(name=name, i=i) for i in range(count)}) for name in names]
        return ["judge", "--images", tmp_path / "images", "--out", tmp_path / "judge.jsonl", "--captions", *files]

    return make


def image_of(request: dict) -> bytes:
    """The bytes that a request shows."""
    url = request["messages"][0]["content"][0]["image_url"]["url"]
    head, _, content = url.partition(",")
    assert head == "data:image/png;base64"
    return base64.b64decode(content, validate=True)


def choices(request: dict) -> dict[str, str]:
    """{letter: caption} of a request."""
    return dict(line.split(". ", 1) for line in request["messages"][0]["content"][1]["text"].splitlines()[1:])


def choose(text: str):
    """A judge that takes the caption with this text in it."""
    return lambda server, request: (200, {}, next(k for k, caption in choices(request).items() if text in caption))


def always(answer, status=200, **headers):
    return lambda server, request: (status, headers, answer)


def results(tmp_path) -> dict:
    return read_json(tmp_path / "judge.json")


def failure(arguments: list) -> str:
    """The one line with which the command ends."""
    message = str(complaint_of(*arguments))
    assert message.startswith("error: ") and "\n" not in message
    return message
