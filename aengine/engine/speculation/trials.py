"""`Trials`: whether drafts bring more tokens a second than none, found by doing without for some steps now and then.

    with drafts     32 steps     64     128     256 ... 512      drafts win: they are left out for 4 to 16 steps;
    without                   16     16      16     ...          or the other way round

A step of a small model on a fast device takes less than the host's part of it, of which an estimate by steps knows too
little: that of a step with drafts is longer (the search, several tokens of each request), and that of one without is
hidden behind the steps given ahead. So what counts is the time from answer to answer as the host takes them, and the
tokens that they bring. Each number of rows, by size, has trials of its own.
"""

from __future__ import annotations

from ..scheduler.step import InFlightStep

_TRIAL = 16  # steps in which the other way is tried
_SHORT_TRIAL, _CLEARLY_LESS = 4, 0.7  # steps after which a trial ends if it has brought less than this share
_FIRST, _MOST = 64, 512  # steps of the better way before the other is tried: twice as many each time that it wins again


class Trials:
    """The trials of all numbers of rows."""

    def __init__(self) -> None:
        self._of_size: dict[int, _Trial] = {}  # keys: bits of the number of rows, less 1

    def may_draft(self, num_rows: int, newest: InFlightStep | None) -> bool:
        """Return whether the next step of so many rows may have drafts. ``newest``: the last step that was made."""
        trial = self._of_size.get((num_rows - 1).bit_length())
        return trial is None or trial.may_draft(newest)

    def note(self, num_rows: int, step: InFlightStep, num_tokens: int, seconds: float) -> None:
        """Note that a step of so many requests with a row, of which some may have had to wait for the next one, brought
        so many tokens, so many seconds after the one before it."""
        if step.num_prompt_tokens or seconds <= 0:
            return
        size = (num_rows - 1).bit_length()
        trial = self._of_size.get(size) or self._of_size.setdefault(size, _Trial())
        trial.note(step, num_tokens, seconds)


class _Trial:
    """What both ways have brought of late."""

    def __init__(self) -> None:
        self._drafts = True  # the way of the steps that are made now
        self._is_trial = False  # it is the one that is tried, not the better one
        self._num_left, self._period = 2 * _TRIAL, _FIRST
        self._brought = [[0, 0.0], [0, 0.0]]  # tokens and seconds, without drafts and with them
        self._last_of_other = -1  # the id of the last step that was made in the other way
        self._has_switched = False

    def may_draft(self, newest: InFlightStep | None) -> bool:
        if self._has_switched and newest is not None:
            self._last_of_other, self._has_switched = newest.step_id, False
        return self._drafts

    def note(self, step: InFlightStep, num_tokens: int, seconds: float) -> None:
        # The first step of a way has waited for the last ones of the other, or these for it.
        if self._has_switched or step.step_id <= self._last_of_other + 1:
            return
        brought = self._brought[self._drafts]
        brought[0] += num_tokens
        brought[1] += seconds
        self._num_left -= 1
        may_end = self._is_trial and self._num_left <= _TRIAL - _SHORT_TRIAL
        if self._num_left <= 0 or (may_end and self._brings_less_than(_CLEARLY_LESS)):
            self._end()

    def _brings_less_than(self, share: float) -> bool:
        """Return whether this way brings less than so many times the other's tokens a second."""
        (tokens, took), (other_tokens, other_took) = self._brought[self._drafts], self._brought[not self._drafts]
        return tokens * other_took < share * other_tokens * took

    def _end(self) -> None:
        """End the steps of this way: the other is tried now, or the better of the two begins."""
        if self._is_trial:
            wins = not self._brings_less_than(1.0)
            self._period = _FIRST if wins else min(_MOST, 2 * self._period)
            self._switch(self._drafts == wins, self._period)
        else:
            self._switch(not self._drafts, _TRIAL)
        self._is_trial = not self._is_trial

    def _switch(self, drafts: bool, num_steps: int) -> None:
        self._has_switched = drafts != self._drafts
        self._drafts, self._num_left = drafts, num_steps
        self._brought[drafts] = [0, 0.0]
