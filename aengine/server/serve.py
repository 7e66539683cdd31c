"""`serve_app`: an application on a socket by uvicorn, until it is told to stop.

stop ──> no new connections, `engine.drain` ──> `engine.abort_all` ──> connections of slow readers are cut ──> return
     0                                      grace - 1 s             grace
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from ..errors import AEngineError, EngineError

if TYPE_CHECKING:
    from ..async_llm import AsyncLLM
    from ..remote import RemoteEngine

__all__ = [
    "BACKLOG",
    "StopSignals",
    "keep_loaded_objects",
    "log_to_stderr",
    "serve_app",
    "stop_signals",
    "until_stopped",
]

BACKLOG = 2048
"""Connections that wait to be accepted."""
_KEEP_ALIVE_SECONDS = 75
"""More than a load balancer keeps an idle connection, 60 s as a rule: it must not use one that is closed here."""
_WATCH_SECONDS = 0.5
_LAST_SECONDS = 1.0
"""Seconds of the grace in which answers that were cut short can be read."""


class StopSignals:
    """``asked``: a first SIGTERM or SIGINT has come; ``insisted``: a second one."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def note(self) -> None:
        (self.insisted if self.asked.is_set() else self.asked).set()


@contextlib.contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Within: SIGTERM and SIGINT are noted, and do nothing else. In the main thread only."""
    loop = asyncio.get_running_loop()
    stop = StopSignals()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.note)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """uvicorn's server; signals are the caller's."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()

    def cut(self) -> None:
        """Close all connections. Their requests see that the client has left."""
        for connection in list(self.server_state.connections):
            if (transport := connection.transport) is not None:
                transport.abort()


async def serve_app(
    app: Any,
    engine: AsyncLLM | RemoteEngine,
    listener: socket.socket,
    *,
    stop: asyncio.Event,
    grace: float = 15.0,
    root_path: str = "",
    access_log: bool = True,
) -> None:
    """Serve an application over a running engine, until ``stop`` is set; then end within ``grace`` seconds.

    Args:
        listener: bound; it is closed at the end.
        grace: seconds for running requests to end by themselves. What is left is then aborted: a stream ends properly,
            with finish reason "length".

    Raises:
        EngineError: the engine has failed.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=access_log,
        root_path=root_path,
        backlog=BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        ws="none",
        lifespan="off",  # the engine runs, and is the caller's
        server_header=False,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    watching = asyncio.create_task(until_stopped(engine, stop))
    try:
        await asyncio.wait([serving, watching], return_when=asyncio.FIRST_COMPLETED)
        deadline = asyncio.get_running_loop().time() + grace
        server.should_exit = True
        await _wind_down(engine, grace)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await asyncio.wait([serving])
    finally:
        watching.cancel()
        if not serving.done():
            server.should_exit = True
            server.cut()
            await asyncio.wait([serving], timeout=_LAST_SECONDS)
            server.force_exit = True  # whatever an application still does
            await asyncio.wait([serving])
    serving.result()
    if engine.state == "failed":
        raise EngineError("the engine has failed: its log says why")


async def until_stopped(engine: AsyncLLM | RemoteEngine, stop: asyncio.Event) -> None:
    """Wait until ``stop`` is set, or the engine has failed."""
    while not stop.is_set() and engine.state != "failed":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WATCH_SECONDS):
                await stop.wait()


async def _wind_down(engine: AsyncLLM | RemoteEngine, grace: float) -> None:
    """Let the engine's requests end by themselves for most of ``grace`` seconds, then abort them."""
    with contextlib.suppress(AEngineError):  # it has failed, and so have they
        if not await engine.drain(max(0.0, grace - min(_LAST_SECONDS, grace / 2))):
            engine.abort_all()


def keep_loaded_objects() -> None:
    """Exempt what is loaded by now from garbage collection, in a process that is a server and nothing else: a full
    collection, for which the loop stands still, then takes a millisecond, not tens."""
    gc.collect()
    gc.freeze()


def log_to_stderr(level: str) -> None:
    """Log to stderr from ``level`` on. Of uvicorn's own life only what is wrong: the command line tells the rest."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if level != "debug":
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        logging.getLogger("asyncio").setLevel(logging.WARNING)
