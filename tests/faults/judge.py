"""A judge server that lies, stalls or breaks off: votes are valid or malformed, or the run ends in one line.

The server's answers are drawn for each image. Each stands beside the vote that it should count as.
"""
import gzip
import json
import socket
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from itertools import count
from pathlib import Path

import captions
from http_server import serving
from world import JUDGE, SKIPPED, Cases, World, check_json, first

IMAGES = 6


def completion(answer: object) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": answer}}]}).encode()


# Name: (status, headers, body), and whether each image then has a vote (True), a malformed answer (False), or the run
# ends in a line (None).
LIES = {
    "A": ((200, {}, completion("A")), True), "a letter that is not there": ((200, {}, completion("H")), False),
    "an empty answer": ((200, {}, completion("")), False), "both": ((200, {}, completion("A and B")), False),
    "null": ((200, {}, completion(None)), False), "a number": ((200, {}, completion(3)), None),
    "a list": ((200, {}, completion([{"type": "text", "text": "A"}])), None),
    "control characters": ((200, {}, completion("\x1b[2J\0\ud800")), False),
    "a long answer": ((200, {}, completion("B " * 10_000)), True), "no JSON": ((200, {}, b"<html>502</html>"), None),
    "NaN": ((200, {}, b'{"choices": NaN}'), None), "no choices": ((200, {}, b'{"choices": []}'), None),
    "depth": ((200, {}, b"[" * 200_000), None), "digits": ((200, {}, b"1" * 10_000), None),
    "no UTF-8": ((200, {}, b'{"choices": [{"message": {"content": "\xff\xfe"}}]}'), None),
    "an error within 200": ((200, {}, b'{"error": {"message": "overloaded"}}'), None),
    "unauthorised": ((401, {}, b'{"error": "who are you?"}'), None), "not there": ((404, {}, b""), None),
    "too many": ((429, {"Retry-After": "0"}, b""), None), "broken": ((500, {}, b"<html>"), None),
    "a redirect": ((302, {"Location": "http://127.0.0.1:9/"}, b""), None), "an odd status": ((999, {}, b""), None),
    "no content": ((204, {}, b""), None), "not gzip": ((200, {"Content-Encoding": "gzip"}, b"no gzip"), None),
    "a gzip bomb": ((200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(400_000_000))), None),
    "a negative length": ((200, {"Content-Length": "-5"}, completion("A")), True),  # http.client reads to the end
    "cut": ((200, {"Content-Length": "9999"}, completion("A")[:20]), None),
    "hang up": ("close", None), "stall before": ("sleep", None), "stall within": ("half", None),
    "a byte now and then": ("drip", None), "no end": ("endless", None), "no HTTP": ("noise", None),
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        reply = self.server.reply(next(self.server.numbers))
        if isinstance(reply, str):
            return getattr(self, reply)()
        status, headers, body = reply
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def begin(self, length: int = 10 ** 9) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def close(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)

    def sleep(self) -> None:
        time.sleep(3600)

    def half(self) -> None:
        self.begin()
        self.wfile.write(b'{"choices"')
        time.sleep(3600)

    def drip(self) -> None:
        self.begin()
        while True:
            self.wfile.write(b" ")
            time.sleep(0.2)

    def endless(self) -> None:
        self.begin(10 ** 15)
        while True:
            self.wfile.write(b" " * 1_000_000)

    def noise(self) -> None:
        self.wfile.write(b"\x16\x03\x01 no HTTP\r\n\r\n")
        self.close_connection = True

    def log_message(self, *args):
        pass


@contextmanager
def server(reply):
    """Run a server that answers with `reply(number of the request)`. Yields its address."""
    with serving(Handler) as http:
        http.reply, http.numbers, http.handle_error = reply, count(), lambda *_: None
        yield f"{http.url}/v1"


def impatient() -> None:
    """Shorten the waits that take minutes in real use."""
    from experiments import judge
    judge.TIMEOUT_SECONDS, judge.RETRIES = (1, 2), 1
    if hasattr(judge, "ANSWER_SECONDS"):
        judge.ANSWER_SECONDS = 4


