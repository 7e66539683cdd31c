"""KV of preempted requests, in places of the host's memory: copied there, and back, in place of being computed again.

    preempted          its pages ── copied to places, ahead of whatever the next step writes ──> swapped
    gets a row again   new pages <── copied from the places, ahead of its first step ─────────── swapped

Places are numbered behind the pool's pages, so that a copy is a pair of numbers like any other (`page_copies`); the
worker makes the copies in the order in which they are named here. So a place may be given anew as soon as it was left.

A request whose pages do not all have a place is computed again, and so is one whose copies failed (`KV_LOST`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...ipc.messages import KVCacheGroup
from .block_pool import BlockTable
from .kv_cache_manager import PreemptedKV, Prefix, first_needed
from .request import Request


class _Swapped(NamedTuple):
    """A request's KV in the host's memory."""

    num_tokens: int  # tokens that all steps made by then compute, at most
    is_long: bool  # see `RopeBorder`
    begins: list[int]  # number of leading blocks of each KV group that are not there: they have left the window
    places: list[list[int]]  # place of each block that follows, for each KV group


class SwappedRequests(PreemptedKV):
    """The preempted requests whose KV is in one of ``num_places`` places."""

    def __init__(self, num_places: int, groups: Sequence[KVCacheGroup]) -> None:
        self._num_places = num_places
        self._groups = groups
        self._free: list[int] = []  # places without a page
        self._swapped: dict[Request, _Swapped] = {}
        self._found: Prefix | None = None  # what `longest` has returned last of its own
        self._copies: list[int] = []  # copies that no step has been told: pairs, from and to

    def begin_worker(self, num_blocks: int) -> None:
        self._swapped.clear()
        self._copies = []
        self._free = list(range(num_blocks, num_blocks + self._num_places))

    @property
    def num_kept(self) -> int:  # type: ignore[override]
        return self._num_places - len(self._free)

    @property
    def has_copies(self) -> bool:  # type: ignore[override]
        return bool(self._copies)

    def keep(self, request: Request) -> None:
        """See `PreemptedKV`. A request that gets a result is computed again, for which all of its hidden states are
        needed."""
        num_tokens, tables = request.num_computed_tokens, request.block_tables
        pages = [table.block_ids[: -(-num_tokens // table.block_size) - table.begin] for table in tables]
        rest = len(self._free) - sum(map(len, pages))
        if not request.samples or rest < 0:
            return
        taken = iter(self._free[rest:])  # ascending, as far as may be: pages that lie together are copied together
        del self._free[rest:]
        places = [[next(taken) for _ in own] for own in pages]
        for own, theirs in zip(pages, places, strict=True):
            self._copies += _pairs(own, theirs)
        self._swapped[request] = _Swapped(num_tokens, request.is_long, [table.begin for table in tables], places)

    def longest(self, request: Request, cached: Prefix) -> Prefix:
        swapped = self._swapped.get(request)
        if swapped is None:
            return cached
        num_tokens = min(swapped.num_tokens, len(request.token_ids) - 1)  # without what is no token
        if num_tokens <= cached.length or request.is_long != swapped.is_long:
            return cached
        tables = [BlockTable(group.block_size, first_needed(group, num_tokens), []) for group in self._groups]
        self._found = Prefix(num_tokens, num_tokens, tables, [])
        return self._found

    def restore(self, request: Request, prefix: Prefix) -> None:
        """See `PreemptedKV`. The blocks are offered to others again, as it is not known which of them are cached."""
        swapped = self._swapped.get(request)
        if swapped is not None and prefix is self._found:
            for table, begin, places in zip(prefix.tables, swapped.begins, swapped.places, strict=True):
                end = -(-prefix.length // table.block_size)
                self._copies += _pairs(places[table.begin - begin : end - begin], table.block_ids[: end - table.begin])
            request.num_offered_tokens = max(table.begin * table.block_size for table in prefix.tables)
        self._found = None
        self.drop(request)

    def take_copies(self) -> list[int]:
        copies, self._copies = self._copies, []
        return copies

    def drop(self, request: Request) -> None:
        swapped = self._swapped.pop(request, None)
        if swapped is not None:
            for places in reversed(swapped.places):
                self._free += places

    def drop_all(self) -> None:
        for request in list(self._swapped):
            self.drop(request)


def _pairs(sources: list[int], targets: list[int]) -> list[int]:
    return [page for pair in zip(sources, targets, strict=True) for page in pair]
