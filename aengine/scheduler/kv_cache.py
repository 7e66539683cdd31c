"""Who owns which KV block, and which blocks hold a prefix worth keeping. Ids only: the memory is the worker's.

    a block is in one of three places

       empty (a stack)  ── allocate ──>  in use (ref_count >= 1)  ── release, hash known ──> idle (LRU order)
       no content       <── release ──   in the tables of        <── acquire (a hit) ─────   ref_count 0, hash known
                            no hash      ref_count requests      <── allocate: when none is empty the oldest idle
                                                                     block is taken and its hash forgotten

    free = empty + idle;  free + in use == num_blocks;  every move is O(1)

A full block is known by a hash that chains through all before it, so equal hash means equal tokens from position 0:

    root = H(cache_salt)      hash[0] = H(root, tokens[0:B])      hash[i] = H(hash[i-1], tokens[iB:(i+1)B])

H is BLAKE2b with 32 bytes: nobody can make a prompt that hits another's blocks by accident or by craft, and a tenant
without the salt can't even tell whether a prompt is cached. A block is offered to others only after the step that wrote
its last slot was answered without an error for that request (see scheduling.md for why not earlier).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from .request import Request

__all__ = ["BlockPool", "PrefixCache", "private_root", "shared_root"]

_DIGEST_SIZE = 32
_TOKEN_BYTES = array("i").itemsize


def shared_root(cache_salt: bytes) -> bytes:
    """Root of the hashes of all requests with this salt."""
    return blake2b(cache_salt, digest_size=_DIGEST_SIZE, person=b"shared root").digest()


def private_root(group: int) -> bytes:
    """Root for the n completions of one call, which share among themselves alone."""
    return blake2b(group.to_bytes(8, "little"), digest_size=_DIGEST_SIZE, person=b"private root").digest()


class BlockPool:
    """The blocks 0 .. num_blocks - 1."""

    __slots__ = ("_by_hash", "_empty", "_hash_of", "_idle", "_ref_counts", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks of no particular content, in use once. The caller has checked `num_free`."""
        assert count <= self.num_free, "allocate() beyond what is free"
        empty, idle, ref_counts = self._empty, self._idle, self._ref_counts
        taken = []
        for _ in range(count):
            if empty:
                block_id = empty.pop()
            else:
                block_id, _ = idle.popitem(last=False)
                self._forget(block_id)
            ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """One more user for each of these cached blocks."""
        ref_counts = self._ref_counts
        for block_id in block_ids:
            if ref_counts[block_id] == 0:
                del self._idle[block_id]
            ref_counts[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        """One user less for each block of a table. The end of a table is forgotten before its beginning."""
        ref_counts, hash_of = self._ref_counts, self._hash_of
        for block_id in reversed(block_ids):
            ref_count = ref_counts[block_id] - 1
            assert ref_count >= 0, "a block was released more often than taken"
            ref_counts[block_id] = ref_count
            if ref_count == 0:
                if hash_of[block_id] is None:
                    self._empty.append(block_id)
                else:
                    self._idle[block_id] = None

    def find(self, block_hash: bytes) -> int | None:
        return self._by_hash.get(block_hash)

    def count_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these would no longer be free once acquired."""
        ref_counts = self._ref_counts
        return sum(ref_counts[block_id] == 0 for block_id in block_ids)

    def offer(self, block_id: int, block_hash: bytes) -> None:
        """Let others find this block. Where the same content is known already, the older block keeps the name."""
        if block_hash not in self._by_hash and self._hash_of[block_id] is None:
            self._by_hash[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hash_of[block_id] = None

    def check(self, tables: Iterable[list[int]]) -> None:
        """Assert the picture above, given the block tables of all who hold blocks."""
        counts = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block twice in one table: {table}"
            for block_id in table:
                counts[block_id] += 1
        assert counts == self._ref_counts, "reference counts do not match the block tables"
        empty, idle = set(self._empty), set(self._idle)
        in_use = {block_id for block_id, count in enumerate(counts) if count}
        assert len(empty) == len(self._empty), "a block is empty twice"
        assert empty | idle | in_use == set(range(self.num_blocks)), "a block was lost"
        assert len(empty) + len(idle) + len(in_use) == self.num_blocks, "a block is in two places"
        named = {block_id: h for block_id, h in enumerate(self._hash_of) if h is not None}
        assert {h: block_id for block_id, h in named.items()} == self._by_hash, "hashes and blocks disagree"
        assert idle <= named.keys() and not empty & named.keys(), "idle blocks have a hash, empty ones have none"


class PrefixCache:
    """Finds and offers the full blocks of requests, by the chain of hashes drawn above."""

    __slots__ = ("_block_size", "_pool")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def match(self, request: Request) -> list[int]:
        """The cached blocks that ``request`` may begin with; one token at least is left to compute.

        Hashes no further than twice the hits: a long prompt that is new here costs one hash now, the others as its
        chunks are offered.
        """
        if request.root_hash is None:
            return []
        hits: list[int] = []
        hashes = request.block_hashes
        limit = (len(request.token_ids) - 1) // self._block_size
        for i in range(limit):
            if i == len(hashes):
                self._extend_hashes(request, min(limit, 2 * i + 1))
            block_id = self._pool.find(hashes[i])
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def offer(self, request: Request, num_written: int) -> None:
        """Offer the full blocks among the first ``num_written`` tokens, whose KV is surely written by now."""
        first, last = request.num_shared_blocks, num_written // self._block_size
        if request.root_hash is None or last <= first:
            return
        self._extend_hashes(request, last)
        for i in range(first, last):
            self._pool.offer(request.block_ids[i], request.block_hashes[i])
        request.num_shared_blocks = last

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        hashes, size = request.block_hashes, self._block_size
        first = len(hashes)
        if num_blocks <= first:
            return
        parent = hashes[-1] if hashes else request.root_hash
        assert parent is not None
        tokens = array("i", request.token_ids[first * size : num_blocks * size]).tobytes()
        width = size * _TOKEN_BYTES
        for start in range(0, len(tokens), width):
            parent = blake2b(parent + tokens[start : start + width], digest_size=_DIGEST_SIZE).digest()
            hashes.append(parent)
