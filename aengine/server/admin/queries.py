"""What a request of vLLM's clients asks for: its query says it, or its body."""

from __future__ import annotations

from typing import Any, TypeVar

from starlette.requests import Request

from ..openai.requests import Body
from ..service import Service, validated

B = TypeVar("B", bound=Body)
_VALUES: dict[str, Any] = {"1": 1, "2": 2, "true": True, "false": False}


async def asked(service: Service, request: Request, kind: type[B]) -> B:
    """Return what a request's query asks for, and if it has none, its body."""
    given: dict[str, Any] = dict(request.query_params)
    service.check_model(given.pop("model", None))  # it says which of several models sleeps
    if not given:
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        return await service.body(request, kind) if has_body else kind()
    given = {name: _VALUES.get(value.lower(), value) for name, value in given.items()}
    if "tags" in given:
        given["tags"] = request.query_params.getlist("tags")
    return validated(kind, given)
