"""``/`` and ``/page/...``: the page's own files, which need no key."""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from ..http import HTTPError
from ..service import Service

# Some installers link each file of a package to their cache (uv's --link-mode=symlink, Bazel).
_FILES = StaticFiles(directory=Path(__file__).with_name("static"), follow_symlink=True)
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
    # Browsers keep the page and revalidate it by its tag each time: another version of the engine has another page.
    "cache-control": "no-cache",
}


async def show_page(service: Service, request: Request) -> Response:
    return await _answer(request, "index.html")


async def show_file(service: Service, request: Request) -> Response:
    return await _answer(request, request.path_params["name"])


async def _answer(request: Request, name: str) -> Response:
    try:
        answer = await _FILES.get_response(name, request.scope)
    except HTTPException:
        raise HTTPError(404, f"the page has no file {name[:100]!r}", code="not_found") from None
    answer.headers.update(_HEADERS)
    return answer
