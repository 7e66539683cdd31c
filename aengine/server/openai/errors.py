"""The body of an error as OpenAI's clients expect it."""

from __future__ import annotations

from typing import Any

from ..http import HTTPError

__all__ = ["error_body"]


def error_body(error: HTTPError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}
