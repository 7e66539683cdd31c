"""`Holds`: for whom an engine does not compute requests as they come, and the state that follows.

for           state     new requests      running ones
good          failed, closed
DRAIN         draining  are refused       go on
a sleep       asleep    wait at the door  stand still
PAUSE         paused    wait at the door  are ended | are computed to their ends | stand still
an update     paused    wait at the door  as of a pause
nobody        running   come in           go on

Of several the uppermost is the state. Each is ended by who has begun it, and changes nothing about the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from ...outputs import ALIVE_STATES
from ..admission_queue import AdmissionQueue
from .step_hold import StepHold

PauseMode = Literal["abort", "wait", "keep"]


class Hold(NamedTuple):
    """For whom an engine is held up, and its state then."""

    holder: str
    state: Literal["draining", "asleep", "paused"]


DRAIN = Hold("drain", "draining")
PAUSE = Hold("pause", "paused")
_ORDER = ("draining", "asleep", "paused")


class _Requests(Protocol):
    """What a pause asks of `Admission`."""

    def count(self, others: set[str]) -> int: ...
    def abort_all(self) -> int: ...


class Holds:
    """All holds of one engine: it closes the door of the queue, and holds up the steps of all replicas."""

    def __init__(self, queue: AdmissionQueue, requests: _Requests, steps: Sequence[StepHold]) -> None:
        """``steps``: of the step loop of each replica."""
        self._queue = queue
        self._requests = requests
        self._steps = steps
        self._begun: set[Hold] = set()
        self._stopping: set[Hold] = set()  # those of them for which no step is given
        self._num_pauses: Counter[Hold] = Counter()
        self._changed = asyncio.Event()
        self._state = "running"
        self.end = ""
        """The state of an engine that has ended for good, which any thread may say."""
        self.obstacle = ""
        """Why nobody can let the engine compute now; it is empty if one can."""

    def __contains__(self, hold: Hold) -> bool:
        return hold in self._begun

    @property
    def state(self) -> str:
        """See `AsyncLLM.state`. From any thread."""
        return self.end or self._state

    @property
    def is_alive(self) -> bool:
        """Whether the engine computes requests, even if it takes no new ones."""
        return self.state in ALIVE_STATES

    def begin(self, hold: Hold) -> None:
        """Let those who come wait at the door, or see to it that they are refused; steps go on."""
        self._begun.add(hold)
        self._settle()

    def stop(self, hold: Hold) -> None:
        """`begin`, and let no replica give a step from now on."""
        self._stopping.add(hold)
        self.begin(hold)

    def release(self, hold: Hold) -> None:
        """End a hold: unless there are others, those at the door come in, and steps go on. Idempotent."""
        self._begun.discard(hold)
        self._stopping.discard(hold)
        self._settle()
        self.note_change()

    def _settle(self) -> None:
        states = {hold.state for hold in self._begun}
        self._state = next((state for state in _ORDER if state in states), "running")
        for steps in self._steps:
            (steps.take if self._stopping else steps.release)()
        (self._queue.close if self._begun - {DRAIN} else self._queue.open)()

    async def at_rest(self) -> None:
        """Wait until no step of any replica is in flight, or nobody holds them up any more."""
        await asyncio.gather(*(steps.at_rest() for steps in self._steps))

    async def pause(self, mode: PauseMode, hold: Hold = PAUSE) -> bool:
        """Stop, once the requests so far are where ``mode`` says. Returns whether the engine is at rest then; False:
        the hold was released meanwhile. One whose caller is cancelled before that has not been, unless another call has
        begun it since."""
        self._num_pauses[hold] += 1
        own = self._num_pauses[hold]
        self.begin(hold)
        try:
            if mode == "abort":
                self._requests.abort_all()
            while mode == "wait" and hold in self and self._requests.count(set()) > self._queue.num_held:
                await self.change()
            if hold in self:
                self.stop(hold)
                await self.at_rest()
        except BaseException:
            if own == self._num_pauses[hold]:
                self.release(hold)
            raise
        return hold in self

    async def change(self) -> None:
        """Wait until a request or a hold has ended."""
        self._changed.clear()
        await self._changed.wait()

    def note_change(self) -> None:
        """Called when a request has ended."""
        self._changed.set()
