"""Pauses of a whole engine: no step is computed, what runs keeps its place, and what comes waits at the door.

pause  ──> the queue is closed ──> running requests are ended | awaited | kept ──> steps held up, none in flight
resume ──> the queue is open, steps go on
"""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol

from ..admission_queue import AdmissionQueue
from .step_hold import StepHold

PauseMode = Literal["abort", "wait", "keep"]
_HOLDER = "pause"


class _Requests(Protocol):
    """What a pause asks of `Admission`."""

    def count(self, others: set[str]) -> int: ...
    def abort_all(self) -> int: ...


class Pausing:
    """Holds up the steps of all replicas, and opens and closes the door of the queue.

    Others who need the workers at rest take a hold of their own: `hold`, `at_rest`, `release`."""

    def __init__(self, queue: AdmissionQueue, requests: _Requests, holds: list[StepHold]) -> None:
        """``holds``: of the step loop of each replica."""
        self._queue = queue
        self._requests = requests
        self._holds = holds
        self._num_begun = 0
        self._changed = asyncio.Event()
        self.obstacle = ""
        """Why the pause can't be ended now; it is empty if it can."""

    def hold(self, holder: str = _HOLDER) -> None:
        """Let no replica give a step from now on. ``holder``: who says so."""
        for hold in self._holds:
            hold.take(holder)

    async def at_rest(self) -> None:
        """Wait until no step of any replica is in flight, or nobody holds them up any more."""
        await asyncio.gather(*(hold.at_rest() for hold in self._holds))

    def release(self, holder: str = _HOLDER) -> None:
        """Let steps be given again, unless somebody else holds them up. Idempotent."""
        for hold in self._holds:
            hold.release(holder)

    async def begin(self, mode: PauseMode) -> bool:
        """Pause. Returns whether the engine is at rest then; False: the pause was ended meanwhile. A pause whose caller
        is cancelled before that has not been one, unless another has begun since."""
        self._num_begun += 1
        own = self._num_begun
        self._queue.close(_HOLDER)
        try:
            if mode == "abort":
                self._requests.abort_all()
            while (
                mode == "wait"
                and self._queue.is_closed_by(_HOLDER)
                and self._requests.count(set()) > self._queue.num_held
            ):
                self._changed.clear()
                await self._changed.wait()
            if self._queue.is_closed_by(_HOLDER):
                self.hold()
                await self.at_rest()
        except BaseException:
            if own == self._num_begun:
                self.end()
            raise
        return self._queue.is_closed_by(_HOLDER)

    def end(self) -> None:
        """End the pause: what waits at the door comes in, and steps go on."""
        self._queue.open(_HOLDER)
        self.release()
        self.note_change()

    def note_change(self) -> None:
        """Called when a request has ended."""
        self._changed.set()
