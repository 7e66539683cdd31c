"""Drafts by lookup: where a request's last tokens occurred before, the tokens that came after them there.

    ... the quick brown fox jumps over ... the quick brown          last three tokens: looked up in a table
                        └─────────┴── drafts                         a match is followed as long as it holds

It needs no model and no weights, and pays where an answer repeats its prompt or itself: edited code, quoted documents,
tables. Where guesses are not accepted there are fewer and shorter ones, and soon none for a while.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..delivery import Sampled
from ..pacing.steps_in_flight import StepsInFlight
from ..scheduler.request import Request, RequestStatus
from ..scheduler.scheduler import Scheduler
from .drafts import Speculation

_N = 3  # tokens that are looked up
_FACTORS = 1_540_483_477, 1_812_433_253, 1_664_525_013  # factors of the hash, odd; sums stay below 2**63
_SHIFT = 16  # bits of the sum that are dropped: in the lowest ones few of a token's bits take part
_MOST_SLOTS = 1 << 17  # slots of a request's table, four bytes each; of two n-grams in one slot the later stays
_MOST_INDEXED = 8192  # tokens that are put into tables before a step, of all requests together: some 100 us
_SLOTS_AS_A_TOKEN = 32  # slots of a new table that take about as long as to put a token into one
_LONG_MATCH = 8  # tokens beyond which a new match is not compared
_FIRST_DRAFTS = 4  # most drafts of a request in a step, as long as none was verified
_MOST_DRAFTS = 16  # most drafts of a request in a step, where all are accepted
_MOST_WAIT = 64  # most tokens for which a request gets no drafts, after many that were all rejected


class DraftHistory:
    """How well the guesses of one request's tokens went. Here the worker makes them (kernels/find_drafts.py), which
    knows the tokens in flight: the host says how many there are."""

    __slots__ = ("_misses", "_most", "_num_accepted", "_num_drafted", "_wait_until", "is_sure")

    num_slots = 0
    """Slots of its table."""

    def __init__(self, max_num_tokens: int) -> None:
        self._most = _FIRST_DRAFTS
        self._misses = 0  # verifications in a row in which no draft was accepted
        self._wait_until = 0  # number of tokens from which on there are drafts again
        self._num_drafted = self._num_accepted = 0  # drafts verified, and accepted, since `_adapt` looked last
        self.is_sure = False
        """Whether all drafts verified last were accepted: those in flight probably will be, too."""

    @property
    def may_follow_drafts(self) -> bool:
        """Whether a guess is worth something while drafts are in flight."""
        return True

    def note_verified(self, num_drafted: int, num_accepted: int) -> None:
        """Called for each answer to a step in which the request had drafts, whoever proposed them."""
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted

    def take_in(self, request: Request, most: int) -> int:
        """Take in the request's new tokens, of a long prompt some. Returns how many were put into a table."""
        self._adapt(request)
        return 0

    def guess(self, request: Request, most: int) -> list[int]:
        """Return at most ``most`` tokens that may follow those in flight, -1 for one that the worker finds; none if
        nothing is found, or guesses went wrong lately. A grammar's bitmasks need tokens that the host knows."""
        if len(request.token_ids) < self._wait_until or request.grammar is not None:
            return []
        return [-1] * min(most, self._most)

    def _adapt(self, request: Request) -> None:
        """Learn from the drafts that were verified since the last time."""
        num_drafted, num_accepted = self._num_drafted, self._num_accepted
        if not num_drafted:
            return
        self._num_drafted = self._num_accepted = 0
        self.is_sure = num_accepted == num_drafted
        if num_accepted:
            self._misses = 0
            self._most = min(_MOST_DRAFTS, 2 * self._most) if self.is_sure else max(2, num_accepted + 1)
        elif len(request.token_ids) >= self._wait_until:  # before it they were behind the rejected ones
            self._misses += 1
            self._most = 2
            self._wait_until = len(request.token_ids) + min(_MOST_WAIT, 1 << self._misses)


