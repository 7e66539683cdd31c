"""The states that are kept at block borders, for others to begin with.

A state goes on with each token, so it is found only where a copy of it was kept. It is a page of its own, with a name
like any other block's; a hit copies it into the request's own page. A request keeps its states

    where its prompt begins to differ from those that were seen before, or from one that waits for it
    at the last border of its prompt
    guessed: at distances before that which double, as the next prompt may begin with the same instruction
    at the latest border within its completion

                          |---------- 2d ----------|---- d ----|
    prompt    ............^........................^...........^...  if it is new

So of what a prompt has in common with the next one at most as much is computed again as its own question is long, and a
block, if the question is short. All are copied within the steps that compute the prompt, by the layers themselves,
which takes no step more. Guesses that nobody has begun with yet give way to newer ones, when they take more than their
share of the pool.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..block_pool import BlockPool, Find
from ..request import Request, RequestStates, StateCopy

if TYPE_CHECKING:
    from ..kv_cache_manager import KVGroup, Prefix

STATE_INTERVAL = 256
"""Least number of tokens from one kept state of a request to the next: a copy takes memory (Qwen3-Next's 75 MiB, as its
keys and values of 3168 tokens do)."""
_QUESTION = 8
"""Part of a prompt, 1 in so many, that may be its own: no further from its end are states kept on a guess, or two
intervals from there: each takes a page for every group of layers with states."""
_NEARER = 4
"""Part of that interval, 1 in so many, that is enough where prompts are known to differ: all that follow gain by it."""
GUESSES = 8
"""Part of the pool, 1 in so many, for guessed states with which nobody has begun yet."""


class KeptStates:
    """The states that are kept at block borders, of all groups that have states."""

    def __init__(self, pool: BlockPool, groups: Sequence[KVGroup], border: int, most_ahead: int) -> None:
        """``border``: states can be kept after each multiple of so many tokens; ``most_ahead``: tokens of a request
        that a step may guess, which its state is apart from."""
        self._pool = pool
        self._groups = groups
        self._border = border
        self._most_ahead = most_ahead
        self._guesses: OrderedDict[tuple[bytes, ...], None] = OrderedDict()  # their names, the oldest first
        self._least_spare = pool.num_blocks // GUESSES  # for which no guess takes room
        self._most_guesses = pool.num_blocks // GUESSES // max(1, len(groups))

    @property
    def interval(self) -> int:
        return STATE_INTERVAL

    @property
    def num_guesses(self) -> int:
        """Number of places at which states are kept that nobody has begun with."""
        return len(self._guesses)

    def longest(self, request: Request, length: int, find: Find) -> tuple[int, list[int]]:
        """Return (tokens, pages) of the last border within ``length`` tokens at which all groups' states are kept; (0,
        []): none."""
        for border in range(length - length % self._border, 0, -self._border):
            kept = self._find(request, border, find)
            if kept:
                return border, kept
        return 0, []

    def _find(self, request: Request, border: int, find: Find) -> list[int]:
        """Return the pages of the states kept at ``border``; [] unless all groups have theirs."""
        kept: list[int] = []
        for group in self._groups:
            page = find(group.name_at(request, border))
            if page is None:
                return []
            kept.append(page)
        return kept

    def begin(self, request: Request, prefix: Prefix) -> None:
        """Plan at which borders of its prompt the request keeps its states."""
        states = request.states = RequestStates()
        states.begun = states.newest = prefix.length
        states.num_known = len(request.token_ids)
        if prefix.kept:
            self._pool.acquire(prefix.kept)
            states.copies.append(StateCopy(prefix.length, prefix.kept))
            self._note_found(self._names(request, prefix.length), prefix.kept)
        if request.root_hash is None:
            return
        last = states.num_known - 1  # a hit leaves at least one token to compute
        last -= last % self._border
        self._insert(states, prefix.attended, STATE_INTERVAL // _NEARER)
        self._insert(states, last)
        distance, most = STATE_INTERVAL, max(2 * STATE_INTERVAL, (last - states.begun) // _QUESTION)
        while distance <= most and len(states.guessed) < self._most_guesses and not request.has_begun:
            border = (last - distance) - (last - distance) % self._border
            if self._insert(states, border):
                states.guessed.add(border)
            distance *= 2

    @staticmethod
    def _insert(states: RequestStates, border: int, interval: int | None = None) -> bool:
        """Plan to keep states at the border, unless others are kept less than an interval from there."""
        least = STATE_INTERVAL if interval is None else interval
        is_apart = all(abs(border - other) >= least for other in (states.begun, *states.planned))
        if border > states.begun and is_apart:
            insort(states.planned, border)
            return True
        return False

    def plan(self, request: Request, border: int) -> int:
        """Have the request keep its states at this border of its prompt, in place of a guess nearby, if it is not past
        it and none is needed shortly before. Returns the last border up to there at which they are, or will be, kept;
        0: there is none."""
        states = request.states
        coming = [copy.border for copy in states.copies] + states.planned
        needed = (b for b in (*states.offered, *coming) if b <= border and b not in states.guessed)
        if border >= request.num_computed_tokens and border - max(needed, default=states.begun) >= STATE_INTERVAL:
            states.planned = [b for b in states.planned if b not in states.guessed or abs(b - border) >= STATE_INTERVAL]
            states.guessed.discard(border)
            insort(states.planned, border)
            return border
        last = max((known for known in coming if known <= border), default=0)
        states.guessed.discard(last)  # somebody waits for it
        return last

    def keep(self, request: Request, num_spare: int) -> list[int]:
        """Copy the request's states aside before its next step, if `KVCacheManager.keep_states` should. Returns pairs
        of pages: from, to."""
        states, position = request.states, request.num_computed_tokens
        if request.root_hash is None or position - states.newest < STATE_INTERVAL:
            return []
        states.newest = position
        if position < states.num_known and position not in states.planned:
            states.guessed.add(position)
        num_known = len(request.token_ids)
        if position <= num_known and self._is_kept(request, position):
            return []
        if num_spare < len(self._groups):
            return []
        pages = self._pool.allocate(len(self._groups))
        states.copies.append(StateCopy(position, pages))
        if position + 2 > num_known:  # with so many tokens the step that begins with the copy was answered
            request.next_check_len = min(request.next_check_len, position + 2)
        return self.pairs(request, pages, is_kept=True)

    def keep_within(self, request: Request, num_tokens: int, num_spare: int) -> list[int]:
        """Have the request's states kept within a step that computes its next ``num_tokens``, if ``num_spare`` blocks
        suffice. Returns where, as `SchedulerOutput.kept_states` has it."""
        states, begin, kept = request.states, request.num_computed_tokens, []
        for border in states.planned:
            if not begin + self._most_ahead < border < begin + num_tokens or self._is_kept(request, border):
                continue
            if num_spare < len(self._groups) + (self._least_spare if border in states.guessed else 0):
                continue
            num_spare -= len(self._groups)
            pages = self._pool.allocate(len(self._groups))
            states.copies.append(StateCopy(border, pages))
            states.newest = border
            for group, page in zip(self._groups, pages, strict=True):
                kept += [request.req_idx, border - begin, group.index, page]
        return kept

    def _is_kept(self, request: Request, border: int) -> bool:
        """Return whether another request with the same tokens has kept its states at the border. It is a guess no more,
        if it is none of this request's."""
        pages = self._find(request, border, self._pool.find)
        if border not in request.states.guessed:
            self._note_found(self._names(request, border), pages)
        return bool(pages)

    def _note_found(self, names: tuple[bytes, ...], pages: Sequence[int]) -> None:
        """Note that the states of these names, if they were a guess, are one no more."""
        if names in self._guesses:
            del self._guesses[names]
            for page, name in zip(pages, names, strict=False):  # without pages they were evicted
                self._pool.on_offer(page, name)

    def _names(self, request: Request, border: int) -> tuple[bytes, ...]:
        return tuple(group.name_at(request, border) for group in self._groups)

    def pairs(self, request: Request, pages: list[int], *, is_kept: bool) -> list[int]:
        """Return the pairs (from, to) for copies between ``pages`` and the request's own pages; ``is_kept``: to
        ``pages``."""
        pairs = []
        for group, page in zip(self._groups, pages, strict=True):
            (own,) = request.block_tables[group.index].block_ids
            pairs += [own, page] if is_kept else [page, own]
        return pairs

    def note_written(self, request: Request, num_tokens: int) -> None:
        """Offer the kept states whose copies were made by steps that are answered now: those before token
        ``num_tokens``."""
        states = request.states
        while states.copies and states.copies[0].border < num_tokens:
            border, pages = states.copies.pop(0)
            names = self._names(request, border)
            is_guess = border in states.guessed
            for name, page in zip(names, pages, strict=True):
                self._pool.offer(page, name, is_guess=is_guess)
            self._pool.release(pages)
            if is_guess:
                self._guess(names)
            if states.offered and request.num_prompt_tokens < states.offered[-1] < border:
                self._drop(self._names(request, states.offered.pop()))  # within a completion the latest alone is of use
            states.offered.append(border)

    def _guess(self, names: tuple[bytes, ...]) -> None:
        """Note that the states of these names were kept on a guess; gives up the oldest beyond their share."""
        self._guesses[names] = None
        if len(self._guesses) > self._most_guesses:
            oldest, _ = self._guesses.popitem(last=False)
            self._drop(oldest)

    def _drop(self, names: tuple[bytes, ...]) -> None:
        for name in names:
            self._pool.drop(name)

    def release(self, request: Request) -> None:
        """Free the pages of unanswered copies, and mark the states that the request has kept as the last to be
        evicted."""
        states = request.states
        for copy in states.copies:
            self._pool.release(copy.pages)
        for border in states.offered:
            for name in self._names(request, border):
                self._pool.touch(name)
