"""Blocks of each request in each KV group, and the prefixes that others can take over. All groups draw on one pool.

    group      needs for the query at position p    a prefix of L tokens is a hit when
    full       the blocks of tokens 0 to p          all its blocks are found
    window w   those of tokens p - w + 1 to p       the blocks of its last w - 1 tokens are found
    state      its one block                        it was kept there

A hit is the longest prefix that all groups agree on.

A state goes on with each token, so it is found only where a copy of it was kept (prefixes/kept_states.py). It is a page
of its own, with a name like any other block's; a hit copies it into the request's own page.

A block that has left a window is freed when the answer is in of the step that passed it (`note_written`). By then the
next query of that request, also in any step in flight, is past the window of all tokens in the block: nothing reads it
any more, and a step that is taken back does not either, since only unanswered steps are. Whoever gets the block writes
it in a later step. The worker is not told: its table keeps the number, and the kernels never look at what is before a
window.

Prefixes are known by a hash that chains through all tokens before, so equal hash means equal tokens from position 0:

    root = H(parts)      hash[0] = H(root, tokens[0:B])      hash[i] = H(hash[i-1], tokens[iB:(i+1)B])

``parts`` are all else that the KV depends on, and who may share it: the cache's salt, an adapter, media. What is
``placed`` in a prompt, such as an image's digest, is hashed with the tokens of the block that its position lies in, so
that only the blocks before it are shared with prompts that have something else there. Requests beyond a model's rope
border have a root of their own (`long_root`). H is BLAKE2b with 32 bytes: nobody can make a
prompt that hits another's blocks by accident or by craft, and a tenant without the salt can't even tell whether a
prompt is cached. B is the smallest block size of the groups; a block of several B goes by the last of its hashes. A
block is offered to others only after the step that wrote its last slot was answered without an error for that request
(docs/internals/scheduling.md says why not earlier).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from ...ipc.messages import KVCacheGroup, most_ahead
from .block_pool import BlockPool, BlockTable, Find, IdleBlocks
from .prefixes.kept_states import KeptStates
from .request import CacheKey, Request

_DIGEST_SIZE = 32
_TOKEN_BYTES = array("i").itemsize


def shared_root(key: CacheKey) -> bytes:
    """Return the root of the hashes of all requests that are equal in salt, adapter and media."""
    parts = _framed(key.salt) + _framed(key.adapter) + _framed(key.media)
    return blake2b(parts, digest_size=_DIGEST_SIZE, person=b"shared root").digest()


def long_root(root: bytes) -> bytes:
    """Return the root of a request beyond the model's rope border, made of its root up to there."""
    return blake2b(root, digest_size=_DIGEST_SIZE, person=b"long root").digest()


def retired_root(root: bytes) -> bytes:
    """Return the root of a request that was being computed when all prefixes were forgotten: what it offers from then
    on is found by no later one."""
    return blake2b(root, digest_size=_DIGEST_SIZE, person=b"retired root").digest()


def private_root(number: int) -> bytes:
    """Return a root for the n completions of one call, which share among themselves alone."""
    return blake2b(number.to_bytes(8, "little"), digest_size=_DIGEST_SIZE, person=b"private root").digest()


def first_needed(group: KVCacheGroup, position: int) -> int:
    """Return the index of the first block that queries from ``position`` on read."""
    return max(0, position - group.window + 1) // group.block_size if group.window else 0


class Prefix(NamedTuple):
    """The tokens with which a request can begin without computing them."""

    length: int
    attended: int  # tokens of the prefix that the attending layers have; states may have been kept for fewer
    tables: list[BlockTable]  # one for each group; empty tables for groups with states
    kept: list[int]  # pages of the kept states, to be copied, one for each group with states; empty without a prefix


class PreemptedKV:
    """What is kept of the KV of preempted requests. Here: nothing, so that they are computed again."""

    num_kept = 0
    """Number of pages that are kept."""

    has_copies = False
    """Whether there are copies of pages that no step has been told."""

    def begin_worker(self, num_blocks: int) -> None:
        """Forget all: the worker is a new one, with so many pages."""

    def keep(self, request: Request) -> None:
        """Called when the request is about to lose its row and its blocks; steps in flight may still write these."""

    def longest(self, request: Request, cached: Prefix) -> Prefix:
        """Return what a request without a row can begin with: ``cached``, or what is kept of it, if that is more."""
        return cached

    def restore(self, request: Request, prefix: Prefix) -> None:
        """Called when the request begins with ``prefix``, of which it has the blocks."""

    def take_copies(self) -> list[int]:
        """Return the copies of pages that the next step is to make for that: pairs, from and to."""
        return []

    def drop(self, request: Request) -> None:
        """Keep nothing of the request any more."""

    def drop_all(self) -> None:
        """Keep nothing of any request any more."""


