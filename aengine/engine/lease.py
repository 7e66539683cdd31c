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

_LATE = 0.005  # seconds; below, two steps in flight do
_MARGIN = 1.5
_WINDOW = 0.25  # seconds over which steps are counted
_SPARE_BLOCKS = 8  # free, for each running request: leased steps take blocks early, and should preempt nobody


class Lease:
    """Measures how long steps take, and says how many there may be in flight."""

    def __init__(self, base: int, most: int) -> None:
        """``base`` with a loop that is on time, ``most`` (no less than that) with one that is not."""
        self._base = base
        self._most = max(base, most)
        self._step_seconds = math.inf
        self._begun = time.monotonic()
        self._num_answered = 0

    def begin(self) -> None:
        """There is work again."""
        self._begun, self._num_answered = time.monotonic(), 0

    def note_answer(self) -> None:
        self._num_answered += 1
        now = time.monotonic()
        if now - self._begun > _WINDOW and self._num_answered > 2:
            self._step_seconds = (now - self._begun) / self._num_answered
            self._begun, self._num_answered = now, 0

    def num_steps(self, lag: float, scheduler: Scheduler) -> int:
        """``lag``: seconds by which the loop was late lately, at worst."""
        if lag < _LATE or self._most == self._base or scheduler.num_constrained:
            return self._base
        if scheduler.num_free_blocks < _SPARE_BLOCKS * scheduler.num_running:
            return self._base
        return min(self._most, self._base + math.ceil(_MARGIN * lag / self._step_seconds))
