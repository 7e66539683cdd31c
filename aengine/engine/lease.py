"""How many steps the worker is given ahead: two, or as many as it takes while the host's loop is busy elsewhere.

A host that blocks its loop (50 ms of JSON, an unawaited query) neither takes answers nor gives steps meanwhile. The
scheduler can make steps far ahead: a token in flight counts as known, lengths are known too, and what is sampled past a
stop is dropped. So when the loop has been late, the worker gets the steps of as long a time as it was late, and runs on
alone. The price is paid by new requests, which wait for all that is under way; so it is done only then.

Grammars need the host between two steps: while any runs, nothing is leased.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .scheduler import Scheduler

__all__ = ["Lease"]

_LATE = 0.004  # seconds; below, two steps in flight do
_MARGIN = 1.5
_HALF_LIFE = 2.0  # seconds in which half of a lateness is forgotten
_WINDOW = 0.25  # seconds over which steps are counted
_SPARE_BLOCKS = 8  # free, for each running request: leased steps take blocks early, and should preempt nobody


class Lease:
    """Measures how long steps take and how late the loop comes back to them, and says how many may be in flight."""

    def __init__(self, base: int, most: int) -> None:
        """``base`` with a loop that is on time, ``most`` (no less than that) with one that is not."""
        self._base = base
        self._most = max(base, most)
        self._step_seconds = math.inf
        self._late = 0.0
        self._turn = self._begun = time.monotonic()
        self._num_answered = 0

    def begin(self) -> None:
        """There is work again."""
        self._turn = self._begun = time.monotonic()
        self._num_answered = 0

    def note_turn(self, num_in_flight: int, num_done: int) -> None:
        """The step loop has its turn, and finds so many of the steps in flight answered.

        All of them, or more than two: it comes late, by about the time since its last turn. (A timer would not tell:
        who blocks a loop regularly may spare just the moments at which it looks.)
        """
        now = time.monotonic()
        seconds, self._turn = now - self._turn, now
        if self._late:
            self._late *= 0.5 ** (seconds / _HALF_LIFE)
        if num_done and (num_done == num_in_flight or num_done > 2):
            self._late = max(self._late, seconds)

    def note_answer(self) -> None:
        self._num_answered += 1
        now = time.monotonic()
        if now - self._begun > _WINDOW and self._num_answered > 2:
            self._step_seconds = (now - self._begun) / self._num_answered
            self._begun, self._num_answered = now, 0

    def num_steps(self, scheduler: Scheduler) -> int:
        if self._late < _LATE or self._most == self._base or scheduler.num_constrained:
            return self._base
        if scheduler.num_free_blocks < _SPARE_BLOCKS * scheduler.num_running:
            return self._base
        return min(self._most, self._base + math.ceil(_MARGIN * self._late / self._step_seconds))