class KVCacheManager:
    """Block tables of requests and the prefix cache, over ``num_blocks`` pages that the ``groups`` share. At most
    ``step_tokens`` tokens of a request are in one step."""

    def __init__(
        self,
        num_blocks: int,
        groups: Sequence[KVCacheGroup],
        step_tokens: int,
        new_idle: Callable[[int], IdleBlocks] = IdleBlocks,
    ) -> None:
        self.num_groups = len(groups)
        # most blocks that one more token can need, over all groups
        self.num_growing = sum(group.kind != "state" for group in groups)
        self.block_size = min(group.block_size for group in groups)
        self.has_states = any(group.kind == "state" for group in groups)
        # Most tokens of a request in a step that are guessed.
        self.most_ahead = most_ahead(groups, otherwise=step_tokens)
        self.has_windows = any(group.window for group in groups)
        # Others can take over a multiple of so many tokens of a prompt that is being computed. 0: none.
        self.prefix_unit = max((group.block_size for group in groups if group.kind != "state"), default=0)
        self.pool = BlockPool(num_blocks, new_idle)
        self._groups = [KVGroup(group, index, self.block_size) for index, group in enumerate(groups)]
        attending = [own for own, group in zip(self._groups, groups, strict=True) if group.kind != "state"]
        # A full group looks up a prefix from its begin, and so tells the windows cheaply how far to look at most.
        self._strictest_last = sorted(attending, key=lambda group: group.window)
        with_states = [own for own, group in zip(self._groups, groups, strict=True) if group.kind == "state"]
        suffixes = {own.suffix for own in with_states}
        self.is_state: Callable[[bytes], bool] = lambda name: name[_DIGEST_SIZE:] in suffixes
        """Returns whether it is the name of a kept state, not of a block."""
        self.states = KeptStates(self.pool, with_states, self.block_size, self.most_ahead)
        self._step_tokens = step_tokens

    # -- prefixes

    def match(self, request: Request, find: Find | None = None) -> Prefix:
        """Find the longest prefix of ``request`` that all groups have cached, of what is reusable. ``find``: what
        knows blocks by name; None: the pool."""
        find = find or self.pool.find
        if request.root_hash is None or not self._strictest_last:
            return self.no_prefix()
        tables = self._empty_tables()
        length = attended = self._agree(request, tables, request.num_reusable, find)
        while self.has_states and length:
            found, kept = self.states.longest(request, length, find)
            if found == length:
                return Prefix(length, attended, tables, kept)
            length = self._agree(request, tables, found, find)
        return Prefix(length, attended, tables, [])

    def no_prefix(self) -> Prefix:
        return Prefix(0, 0, self._empty_tables(), [])

    def _empty_tables(self) -> list[BlockTable]:
        return [BlockTable(group.block_size, 0, []) for group in self._groups]

    def _agree(self, request: Request, tables: list[BlockTable], length: int, find: Find) -> int:
        """Set the tables of the attending groups to the longest prefix, of at most ``length`` tokens, that all of them
        have; return its length."""
        num_agreed = 0
        while num_agreed < len(self._strictest_last):
            for group in self._strictest_last:
                table = tables[group.index] = group.longest_hit(find, request, length)
                num_agreed = num_agreed + 1 if table.room == length else 1
                length = table.room
        return length

    def num_coming(self, request: Request, most: int) -> int:
        """Return how many of the first ``most`` tokens of its prompt others will be able to take over; of a model with
        states it will keep them there, if that is worth its while."""
        border = most - most % self.prefix_unit
        return self.states.plan(request, border) if self.has_states else border

    def shares_prompt(self, request: Request) -> bool:
        """Return whether another completion of the request's call could reuse blocks of its prompt."""
        least = max(self.block_size, self.states.interval if self.has_states else 0)
        return request.num_prompt_tokens > least and bool(self._strictest_last)

    def num_missing(self, prefix: Prefix, num_tokens: int) -> int:
        """Return how many blocks must be free to begin a request of ``num_tokens`` tokens with ``prefix``."""
        needed = self.pool.count_idle(prefix.kept) if prefix.kept else 0
        for group, table in zip(self._groups, prefix.tables, strict=True):
            most = group.most_blocks(num_tokens, self._step_tokens)
            to_come = -((table.room - num_tokens) // group.block_size)
            needed += self.pool.count_idle(table.block_ids) + min(most - len(table.block_ids), to_come)
        return needed

    def begin(self, request: Request, prefix: Prefix) -> None:
        """Give the request the tables of its prefix."""
        for table in prefix.tables:
            self.pool.acquire(table.block_ids)
        request.block_tables = prefix.tables
        request.num_computed_tokens = request.num_offered_tokens = prefix.length
        if self.has_states:
            self.states.begin(request, prefix)

    def note_written(self, request: Request, num_tokens: int) -> None:
        """Note that the KV of the first ``num_tokens`` tokens is written, and the next query is at that position.

        Offers their full blocks, and frees those that have left a window.
        """
        size, first = self.block_size, request.num_offered_tokens
        last = num_tokens - num_tokens % size
        if last > first and request.root_hash is not None:
            extend_hashes(request, last // size, size)
            for group in self._strictest_last:
                group.offer(self.pool, request, first, last)
            request.num_offered_tokens = last
        if self.has_states:
            self.states.note_written(request, num_tokens)
        if self.has_windows:
            for group, table in zip(self._groups, request.block_tables, strict=True):
                num_left = min(group.first_needed(num_tokens) - table.begin, len(table.block_ids))
                if num_left > 0:
                    self.pool.release(table.block_ids[:num_left])
                    del table.block_ids[:num_left]
                    table.begin += num_left

    def restore_states(self, request: Request, prefix: Prefix) -> list[int]:
        """Return the copies of pages that its first step begins with, if any were kept: pairs, from and to."""
        return self.states.pairs(request, prefix.kept, is_kept=False)

    def keep_states(self, request: Request, num_spare: int) -> list[int]:
        """Return the copies of pages, as above, that its next step begins with: of its states as they are now, if it
        is at a border where that is worth its while, and ``num_spare`` blocks suffice. Only if the model `has_states`.
        """
        if request.num_computed_tokens % self.block_size:
            return []
        return self.states.keep(request, num_spare)

    # -- room

    @staticmethod
    def room(request: Request) -> int:
        """Return how many tokens the request's blocks can hold."""
        tables = request.block_tables
        return tables[0].room if len(tables) == 1 else min(table.room for table in tables)

    @staticmethod
    def num_lacking(request: Request, num_tokens: int) -> int:
        """Return how many more blocks the request needs to hold ``num_tokens`` tokens."""
        lacking = 0
        for table in request.block_tables:
            if num_tokens > table.room:
                lacking -= (table.room - num_tokens) // table.block_size
        return lacking

    def reach(self, request: Request, num_blocks: int, num_tokens: int) -> int:
        """Return how many tokens, at most ``num_tokens``, the request can hold with ``num_blocks`` more blocks."""
        size, held = self.block_size, self.room(request)
        ends = range(held + size, num_tokens, size)  # token counts after which another block is needed in some group
        fitting = bisect_right(ends, num_blocks, key=lambda end: self.num_lacking(request, end))
        return held + size * fitting

    def grow(self, request: Request, num_tokens: int) -> list[tuple[int, list[int]]]:
        """Allocate the blocks that the request lacks to hold ``num_tokens`` tokens. Returns (group, block ids) of each
        group that got some."""
        grown = []
        for group, table in enumerate(request.block_tables):
            if num_tokens > table.room:
                block_ids = self.pool.allocate(-((table.room - num_tokens) // table.block_size))
                table.append(block_ids)
                grown.append((group, block_ids))
        return grown

    def take_back(self, request: Request, group: int) -> None:
        """Free the newest block of the request's table in ``group``."""
        self.pool.release([request.block_tables[group].pop()])

    def release(self, request: Request) -> None:
        """Free all blocks of the request."""
        for table in request.block_tables:
            self.pool.release(table.block_ids)
        if self.has_states:
            self.states.release(request)

    def num_held(self, request: Request) -> int:
        num_blocks = sum([len(table.block_ids) for table in request.block_tables])
        return num_blocks + request.states.num_copied if self.has_states else num_blocks

    def num_leaving(self, request: Request) -> int:
        """Return how many of the request's blocks leave their windows when the steps made so far are answered."""
        position = request.num_computed_tokens
        tables = zip(self._groups, request.block_tables, strict=True)
        return sum(max(0, min(g.first_needed(position) - t.begin, len(t.block_ids))) for g, t in tables)

    def check(self, requests: Iterable[Request], also: Iterable[list[int]] = ()) -> None:
        """Assert that the pool agrees with the tables of ``requests``, which with ``also`` are all that hold blocks."""
        tables = [
            [i for t in request.block_tables for i in t.block_ids] + [i for c in request.states.copies for i in c.pages]
            for request in requests
        ]
        self.pool.check([*tables, *also])


class KVGroup:
    """The rules of one KV group: which blocks a query needs, and how long a prefix hit is."""

    def __init__(self, group: KVCacheGroup, index: int, hash_size: int) -> None:
        self.index = index
        self.block_size = group.block_size
        self.window = group.window
        self.most_blocks = group.most_blocks
        self.first_needed = partial(first_needed, group)  # index of the first block that queries read from there on
        self._hash_size = hash_size
        self._hashes_per_block = group.block_size // hash_size
        self.suffix = bytes([index]) if index else b""  # tells this group's names of blocks from the others'

    def longest_hit(self, find: Find, request: Request, length: int) -> BlockTable:
        """Return the blocks of the longest prefix of at most ``length`` tokens with which this group can begin.

        A full group hashes no further than twice the hits: a long prompt that is new here costs one hash now, the
        others as its chunks are offered. A window must know all hashes up to the length.
        """
        hashes, step, suffix = request.block_hashes, self._hashes_per_block, self.suffix
        end = length // self.block_size
        hits: list[int] = []
        if not self.window:
            for i in range(end):
                if (i + 1) * step > len(hashes):
                    extend_hashes(request, min(end, 2 * i + 1) * step, self.block_size // step)
                block_id = find(hashes[(i + 1) * step - 1] + suffix)
                if block_id is None:
                    break
                hits.append(block_id)
            return BlockTable(self.block_size, 0, hits)
        extend_hashes(request, end * step, self.block_size // step)
        i = end
        while i > self.first_needed(end * self.block_size):
            i -= 1
            block_id = find(hashes[(i + 1) * step - 1] + suffix)
            if block_id is None:
                end, hits = i, []
            else:
                hits.append(block_id)
        return BlockTable(self.block_size, i, hits[::-1])

    def name_at(self, request: Request, border: int) -> bytes:
        """Return the name of this group's block, or kept state, that ends at token ``border``."""
        extend_hashes(request, border // self._hash_size, self._hash_size)
        return request.block_hashes[border // self._hash_size - 1] + self.suffix

    def offer(self, pool: BlockPool, request: Request, first: int, last: int) -> None:
        """Offer the blocks that have become full with the tokens ``first`` to ``last`` - 1."""
        table, step, size = request.block_tables[self.index], self._hashes_per_block, self.block_size
        for i in range(first // size, last // size):
            pool.offer(table.block_ids[i - table.begin], request.block_hashes[(i + 1) * step - 1] + self.suffix)


def extend_hashes(request: Request, num_hashes: int, size: int) -> None:
    """Compute the request's hashes of its first ``num_hashes`` blocks of ``size`` tokens, as far as they are
    missing."""
    hashes = request.block_hashes
    first = len(hashes)
    if num_hashes <= first:
        return
    parent = hashes[-1] if hashes else request.root_hash
    assert parent is not None
    tokens = array("i", request.token_ids[first * size : num_hashes * size]).tobytes()
    width = size * _TOKEN_BYTES
    placed = request.cache_key.placed
    for start in range(0, len(tokens), width):
        block = tokens[start : start + width]
        if placed:  # these make a block longer, so none is taken for one without
            block += _placed_in(placed, first * size + start // _TOKEN_BYTES, size)
        parent = blake2b(parent + block, digest_size=_DIGEST_SIZE).digest()
        hashes.append(parent)


def _placed_in(placed: Sequence[tuple[int, bytes]], begin: int, size: int) -> bytes:
    """Return what is placed in the block of ``size`` tokens that begins with token ``begin``."""
    here = placed[bisect_left(placed, (begin,)) : bisect_left(placed, (begin + size,))]
    return b"".join([position.to_bytes(8, "little") + _framed(digest) for position, digest in here])


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part
