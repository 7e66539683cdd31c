"""What `aengine serve` logs: a line for each request, one now and then on the engine, as text or as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, MutableMapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from ..outputs import Usage
    from ..telemetry.metrics import Statistics
    from .serve import Served
    from .several.awake import SumsOfModels

_PROBES = ("/health", "/livez", "/readyz", "/metrics")
_ID_HEADERS = (b"x-request-id", b"request-id")
_RATES = (
    "{prompt_tokens_per_second} prompt and {generated_tokens_per_second} generated tokens/s, {running} running, "
    "{waiting} waiting, {kv_cache_percent} % of the KV cache in use"
)
_USAGE = "aengine.usage"  # key of the usage in a request's scope

access = logging.getLogger("aengine.access")
probes = logging.getLogger("aengine.access.probes")
logger = logging.getLogger("aengine.server")

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime"}


class JSONFormatter(logging.Formatter):
    """Writes a record as one line of JSON: time, level, logger, message, and whatever attributes it has besides."""

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        shown |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, default=str)


def log_to_stderr(level: str, form: str = "text", *, with_probes: bool = True) -> None:
    """Log to stderr from ``level`` on. Of uvicorn's own life only what is wrong: the command line tells the rest.

    Args:
        form: "text", or "json": a JSON object a line.
        with_probes: log requests for /health, /livez, /readyz and /metrics, too.
    """
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JSONFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    probes.disabled = not with_probes
    if level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        logging.getLogger("asyncio").setLevel(logging.WARNING)


def note_usage(request: Request, *answers: Any) -> None:
    """Note whose tokens a request's line tells: streams, or completions, with a ``usage`` each."""
    request.scope[_USAGE] = answers


class AccessLog:
    """Middleware that logs a line for each request, once it is answered: who, what, status, seconds, tokens, id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        log = probes if scope.get("path", "").rstrip("/").endswith(_PROBES) else access
        if scope["type"] != "http" or not log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        seen: dict[str, Any] = {"status": 499, "request_id": None, "is_whole": False}

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = dict(message.get("headers", ()))
                seen["status"] = message["status"]
                seen["request_id"] = next((headers[name].decode() for name in _ID_HEADERS if name in headers), None)
            await send(message)
            seen["is_whole"] = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, send_noting)
        finally:
            _write(log, scope, seen, time.perf_counter() - begun)


def _write(log: logging.Logger, scope: MutableMapping[str, Any], seen: dict[str, Any], seconds: float) -> None:
    usages: list[Usage] = [answer.usage for answer in scope.get(_USAGE, ())]
    fields = {
        "client": "{}:{}".format(*scope["client"]) if scope.get("client") else "-",
        "method": scope["method"],
        "path": quote(scope["path"]),  # quoted, so that it can't begin a line of its own
        "status": seen["status"],
        "seconds": round(seconds, 4),
        "request_id": seen["request_id"],
    }
    text = "{client} {method} {path} {status} in {seconds:.3f} s".format(**fields)
    if usages:
        fields["prompt_tokens"] = sum(usage.prompt_tokens for usage in usages)
        fields["generated_tokens"] = sum(usage.completion_tokens for usage in usages)
        text += ", {prompt_tokens} prompt and {generated_tokens} generated tokens".format(**fields)
    if fields["request_id"]:
        text += ", {request_id}".format(**fields)
    if not seen["is_whole"] and seen["status"] != 499:
        fields["status"] = 499
        text += ", the client left"
    log.info("%s", text, extra=fields)


@contextlib.asynccontextmanager
async def reported(engine: Served, seconds: float) -> AsyncIterator[None]:
    """Log what the engine does every ``seconds`` in which it does anything, inside the context; 0: never."""
    reporting = asyncio.create_task(_report(engine, seconds)) if seconds else None
    try:
        yield
    finally:
        if reporting is not None:
            reporting.cancel()
            await asyncio.wait([reporting])


async def _report(engine: Served, seconds: float) -> None:
    before, then = engine.statistics(), time.perf_counter()
    while True:
        await asyncio.sleep(seconds)
        numbers, now = engine.statistics(), time.perf_counter()
        if (fields := rates(before, numbers, now - then)) is not None:
            logger.info("%s", _RATES.format(**fields), extra=fields)
        before, then = numbers, now


def rates(
    before: Statistics | SumsOfModels, numbers: Statistics | SumsOfModels, seconds: float
) -> dict[str, float] | None:
    """Return what an engine did between two statistics; None: nothing."""
    # The counters of an engine that was closed begin anew when it is started again.
    num_prompt = max(0, numbers.prompt_tokens - before.prompt_tokens)
    num_generated = max(0, numbers.generated_tokens - before.generated_tokens)
    used = numbers.num_blocks - numbers.num_free_blocks
    if not (num_prompt or num_generated or numbers.num_running or numbers.num_waiting):
        return None
    return {
        "prompt_tokens_per_second": round(num_prompt / seconds, 1),
        "generated_tokens_per_second": round(num_generated / seconds, 1),
        "running": numbers.num_running,
        "waiting": numbers.num_waiting,
        "kv_cache_percent": round(100 * used / max(1, numbers.num_blocks), 1),
    }
