"""A model hub on loopback, as huggingface_hub's HfApi speaks to one: accounts, repositories, large files, commits.

It takes a commit whole or not at all, as the real one does, and refuses at any step that a test names.  Large files
go the way of git LFS; the real hub's other way, Xet, is not played (HF_HUB_DISABLE_XET).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "sEcReT" * 5


@dataclass
class Repo:
    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)  # (sha, files), oldest first

    @property
    def head(self) -> str:
        return self.commits[-1][0]

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][1]

    def commit(self, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits.append((sha, files))
        return sha


@dataclass
class ModelHub:
    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)  # method and path of every request
    refuses: tuple[str, int, str] | None = None  # (what a path holds, status, text)
    loses: str = ""  # this file never appears in a commit

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        self.said.append(f"{method} {path}")
        if self.refuses is not None and self.refuses[0] in f"{method} {path}":
            return self.refuses[1], {"error": self.refuses[2]}
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "type": "user"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.startswith("/blobs/"):
            oid = path.removeprefix("/blobs/")
            assert hashlib.sha256(body).hexdigest() == oid
            self.blobs[oid] = body
            return 200, {}
        if found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            return 200, {"objects": [self._object(each) for each in json.loads(body)["objects"]]}
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|preupload|commit)/(.+))?", path)
        if found is None or found[1] not in self.repos:
            return 404, {"error": "Repository not found"}
        repo = self.repos[found[1]]
        match found[2]:
            case "preupload":
                files = json.loads(body)["files"]
                modes = {each["path"]: _mode(each["path"]) for each in files}
                return 200, {
                    "files": [
                        {"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()
                    ]
                }
            case "commit":
                return self._commit(found[1], repo, [json.loads(line) for line in body.splitlines()])
        return 200, {
            "id": found[1],
            "sha": repo.head,
            "siblings": [{"rfilename": name} for name in sorted(repo.files)],
            "cardData": _head_of(repo.files.get("README.md", b"").decode()),
        }

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.repos:
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        self.repos[name] = Repo(asked.get("visibility") == "private")
        self.repos[name].commit({".gitattributes": b"*.safetensors filter=lfs"})
        return 200, {"url": f"{self.url}/{name}"}

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        known = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] in self.blobs:
            return known
        return known | {"actions": {"upload": {"href": f"{self.url}/blobs/{asked['oid']}"}}}

    def _commit(self, name: str, repo: Repo, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, repo.head):
            return 412, {"error": "The parent commit is not the newest one"}
        files = dict(repo.files)
        for line in lines[1:]:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.blobs[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        files.pop(self.loses, None)
        sha = repo.commit(files)
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{sha}", "commitOid": sha}


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


def _head_of(card: str) -> dict[str, Any]:
    if not card.startswith("---\n"):
        return {}
    lines = card.split("---\n")[1].splitlines()
    return {key: json.loads(value) for key, value in (line.split(": ", 1) for line in lines)}


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    hub = ModelHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.headers.get("authorization") == f"Bearer {TOKEN}" or self.path.startswith("/blobs/"):
                status, answer = hub.answer(self.command, self.path.partition("?")[0], body)
            else:
                status, answer = 401, {"error": f"Invalid credentials {self.headers.get('authorization')}"}
            raw = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            if "error" in answer:
                self.send_header("x-error-message", str(answer["error"]))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = do_PUT = do_HEAD = _any

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
