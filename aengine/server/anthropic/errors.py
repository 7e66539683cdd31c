"""Errors as Anthropic's clients expect them, and the id of a request, which their header and their body have."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..http import HTTPError, JSONAnswer

REQUEST_ID = "request-id"
"""Name of the header."""

THREAD_UNSUPPORTED = "thread_unsupported_request"
"""Anthropic's code, which its client looks for in the error's details."""

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OVERLOADED = 529


def is_for_anthropic(path: str) -> bool:
    """Return whether a path of the application is one of Anthropic's interface."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def request_id_of(request: Request) -> str:
    """Return the id of a request: the same whenever it is asked for."""
    known: str = request.scope.setdefault("aengine.request_id", f"req_{uuid.uuid4().hex}")
    return known


def answer_error(request: Request, error: HTTPError) -> Response:
    """Return the response for an error that comes before an answer."""
    headers = {**error.headers, REQUEST_ID: request_id_of(request)}
    return JSONAnswer(error_body(request, error), _status(error), headers=headers)


def error_body(request: Request, error: HTTPError) -> dict[str, Any]:
    """Return the body of an error, which is also that of a stream's event."""
    status = _status(error)
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    # Agents know by these words that they have to shorten their conversation.
    prefix = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    shown: dict[str, Any] = {"type": kind, "message": prefix + error.message}
    if error.code == THREAD_UNSUPPORTED:
        shown["details"] = {"error_code": error.code, "unsupported": ["thread"]}
    return {"type": "error", "error": shown, "request_id": request_id_of(request)}


def _status(error: HTTPError) -> int:
    """Return Anthropic's status: a full queue is nobody's rate limit."""
    return _OVERLOADED if error.code == "engine_overloaded" else error.status
