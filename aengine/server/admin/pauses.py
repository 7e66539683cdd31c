"""``/pause``, ``/resume`` and ``/reset_prefix_cache``, by vLLM's names."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from ..http import JSONAnswer
from ..openai.requests import Body, Ignored
from ..service import Service


class PauseBody(Body):
    """What becomes of the requests so far; see `AsyncLLM.pause`."""

    mode: Literal["abort", "wait", "keep"] = "abort"


class NoBody(Body):
    """Nothing: ``{}``."""

    reset_running_requests: Ignored = None
    reset_external: Ignored = None


async def pause(service: Service, request: Request) -> Response:
    """Let the workers compute nothing until the engine is resumed"""
    body = await service.body(request, PauseBody)
    return JSONAnswer({"status": "paused" if await service.engine.pause(body.mode) else service.engine.state})


async def resume(service: Service, request: Request) -> Response:
    """Compute again after a pause, and take requests again after a drain"""
    await service.body(request, NoBody)
    await service.engine.resume()
    return JSONAnswer({"status": service.engine.state})


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """Forget the keys and values of all prompts so far"""
    await service.body(request, NoBody)
    return JSONAnswer({"num_blocks": await service.engine.reset_prefix_cache()})
