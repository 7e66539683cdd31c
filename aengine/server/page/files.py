"""``/`` and ``/page/...``: the page's own files, which need no key."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ...engine.threads.pools import run_in_thread
from ..http import HTTPError
from ..service import Service

__all__ = ["show_file", "show_page"]

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Only the page's own files and calls are allowed; no text is read as HTML. What the model says can't become a
    # script, whatever else goes wrong.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Kept by browsers, and asked for by its tag each time: another version of the engine has another page.
    "cache-control": "no-cache",
}


class File(NamedTuple):
    content: bytes
    headers: dict[str, str]
    """Headers of its response, the tag among them."""


@functools.cache
def files() -> dict[str, File]:
    """Read the files, by name. Blocks the first time."""
    return {path.name: _read(path) for path in Path(__file__).with_name("static").iterdir() if path.suffix in _KINDS}


def _read(path: Path) -> File:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    return File(content, _HEADERS | {"content-type": _KINDS[path.suffix], "etag": tag})


async def show_page(service: Service, request: Request) -> Response:
    return await _answer(request, "index.html")


async def show_file(service: Service, request: Request) -> Response:
    return await _answer(request, request.path_params["name"])


async def _answer(request: Request, name: str) -> Response:
    known = await run_in_thread("page", files)
    if name not in known:
        raise HTTPError(404, f"the page has no file {name[:100]!r}", code="not_found")
    file = known[name]
    tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.headers["etag"] in tags:
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)
