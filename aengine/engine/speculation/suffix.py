"""Drafts by the longest end of a request's text that occurred before: what came after it there comes now.

    ... the quick brown fox jumps over ... a quick brown dog ... the quick brown       the last three tokens are looked
              ▲──── 3 tokens ────┘              2 tokens                               up; of the places found those
                         followed as long as it holds                                  that agree the longest vote

It needs no model and no weights, and pays where an answer repeats its prompt or itself: edited code, quoted documents,
tables, JSON. A match that holds is followed, and each token that it foretold makes the next guess more likely, whether
it was drafted or not. With `PastTexts` the outputs of earlier requests of the same salt are looked up, too.
"""

from __future__ import annotations

from collections import OrderedDict
from math import prod
from typing import Any

import numpy as np

from ..scheduler.request import Request
from .history import MOST_DRAFTS, NO_GUESS, NONE_CANCELLABLE, Chances, DraftHistory, Guess, PendingTokens, num_coming

_N = 3  # tokens that are looked up
_FACTORS = 1_540_483_477, 1_812_433_253, 1_664_525_013  # factors of the hash, odd; sums stay below 2**63
_SHIFT = 16  # bits of the sum that are dropped: in the lowest ones few of a token's bits take part
_MOST_PLACES = 1 << 17  # places of a text that are found, eight bytes each; of a longer text the last ones
_MOST_COMPARED = 8  # places of the last three tokens that are compared, newest first
_FEW = 32  # tokens that are put into a table one by one: arrays of numpy take longer
_NEAR = 8  # tokens after the end of a match among which the text is expected to go on
_LONGEST = 32  # tokens beyond which two matches are equally long
_PLACES_AS_A_TOKEN = 64  # places of a new table that take about as long as to put a token into one
_MOST_PAST = 1 << 15  # tokens of past outputs that are kept for a salt, of which the older half goes at once
_MOST_SALTS = 8  # salts whose past outputs are kept


class TokenIndex:
    """Where each three tokens of a list, which may grow, occurred: the last place of each hash, and for each place the
    one before it with the same hash. To put a token in, and to look one up, takes a microsecond or few."""

    __slots__ = ("_before", "_before_array", "_last", "_last_array", "_mask", "num_indexed", "token_ids")

    def __init__(self, token_ids: list[int], most_tokens: int) -> None:
        """``most_tokens``: how long the list may get."""
        self.token_ids = token_ids
        size = 1 << (min(_MOST_PLACES, max(_N, most_tokens)) - 1).bit_length()
        self._mask = size - 1
        self._last_array = np.zeros(size, dtype=np.int32)  # last place of each hash; 0: none
        self._before_array = np.zeros(size, dtype=np.int32)  # at the lowest bits of a place: the one before it
        # the same memory: single numbers are read and written faster
        self._last, self._before = memoryview(self._last_array.data), memoryview(self._before_array.data)
        self.num_indexed = _N - 1  # the first place at which no indexed three tokens end

    @property
    def size(self) -> int:
        return self._mask + 1

    def add(self, end: int) -> int:
        """Put the tokens before place ``end`` in. Returns how many these were."""
        begin, mask, last, before = self.num_indexed, self._mask, self._last, self._before
        if end - begin > _FEW:
            self._add_many(begin, end)
        else:
            ids = self.token_ids[begin - _N + 1 : end]
            for place, three in enumerate(zip(ids, ids[1:], ids[2:], strict=False), begin):
                slot = _hash(*three) >> _SHIFT & mask
                before[place & mask] = last[slot]
                last[slot] = place
        self.num_indexed = max(begin, end)
        return max(0, end - begin)

    def _add_many(self, begin: int, end: int) -> None:
        ids, count = np.array(self.token_ids[begin - _N + 1 : end], dtype=np.int64), end - begin
        slots = _hash(*(ids[i : i + count] for i in range(_N))) >> _SHIFT & self._mask
        places = np.sort(slots << 32 | np.arange(begin, end))  # ordered by slot, then by place
        slots, places = places >> 32, places & 0xFFFFFFFF
        is_first = np.ones(count, dtype=bool)  # the first place of its slot
        is_first[1:] = slots[1:] != slots[:-1]
        before = np.empty(count, dtype=np.int64)
        before[1:] = places[:-1]
        before[is_first] = self._last_array[slots[is_first]]
        self._before_array[places & self._mask] = before
        is_last = np.append(is_first[1:], True)
        self._last_array[slots[is_last]] = places[is_last]

    def find(self, text: list[int]) -> tuple[int, int]:
        """Return the place where the longest end of ``text``, of three tokens or more, ends, and its length; of several
        the one after which came what came most often after them. (-1, 0): none is found."""
        token_ids, mask, tail = self.token_ids, self._mask, text[-_N:]
        if len(tail) < _N:
            return -1, 0
        place, floor = self._last[_hash(*tail) >> _SHIFT & mask], max(0, self.num_indexed - self.size)
        found: list[int] = []
        longest = 0
        for _ in range(_MOST_COMPARED):
            if place <= floor:
                break
            if token_ids[place - _N + 1 : place + 1] == tail:
                length = _agreeing(token_ids, place, text)
                if length > longest:
                    longest, found = length, []
                if length == longest:
                    found.append(place)
            before = self._before[place & mask]
            place = before if before < place else 0
        return (_likeliest(token_ids, found), longest) if found else (-1, 0)


