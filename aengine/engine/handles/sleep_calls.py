"""`SleepCalls`: the calls of an engine that sleeps and wakes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from ...errors import EngineClosedError
from ...limits.values import not_valid

if TYPE_CHECKING:
    from ..core import EngineCore
    from .handle import Handle

_TAGS = ("weights", "kv_cache")


async def sleep(core: EngineCore, level: int) -> None:
    """See `SleepCalls.sleep`."""
    await core.sleeping.sleep(level)


async def wake_up(core: EngineCore, tags: Sequence[str] | None) -> None:
    """See `SleepCalls.wake_up`."""
    await core.sleeping.wake_up(_TAGS if tags is None else tags)


async def hold_awake(core: EngineCore, change: int) -> None:
    """See `SleepCalls.stays_awake`."""
    core.sleeping.hold_awake(change)


class SleepCalls:
    """Calls about the sleep of an engine held by a handle."""

    _handle: Handle

    async def sleep(self, level: int = 1) -> None:
        """Give the memory of the workers back to the system, until `wake_up` or, as ``when_asleep`` says, a request.

        Requests that run stand still, and are computed again from their tokens so far. ``state`` is "asleep" from the
        call on. The call may be cancelled; the engine falls asleep all the same.

        Args:
            level: 1: weights are kept in the host's memory, KV is dropped; on a GPU with ``enable_sleep_mode`` only,
                else as 2. 2: the workers end, and waking loads the weights from their files.

        Raises:
            InvalidRequestError: ``level`` is something else.
            NotEnoughMemoryError: the host has no memory for the weights; the engine goes on as before.
            EngineClosedError: the engine is not running, drains, or ended meanwhile.
        """
        if isinstance(level, bool) or level not in (1, 2):
            raise not_valid("level", level, "1 or 2")
        await self._handle.run(sleep, level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again; what stood still goes on. Without effect on an engine that is awake.

        Args:
            tags: what to wake: "weights", "kv_cache". The engine is awake when all of it is; weights can be sent
                anew before there is KV. None: all.

        Raises:
            InvalidRequestError: there is no such tag.
            NotEnoughMemoryError: something else has taken the memory; the engine sleeps on, and can be woken later.
            ModelLoadError: new workers can't load the model; likewise. WorkerDiedError: one died meanwhile; likewise.
            EngineClosedError: the engine is not running, or ended meanwhile.
        """
        if tags is not None and (isinstance(tags, str) or not all(tag in _TAGS for tag in tags)):
            raise not_valid("tags", tags, "a list of 'weights' and 'kv_cache', or None")
        await self._handle.run(wake_up, None if tags is None else [tag for tag in _TAGS if tag in tags])

    @asynccontextmanager
    async def stays_awake(self) -> AsyncIterator[None]:
        """Inside the context the engine does not fall asleep by itself (``sleep_after``). One that sleeps already is
        not woken.

        Raises EngineClosedError: the engine is not running.
        """
        await self._handle.run(hold_awake, 1)
        try:
            yield
        finally:
            with suppress(EngineClosedError):
                await self._handle.run(hold_awake, -1)
