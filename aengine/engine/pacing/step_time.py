"""How long steps take, learned from those that were answered, and how many prompt tokens one may have beside decodes.

A step with prompts takes about ``fixed + per_token * tokens`` seconds, on a GPU as on a CPU. Both are fitted to the
last few steps, each of which counts for less than the one after it. ``tokens`` are all of the step, those that decode
and those that pad it included; what attention adds for a long context is part of it as it was in those steps.

Requests that decode get their next tokens when the step ends. So beside them a step has no more prompt tokens than

* it computes within the goal, or within six times what the decodes take alone: on a slow device, or with a large model,
  prompts would get next to nothing otherwise; and no more than four times as many as were measured of late. Where the
  last step had no room for more requests than one and than a twentieth of those that decode, the time grows with their
  number: these would wait longer for their first tokens than the others gain.
* the worker runs as one launch, if that takes little time: a larger step is launched op by op, which takes the worker's
  thread as long as thousands of tokens take a device that is fast for its model, and the answers before it wait. Not so
  in a crowd: large steps save the fixed parts of small ones, and if those without room gain more by it than those that
  decode lose, nothing is cut.

What is left is cut to a size to which the worker pads anyway, so that nothing is computed for padding.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

_KEPT = 0.9  # factor on the weight of earlier steps with each new one
_THROUGH_ORIGIN = 0.02
"""Weight of no fixed part at all: what is believed while all steps had about as many tokens, and tell no slope."""
_LEAST_SLOPE = 0.1  # least cost of a token, as a share of its cost with the fixed part spread over all tokens
_MOST_GROWTH = 2.0  # a step that takes longer than expected counts as at most so many times as long: it was disturbed
_TIMES_ALONE = 6.0  # beside decodes a step may take so many times what they take alone
_MOST_BEYOND = 4  # a step has at most so many times the prompt tokens that were measured of late
_LEFT_PER_DECODE = 0.05  # requests without room that are ignored, as a share of those that decode
# requests left without room for each that decodes, weighted by the fixed part's share of a step: then nothing is cut
_CROWD = 0.125
_LEAST_TOKENS = 32  # fewest prompt tokens of a step
_LAUNCH_SECONDS = 0.02
"""A step of one launch that takes less is no longer than the worker takes to launch a larger one op by op."""
_UNPADDED = 1.25  # steps larger than the largest padded size by no more than this factor are not cut to that size


_LEAST_SECONDS, _MOST_SECONDS = 1e-6, 3600.0  # no step takes less or more: the answer that says so is damaged


class StepTime:
    """Learns from steps with prompts. ``goal``: seconds that decodes may wait for one; inf: as long as it takes.
    ``sizes``: numbers of tokens, ascending, to which the worker pads steps with prompts; larger ones are not padded,
    and launched op by op."""

    def __init__(self, goal: float, sizes: Sequence[int] = ()) -> None:
        self._goal = goal
        self._sizes = list(sizes)
        self._weight = self._mean_tokens = self._mean_seconds = 0.0
        self._variance = self._covariance = 0.0  # weighted variance of tokens; covariance of tokens and seconds
        self._most_tokens = 0.0  # tokens of the largest step of late, decaying

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Note that the worker took so many seconds, more than 0, for a step with prompts of so many tokens in all."""
        seconds = min(max(seconds, _LEAST_SECONDS), _MOST_SECONDS)
        place = bisect_left(self._sizes, num_tokens)
        tokens = self._sizes[place] if place < len(self._sizes) else num_tokens
        expected = self.expected(tokens)
        if seconds < expected / _MOST_GROWTH:  # the steps before were slow for another reason, such as a compiler
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

    def _fit(self) -> tuple[float, float]:
        """Return (seconds of the fixed part, seconds a token), both at least 0."""
        tokens, seconds = self._mean_tokens, self._mean_seconds
        most = seconds / tokens
        ridge = _THROUGH_ORIGIN * tokens * tokens
        slope = (self._covariance + ridge * most) / (self._variance + ridge)
        slope = min(max(slope, _LEAST_SLOPE * most), most)
        return max(0.0, seconds - slope * tokens), slope

    def expected(self, num_tokens: int) -> float:
        """Return the seconds that a step with prompts of so many tokens takes; 0 before one was measured."""
        if not self._weight:
            return 0.0
        fixed, slope = self._fit()
        return fixed + slope * num_tokens

    def prompt_limit(self, num_decoding: int, num_left: int) -> int | None:
        """Return the most prompt tokens of a step beside so many requests that decode, if the last step had no room for
        so many others; None: not limited."""
        if self._goal == math.inf:
            return None
        most = float(self._sizes[-1]) if self._sizes else math.inf
        if self._weight:
            fixed, slope = self._fit()
            if num_left * fixed / (fixed + slope * most) > _CROWD * num_decoding:
                return None
            if fixed + slope * most > _LAUNCH_SECONDS:
                most = math.inf
            alone = fixed + slope * num_decoding
            crowd = max(1.0, (num_left - 1) / (_LEFT_PER_DECODE * num_decoding))
            seconds = max(self._goal, _TIMES_ALONE * alone) * crowd
            most = min(most, (seconds - fixed) / slope, num_decoding + _MOST_BEYOND * self._most_tokens)
        if most == math.inf:
            return None
        place = bisect_right(self._sizes, most)
        if place and self._sizes[place - 1] >= num_decoding + _LEAST_TOKENS and most < _UNPADDED * self._sizes[-1]:
            most = self._sizes[place - 1]
        return max(_LEAST_TOKENS, int(most) - num_decoding)
