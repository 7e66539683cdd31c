"""`DraftBudget`: how many of the tokens that were guessed for all requests a step computes.

    tokens a second     (rows + what drafts bring) / seconds of a step with so many positions
    ──────────────►     as many drafts, the likeliest first, as make that most; none where the plain step has more

What a step takes is learned from the steps: of plain ones by rows, of those with drafts by positions. It is the time
from one answer to the next, so it has what the worker waits for the host in it: a small model's steps are given ahead
without drafts, and wait for each other with them. What the plain steps behind drafts take longer than others is theirs,
too, as it takes some until steps are given ahead again. What no step of a size has measured is taken to be what others
with drafts take longer than plain ones, and to grow by a share of the step with each position; what was measured long
ago counts for little, so that it is tried once more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import mul, truediv

from ..scheduler.step import InFlightStep

_SIZES = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256
"""Numbers of positions for which seconds are kept; those between count for the next one."""
_LEAST_GAIN = 1.03  # times as many tokens a second that drafts must promise: what they bring is an estimate
_LEAST_CHANCE = 0.02  # a draft that is right less often is not considered
_MOST_WEIGHT = 12.0  # measured steps after which older ones count for ever less
_LEARNED_TOGETHER = 8  # measured steps after which the weights of all sizes are lowered
_LITTLE = 0.02  # share of a step's seconds
_BEHIND = 8  # plain steps behind one with drafts that may take longer for it
_KEPT, _KEPT_OF_DRAFTED = 0.96, 0.995  # the factors on the weights then: plain steps grow with their contexts
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

    def grant(self, num_rows: int, chances: Sequence[Sequence[float]], *, is_gated: bool = False) -> list[int]:
        """Return how many drafts each request gets in a step of ``num_rows``. ``chances``: of each request's guesses,
        in order, to be right if all before are. ``is_gated``: the step waits for a bitmask with a row for each."""
        return _counts(self._gains(num_rows, chances), len(chances))

    def _gains(self, num_rows: int, chances: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
        """Return (tokens that it brings, request) of each draft for which there is room, the likeliest first. A
        request's later draft is no likelier than the one before it."""
        gains: list[tuple[float, int]] = []
        for place, some in enumerate(chances):
            gains += [(gain, place) for gain in accumulate(some, mul) if gain >= _LEAST_CHANCE]
        gains.sort(reverse=True)
        return gains[: max(0, self.room(num_rows))]


class CostBudget(DraftBudget):
    """Grants those drafts by which the steps are expected to bring most tokens a second."""

    def __init__(self, most_positions: int, growth: float) -> None:
        """``growth``: the share of a step of one position by which each further one prolongs it, before any was
        measured."""
        super().__init__(most_positions)
        self._costs = _Costs(growth), _Costs(growth)  # without bitmasks; of steps that wait for one
        self._num_plain = _BEHIND  # plain steps since the last one with drafts

    def learn(self, step: InFlightStep, seconds: float) -> None:
        num_rows = len(step.batch)
        num_positions = num_rows + sum(len(ahead.token_ids) for ahead in step.ahead.values())
        if seconds <= 0 or step.chunks or num_positions != step.num_tokens:
            return  # it has prompts
        costs = self._costs[step.is_gated]
        if step.ahead:
            self._num_plain = 0
            costs.learn_drafted(num_rows, num_positions, seconds)
            return
        self._num_plain += 1
        if self._num_plain > _BEHIND or step.is_gated:  # all that wait for a bitmask wait for the answer before
            costs.learn_plain(num_rows, seconds)
        else:
            costs.add_to_drafted(num_rows, seconds, is_next=self._num_plain == 1)

    def waits_for_answers(self, num_rows: int) -> bool:
        return self._costs[False].known_seconds(num_rows) >= _LONG_STEP

    def grant(self, num_rows: int, chances: Sequence[Sequence[float]], *, is_gated: bool = False) -> list[int]:
        gains = self._gains(num_rows, chances)
        if not gains:
            return [0] * len(chances)
        plain, seconds = self._costs[is_gated].of(num_rows, len(gains))
        tokens = accumulate((gain for gain, _ in gains), initial=float(num_rows))
        next(tokens)
        rates = list(map(truediv, tokens, seconds))
        best = max(rates)
        count = 1 + rates.index(best) if best > _LEAST_GAIN * num_rows / plain else 0
        return _counts(gains[:count], len(chances))


