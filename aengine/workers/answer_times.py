"""When the answer to the oldest step on the device can be there at the earliest: until then the worker sleeps.

    launched      begins: the one before is done        due          done
       |                    |                            |            |
       v                    v     sleep, until a frame   v   look all the time
    ---+--------------------+----------------------------+------------+----> time
                            <- the shortest of the last steps of decodes -> less _MARGIN

Steps of decodes alone take much the same time one after the other, so the shortest of the last few is a good guess,
and steps with prompts take longer. A step that was done when the worker woke up may have been so for a while: it counts
as one that took three quarters of what was measured.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["AnswerTimes"]

_NUM_STEPS = 8
_MARGIN = 100e-6  # seconds: a thread wakes up so much late, at times
_LEAST_SLEEP = 50e-6  # seconds; falling asleep and waking up costs as much CPU time as a third of it
_MISSED = 0.75


class AnswerTimes:
    """Measures steps in the order in which they are launched. All times are seconds of one clock."""

    def __init__(self) -> None:
        self._launched: deque[tuple[bool, float]] = deque()  # decodes alone; when
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)  # of steps of decodes alone
        self._done_at = 0.0  # the newest of those that were taken
        self._is_watched = False  # the oldest was looked for after it was due, and not done

    def note_launched(self, now: float, *, only_decodes: bool) -> None:
        self._launched.append((only_decodes, now))

    def note_taken(self, now: float) -> None:
        """Note that the oldest step's answer was taken."""
        only_decodes, launched_at = self._launched.popleft()
        begun = max(launched_at, self._done_at)
        self._done_at = now if self._is_watched else begun + _MISSED * (now - begun)
        if only_decodes:
            self._seconds.append(self._done_at - begun)
        self._is_watched = False

    def seconds_to_sleep(self, now: float) -> float:
        """Return for how long to look for frames alone, as the oldest step, which is not done, can't be sooner; 0: look
        for its answer, too."""
        if not self._launched:
            return 0.0
        begun = max(self._launched[0][1], self._done_at)
        left = begun + min(self._seconds, default=-math.inf) - _MARGIN - now
        if left >= _LEAST_SLEEP:
            return left
        self._is_watched = True
        return 0.0
