"""An app process of `serve_processes`: ``python -m aengine.server.app_process``, with its settings on stdin."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from typing import Any

import setproctitle

from ..errors import AEngineError
from ..remote import connect
from .app import create_app
from .logs import log_to_stderr
from .serve import keep_loaded_objects, serve_app, stop_signals


def main() -> int:
    settings = json.load(sys.stdin)
    log_to_stderr(**settings.pop("log"))
    setproctitle.setproctitle("aengine app process")
    try:
        import uvloop
    except ImportError:
        return asyncio.run(_serve(**settings))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(**settings))


async def _serve(engine: str, listener: int, grace: float, app: dict[str, Any], server: dict[str, Any]) -> int:
    """Serve the application of an engine in another process until a signal comes. ``app``, ``server``: keyword
    arguments of `create_app` and of `serve_app`."""
    with stop_signals() as stop:
        try:
            async with connect(engine) as remote:
                keep_loaded_objects()
                await serve_app(
                    create_app(remote, **app),
                    remote,
                    socket.socket(fileno=listener),
                    stop=stop.asked,
                    grace=grace,
                    tells=False,  # the engine's process logs the shutdown
                    **server,
                )
        except AEngineError:
            _remove_leftover(engine)
            return 1  # the engine's process has ended, or will log why
    return 0


def _remove_leftover(path: str) -> None:
    """Remove the socket at which nobody listens any more, and its folder: the engine's process may have been killed."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            os.rmdir(os.path.dirname(path))


if __name__ == "__main__":
    raise SystemExit(main())
