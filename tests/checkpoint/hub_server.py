"""A small Hugging Face hub on 127.0.0.1: the calls that `huggingface_hub` makes to fetch a model, from memory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """Repositories by name; what was asked of it."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str = "hf_right"
    """Opens the gated ones; any other token is refused everywhere, as the hub does."""
    url: str = ""
    downloads: list[str] = field(default_factory=list)
    revisions: list[str] = field(default_factory=list)
    """Of what each request asked for."""

    def commit(self, repo: str) -> str:
        names = "\n".join(f"{name} {len(data)}" for name, data in sorted(self.repositories[repo].items()))
        return hashlib.sha1(names.encode()).hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET(body=False)

        def do_GET(self, body: bool = True) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            api = path.startswith("api/models/")
            owner, name, *rest = path.removeprefix("api/models/").split("/")
            repo = f"{owner}/{name}"
            refusal = self._refusal(repo)
            if refusal:
                self._send(*refusal, body=body)
                return
            files, commit = hub.repositories[repo], hub.commit(repo)
            revision = rest[1] if len(rest) > 1 else "main"
            hub.revisions.append(revision)
            if revision not in ("main", commit):
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body=body)
            elif api and rest[:1] == ["tree"]:
                entries = [
                    {"type": "file", "path": file, "size": len(data), "oid": _oid(data)} for file, data in files.items()
                ]
                self._send(200, json.dumps(entries).encode(), body=body)
            elif api:
                siblings = [
                    {"rfilename": file, "size": len(data), "blobId": _oid(data)} for file, data in files.items()
                ]
                info = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "private": False, "tags": []}
                self._send(200, json.dumps(info).encode(), body=body)
            else:
                file = "/".join(rest[2:])
                if body:
                    hub.downloads.append(file)
                headers = {"ETag": f'"{_oid(files[file])}"', "X-Repo-Commit": commit}
                self._send(200, files[file], headers, body=body)

        def _refusal(self, repo: str) -> tuple[int, bytes, dict[str, str]] | None:
            given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if given and given != hub.token:
                message = "Invalid username or password."
                return 401, json.dumps({"error": message}).encode(), {"X-Error-Message": message}
            if repo not in hub.repositories:
                return 401, b"{}", {"X-Error-Code": "RepoNotFound"}  # the hub does not tell it from a private one
            if repo in hub.gated and not given:
                return 401, b"{}", {"X-Error-Code": "GatedRepo"}
            return None

        def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, *, body: bool) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
