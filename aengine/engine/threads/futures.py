"""Futures of a loop: settled once, perhaps by a timer."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["settle", "wait_at_most"]


def settle(future: asyncio.Future[Any] | None, value: object = None, error: BaseException | None = None) -> None:
    """Give a future its value or its error, on its loop; no effect if there is none, it is done, or the loop closed."""
    if future is None or future.done() or future.get_loop().is_closed():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


async def wait_at_most(seconds: float, waiter: asyncio.Future[None]) -> None:
    """Wait until ``waiter`` is settled, which is done here when the time is over."""
    timer = waiter.get_loop().call_later(seconds, settle, waiter)
    try:
        await waiter
    finally:
        timer.cancel()
