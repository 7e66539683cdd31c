"""Blocking work off the host's loop, without leaving threads behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["run_in_thread"]

T = TypeVar("T")


async def run_in_thread(name: str, function: Callable[..., T], *args: Any) -> T:
    """Run ``function(*args)`` in a thread of its own that ends with it.

    Unlike ``asyncio.to_thread`` it makes no pool on the host's loop that would outlive the engine. When the caller is
    cancelled the thread, a daemon, runs on and its result is dropped.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def body() -> None:
        value, error = None, None
        try:
            value = function(*args)
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop was closed meanwhile: nobody is left to tell
            pass

    threading.Thread(target=body, name=f"aengine-{name}", daemon=True).start()
    return await result
