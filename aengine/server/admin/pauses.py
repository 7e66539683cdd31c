"""``/pause``, ``/resume`` and ``/reset_prefix_cache``, by vLLM's names."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from ..http import JSONAnswer
from ..openai.requests import Body, Ignored
from ..service import Service
from .queries import asked


class PauseBody(Body):
    """What becomes of the requests so far; see `AsyncLLM.pause`."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = False


class NoBody(Body):
    """Nothing: ``{}``."""

    reset_running_requests: Ignored = None
    reset_external: Ignored = None


async def pause(service: Service, request: Request) -> Response:
    """Let the workers compute nothing until the engine is resumed"""
    body = await asked(service, request, PauseBody)
    is_paused = await service.engine.pause(body.mode)
    if body.clear_cache:
        await service.engine.reset_prefix_cache()
    return JSONAnswer({"status": "paused" if is_paused else service.engine.state})


async def is_paused(service: Service, request: Request) -> Response:
    """Tell whether the engine is paused"""
    return JSONAnswer({"is_paused": service.engine.state == "paused"})


async def resume(service: Service, request: Request) -> Response:
    """Compute again after a pause, and take requests again after a drain"""
    await asked(service, request, NoBody)
    await service.engine.resume()
    return JSONAnswer({"status": service.engine.state})


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """Forget the keys and values of all prompts so far"""
    await asked(service, request, NoBody)
    return JSONAnswer({"num_blocks": await service.engine.reset_prefix_cache()})
