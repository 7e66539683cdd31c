"""Futures of a loop: settled once, perhaps by a timer; several of them; and the error that several of them get."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from ...errors import AEngineError
from ...ipc.thread_calls import settle

T = TypeVar("T")


async def wait_at_most(seconds: float, waiter: asyncio.Future[None]) -> None:
    """Wait until ``waiter`` is done, for at most ``seconds``; it is settled here when the time is over."""
    timer = waiter.get_loop().call_later(seconds, settle, waiter)
    try:
        await waiter
    finally:
        timer.cancel()


async def all_ended(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Await all, side by side and to their ends, also if one fails: what they use is free then. Raises the first
    error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]


def error_for_waiter(error: AEngineError) -> AEngineError:
    """Copy an error, for each of several waiters: otherwise each `raise` would lengthen the traceback of all."""
    clone = error.__class__.__new__(error.__class__, *error.args)
    clone.args = error.args
    clone.__dict__.update(error.__dict__)
    clone.__cause__ = error.__cause__ or error
    return clone
