"""`LoraSlots`: which adapters the workers have in their memory, and who uses them.

    acquire(lora) ─┬─ it is in a slot ──────────────────────────────> one user more, when it is loaded
                   ├─ a slot is empty, or no request uses its adapter > loaded into it (the least recently used first)
                   └─ all are in use ─> waits, in order of arrival ───> the slot whose last user leaves
                                        (of several accounts by their turns, see threads/turns.py)

A slot that is in use is not given to another adapter. If all of them stay in use, the least recently used takes no new
users after `PATIENCE` seconds: they queue behind whoever waits.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from itertools import count
from typing import NamedTuple

from ...checkpoint.lora import LoraFiles
from ...errors import AEngineError, InvalidRequestError
from ..threads.futures import error_for_waiter
from ..threads.turns import Turns

PATIENCE = 0.5
"""Seconds that a request waits before a slot in use takes no new users."""


_PROCESS = os.urandom(16)


class Lora(NamedTuple):
    """An adapter that requests can name."""

    name: str
    files: LoraFiles
    serial: int  # tells adapters of the same name apart, of which one replaced the other
    memory: object = None  # what holds its file, if that has no place

    @property
    def key(self) -> bytes:
        """What KV that was computed with it depends on. Another process numbers its adapters likewise."""
        return _PROCESS + f"{self.serial} {self.name}".encode()


Load = Callable[[int, Lora], Awaitable[None]]
"""Load an adapter into a slot of all workers. Raises InvalidRequestError: it is none for this model."""


class _Waiting(NamedTuple):
    """Requests that wait for an adapter."""

    turn: float
    futures: list[asyncio.Future[None]]


class _Slot:
    def __init__(self, index: int) -> None:
        self.index = index
        self.lora: Lora | None = None
        self.loading: asyncio.Task[None] | None = None  # None: loaded, or empty
        self.num_users = 0
        self.last_used = 0
        self.is_leaving = False  # takes no new users


class LoraSlots:
    """The slots of an engine's workers, which all have the same adapters. On its loop."""

    def __init__(self, num_slots: int, load: Load) -> None:
        self._slots = [_Slot(index) for index in range(num_slots)]
        self._load = load
        self._waiting: dict[Lora, _Waiting] = {}  # in order of arrival
        self._turns = Turns()
        self._pinned: set[Lora] = set()  # those that keep their slot, or will when they have one
        self.num_loads = 0  # adapters that were brought into a slot
        self._uses = count(1)
        self._loop = asyncio.get_running_loop()

    def __iter__(self) -> Iterator[tuple[int, Lora]]:
        """Yield each slot that has an adapter, or gets it just now, with that adapter."""
        return iter([(slot.index, slot.lora) for slot in self._slots if slot.lora is not None])

    @property
    def num_users(self) -> dict[str, int]:
        """How many requests use each adapter that is in a slot."""
        return {slot.lora.name: slot.num_users for slot in self._slots if slot.lora is not None}

    @property
    def size(self) -> int:
        return len(self._slots)

    @property
    def waiting(self) -> Iterable[Lora]:
        """The adapters for which requests wait."""
        return self._waiting.keys()

    @property
    def num_waiting(self) -> dict[str, int]:
        """How many requests wait for a slot, by adapter."""
        return {lora.name: len(waiting.futures) for lora, waiting in self._waiting.items()}

    async def acquire(self, lora: Lora) -> tuple[int, Callable[[], None]]:
        """Wait until the adapter is loaded, and use it. Returns its slot, and what ends the use.

        Raises InvalidRequestError: it is no adapter for this model. EngineError: the workers failed.
        """
        while (slot := self._slot_of(lora)) is None:
            if (free := self._free_slot()) is None:
                await self._wait(lora)
            else:
                self._begin(free, lora)
        slot.num_users += 1
        slot.last_used = next(self._uses)
        try:
            if slot.loading is not None:
                await asyncio.shield(slot.loading)
        except AEngineError as error:
            self._leave(slot)
            raise error_for_waiter(error) from error
        except BaseException:
            self._leave(slot)
            raise
        return slot.index, partial(self._leave, slot)

    async def pin(self, lora: Lora) -> None:
        """Load the adapter, and keep it in its slot. Raises InvalidRequestError: no other slot would be left."""
        is_new, num_pinned = lora not in self._pinned, len(self._pinned - {lora})
        if num_pinned + 1 >= len(self._slots):
            raise InvalidRequestError(
                f"{num_pinned} of max_loras={len(self._slots)} adapters are pinned, and one place must be left for "
                f"others: remove one, or raise max_loras",
                param="name",
            )
        self._pinned.add(lora)
        try:
            _, leave = await self.acquire(lora)
        except BaseException:
            if is_new:
                self._unpin(lora)
            raise
        leave()

    def forget(self, lora: Lora, heir: Lora | None = None) -> None:
        """Use the adapter's slot for others as soon as no request does. ``heir``: is pinned if it was."""
        if heir is not None and lora in self._pinned:
            self._pinned.add(heir)
        self._unpin(lora)
        slot = self._slot_of(lora, leaving=True)
        if slot is not None:
            slot.is_leaving = True
            if not slot.num_users and slot.loading is None:
                self._hand_over(slot)

    def fail(self, error: AEngineError) -> None:
        """End all waiting for a slot with ``error``, and hold no adapter. Loads end with their workers."""
        self._pinned.clear()
        for slot in self._slots:
            slot.lora = None
        for waiting in self._waiting.values():
            for future in waiting.futures:
                if not future.done():
                    future.set_exception(error_for_waiter(error))

    # -- one slot

    def _unpin(self, lora: Lora) -> None:
        self._pinned.discard(lora)
        if (slot := self._slot_of(lora)) is not None:
            self._offer(slot)

    def _is_pinned(self, slot: _Slot) -> bool:
        return slot.lora in self._pinned and not slot.is_leaving

    def _slot_of(self, lora: Lora, leaving: bool = False) -> _Slot | None:
        return next((slot for slot in self._slots if slot.lora == lora and slot.is_leaving <= leaving), None)

    def _free_slot(self) -> _Slot | None:
        """Return the slot that can be had at once: an empty one, or the one that was used longest ago of those that are
        not in use. None while others wait, who came before."""
        idle = [one for one in self._slots if not (one.num_users or self._is_pinned(one) or one.loading)]
        return None if self._waiting else min(idle, key=lambda slot: slot.last_used, default=None)

    def _begin(self, slot: _Slot, lora: Lora) -> None:
        slot.lora, slot.is_leaving, slot.last_used = lora, False, next(self._uses)
        slot.loading = self._loop.create_task(self._fill(slot, lora), name="aengine-lora")
        slot.loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody waits

    async def _fill(self, slot: _Slot, lora: Lora) -> None:
        try:
            await self._load(slot.index, lora)
            self.num_loads += 1
        except BaseException:
            slot.lora = None
            raise
        finally:
            slot.loading = None
            if not slot.num_users:
                self._loop.call_soon(self._offer, slot)

    def _leave(self, slot: _Slot) -> None:
        slot.num_users -= 1
        self._offer(slot)

    def _offer(self, slot: _Slot) -> None:
        """Let whose turn it is have the slot, if nobody uses it."""
        if not (slot.num_users or slot.loading or self._is_pinned(slot)) and (self._waiting or slot.is_leaving):
            self._hand_over(slot)

    def _hand_over(self, slot: _Slot) -> None:
        slot.lora, slot.is_leaving, slot.last_used = None, False, 0
        if self._waiting:
            lora = min(self._waiting, key=lambda one: self._waiting[one].turn)
            self._turns.now, futures = self._waiting.pop(lora)
            self._begin(slot, lora)
            for future in futures:
                if not future.done():
                    future.set_result(None)

    # -- waiting

    async def _wait(self, lora: Lora) -> None:
        """Wait until a slot was given to the adapter."""
        future: asyncio.Future[None] = self._loop.create_future()
        if lora not in self._waiting:
            self._waiting[lora] = _Waiting(self._turns.next(is_idle=not self._waiting), [])
        self._waiting[lora].futures.append(future)
        timer = self._loop.call_later(PATIENCE, self._let_one_go)
        try:
            await future
        finally:
            timer.cancel()
            waiting = self._waiting.get(lora)
            if waiting is not None and future in waiting.futures:
                waiting.futures.remove(future)
                if not waiting.futures:
                    del self._waiting[lora]

    def _let_one_go(self) -> None:
        """Close a slot to new users, if fewer are closed than adapters wait."""
        if sum(slot.is_leaving for slot in self._slots) < len(self._waiting):
            able = [one for one in self._slots if not (one.is_leaving or self._is_pinned(one) or one.loading)]
            if able:
                min(able, key=lambda slot: slot.last_used).is_leaving = True
