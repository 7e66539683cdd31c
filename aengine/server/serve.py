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
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import uvicorn

from ..errors import AEngineError, EngineError
from ..outputs import ALIVE_STATES
from .logs import AccessLog

if TYPE_CHECKING:
    from ..async_llm import AsyncLLM
    from .several.awake import AwakeModels

Served: TypeAlias = "AsyncLLM | AwakeModels"
"""What an application serves."""

logger = logging.getLogger("aengine.server")

BACKLOG = 2048
"""Connections that wait to be accepted."""
_KEEP_ALIVE_SECONDS = 75
"""More than a load balancer keeps an idle connection, 60 s as a rule: it must not use one that is closed here."""
_WATCH_SECONDS = 0.5
_LAST_SECONDS = 1.0
"""Seconds of the grace in which answers that were cut short can be read, and as many to close in; of a short grace, a
quarter each."""


class StopSignals:
    """``asked``: a first SIGTERM or SIGINT has come, ``asked_at`` by the loop's clock; ``insisted``: a second one."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.asked_at = 0.0
        self.insisted = asyncio.Event()

    def note(self) -> None:
        if self.asked.is_set():
            logger.warning("stopping: told to a second time, everything ends now")
            self.insisted.set()
        else:
            self.asked_at = asyncio.get_running_loop().time()
            self.asked.set()


@contextlib.contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Note SIGTERM and SIGINT inside the context, and do nothing else for them. In the main thread only."""
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
    engine: Served,
    listener: socket.socket,
    *,
    stop: asyncio.Event,
    grace: float = 15.0,
    root_path: str = "",
    access_log: bool = True,
    tells: bool = True,
) -> None:
    """Serve an application over a running engine, until ``stop`` is set; then end within ``grace`` seconds, less one in
    which the engine can be closed.

    Args:
        listener: bound; it is closed at the end.
        grace: seconds for running requests to end by themselves. What is left is then aborted: a stream ends properly,
            with an error.
        access_log: log a line for each request.
        tells: log who is waited for at the end, and how that ended.

    Raises:
        EngineError: the engine has failed.
    """
    config = uvicorn.Config(
        AccessLog(app) if access_log else app,
        log_config=None,
        access_log=False,  # `AccessLog` logs more about each request
        root_path=root_path,
        backlog=BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        ws="none",
        lifespan="off",  # the engine runs already, and its owner closes it
        server_header=False,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    watching = asyncio.create_task(until_stopped(engine, stop))
    try:
        await asyncio.wait([serving, watching], return_when=asyncio.FIRST_COMPLETED)
        deadline = asyncio.get_running_loop().time() + grace - _last_seconds(grace)
        server.should_exit = True
        await _wind_down(engine, grace, tells=tells)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await asyncio.wait([serving])
    finally:
        watching.cancel()
        if not serving.done():
            server.should_exit = True
            server.cut()
            await asyncio.wait([serving], timeout=_last_seconds(grace) / 2)
            server.force_exit = True  # do not wait for the application's own tasks
            await asyncio.wait([serving])
    serving.result()
    if engine.state == "failed":
        raise EngineError("the engine has failed: its log says why")


async def until_stopped(engine: Served, stop: asyncio.Event) -> None:
    """Wait until ``stop`` is set, or the engine has failed."""
    while not stop.is_set() and engine.state != "failed":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WATCH_SECONDS):
                await stop.wait()


def _last_seconds(grace: float) -> float:
    return min(_LAST_SECONDS, grace / 4)


async def _wind_down(engine: Served, grace: float, *, tells: bool) -> None:
    """Let the engine's requests end by themselves for most of ``grace`` seconds, then abort them."""
    seconds = max(0.0, grace - 2 * _last_seconds(grace))
    # An engine that has failed raises here; its requests have failed, too.
    with contextlib.suppress(AEngineError), ShutdownLog(engine, seconds, tells=tells):
        if not await engine.drain(seconds):
            engine.abort_all()


class ShutdownLog:
    """Logs the end of a server: within ``with``, requests get ``seconds`` to end, and are ended then."""

    def __init__(self, engine: Served, seconds: float, *, tells: bool = True) -> None:
        self._engine = engine
        self._seconds = seconds
        self._tells = tells and engine.state != "failed"

    def __enter__(self) -> None:
        if self._tells:
            numbers = self._engine.statistics()
            self._begun, self._num_aborted = time.perf_counter(), numbers.num_aborted
            count = numbers.num_running + numbers.num_waiting
            who = f"{count} {'request has' if count == 1 else 'requests have'} {self._seconds:.1f} s to end"
            logger.info("stopping: no new connections; %s", who if count else "no request is running")

    def __exit__(self, *_: object) -> None:
        if self._tells and self._engine.state in ALIVE_STATES:
            count = self._engine.statistics().num_aborted - self._num_aborted
            ended = f"{count} {'request was' if count == 1 else 'requests were'} ended before the answer was whole"
            how = ended if count else "all requests have ended"
            logger.info("stopping: after %.1f s %s", time.perf_counter() - self._begun, how)


def keep_loaded_objects() -> None:
    """Exempt what is loaded by now from garbage collection, in a process that is a server and nothing else: a full
    collection, for which the loop stands still, then takes a millisecond, not tens."""
    gc.collect()
    gc.freeze()
