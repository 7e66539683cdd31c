"""Interfaces that clients know, and that this engine does not have yet."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..http import HTTPError
from ..service import Service

__all__ = ["no_pooling"]


async def no_pooling(service: Service, request: Request) -> Response:
    """Refuse embeddings, reranking and scores."""
    raise HTTPError(
        501,
        f"{request.url.path} is not implemented: the engine generates text, and has no pooling models yet",
        kind="not_implemented_error",
        code="not_implemented",
        headers={"x-should-retry": "false"},  # OpenAI's client tries again otherwise, as for any 5xx
    )
