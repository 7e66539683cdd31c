"""`serve_processes`: several app processes over one engine.

    this process                                      app processes (app_process.py)
    AsyncLLM <── serve_engine <════ Unix socket ════> AsyncLLM <── create_app <── uvicorn <── HTTP

An app process parses HTTP and JSON, and writes answers. One that dies takes its requests with it, no others, and
another is started. They end with this one: the Unix socket tells them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import EngineError
from ..remote import serve_engine
from .serve import ShutdownLog, until_stopped

if TYPE_CHECKING:
    from ..async_llm import AsyncLLM

logger = logging.getLogger("aengine.server")

_MOST_FOLDER_BYTES = 80
_SHORT_LIFE = 5.0
_MOST_SHORT_LIVES = 5
_LAST_SECONDS = 2.0
"""Beyond the grace, for a process to end by itself."""


async def serve_processes(
    engine: AsyncLLM,
    listeners: Sequence[socket.socket],
    settings: Mapping[str, Any],
    *,
    stop: asyncio.Event,
    grace: float,
) -> None:
    """Serve an engine by app processes, until ``stop`` is set; then end them within ``grace`` seconds.

    Args:
        engine: on this loop, started.
        listeners: one for each process; the same one several times, or several of one address. They listen already, and
            are closed at the end. What comes while a process is replaced waits.
        settings: what `app_process` needs besides: plain data.

    Raises:
        EngineError: the engine has failed, or app processes end as soon as they are started.
    """
    # For this user only. A Unix socket's path has some 100 bytes, which a $TMPDIR may take alone.
    place = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > _MOST_FOLDER_BYTES else None
    with tempfile.TemporaryDirectory(prefix="aengine-", dir=place) as folder:
        path = os.path.join(folder, "engine")
        async with serve_engine(engine, path, admin=bool(settings["app"].get("admin_key"))):
            processes = [_AppProcess({**settings, "engine": path, "grace": grace}, one) for one in listeners]
            keeping = [asyncio.create_task(process.keep()) for process in processes]
            watching = asyncio.create_task(until_stopped(engine, stop))
            try:
                await asyncio.wait([*keeping, watching], return_when=asyncio.FIRST_COMPLETED)
                with ShutdownLog(engine, grace):
                    for listener in listeners:
                        listener.close()
                    for process in processes:
                        process.stop()
                    await asyncio.wait(keeping, timeout=grace + _LAST_SECONDS)
            finally:
                watching.cancel()
                for process in processes:
                    process.kill()
                await asyncio.wait(keeping)
            for task in keeping:
                task.result()
            if engine.state == "failed":
                raise EngineError("the engine has failed: its log says why")


class _AppProcess:
    """A process of the application that is started again whenever it ends, until `stop`."""

    def __init__(self, settings: Mapping[str, Any], listener: socket.socket) -> None:
        self._settings = settings
        self._listener = listener
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopped = False

    async def keep(self) -> None:
        """Start a process, and another when it ends, until `stop`. Raises EngineError."""
        loop = asyncio.get_running_loop()
        num_short_lives = 0
        while self._may_go_on():
            begun = loop.time()
            code = await self._run()
            if not self._may_go_on():
                return
            num_short_lives = num_short_lives + 1 if loop.time() - begun < _SHORT_LIFE else 0
            if num_short_lives > _MOST_SHORT_LIVES:
                raise EngineError(f"app processes end as soon as they are started, the last one with exit code {code}")
            logger.error("an app process ended with exit code %d; another is started", code)

    def _may_go_on(self) -> bool:
        return not self._is_stopped

    async def _run(self) -> int:
        number = self._listener.fileno()
        command = (sys.executable, "-m", "aengine.server.app_process")
        self._process = process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=[number],
            start_new_session=True,  # Ctrl-C is for this process alone
        )
        if self._is_stopped:
            self.stop()
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # the process has died
            process.stdin.write(json.dumps({**self._settings, "listener": number}).encode())
            await process.stdin.drain()
            process.stdin.close()
        return await process.wait()

    def stop(self) -> None:
        """Ask the process to end, and start no other."""
        self._is_stopped = True
        self._signal("terminate")

    def kill(self) -> None:
        self._is_stopped = True
        self._signal("kill")

    def _signal(self, name: str) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                getattr(self._process, name)()