def ask(world: World, folder: Path, url: str, systems: list[str], out: str = "j.jsonl"):
    return world.call(JUDGE, "--captions", *systems, "--images", "images", "--url", url, "--model", "m", "--out",
                      out, cwd=folder, timeout=90, prepare=impatient)


def write_systems(world: World, folder: Path, number: int, texts: list[str] | None = None) -> list[str]:
    (folder / "images").mkdir(exist_ok=True)
    for i in range(number):
        (folder / "images" / f"{i}.png").write_bytes(world.samples[i % len(world.samples)][0])
    for name in ("x", "y"):
        (folder / f"{name}.json").write_text(json.dumps({"captions": {
            str(i): f"{texts[i] if texts else ''} {name}{i}" for i in range(number)}}))
    return ["x=x.json", "y=y.json"]


def lies(world: World) -> Cases:
    """Give each kind of answer to all images, and to every second one after an honest answer. Then answer honestly."""
    names = list(LIES)[:max(4, world.args.broken * len(LIES) // 20)]
    for name in names:
        reply, worth = LIES[name]
        for every in (1, 2):
            folder = world.fresh("judge/lies")
            systems = write_systems(world, folder, IMAGES)
            with server(lambda i, every=every, reply=reply: reply if i % every == every - 1 else
                        LIES["A"][0]) as url:
                ended = ask(world, folder, url, systems)
            result = json.loads((folder / "j.json").read_text()) if (folder / "j.json").exists() else None
            problem = first(ended.problem(), check_json(folder))
            if not problem and worth is None:
                problem = None if ended.code else "it ended well"
            elif not problem:
                votes = IMAGES if worth else IMAGES - IMAGES // every
                counted = (result or {}).get("judged"), (result or {}).get("malformed")
                problem = first(ended.problem(0 if votes else 1), None if counted == (votes, IMAGES - votes) else
                                f"counted {counted}: {ended.last_line()[:200]}")
            yield f"{name}, to every {every}.", problem
            with server(lambda _: LIES["A"][0]) as url:
                ended = ask(world, folder, url, systems)
            rows = [json.loads(line)["id"] for line in (folder / "j.jsonl").read_text().splitlines()[1:]] if (
                folder / "j.jsonl").exists() else []
            yield f"honest after {name}, to every {every}.", first(
                ended.problem(None if worth is False else 0), check_json(folder),
                None if sorted(rows) == [str(i) for i in range(IMAGES)] else f"rows {sorted(rows)}")
    with server(lambda _: LIES["A"][0]) as url:
        port = int(url.split(":")[2].partition("/")[0])
    folder = world.fresh("judge/nobody")
    yield "nobody is there", ask(world, folder, f"http://127.0.0.1:{port}/v1", write_systems(
        world, folder, 2)).problem(1)
    for url in ("http://", "no address", "ftp://127.0.0.1/v1", "http://[::1/v1", "http://a b/v1"):
        yield f"the address {url!r}", ask(world, folder, url, ["x=x.json", "y=y.json"], "u.jsonl").problem(1)


def texts(world: World) -> Cases:
    """Hostile captions reach the server, each in one line of the question, and every image has a vote."""
    folder, hostile = world.fresh("judge/captions"), [*captions.hostile(world), "\ud800"]
    if not hostile:
        yield "captions", f"{SKIPPED}none were asked for"
    systems = write_systems(world, folder, len(hostile), hostile)
    with server(lambda _: LIES["A"][0]) as url:
        ended = world.call(JUDGE, "--captions", *systems, "--images", "images", "--url", url, "--model", "m",
                           "--out", "j.jsonl", cwd=folder, timeout=1200)
    result = json.loads((folder / "j.json").read_text()) if (folder / "j.json").exists() else {}
    yield from captions.for_all(hostile, first(ended.problem(0), check_json(folder), None if result.get(
        "judged") == len(hostile) else f"judged {result.get('judged')} of {len(hostile)}"))


PARTS = {"judge: lies, stalls and cuts": lies, "judge: hostile captions": texts}
