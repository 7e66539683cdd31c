"""Futures of a loop: settled once, perhaps by a timer; and the error that several of them get."""

from __future__ import annotations

import asyncio

from ...errors import AEngineError
from ...ipc.thread_calls import settle


async def wait_at_most(seconds: float, waiter: asyncio.Future[None]) -> None:
    """Wait until ``waiter`` is done, for at most ``seconds``; it is settled here when the time is over."""
    timer = waiter.get_loop().call_later(seconds, settle, waiter)
    try:
        await waiter
    finally:
        timer.cancel()


def error_for_waiter(error: AEngineError) -> AEngineError:
    """Copy an error, for each of several waiters: otherwise each `raise` would lengthen the traceback of all."""
    clone = error.__class__.__new__(error.__class__, *error.args)
    clone.args = error.args
    clone.__dict__.update(error.__dict__)
    clone.__cause__ = error.__cause__ or error
    return clone
