"""Blocking calls in threads of their own, whose results come back to an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from aengine.errors import EngineError, InternalError

T = TypeVar("T")


async def run_in_thread(name: str, function: Callable[..., T], *args: Any) -> T:
    """Run ``function(*args)`` in a thread of its own that ends with it.

    Unlike ``asyncio.to_thread`` it makes no pool on the host's loop that would outlive the engine. When the caller is
    cancelled the thread, a daemon, runs on and its result is dropped. Raises EngineError when none can be started, and
    InternalError for what is no `Exception`.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def body() -> None:
        tell(loop, settle, result, *outcome_of(partial(function, *args)))

    try:
        threading.Thread(target=body, name=f"aengine-{name}", daemon=True).start()
    except RuntimeError as error:
        raise EngineError(no_thread(error)) from error
    return await result


def outcome_of(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call it. Returns its value, or what it raised: an InternalError for what is no `Exception`.

    A panic of a library in Rust is none, and a task's `except Exception` would miss it; a SystemExit would end the
    event loop that it is handed to.
    """
    try:
        return call(), None
    except Exception as error:
        return None, error
    except BaseException as error:
        raised = InternalError(f"a function that ran in a thread raised {error!r}")
        raised.__cause__ = error
        return None, raised


def no_thread(error: RuntimeError) -> str:
    return (
        f"no thread can be started ({error}): this process, user or container has as many as it may have; raise "
        f"`ulimit -u` or the container's pids limit"
    )


def settle(future: asyncio.Future[Any] | None, value: object = None, error: BaseException | None = None) -> None:
    """Give a future its value or its error, on its loop; no effect if there is none, it is done, or the loop closed."""
    if future is None or future.done() or future.get_loop().is_closed():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Call ``callback(*args)`` on the loop, from any thread."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:  # the loop is closed, and the callers that waited on it are gone
        pass
