"""``/sleep``, ``/wake_up`` and ``/is_sleeping``, with vLLM's parameters, in the query or in a body."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..http import JSONAnswer
from ..openai.requests import Body, Ignored, Many
from ..service import Service, validated

B = TypeVar("B", bound=Body)


class SleepBody(Body):
    level: Literal[1, 2] = 1
    mode: Ignored = None


class WakeUpBody(Body):
    tags: Annotated[Many[Literal["weights", "kv_cache"]], Field(max_length=2)] | None = None


async def sleep(service: Service, request: Request) -> Response:
    """Give the memory of the workers back until the engine is woken"""
    body = await _asked(service, request, SleepBody)
    await service.engine.sleep(body.level)
    return JSONAnswer({"is_sleeping": service.engine.is_sleeping})


async def wake_up(service: Service, request: Request) -> Response:
    """Take the memory of the workers again"""
    body = await _asked(service, request, WakeUpBody)
    await service.engine.wake_up(body.tags)
    return JSONAnswer({"is_sleeping": service.engine.is_sleeping})


async def is_sleeping(service: Service, request: Request) -> Response:
    """Tell whether the engine sleeps"""
    return JSONAnswer({"is_sleeping": service.engine.is_sleeping})


async def _asked(service: Service, request: Request, kind: type[B]) -> B:
    """Return what a request's query asks for, and if it has none, its body."""
    given: dict[str, Any] = dict(request.query_params)
    service.check_model(given.pop("model", None))  # it says which of several models sleeps
    if not given:
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        return await service.body(request, kind) if has_body else kind()
    if given.get("level") in ("1", "2"):
        given["level"] = int(given["level"])
    if "tags" in given:
        given["tags"] = request.query_params.getlist("tags")
    return validated(kind, given)
