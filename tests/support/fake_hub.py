"""A hub on the loopback interface: the routes that huggingface-hub asks for one model, from files in memory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
OLD_COMMIT = "b" * 40


class FakeHub:
    """Serves `org/tiny` at branch `main` (`files`) and tag `v1` (`old_files`); `org/gated` is gated, others unknown.

    Attributes:
        requests: method and path of everything that was asked for.
        status: answered to everything instead, when it is not 0.
    """

    def __init__(self, files: dict[str, bytes], old_files: dict[str, bytes] | None = None) -> None:
        self.commits = {COMMIT: files, OLD_COMMIT: old_files if old_files is not None else files}
        self.revisions = {"main": COMMIT, "v1": OLD_COMMIT, COMMIT: COMMIT, OLD_COMMIT: OLD_COMMIT}
        self.requests: list[str] = []
        self.status = 0
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[FakeHub]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, format: str, *args: Any) -> None:
                hub.requests.append(f"{self.command} {self.path}")

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        status, headers, content = self._route(unquote(urlsplit(request.path).path))
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if body:
            request.wfile.write(content)

    def _route(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if self.status:
            return self.status, {}, b"{}"
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repository, rest = ("/".join(parts[2:4]), parts[4:]) if api else ("/".join(parts[:2]), parts[2:])
        if repository == "org/gated":
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if repository != "org/tiny":
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit = self.revisions.get(rest[1] if len(rest) > 1 else "main")
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = self.commits[commit]
        if api and rest[:1] == ["tree"]:
            return 200, {}, json.dumps([{"type": "file", **self._entry(name, files)} for name in files]).encode()
        if api:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            return 200, {}, json.dumps({"id": repository, "sha": commit, "siblings": siblings}).encode()
        name = "/".join(rest[2:])
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"{}"
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{self._entry(name, files)["oid"]}"'}, files[name]

    @staticmethod
    def _entry(name: str, files: dict[str, bytes]) -> dict[str, Any]:
        return {"path": name, "size": len(files[name]), "oid": hashlib.sha1(files[name]).hexdigest()}
