"""How long steps take, learned from those that were answered, and how many prompt tokens one may have for a time.

A step with prompts takes about ``fixed + per_token * tokens`` seconds, on a GPU as on a CPU. Both are fitted to the
last few steps, each of which counts for less than the one after it. What attention adds for a long context, and the
decodes beside, are part of it, as they were in those steps.

Requests that decode get their next tokens when the step ends. So beside them a step has no more prompt tokens than it
computes within the goal, or within three times the fixed part: on a slow device prompts would get next to nothing
otherwise. And no more than four times as many as were measured of late. Where more wait for their first token than one
for every four that decode, as in a burst, the time grows with their number: these would wait longer for their first
tokens than the others gain. Prompts alone are not cut, nor is anything before a step with prompts has been measured.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["StepTime"]

_KEPT = 0.9  # weight of a step, when the next one has come
_THROUGH_ORIGIN = 0.02
"""Weight of no fixed part at all: what is believed while all steps had about as many tokens, and tell no slope."""
_LEAST_SLOPE = 0.1  # of the seconds that a token took with its share of the fixed part
_MOST_GROWTH = 2.0  # a step that takes longer than expected counts as so many times as long, at most: it was disturbed
_FIXED_PARTS = 3.0
_MOST_BEYOND = 4
_WAITING_PER_DECODE = 0.25
_LEAST_TOKENS = 32


class StepTime:
    """Learns from steps in the order in which they are made and answered. ``goal``: seconds that decodes may wait for a
    step with prompts; inf: as long as it takes."""

    def __init__(self, goal: float) -> None:
        self._goal = goal
        self._in_flight: deque[tuple[int, float]] = deque()  # prompt tokens, 0 if not to be measured; when published
        self._answered_at = 0.0
        self._weight = self._mean_tokens = self._mean_seconds = 0.0  # of the steps with prompts
        self._variance = self._covariance = 0.0  # of tokens; of tokens and seconds
        self._most_tokens = 0.0  # of one of them

    # -- measuring

    def begin(self, num_prompt_tokens: int, now: float, *, waits_for_host: bool = False) -> None:
        """Note that a step was published at ``now`` (seconds of any clock). ``waits_for_host``: its time is not the
        worker's alone."""
        self._in_flight.append((0 if waits_for_host else num_prompt_tokens, now))

    def end(self, answered_at: float) -> None:
        """Note that the worker answered the oldest step at ``answered_at``, by the same clock."""
        num_prompt_tokens, published_at = self._in_flight.popleft()
        seconds = answered_at - max(published_at, self._answered_at)
        self._answered_at = answered_at
        if seconds > 0 and num_prompt_tokens > 0:
            self._learn(num_prompt_tokens, seconds)

    def drop(self, num_steps: int) -> None:
        """Note that the worker will not answer the newest ``num_steps``."""
        for _ in range(num_steps):
            self._in_flight.pop()

    def begin_worker(self) -> None:
        """Note that another worker answers from now on."""
        self._in_flight.clear()

    def _learn(self, tokens: int, seconds: float) -> None:
        expected = self.expected(tokens)
        if seconds < expected / _MOST_GROWTH:  # those before were slowed down, by a compiler, say
            self._weight = 0.0
        elif expected:
            seconds = min(seconds, _MOST_GROWTH * expected)
        self._most_tokens = max(tokens, _KEPT * self._most_tokens)
        self._weight = _KEPT * self._weight + 1
        share = 1 / self._weight
        off_tokens, off_seconds = tokens - self._mean_tokens, seconds - self._mean_seconds
        self._mean_tokens += share * off_tokens
        self._mean_seconds += share * off_seconds
        rest = (1 - share) * share
        self._variance = (1 - share) * self._variance + rest * off_tokens * off_tokens
        self._covariance = (1 - share) * self._covariance + rest * off_tokens * off_seconds

    # -- expecting

    def _fit(self) -> tuple[float, float]:
        """The fixed part, and seconds a token: neither is negative."""
        tokens, seconds = self._mean_tokens, self._mean_seconds
        most = seconds / tokens
        ridge = _THROUGH_ORIGIN * tokens * tokens
        slope = (self._covariance + ridge * most) / (self._variance + ridge)
        slope = min(max(slope, _LEAST_SLOPE * most), most)
        return max(0.0, seconds - slope * tokens), slope

    def expected(self, num_prompt_tokens: int) -> float:
        """Seconds that a step with so many prompt tokens takes; 0 before one was measured."""
        if not self._weight:
            return 0.0
        fixed, slope = self._fit()
        return fixed + slope * num_prompt_tokens

    def prompt_limit(self, num_decoding: int, num_waiting: int) -> int | None:
        """Most prompt tokens of a step beside so many requests that decode, while so many wait for their first token;
        None: not limited."""
        if not self._weight or self._goal == math.inf:
            return None
        fixed, slope = self._fit()
        seconds = max(self._goal, _FIXED_PARTS * fixed) * max(1.0, num_waiting / (_WAITING_PER_DECODE * num_decoding))
        return max(_LEAST_TOKENS, int(min((seconds - fixed) / slope, _MOST_BEYOND * self._most_tokens)))
