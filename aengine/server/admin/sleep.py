"""``/sleep``, ``/wake_up`` and ``/is_sleeping``, with vLLM's parameters, in the query or in a body."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..http import JSONAnswer
from ..openai.requests import Body, Ignored, Many
from ..service import Service
from .queries import asked


class SleepBody(Body):
    level: Literal[1, 2] = 1
    mode: Ignored = None


class WakeUpBody(Body):
    tags: Annotated[Many[Literal["weights", "kv_cache"]], Field(max_length=2)] | None = None


async def sleep(service: Service, request: Request) -> Response:
    """Give the memory of the workers back until the engine is woken"""
    body = await asked(service, request, SleepBody)
    await service.engine.sleep(body.level)
    return JSONAnswer({"is_sleeping": service.engine.is_sleeping})


async def wake_up(service: Service, request: Request) -> Response:
    """Take the memory of the workers again"""
    body = await asked(service, request, WakeUpBody)
    await service.engine.wake_up(body.tags)
    return JSONAnswer({"is_sleeping": service.engine.is_sleeping})


async def is_sleeping(service: Service, request: Request) -> Response:
    """Tell whether the engine sleeps"""
    return JSONAnswer({"is_sleeping": service.engine.is_sleeping})
