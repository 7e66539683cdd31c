"""How much longer than could be expected the device has worked on a step: a kernel that is stuck, or waits for another
rank for ever.

    launched       looked at: not done     not done     not done
       |                    |                  |            |
    ---+--------------------+------------------+------------+----> time
                            <- waited, in looks of at most _MOST_BETWEEN_LOOKS seconds
                            <- allowed: twice what a step of so many tokens took ->  overdue

Only what the main thread has seen counts: nothing does while it runs code of the host (compiles a kernel, say), and a
process that was stopped for a while has waited no longer than one look. A rank's device may wait for a rank that
compiles: so the host takes the least of all ranks that compute (`overdue_seconds`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

IDLE = 2**64 - 1
"""In the place of `DeviceWatch.word`: this rank has no step."""

_MOST_BETWEEN_LOOKS = 1.0
_NUM_STEPS = 64
_LEAST_TOKENS = 16  # tokens; steps of fewer take as long as one of so many
_FACTOR = 2.0  # longest duration of a step, as a multiple of the slowest of the last ones, by its tokens
_FIRST_STEP_SECONDS = 30.0  # seconds allowed for a step while none was measured


class DeviceWatch:
    """Watches the oldest step on one rank's device. `word` is read by another thread."""

    def __init__(self) -> None:
        self.word = IDLE
        """What the host is told: IDLE; 0 while the host's part of a step runs; else 1 + the milliseconds overdue."""
        self._last_look = 0.0
        self._waited = 0.0
        self._is_watching = False
        # seconds of each of the last steps, and seconds per token
        self._known: deque[tuple[float, float]] = deque(maxlen=_NUM_STEPS)

    def note_busy(self) -> None:
        """Note that the main thread runs code of the host's, which may take any time: nothing is overdue meanwhile."""
        self.word = 0
        self._is_watching = False

    def note_idle(self) -> None:
        """Note that the device computes no step."""
        self.word = IDLE
        self._is_watching = False

    def note_done(self, num_tokens: int, seconds: float) -> None:
        """Note that the oldest step, of ``num_tokens`` tokens, is done; it took ``seconds`` (0: not known)."""
        self._waited = 0.0
        if seconds:
            self._known.append((seconds, seconds / max(num_tokens, _LEAST_TOKENS)))

    def note_not_done(self, num_tokens: int, now: float) -> None:
        """Note that the oldest step, of ``num_tokens`` tokens, was not done at ``now`` (monotonic seconds)."""
        if self._is_watching:
            self._waited += min(now - self._last_look, _MOST_BETWEEN_LOOKS)
        self._is_watching, self._last_look = True, now
        overdue = self._waited - self._allowed(num_tokens) if self._waited > 1.0 else 0.0
        self.word = 1 + max(0, int(overdue * 1000))

    def _allowed(self, num_tokens: int) -> float:
        if not self._known:
            return _FIRST_STEP_SECONDS
        longest, slowest = map(max, zip(*self._known, strict=True))
        return _FACTOR * max(longest, slowest * num_tokens)


def overdue_seconds(words: Iterable[int]) -> float:
    """Return for how long the devices of all ranks that have a step are overdue, by their `DeviceWatch.word`."""
    least = min((word for word in words if word != IDLE), default=0)
    return max(0, least - 1) / 1000
