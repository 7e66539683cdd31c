"""The block pool, the chain of hashes, and the waiting queue."""

from __future__ import annotations

import random

import pytest

from aengine.params import SamplingParams
from aengine.scheduler.kv_cache import BlockPool, PrefixCache, private_root, shared_root
from aengine.scheduler.request import Request
from aengine.scheduler.waiting_queue import WaitingQueue

SIZE = 4


def make(tokens: list[int], root: bytes | None = shared_root(b"")) -> Request:
    request = Request("r", tokens, SamplingParams(), seed=0, max_num_tokens=1000, stop_token_ids=frozenset())
    request.root_hash = root
    return request


def written(pool: BlockPool, cache: PrefixCache, tokens: list[int], root: bytes | None = shared_root(b"")) -> Request:
    """A request whose prompt is computed, from scratch, and offered."""
    request = make(tokens, root)
    request.block_ids = pool.allocate(-(-len(tokens) // SIZE))
    cache.offer(request, len(tokens))
    return request


def test_blocks_move_between_the_three_places() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    assert pool.num_free == 1
    pool.offer(a, b"A")
    pool.release([a, b])
    assert pool.num_free == 3 and pool.find(b"A") == a
    pool.check([])
    pool.acquire([a])
    pool.acquire([a])
    assert pool.num_free == 2
    pool.check([[a], [a]])
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([[a]])
    pool.release([a])
    assert pool.num_free == 2
    pool.release([a])
    assert pool.num_free == 3
    with pytest.raises(AssertionError):
        pool.release([a])


def test_empty_blocks_are_taken_before_cached_ones_and_the_oldest_of_those_first() -> None:
    pool = BlockPool(4)
    table = pool.allocate(3)
    for block, name in zip(table, (b"A", b"B", b"C")):
        pool.offer(block, name)
    pool.release(table)
    pool.allocate(1)
    assert all(pool.find(name) is not None for name in (b"A", b"B", b"C"))
    # The end of the table goes before its beginning, which more prompts have in common.
    assert pool.allocate(1) == [table[2]] and pool.find(b"C") is None
    pool.acquire([table[1]])
    pool.release([table[1]])  # used just now: the youngest
    assert pool.allocate(1) == [table[0]] and pool.find(b"A") is None and pool.find(b"B") == table[1]


def test_allocating_more_than_is_free_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        BlockPool(2).allocate(3)


def test_the_older_of_two_equal_blocks_keeps_the_name() -> None:
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.offer(a, b"A")
    pool.offer(b, b"A")
    assert pool.find(b"A") == a
    pool.release([b])
    pool.check([[a]])
    assert pool.num_free == 1 and pool.allocate(1) == [b] and pool.find(b"A") == a


@pytest.mark.parametrize(("num_tokens", "num_hits"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (30, 2)])
def test_a_hit_is_whole_blocks_and_leaves_one_token(num_tokens: int, num_hits: int) -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, SIZE)
    first = written(pool, cache, list(range(11)))
    assert cache.match(make(list(range(num_tokens)))) == first.block_ids[:num_hits]


def test_equal_tokens_after_different_ones_do_not_hit() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, SIZE)
    first = written(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.match(make([0, 2, 3, 4, 5, 6, 7, 8, 9])) == []
    assert cache.match(make([5, 6, 7, 8, 9])) == []
    assert cache.match(make([1, 2, 3, 4, 5, 6, 0, 8, 9])) == first.block_ids[:1]


def test_salts_and_groups_do_not_share() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, SIZE)
    tokens = list(range(9))
    roots = [shared_root(b""), shared_root(b"a"), shared_root(b"b"), private_root(0), private_root(1)]
    roots.append(shared_root((0).to_bytes(8, "little")))  # a salt made to look like a group
    assert len(set(roots)) == len(roots)
    first = written(pool, cache, tokens, roots[1])
    for root in roots:
        assert cache.match(make(tokens, root)) == (first.block_ids[:2] if root == roots[1] else [])


def test_without_a_root_nothing_is_hashed() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, SIZE)
    request = written(pool, cache, list(range(9)), None)
    assert request.block_hashes == [] and cache.match(make(list(range(9)), None)) == []


def test_hashes_grow_with_the_request(rng: random.Random) -> None:
    """Offered bit by bit or at once: the same chain."""
    tokens = [rng.randrange(1000) for _ in range(50)]
    pool = BlockPool(40)
    cache = PrefixCache(pool, SIZE)
    whole = written(pool, cache, tokens)
    bit_by_bit = make(tokens)
    bit_by_bit.block_ids = pool.allocate(13)
    for num_written in sorted(rng.sample(range(50), 10)) + [50]:
        cache.offer(bit_by_bit, num_written)
        assert bit_by_bit.num_shared_blocks == num_written // SIZE
    assert bit_by_bit.block_hashes == whole.block_hashes and len(whole.block_hashes) == 12


def test_a_random_pool_stays_whole(rng: random.Random) -> None:
    pool = BlockPool(12)
    cache = PrefixCache(pool, SIZE)
    alive: list[Request] = []
    for _ in range(400):
        if alive and (rng.random() < 0.5 or pool.num_free < 4):
            pool.release(alive.pop(rng.randrange(len(alive))).block_ids)
        else:
            request = make([rng.randrange(2)] * rng.randint(1, 16))
            hits = cache.match(request)
            request.num_shared_blocks = len(hits)
            pool.acquire(hits)
            request.block_ids = hits + pool.allocate(-(-len(request.token_ids) // SIZE) - len(hits))
            cache.offer(request, len(request.token_ids))
            alive.append(request)
        pool.check(request.block_ids for request in alive)


def test_the_waiting_queue_sorts_and_lets_go(rng: random.Random) -> None:
    queue = WaitingQueue()
    requests = [make([1]) for _ in range(50)]
    for i, request in enumerate(requests):
        request.sort_key = (rng.randint(-1, 1), float(rng.randint(0, 3)), i)
        queue.add(request)
    gone = rng.sample(requests, 20)
    for request in gone:
        queue.discard(request)
        queue.discard(request)
    left = sorted((r for r in requests if r not in gone), key=lambda r: r.sort_key)
    assert list(queue) == left and queue.peek() is left[0]
    assert [queue.pop() for _ in range(len(queue))] == left
