"""A small Hugging Face hub: it answers huggingface_hub's requests to create, fill and read a model repository."""
import base64
import hashlib
import json
from contextlib import contextmanager

from http_server import Handler, serving

TOKEN, COMMIT = "hf_of_the_test", "0123456789" * 4


class Hub(Handler):
    protocol_version = "HTTP/1.1"

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_PUT(self) -> None:
        content, oid = self.body(), self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.objects[oid] = content
        self.answer({})

    def do_POST(self) -> None:
        content, path = self.body(), self.path
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid credentials"}, 401)
        if path == "/api/repos/create":
            repo = json.loads(content)
            self.server.files = {}
            return self.answer({"url": f"{self.server.url}/{repo['organization']}/{repo['name']}"})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/models/org/name/preupload/main":
            return self.answer({"files": [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith((".safetensors", ".pt2")) else "regular",
                 "shouldIgnore": False} for f in json.loads(content)["files"]]})
        if path == "/org/name.git/info/lfs/objects/batch":
            return self.answer({"transfer": "basic", "objects": [
                {**x, "actions": {"upload": {"href": f"{self.server.url}/upload/{x['oid']}"}}}
                for x in json.loads(content)["objects"]]})
        if path == "/api/models/org/name/commit/main":
            for line in map(json.loads, content.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.objects[value["oid"]]
            return self.answer({"commitUrl": f"{self.server.url}/org/name/commit/{COMMIT}", "commitOid": COMMIT,
                                "pullRequestUrl": None})
        self.answer({"error": path}, 404)

    def do_GET(self) -> None:
        place = self.path.partition("?")[0].removeprefix("/org/name/resolve/main/")
        if (content := self.server.files.get(place)) is None:
            return self.answer({"error": place}, 404, X_Error_Code="EntryNotFound")
        self.answer(content, ETag=f'"{hashlib.sha256(content).hexdigest()}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET


@contextmanager
def hub():
    """A server with `url` and, by path, `files` of the repository org/name."""
    with serving(Hub) as server:
        server.files, server.objects = {}, {}
        yield server
