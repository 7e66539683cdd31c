"""The body of an error as OpenAI's clients expect it."""

from __future__ import annotations

from typing import Any

from ..errors import http_error
from ..http import HTTPError, event
from .answers import dumps
from .requests import Body


def error_body(error: HTTPError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_events(body: Body, error: BaseException) -> bytes:
    """Return the last events of a stream that fails; ``body``: what was asked for."""
    return event(dumps(error_body(http_error(error, body)))) + event("[DONE]")
