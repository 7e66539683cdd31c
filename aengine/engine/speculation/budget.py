"""`DraftBudget`: how many of the tokens that were guessed for all requests a step computes.

    tokens a second     (rows + what drafts bring) / seconds of a step with so many positions
    ──────────────►     as many drafts, the likeliest first, as make that most; none where the plain step has more

What a step takes is learned from the steps: of plain ones by rows, of those with drafts by positions. It is the time
from one answer to the next, so it has what the worker waits for the host in it: a small model's steps are given ahead
without drafts, and wait for each other with them. What no step has measured lately is taken to grow by a share of the
step with each position, so that it is tried once more by and by.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from ..scheduler.step import InFlightStep

_SIZES = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256
"""Numbers of positions for which seconds are kept; those between count for the next one."""
_LEAST_GAIN = 1.03  # times as many tokens a second that drafts must promise: what they bring is an estimate
_LEAST_CHANCE = 0.02  # a draft that is right less often is not considered
_MOST_WEIGHT = 12.0  # measured steps after which older ones count for ever less
_KEPT = 0.995  # factor on the weight of what was measured with each step that is measured
_DISTURBED = 3.0  # a step that took so many times as long as expected counts as that
_LONG_STEP = 0.003
"""Seconds of a step beside which it costs nothing to wait for its answer before the next is made: then drafts follow
tokens that are known."""


class DraftBudget:
    """Grants all drafts up to a number of positions of a step, whatever steps take."""

    def __init__(self, most_positions: int) -> None:
        self._most_positions = most_positions

    def learn(self, step: InFlightStep, seconds: float) -> None:
        """Note that a step was answered so many seconds after the one before."""

    def waits_for_answers(self, num_rows: int) -> bool:
        """Return whether drafts of a step are to follow the answers to all before it, with so many rows."""
        return False

    def room(self, num_rows: int) -> int:
        """Return how many drafts a step of so many rows may have."""
        return self._most_positions - num_rows

    def grant(self, num_rows: int, chances: Sequence[Sequence[float]]) -> list[int]:
        """Return how many drafts each request gets in a step of ``num_rows``. ``chances``: of each request's guesses,
        in order, to be right if all before are."""
        return _counts(self._gains(num_rows, chances), len(chances))

    def _gains(self, num_rows: int, chances: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
        """Return (tokens that it brings, request) of each draft for which there is room, the likeliest first."""
        gains: list[tuple[float, int]] = []
        # The next draft of each request, the likeliest first: (gain, request, number of the draft), as negative gains.
        ahead = [(-some[0], place, 0) for place, some in enumerate(chances) if some and some[0] >= _LEAST_CHANCE]
        heapify(ahead)
        for _ in range(self.room(num_rows)):
            if not ahead:
                break
            gain, place, number = ahead[0]
            gains.append((-gain, place))
            following = chances[place][number + 1 : number + 2]
            if following and gain * following[0] <= -_LEAST_CHANCE:
                heapreplace(ahead, (gain * following[0], place, number + 1))
            else:
                heappop(ahead)
        return gains


class CostBudget(DraftBudget):
    """Grants those drafts by which the steps are expected to bring most tokens a second."""

    def __init__(self, most_positions: int, growth: float) -> None:
        """``growth``: the share of a step of one position by which each further one prolongs it, before any was
        measured."""
        super().__init__(most_positions)
        self._growth = growth
        self._plain = _Measured()
        self._drafted = _Measured()
        self._follows_plain = True  # the last step that was measured had no drafts

    def learn(self, step: InFlightStep, seconds: float) -> None:
        num_positions = len(step.batch) + sum(len(ahead.token_ids) for ahead in step.ahead.values())
        if seconds <= 0 or step.is_gated or step.chunks or num_positions != step.num_tokens:
            return  # it has prompts, or has waited for a bitmask
        follows_plain, self._follows_plain = self._follows_plain, not step.ahead
        if not (step.ahead or follows_plain):
            return  # it may have waited for the answer of the one before
        self._plain.age()
        self._drafted.age()
        measured = self._drafted if step.ahead else self._plain
        measured.learn(num_positions, seconds)

    def waits_for_answers(self, num_rows: int) -> bool:
        return self._plain.is_known and self._plain_seconds(num_rows) >= _LONG_STEP

    def grant(self, num_rows: int, chances: Sequence[Sequence[float]]) -> list[int]:
        gains = self._gains(num_rows, chances)
        plain = self._plain_seconds(num_rows)
        best, best_count, tokens = _LEAST_GAIN * num_rows / plain, 0, float(num_rows)
        seconds = self._drafted_seconds(num_rows, plain, len(gains))
        for count, (gain, _) in enumerate(gains, 1):
            tokens += gain
            if tokens / seconds[count - 1] > best:
                best, best_count = tokens / seconds[count - 1], count
        return _counts(gains[:best_count], len(chances))

    def _plain_seconds(self, num_rows: int) -> float:
        """Return what a step without drafts takes; in some unit, before one was measured."""
        size, seconds = self._plain.nearest(num_rows)
        return self._grown(seconds, size, num_rows - size)

    def _drafted_seconds(self, num_rows: int, plain: float, most: int) -> list[float]:
        """Return what steps take that have 1 to ``most`` drafts."""
        found: list[float] = []
        size, seconds, slope = num_rows, plain, 0.0
        for place in range(bisect_left(_SIZES, num_rows + 1), len(_SIZES)):
            if len(found) >= most:
                break
            more = _SIZES[place] - size
            expected = max(self._grown(seconds, size, more), seconds + slope * more)
            slope = (self._drafted.blended(place, expected) - seconds) / more
            found += [seconds + slope * i for i in range(1, more + 1)]
            size, seconds = _SIZES[place], found[-1]
        return found

    def _grown(self, seconds: float, num_positions: int, num_more: int) -> float:
        return seconds * (1 + self._growth * (num_positions + num_more)) / (1 + self._growth * num_positions)


class _Measured:
    """Seconds of steps by `_SIZES`, each a mean of the last ones, with a weight."""

    def __init__(self) -> None:
        self._means = [0.0] * len(_SIZES)
        self._weights = [0.0] * len(_SIZES)
        self.is_known = False

    def age(self) -> None:
        """Count what was measured for less."""
        self._weights = [_KEPT * weight for weight in self._weights]

    def learn(self, num_positions: int, seconds: float) -> None:
        self.is_known = True
        place = min(bisect_left(_SIZES, num_positions), len(_SIZES) - 1)
        weight = self._weights[place] = min(_MOST_WEIGHT, self._weights[place] + 1)
        if weight > 1.5:
            seconds = min(seconds, _DISTURBED * self._means[place])
        self._means[place] += (seconds - self._means[place]) / weight

    def nearest(self, num_positions: int) -> tuple[int, float]:
        """Return the measured size that is nearest, and its seconds; (1, 1.0): none is."""
        place = min(bisect_left(_SIZES, num_positions), len(_SIZES) - 1)
        if not self.is_known:
            return 1, 1.0
        least = min(0.1, max(self._weights))
        measured = [i for i, weight in enumerate(self._weights) if weight >= least]
        near = min(measured, key=lambda i: abs(i - place))
        return _SIZES[near], self._means[near]

    def blended(self, place: int, expected: float) -> float:
        """Return the seconds of a size, of which ``expected`` is believed as much as one measured step."""
        weight = self._weights[place]
        return (weight * self._means[place] + expected) / (weight + 1)


def _counts(gains: Sequence[tuple[float, int]], num_requests: int) -> list[int]:
    counts = [0] * num_requests
    for _, place in gains:
        counts[place] += 1
    return counts
