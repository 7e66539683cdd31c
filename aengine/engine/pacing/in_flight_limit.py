"""The limit of steps in flight: two, or as many as the worker needs while the host's loop is busy elsewhere.

A host that blocks its loop (50 ms of JSON, an unawaited query) neither takes answers nor gives steps meanwhile. So when
the loop has been late, the worker gets the steps of as long a time as it was late (multi_step.py), and runs on alone.

Lateness is the loop's own: the time between the moment at which the worker sent an answer, by the clock that both
processes share, and the moment at which the step loop takes it. What passed before the loop took the answer before it
does not count: the loop could give a step then. So neither does how long a step takes, nor how many answers lie there
because the worker is faster than the loop: more steps ahead would make these more, and the loop no faster.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..scheduler.scheduler import Scheduler

_LATE = 0.004  # seconds of lateness below which two steps in flight are enough
_MARGIN = 1.5  # steps leased, as a multiple of those that the lateness takes
_HALF_LIFE = 2.0  # seconds in which half of a measured lateness is forgotten
_NUM_INTERVALS = 8  # intervals between answers that are remembered
_SPARE_BLOCKS = 8  # least free blocks for each running request and group: leases take blocks early and preempt nobody


class InFlightLimit:
    """Measures how late the step loop takes answers and how long steps take, and says how many may be in flight."""

    def __init__(self, base: int, most: int) -> None:
        """``base`` with a loop that is on time, ``most`` (no less than that) with one that is not."""
        self.base = base
        self._most = max(base, most)
        self._late = 0.0  # seconds by which answers were taken late, decaying
        self._taken_at = time.monotonic()
        self._answered_at = math.inf  # when the worker sent the last answer (monotonic seconds); inf: it was idle since
        self._intervals: deque[float] = deque(maxlen=_NUM_INTERVALS)  # seconds between consecutive answers

    def begin(self) -> None:
        """Note that there is work again after a time without any."""
        self._answered_at = math.inf

    def note_answer(self, answered_at: float) -> None:
        """Note that the step loop takes an answer now which the worker sent at ``answered_at`` (monotonic seconds)."""
        now = time.monotonic()
        self._late *= 0.5 ** ((now - self._taken_at) / _HALF_LIFE)
        self._late = max(self._late, now - max(answered_at, self._taken_at))
        self._taken_at = now
        if answered_at > self._answered_at:
            self._intervals.append(answered_at - self._answered_at)
        self._answered_at = answered_at

    def num_steps(self, scheduler: Scheduler) -> int:
        """Return the most steps that may be in flight now: as many as the worker computes while the host is late."""
        if self._late < _LATE or self._most == self.base or not self._intervals or not scheduler.is_steady:
            return self.base
        if scheduler.num_free_blocks < _SPARE_BLOCKS * scheduler.num_running * scheduler.rows.kv.num_groups:
            return self.base
        # The first quartile: while the worker lacks steps, most of the intervals are the host's own.
        step_seconds = sorted(self._intervals)[len(self._intervals) // 4]
        return min(self._most, self.base + math.ceil(_MARGIN * self._late / step_seconds))
