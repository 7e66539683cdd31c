"""`DraftHistory`: what is known of one request's text, what may follow it, and how likely that is right.

    tokens of an answer ──> take_in ──> is the last guess what came?    counted, whether it was drafted or not
    before the next step ──> guess ──> tokens, each with its chance    `DraftBudget` says how many are drafted

A guess that is not drafted is compared too, so to learn that a text can't be guessed costs no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..scheduler.request import Request

MOST_DRAFTS = 16
"""Most drafts of a request in a step."""

_KINDS = 6
_FIRST_CHANCES = (0.1, 0.2, 0.35, 0.55, 0.75, 0.9)
"""Chance of a guess after a match of some tokens, by the bits of their number, before any was compared."""
_PRIOR = 4.0  # guesses for which the chances of all requests count as those of one
_MOST_COUNTED = 24.0  # guesses after which older ones count for ever less
_KEEP = 1 - 1 / _MOST_COUNTED
_FORGOTTEN = 512  # tokens without a draft of the worker, after which the chances before them count for nothing


class Guess(NamedTuple):
    """Tokens that may follow those in flight; -1: one that the worker finds."""

    token_ids: list[int]
    chances: list[float]  # that each is right, if all before it are; of the first, with the guesses of those in flight


NO_GUESS = Guess([], [])


class PendingTokens(NamedTuple):
    """What is known of one request's steps in flight."""

    drafts: Sequence[Sequence[int]] = ()  # those of the steps that have some
    num_cancellable: int = 0  # steps without drafts that are cancelled if anything is drafted

    def num_of(self, request: Request) -> int:
        """Return how many tokens they have, all drafts included, but for those that may be cancelled."""
        return max(0, request.num_pending - self.num_cancellable)


NONE_CANCELLABLE = PendingTokens()


def num_coming(request: Request, pending: PendingTokens, following: Sequence[int]) -> int:
    """Return how many tokens the steps in flight bring if ``following`` comes: drafts are accepted as far as they agree
    with it, and those behind a rejected one, too, have been drafted for another place."""
    count = pending.num_of(request) - sum(1 + len(drafts) for drafts in pending.drafts)
    for drafts in pending.drafts:
        expected = following[count : count + len(drafts)]
        pairs = zip(drafts, expected, strict=False)
        count += 1 + next((i for i, (one, other) in enumerate(pairs) if one != other), len(expected))
    return count


class Chances:
    """How often guesses were right, by kind: that of a lookup's guess is the length of its match, so that a long match
    counts for more. Those of one request have the chances of all requests as ``prior``."""

    __slots__ = ("_prior", "_right", "_tried")

    def __init__(self, prior: Chances | None = None) -> None:
        self._prior = prior
        self._right = [0.0] * _KINDS
        self._tried = [0.0] * _KINDS

    def of(self, match: int) -> float:
        """Return the chance of a guess after ``match`` tokens that agree."""
        return self._of_kind(min(match.bit_length(), _KINDS - 1))

    def _of_kind(self, kind: int) -> float:
        prior = _FIRST_CHANCES[kind] if self._prior is None else self._prior._of_kind(kind)
        return (self._right[kind] + _PRIOR * prior) / (self._tried[kind] + _PRIOR)

    def of_each(self, match: int, count: int) -> list[float]:
        """Return the chances of ``count`` guesses, the first of which comes after ``match`` tokens that agree."""
        found: list[float] = []
        end = match + count
        while match < end:
            kind, border = _kind_of(match, end)
            found += [self._of_kind(kind)] * (border - match)
            match = border
        return found

    def note(self, match: int, num_right: int, is_wrong: bool) -> None:
        """Note that so many guesses from there on were right, and perhaps the one after them wrong."""
        num_more = is_wrong
        end = match + num_right + num_more
        while match < end:
            kind, border = _kind_of(match, end)
            self._add(kind, border - match, border - match - (num_more and border == end))
            match = border

    def _add(self, kind: int, num_tried: int, num_right: int) -> None:
        tried, right = self._tried[kind], self._right[kind]
        if tried >= _MOST_COUNTED:
            keep = _KEEP**num_tried
            self._tried[kind] = tried * keep + (1 - keep) * _MOST_COUNTED
            self._right[kind] = right * keep + (1 - keep) * _MOST_COUNTED * num_right / num_tried
        else:
            self._tried[kind] = tried + num_tried
            self._right[kind] = right + num_right
        if self._prior is not None:
            self._prior._add(kind, num_tried, num_right)


def _kind_of(match: int, end: int) -> tuple[int, int]:
    """Return the kind of a guess after ``match`` tokens, and up to which number, ``end`` at most, others are of it."""
    kind = match.bit_length()
    return (_KINDS - 1, end) if kind >= _KINDS - 1 else (kind, min(end, 1 << kind))


class DraftHistory:
    """Says how many tokens of a request are drafted, where the worker makes the guesses (kernels/find_drafts.py or a
    model): the worker knows the tokens in flight, and the host hears of those guesses alone that were drafted. So what
    has not been drafted for long is taken to be ever likelier again: it would never be drafted otherwise."""

    __slots__ = ("_limit", "_most", "_num_misses", "_untried_from", "_wait_until", "chances")

    def __init__(self, request: Request, chances: Chances, most: int = MOST_DRAFTS) -> None:
        """``most``: guesses of the worker in a step."""
        self.chances = chances
        self._limit, self._most = most, 4
        self._num_misses = 0  # verifications in a row in which no draft was accepted
        self._wait_until = 0  # number of tokens from which on there are drafts again
        # the number of tokens from which on they count as untried; a request's text may be of another kind than others'
        self._untried_from = len(request.token_ids) - _FORGOTTEN

    size = 0
    """Tokens that could have been put into a table in the time in which the history was made."""

    def note_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Called for each answer to a step in which the request had drafts, whoever proposed them."""
        self.chances.note(MOST_DRAFTS, num_accepted, num_accepted < num_drafted)
        self._untried_from = len(request.token_ids) - self._num_untried(request) // 2
        if num_accepted:
            self._num_misses = 0
            self._most = min(self._limit, 2 * self._most) if num_accepted == num_drafted else max(2, num_accepted + 1)
        elif len(request.token_ids) >= self._wait_until:  # before it they were behind the rejected ones
            self._num_misses += 1
            self._most = 2
            self._wait_until = len(request.token_ids) + (1 << min(6, self._num_misses))

    def take_in(self, request: Request, most: int) -> int:
        """Take in the request's new tokens, of a long prompt some. Returns how many were put into a table."""
        return 0

    def guess(self, request: Request, most: int, pending: PendingTokens = NONE_CANCELLABLE) -> Guess:
        """Return at most ``most`` tokens that may follow those in flight, see `num_coming`. A grammar's bitmasks need
        tokens that the host knows."""
        if len(request.token_ids) < self._wait_until or request.grammar is not None:
            return NO_GUESS
        count = min(most, self._most, self._limit)
        chance = self.chances.of(MOST_DRAFTS)
        hoped = max(chance, _FIRST_CHANCES[-1])
        chance += (hoped - chance) * self._num_untried(request) / _FORGOTTEN
        return Guess([-1] * count, [chance] * count)

    def _num_untried(self, request: Request) -> int:
        return min(_FORGOTTEN, len(request.token_ids) - self._untried_from)

    def end(self, request: Request) -> None:
        """Called when the request has ended, and all of its tokens are delivered."""
