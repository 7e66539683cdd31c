"""Futures of a loop: settled once, perhaps by a timer."""

from __future__ import annotations

import asyncio

from ...ipc.thread_calls import settle

__all__ = ["settle", "wait_at_most"]


async def wait_at_most(seconds: float, waiter: asyncio.Future[None]) -> None:
    """Wait until ``waiter`` is done, for at most ``seconds``; it is settled here when the time is over."""
    timer = waiter.get_loop().call_later(seconds, settle, waiter)
    try:
        await waiter
    finally:
        timer.cancel()