class TokenHistory(DraftHistory):
    """The n-grams of one request's tokens, and how well guesses from them went.

    Looking up the last tokens, and taking in a new one, cost a microsecond, whatever the request's length is.
    """

    __slots__ = ("_match", "_num_indexed", "_num_seen", "_slots", "_source", "_table")

    def __init__(self, max_num_tokens: int) -> None:
        super().__init__(max_num_tokens)
        num_slots = 1 << (min(_MOST_SLOTS, 2 * max_num_tokens) - 1).bit_length()
        self._table = np.zeros(num_slots, dtype=np.int32)  # last position of each hash; 0: none
        self._slots = memoryview(self._table.data)  # the same memory: single slots are read and written faster
        self._num_indexed = _N - 1  # position of the end of the first n-gram that is not in the table
        self._num_seen = 0  # tokens of the request when it was looked at last
        self._source = -1  # position that is matched with the last token; -1: none
        self._match = 0  # tokens that agree up to there, as far as they were compared

    @property
    def num_slots(self) -> int:  # type: ignore[override]
        return len(self._slots)

    @property
    def may_follow_drafts(self) -> bool:
        """Where those in flight end is known only if they are all accepted."""
        return self.is_sure

    def take_in(self, request: Request, most: int) -> int:
        self._adapt(request)
        token_ids = request.token_ids
        begin, end = self._num_indexed, min(len(token_ids) - 1, self._num_indexed + most)
        if end - begin > 2 * _N:
            self._index_many(request, begin, end)
        else:
            mask = len(self._slots) - 1
            for last in range(begin, end):
                self._slots[_hash(*token_ids[last - _N + 1 : last + 1]) >> _SHIFT & mask] = last
        self._num_indexed = max(begin, end)
        self._follow(token_ids)
        return max(0, end - begin)

    def _index_many(self, request: Request, begin: int, end: int) -> None:
        first = begin - _N + 1
        if end <= request.num_prompt_tokens:
            ids = np.frombuffer(request.prompt.packed, dtype=np.int32)[first:end].astype(np.int64)
        else:
            ids = np.array(request.token_ids[first:end], dtype=np.int64)
        n = end - begin
        slots = _hash(*(ids[i : i + n] for i in range(_N))) >> _SHIFT & (len(self._table) - 1)
        self._table[slots] = np.arange(begin, end, dtype=np.int32)

    def _follow(self, token_ids: list[int]) -> None:
        """Move the match on over the new tokens, as far as it holds; without one look for another."""
        num_new = len(token_ids) - self._num_seen
        if self._source >= 0 and num_new:
            source = self._source + 1
            if token_ids[source : source + num_new] == token_ids[-num_new:]:
                self._source += num_new
                self._match += num_new
            else:
                self._source = -1
        self._num_seen = len(token_ids)
        if self._source < 0 and len(token_ids) > _N:
            self._find(token_ids)

    def _find(self, token_ids: list[int]) -> None:
        tail = token_ids[-_N:]
        found = self._slots[_hash(*tail) >> _SHIFT & (len(self._slots) - 1)]
        if not found or token_ids[found - _N + 1 : found + 1] != tail:
            return
        match = _N
        while match < min(_LONG_MATCH, found + 1) and token_ids[found - match] == token_ids[-1 - match]:
            match += 1
        self._source, self._match = found, match

    def guess(self, request: Request, most: int) -> list[int]:
        token_ids, most = request.token_ids, min(most, self._most, self._match)
        if self._source < 0 or most <= 0 or len(token_ids) < self._wait_until:
            return []
        begin = self._source + 1
        ahead = request.num_pending
        following = token_ids[begin : begin + ahead + most]
        if len(following) < ahead + most:  # the match goes on into itself: a text that repeats
            following *= (ahead + most) // len(following) + 1
        return following[ahead : ahead + most]


class NGramSpeculation(Speculation):
    """Proposes drafts for requests that decode, from the histories of their own tokens."""

    def __init__(
        self,
        scheduler: Scheduler,
        in_flight: StepsInFlight,
        most_rows: int,
        history: type[DraftHistory] = TokenHistory,
    ) -> None:
        """``history``: what each request gets; `DraftHistory` leaves the lookup to the worker. ``most_rows``: rows of
        logits that a step with drafts may have: beyond some number a row costs a GPU, and on a CPU nearly each, as much
        as it saves."""
        self._scheduler = scheduler
        self._in_flight = in_flight
        self._most_rows = most_rows
        self._history = history
        self._changed: dict[Request, None] = {}  # requests that got tokens since the last step was made

    def note_tokens(self, sampled: Sampled) -> None:
        self._changed |= dict.fromkeys(request for request, _, _ in sampled)

    def propose(self) -> bool:
        changed, self._changed = self._changed, {}
        room, budget = self._most_rows - self._scheduler.num_running, _MOST_INDEXED
        if room <= 0:
            return True
        drafted = {step.batch[place] for step in self._scheduler.rows.steps for place in step.ahead}
        for request in changed:
            if request.status is not RequestStatus.DECODING or not request.params.speculation:
                continue
            history = request.history
            if history is None:
                if budget <= 0:  # it gets one with a later token
                    continue
                history = request.history = self._history(request.max_num_tokens)
                budget -= history.num_slots // _SLOTS_AS_A_TOKEN
            budget -= history.take_in(request, budget)
            if request in drafted and not history.may_follow_drafts:
                continue
            drafts = history.guess(request, room)
            if drafts:
                if self._in_flight.runs_ahead:  # steps ahead have one token each, at the places of the drafts
                    self._in_flight.interrupt()
                    self._changed = changed
                    return False
                room -= self._scheduler.rows.lookahead.propose(request, drafts)
        return True


def _hash(first: Any, second: Any, third: Any) -> Any:
    """Return the hash of three tokens, or the hashes of three arrays of tokens."""
    return first * _FACTORS[0] + second * _FACTORS[1] + third * _FACTORS[2]