class _Costs:
    """What steps take: those without drafts by rows, those with drafts by positions."""

    def __init__(self, growth: float) -> None:
        self._growth = growth
        self._plain = _Measured(_KEPT)
        self._drafted = _Measured(_KEPT_OF_DRAFTED)
        self._longer = _Measured(_KEPT_OF_DRAFTED)  # shares of a plain step by which those with drafts take longer
        self._begun: set[int] = set()  # sizes of steps with drafts; the first of a size may have captured a graph
        self._newest = 0  # positions of the last step with drafts that was measured
        self._num_learned = 0
        # seconds of a step without drafts, and of those with 1, 2 and so on, by rows
        self._known: dict[int, tuple[float, list[float]]] = {}

    def learn_plain(self, num_rows: int, seconds: float) -> None:
        self._note(self._plain.learn(num_rows, seconds))

    def learn_drafted(self, num_rows: int, num_positions: int, seconds: float) -> None:
        if (place := _place(num_positions)) not in self._begun:
            self._begun.add(place)
            return
        self._newest = num_positions
        if self._plain.is_known:
            plain = self.known_seconds(num_rows)
            expected = self._grown(plain, num_rows, num_positions - num_rows)
            self._longer.learn(1, max(0.0, min(seconds, _DISTURBED * expected) - expected) / plain)
        self._note(self._drafted.learn(num_positions, seconds))

    def add_to_drafted(self, num_rows: int, seconds: float, *, is_next: bool) -> None:
        """Add to the last step with drafts what a plain one behind it, perhaps the next, takes longer than others."""
        if not self._plain.is_known:
            if not is_next:
                self.learn_plain(num_rows, seconds)
            return
        plain = self.known_seconds(num_rows)
        more = min(seconds, _DISTURBED * plain) - plain
        if self._newest:
            self._longer.add(1, more / plain)
            self._note(self._drafted.add(self._newest, more))

    def _note(self, is_change: bool) -> None:
        self._num_learned += 1
        if is_old := self._num_learned % _LEARNED_TOGETHER == 0:
            for measured in (self._plain, self._drafted, self._longer):
                measured.age()
        if is_change or is_old:
            self._known.clear()

    def known_seconds(self, num_rows: int) -> float:
        """Return what a step without drafts takes; 0 before one was measured."""
        return self.of(num_rows, 0)[0] if self._plain.is_known else 0.0

    def of(self, num_rows: int, most: int) -> tuple[float, list[float]]:
        """Return what a step of so many rows takes without drafts, in some unit before one was measured, and with 1, 2
        and so on, ``most`` or more of them."""
        plain, seconds = self._known.get(num_rows, (0.0, []))
        if not plain:
            size, plain = self._plain.nearest(num_rows)
            plain = self._grown(plain, size, num_rows - size)
        if len(seconds) < most:
            seconds = self._drafted_seconds(num_rows, plain, most)
        self._known[num_rows] = plain, seconds
        return plain, seconds

    def _drafted_seconds(self, num_rows: int, plain: float, most: int) -> list[float]:
        """Return what steps take that have 1 to ``most`` drafts."""
        found: list[float] = []
        size, seconds, slope = num_rows, plain * (1 + self._longer.blended(0, 0.0)), 0.0
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

    def __init__(self, kept: float) -> None:
        """``kept``: what is left of the weights when they `age`."""
        self._kept = kept
        self._means = [0.0] * len(_SIZES)
        self._weights = [0.0] * len(_SIZES)
        self.is_known = False

    def age(self) -> None:
        """Count what was measured for less."""
        self._weights = [self._kept * weight for weight in self._weights]

    def learn(self, num_positions: int, seconds: float) -> bool:
        """Note what a step took. Returns whether that changes what is expected of others by more than a little."""
        self.is_known = True
        place = _place(num_positions)
        weight = self._weights[place] = min(_MOST_WEIGHT, self._weights[place] + 1)
        if weight > 1.5:
            seconds = min(seconds, _DISTURBED * self._means[place] or seconds)
        change = (seconds - self._means[place]) / weight
        self._means[place] += change
        return abs(change) > _LITTLE * self._means[place]

    def add(self, num_positions: int, seconds: float) -> bool:
        """Add seconds to the last step of this size. Returns as `learn` does."""
        place = _place(num_positions)
        change = seconds / max(1.0, self._weights[place])
        self._means[place] = max(0.0, self._means[place] + change)
        return abs(change) > _LITTLE * self._means[place]

    def nearest(self, num_positions: int) -> tuple[int, float]:
        """Return the measured size that is nearest, and its seconds; (1, 1.0): none is."""
        if not self.is_known:
            return 1, 1.0
        place = _place(num_positions)
        least = min(0.1, max(self._weights))
        measured = [i for i, weight in enumerate(self._weights) if weight >= least]
        near = min(measured, key=lambda i: abs(i - place))
        return _SIZES[near], self._means[near]

    def blended(self, place: int, expected: float) -> float:
        """Return the seconds of a size, of which ``expected`` is believed as much as one measured step."""
        weight = self._weights[place]
        return (weight * self._means[place] + expected) / (weight + 1)


def _place(num_positions: int) -> int:
    return min(bisect_left(_SIZES, num_positions), len(_SIZES) - 1)


def _counts(gains: Sequence[tuple[float, int]], num_requests: int) -> list[int]:
    counts = [0] * num_requests
    for _, place in gains:
        counts[place] += 1
    return counts
