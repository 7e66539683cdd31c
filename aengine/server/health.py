"""``/health``, ``/livez``, ``/readyz`` and ``/version``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from ..__version__ import __version__
from ..errors import AEngineError
from .errors import http_error
from .http import JSONAnswer

if TYPE_CHECKING:
    from ..async_llm import AsyncLLM
    from .service import Service

_TIMEOUT = 5.0
"""Seconds for the worker to answer a ping."""


class Health:
    """Asks whether the engine can answer. However many ask at once, the worker gets one ping."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._ping: asyncio.Task[str | None] | None = None

    async def problem(self) -> str | None:
        """Return why the engine can't answer; None: it can."""
        if self._engine.state == "asleep" and self._engine.config.when_asleep == "wake":
            return None
        if self._engine.state != "running":
            return f"the engine is {self._engine.state}"
        here = asyncio.get_running_loop()
        if self._ping is None or self._ping.done() or self._ping.get_loop() is not here:
            self._ping = asyncio.create_task(self._ask())
        return await asyncio.shield(self._ping)  # the client that asked first may leave before the others

    async def _ask(self) -> str | None:
        try:
            await self._engine.check_health(_TIMEOUT)
        except AEngineError as error:
            return http_error(error).message
        return None


async def health(service: Service, request: Request) -> Response:
    """Answer 200 while the engine takes requests and its worker answers, else 503 with the reason."""
    problem = await service.health.problem()
    if problem is None:
        return JSONAnswer({"status": "ok"})
    return JSONAnswer({"status": "unavailable", "reason": problem}, 503, headers={"retry-after": "1"})


async def livez(service: Service, request: Request) -> Response:
    """Answer 200 unless the engine has failed or is closed for good, also while a worker is replaced."""
    state = service.engine.state
    return JSONAnswer({"status": state}, 503 if state in ("failed", "closed") else 200)


async def version(service: Service, request: Request) -> Response:
    """Answer with the version of aengine."""
    return JSONAnswer({"version": __version__})
