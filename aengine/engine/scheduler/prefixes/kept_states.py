"""The states that are kept at block borders, for others to begin with.

A state goes on with each token, so it is found only where a copy of it was kept: at the last block border of a prompt;
where a prompt begins to differ from those that were seen before, or from one that waits for it; and at the latest
border within a completion. A copy is made before the step that goes on from there. It is a page of its own, with a name
like any other block's; a hit copies it into the request's own page.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..block_pool import BlockPool, Find
from ..request import Request, RequestStates, StateCopy

if TYPE_CHECKING:
    from ..kv_cache_manager import KVGroup, Prefix

STATE_INTERVAL = 256
"""Least number of tokens from one kept state of a request to the next: a prompt is cut where its state is kept, and a
copy takes memory (Qwen3-Next's 75 MiB, as its keys and values of 3168 tokens do)."""


class KeptStates:
    """The states that are kept at block borders, of all groups that have states."""

    def __init__(self, pool: BlockPool, groups: Sequence[KVGroup], border: int) -> None:
        """``border``: states can be kept after each multiple of so many tokens."""
        self._pool = pool
        self._groups = groups
        self._border = border

    @property
    def interval(self) -> int:
        return STATE_INTERVAL

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
        states.begun = states.newest = newest = prefix.length
        if prefix.kept:
            self._pool.acquire(prefix.kept)
            states.copies.append(StateCopy(prefix.length, prefix.kept))
        num_tokens = len(request.token_ids) - 1  # a hit leaves at least one token to compute
        for border in sorted({prefix.attended, num_tokens - num_tokens % self._border}):
            if border - newest >= STATE_INTERVAL and request.root_hash is not None:
                states.planned.append(border)
                newest = border

    def plan(self, request: Request, border: int) -> int:
        """Have the request keep its states at this border of its prompt, if it is not past it and none is kept shortly
        before. Returns the last border up to there at which they are, or will be, kept; 0: there is none."""
        states = request.states
        borders = [copy.border for copy in states.copies] + states.planned
        last = max((known for known in borders if known <= border), default=0)
        if border >= request.num_computed_tokens and border - max(last, states.newest) >= STATE_INTERVAL:
            insort(states.planned, border)
            return border
        return last

    def keep(self, request: Request, num_spare: int) -> list[int]:
        """Copy the request's states aside before its next step, if `KVCacheManager.keep_states` should. Returns pairs
        of pages: from, to."""
        states, position = request.states, request.num_computed_tokens
        if request.root_hash is None or position - states.newest < STATE_INTERVAL:
            return []
        states.newest = position
        num_known = len(request.token_ids)
        if position <= num_known and self._find(request, position, self._pool.find):  # another request has kept it
            return []
        if num_spare < len(self._groups):
            return []
        pages = self._pool.allocate(len(self._groups))
        states.copies.append(StateCopy(position, pages))
        if position + 2 > num_known:  # with so many tokens the step that begins with the copy was answered
            request.next_check_len = min(request.next_check_len, position + 2)
        return self.pairs(request, pages, is_kept=True)

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
            for group, page in zip(self._groups, pages, strict=True):
                self._pool.offer(page, group.name_at(request, border))
            self._pool.release(pages)
            if states.offered and request.num_prompt_tokens < states.offered[-1] < border:
                self._drop(request, states.offered.pop())  # within a completion only the latest is of use
            states.offered.append(border)

    def _drop(self, request: Request, border: int) -> None:
        for group in self._groups:
            self._pool.drop(group.name_at(request, border))

    def release(self, request: Request) -> None:
        """Free the pages of unanswered copies, and mark the states that the request has kept as the last to be
        evicted."""
        states = request.states
        for copy in states.copies:
            self._pool.release(copy.pages)
        for border in states.offered:
            for group in self._groups:
                self._pool.touch(group.name_at(request, border))
