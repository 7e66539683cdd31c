"""When the answer to the oldest step on the device can be there at the earliest: until then the worker sleeps.

    launched      begins: the one before is done        due          done
       |                    |                            |            |
       v                    v     sleep, until a frame   v   look     v
    ---+--------------------+----------------------------+------------+----> time
                            <- the shortest of the last steps of decodes -> less _MARGIN

Steps of decodes alone take much the same time one after the other, so the shortest of the last few is a good guess,
and steps with prompts take longer. From when a step is due on, the worker looks for its answer all the time; or between
naps, where the answer is not urgent: the device has another step, and tokens come later by a twentieth of a step. A
step that was done when the worker woke up may have been so for a while: it counts as one that took three quarters of
what was measured.

A step's end is between the last look at which it was not done and the one at which it was: a worker that launches
another step meanwhile sees nothing. How long a step took is known where these times leave little doubt.
"""

from __future__ import annotations

from collections import deque

_NUM_STEPS = 8
_MARGIN = 100e-6  # seconds by which a thread may wake up late
_LEAST_SLEEP = 50e-6  # seconds; falling asleep and waking up takes a third of it in CPU time
_MISSED = 0.75
_NAP = 1 / 16, 30e-6, 50e-6  # share of the shortest step that a nap may take; least and most seconds of a nap
_MOST_DOUBT = 0.3  # largest uncertainty of a measured duration, as a share of it


class AnswerTimes:
    """Measures steps in the order in which they are launched. All times are seconds of one clock."""

    def __init__(self) -> None:
        self._launched: deque[tuple[bool, float, float]] = deque()  # (only decodes, begun, launched) of each step
        self._seconds: deque[float] = deque(maxlen=_NUM_STEPS)  # seconds of the last steps of decodes alone
        self._done_at = 0.0  # when the last step whose answer was taken was done
        self._is_watched = False  # the oldest step was looked for after it was due, and was not done
        self._not_done_at = 0.0  # when the oldest step was last seen not to be done
        self._last_end = 0.0, 0.0  # earliest and latest time at which the last step taken can have ended

    def note_launched(self, now: float, *, only_decodes: bool, begun: float | None = None) -> None:
        """Note that a step was launched, which began at ``begun``; None: just now."""
        self._launched.append((only_decodes, now if begun is None else begun, now))

    def note_taken(self, now: float) -> float:
        """Note that the oldest step's answer was taken. Returns the seconds that it took, 0 if they are not known."""
        only_decodes, began_at, launched_at = self._launched.popleft()
        begun = max(launched_at, self._done_at)
        self._done_at = now if self._is_watched else begun + _MISSED * (now - begun)
        if only_decodes:
            self._seconds.append(self._done_at - begun)
        self._is_watched = False
        begin = [max(began_at, end) for end in self._last_end]
        self._last_end = end = max(self._not_done_at, launched_at), now
        seconds = (sum(end) - sum(begin)) / 2
        doubt = end[1] - end[0] + begin[1] - begin[0]
        return seconds if doubt < _MOST_DOUBT * seconds else 0.0

    def seconds_to_sleep(self, now: float, *, may_nap: bool = False) -> float:
        """Return for how long to look for frames alone, as the oldest step, which is not done, can't be sooner, or as
        its answer is not urgent (``may_nap``); 0: look for its answer, too."""
        if not self._launched:
            return 0.0
        self._not_done_at = now
        begun = max(self._launched[0][2], self._done_at)
        shortest = min(self._seconds, default=0.0)
        left = begun + shortest - _MARGIN - now
        if shortest and left >= _LEAST_SLEEP:
            return left
        self._is_watched = True
        share, least, most = _NAP
        nap = min(share * shortest, most)
        return nap if may_nap and nap >= least and self._launched[0][0] else 0.0