def _agreeing(token_ids: list[int], place: int, text: list[int]) -> int:
    """Return how many tokens that end at ``place``, three of which agree, agree with the end of ``text``."""
    most = min(_LONGEST, place + 1, len(text))
    if token_ids[place - most + 1 : place + 1] == text[-most:]:
        return most
    length = _N
    while token_ids[place - length] == text[-1 - length]:
        length += 1
    return length


def _likeliest(token_ids: list[int], places: list[int]) -> int:
    """Return the one of ``places``, newest first, after which came, token by token, what came after most of them."""
    texts = [token_ids[place + 1 : place + 1 + MOST_DRAFTS] for place in places]
    ahead = 0
    while texts.count(texts[0]) < len(texts):
        following = [text[ahead] if ahead < len(text) else -1 for text in texts]
        most = max(following, key=following.count)  # the newest, if several came as often
        left = [number for number, token_id in enumerate(following) if token_id == most]
        places, texts = [places[number] for number in left], [texts[number] for number in left]
        ahead += 1
    return places[0]


class PastTexts:
    """The outputs of earlier requests, by salt: bounded, the oldest go first."""

    def __init__(self) -> None:
        self._indices: OrderedDict[bytes, list[TokenIndex]] = OrderedDict()  # one or two of each salt, newest first

    def of(self, salt: bytes) -> list[TokenIndex]:
        return self._indices.get(salt, [])

    def add(self, salt: bytes, token_ids: list[int]) -> None:
        """Add an output. They are put into the index with later tokens."""
        indices = self._indices.pop(salt, [])
        if not indices or len(indices[0].token_ids) > _MOST_PAST // 2:
            indices = [TokenIndex([-1], _MOST_PAST), *indices[:1]]
        indices[0].token_ids += [*token_ids[: _MOST_PAST // 2], -1]
        self._indices[salt] = indices
        if len(self._indices) > _MOST_SALTS:
            self._indices.popitem(last=False)


class SuffixHistory(DraftHistory):
    """The places of one request's tokens, and the match that is being followed."""

    __slots__ = ("_index", "_lost", "_match", "_num_seen", "_past", "_place", "_source")

    def __init__(self, request: Request, chances: Chances, past: PastTexts | None = None) -> None:
        super().__init__(request, chances)
        self._index = TokenIndex(request.token_ids, request.max_num_tokens)
        self._past = past
        self._num_seen = 0  # tokens of the request when it was looked at last
        self._source = request.token_ids  # the text in which there is a match
        self._place = -1  # the place there that is matched with the last token; -1: none
        self._lost = -1  # the place there at which something else came last; -1: none, or long ago
        self._match = 0  # tokens that agree up to there, as far as they were compared

    @property
    def size(self) -> int:  # type: ignore[override]
        return self._index.size // _PLACES_AS_A_TOKEN

    def note_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: all guesses are compared when more tokens are known, also those that were drafted."""

    def take_in(self, request: Request, most: int) -> int:
        token_ids, index = request.token_ids, self._index
        num_seen, match = self._num_seen, self._match
        self._follow(token_ids)
        if self._match >= _N <= match and self._source is token_ids and index.num_indexed >= num_seen - 1:
            index.num_indexed = len(token_ids) - 1  # all of the new ones are found where they are repeated from
            return 0
        num_added = index.add(min(len(token_ids) - 1, index.num_indexed + most))
        past = () if self._past is None else self._past.of(request.cache_key.salt)
        for one in past:
            num_added += one.add(min(len(one.token_ids), one.num_indexed + max(0, most - num_added)))
        if self._match < _N:
            for one in (index, *past):
                place, match = one.find(token_ids)
                if match > self._match:
                    self._source, self._place, self._match, self._lost = one.token_ids, place, match, -1
        return num_added

    def _follow(self, token_ids: list[int]) -> None:
        """Move the match on over the new tokens, as far as it holds."""
        num_seen, self._num_seen = self._num_seen, len(token_ids)
        if self._place < 0 or num_seen == len(token_ids):
            return
        new = token_ids[num_seen:]
        foretold = self._source[self._place + 1 : self._place + 1 + len(new)]
        num_right = len(foretold)  # near the end of a text fewer are foretold
        if foretold != new:
            pairs = zip(foretold, new, strict=False)
            num_right = next((i for i, (first, second) in enumerate(pairs) if first != second), num_right)
        self.chances.note(self._match, num_right, num_right < len(foretold))
        if num_right == len(new):
            self._place += num_right
            self._match += num_right
            return
        # Something else came. As long as no other match is found, the text may go on soon after that, or is taken to
        # have another token there.
        self._match = 0
        if num_right == len(foretold):  # the text in which there was a match ends
            self._place = self._lost = -1
            return
        if self._lost < 0 or num_right:
            self._lost = self._place + 1 + num_right
        near = self._source[self._lost : min(self._lost + _NEAR, len(self._source) - 1)]
        if self._place >= self._lost + _NEAR:
            self._place = self._lost = -1
        elif token_ids[-1] in near:
            self._place, self._match = self._lost + near.index(token_ids[-1]), 1
        else:
            self._place += 1 + num_right

    def guess(self, request: Request, most: int, pending: PendingTokens = NONE_CANCELLABLE) -> Guess:
        if self._place < 0:
            return NO_GUESS
        ahead, source, begin = pending.num_of(request), self._source, self._place + 1
        most = min(most, MOST_DRAFTS, 2 + 2 * self._match)
        following = source[begin : begin + ahead + most]
        if source is request.token_ids and 0 < len(following) < ahead + most:
            following *= (ahead + most) // len(following) + 1  # the match goes on into itself: a text that repeats
        if -1 in following:  # an output ends there
            following = following[: following.index(-1)]
        if pending.drafts:
            ahead = num_coming(request, pending, following)
        following = following[ahead : ahead + most]
        chances = self.chances.of_each(self._match, ahead + len(following))
        return Guess(following, [prod(chances[: ahead + 1]), *chances[ahead + 1 :]] if following else [])

    def end(self, request: Request) -> None:
        if self._past is not None:
            self._past.add(request.cache_key.salt, request.output_token_ids)


def _hash(first: Any, second: Any, third: Any) -> Any:
    """Return the hash of three tokens, or the hashes of three arrays of tokens."""
    return first * _FACTORS[0] + second * _FACTORS[1] + third * _FACTORS[2]
