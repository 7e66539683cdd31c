"""The block pool, the chain of hashes, and the waiting queue."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from aengine.engine.scheduler.block_pool import BlockPool
from aengine.engine.scheduler.kv_cache_manager import (
    KVCacheManager,
    extend_hashes,
    long_root,
    private_root,
    retired_root,
    shared_root,
)
from aengine.engine.scheduler.prefixes import kept_states
from aengine.engine.scheduler.request import CacheKey, Request
from aengine.engine.scheduler.waiting_queue import WaitingQueue
from aengine.ipc.messages import STATE_BLOCK_SIZE, KVCacheGroup
from aengine.params import SamplingParams

SIZE = 4
ROOT = shared_root(CacheKey())
FULL = KVCacheGroup("full", SIZE)


def make(tokens: list[int], root: bytes | None = ROOT, placed: tuple[tuple[int, bytes], ...] = ()) -> Request:
    limits: dict[str, Any] = {"seed": 0, "max_num_tokens": 1000, "stop_token_ids": frozenset()}
    request = Request("r", tokens, SamplingParams(), cache_key=CacheKey(placed=placed), **limits)
    request.root_hash = root
    return request


def manager(num_blocks: int, *groups: KVCacheGroup) -> KVCacheManager:
    return KVCacheManager(num_blocks, groups or (FULL,), step_tokens=8)


def blocks(request: Request, group: int = 0) -> list[int]:
    return request.block_tables[group].block_ids


def run(kv: KVCacheManager, request: Request, chunk: int = 8) -> Request:
    """Compute its prompt: what is not a hit in steps of ``chunk`` tokens, each answered at once."""
    kv.begin(request, kv.match(request))
    while request.num_computed_tokens < len(request.token_ids):
        request.num_computed_tokens = min(request.num_computed_tokens + chunk, len(request.token_ids))
        kv.grow(request, request.num_computed_tokens)
        kv.note_written(request, request.num_computed_tokens)
    return request


def written(kv: KVCacheManager, tokens: list[int], root: bytes | None = ROOT, **more: Any) -> Request:
    """A request whose prompt is computed and offered."""
    return run(kv, make(tokens, root, **more))


@pytest.mark.invariant
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


@pytest.mark.invariant
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
    kv = manager(8)
    first = written(kv, list(range(11)))
    hit = kv.match(make(list(range(num_tokens))))
    assert hit.tables[0].block_ids == blocks(first)[:num_hits] and hit.tables[0].room == SIZE * num_hits


def test_equal_tokens_after_different_ones_do_not_hit() -> None:
    kv = manager(8)
    first = written(kv, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert kv.match(make([0, 2, 3, 4, 5, 6, 7, 8, 9])).tables[0].block_ids == []
    assert kv.match(make([5, 6, 7, 8, 9])).tables[0].block_ids == []
    assert kv.match(make([1, 2, 3, 4, 5, 6, 0, 8, 9])).tables[0].block_ids == blocks(first)[:1]


def test_salts_adapters_media_and_private_groups_do_not_share() -> None:
    tokens = list(range(9))
    keys = [CacheKey(), CacheKey(b"a"), CacheKey(b"b"), CacheKey(adapter=b"a"), CacheKey(media=b"a"), CacheKey(b"aa")]
    keys += [CacheKey(b"a", b"a"), CacheKey((0).to_bytes(8, "little"))]  # the last one looks like a private group
    roots = [*map(shared_root, keys), private_root(0), private_root(1), long_root(ROOT), retired_root(ROOT)]
    assert len(set(roots)) == len(roots)
    for used in roots:
        kv = manager(8)
        first = written(kv, tokens, used)
        for root in roots:
            assert kv.match(make(tokens, root)).tables[0].block_ids == (blocks(first)[:2] if root == used else [])


PLACED = [
    (),
    ((6, b"cat"),),
    ((6, b"dog"),),
    ((7, b"cat"),),
    ((6, b"cat"), (7, b"dog")),
    ((6, b"dog"), (7, b"cat")),
    ((6, b"catdog"),),
    ((6, b""),),
]


def test_what_is_placed_in_a_prompt_parts_it_from_its_block_on() -> None:
    """Positions 6 and 7 are in the second block of four tokens."""
    tokens = list(range(17))
    for used in PLACED:
        kv = manager(8)
        first = written(kv, tokens, placed=used)
        for placed in PLACED:
            hit = kv.match(make(tokens, placed=placed))
            assert hit.tables[0].block_ids == blocks(first)[: 4 if placed == used else 1]


def test_what_is_placed_further_on_costs_a_prompt_nothing_before_it() -> None:
    """It may lie where no block is full yet, or where hashes were made already."""
    kv = manager(40)
    tokens, placed = list(range(22)), ((0, b"a"), (12, b"b"), (21, b"c"))
    whole = written(kv, tokens, placed=placed)
    bit_by_bit = make(tokens, placed=placed)
    for count in (1, 3, 4, 5):
        extend_hashes(bit_by_bit, count, SIZE)
    assert bit_by_bit.block_hashes == whole.block_hashes
    assert kv.match(make(tokens, placed=placed[:2])).length == 20
    assert kv.match(make(tokens, placed=placed[:1])).length == 12
    assert kv.match(make(tokens, placed=placed[1:])).length == 0


def test_without_a_root_nothing_is_hashed() -> None:
    kv = manager(8)
    request = written(kv, list(range(9)), None)
    assert request.block_hashes == [] and kv.match(make(list(range(9)), None)).length == 0


def test_hashes_grow_with_the_request(rng: random.Random) -> None:
    """Offered bit by bit or at once: the same chain."""
    tokens = [rng.randrange(1000) for _ in range(50)]
    kv = manager(40)
    whole = written(kv, tokens)
    bit_by_bit = make(tokens)
    kv.begin(bit_by_bit, manager(1).match(bit_by_bit))
    kv.grow(bit_by_bit, 50)
    for num_written in sorted(rng.sample(range(50), 10)) + [50]:
        kv.note_written(bit_by_bit, num_written)
        assert bit_by_bit.num_offered_tokens == num_written // SIZE * SIZE
    assert bit_by_bit.block_hashes == whole.block_hashes and len(whole.block_hashes) == 12


GROUPS = {
    "full": [FULL],
    "window": [KVCacheGroup("window", SIZE, 5)],
    "both": [FULL, KVCacheGroup("window", SIZE, 6)],
    "three": [KVCacheGroup("window", SIZE, 3), KVCacheGroup("full", 2 * SIZE), KVCacheGroup("window", SIZE, 9)],
    "state": [KVCacheGroup("state", STATE_BLOCK_SIZE), FULL],
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_random_pool_stays_whole(rng: random.Random, name: str) -> None:
    groups = GROUPS[name]
    kv = manager(14 * len(groups), *groups)
    alive: list[Request] = []
    for _ in range(400):
        if alive and (rng.random() < 0.5 or kv.pool.num_free < 5 * len(groups)):
            kv.release(alive.pop(rng.randrange(len(alive))))
        else:
            alive.append(run(kv, make([rng.randrange(2)] * rng.randint(1, 16)), chunk=rng.randint(1, 8)))
        kv.check(alive)


# -- windows


def test_blocks_that_have_left_the_window_are_freed() -> None:
    kv = manager(100, KVCacheGroup("window", SIZE, 10))
    request = make([1] * 100)
    kv.begin(request, kv.match(request))
    for num_tokens in range(1, 101):
        kv.grow(request, num_tokens)
        kv.note_written(request, num_tokens)
        # Those of the last 9 tokens, which the next query reads beside its own.
        first = max(0, num_tokens - 9) // SIZE
        assert request.block_tables[0].begin == first and request.block_tables[0].room == -(-num_tokens // SIZE) * SIZE
        assert kv.pool.num_blocks - kv.pool.num_free == kv.num_held(request) <= 4
    assert kv.room(request) == 100 and kv.num_lacking(request, 101) == 1


def test_a_windows_hit_needs_its_last_blocks_alone() -> None:
    """The blocks before have been given to others, but with the last ones the prompt still need not be computed."""
    kv = manager(12, KVCacheGroup("window", SIZE, 6))
    first = written(kv, list(range(40)), ROOT)
    assert first.block_tables[0].begin == 8 and kv.num_held(first) == 2
    kv.release(run(kv, make(list(range(100, 140)), None), chunk=40))  # it takes all the other blocks
    hit = kv.match(make(list(range(45))))
    assert hit.tables[0].room == 40 and hit.tables[0].begin == 8 and hit.tables[0].block_ids == blocks(first)
    # A prefix that ends before: at 36 the block of tokens 28 to 31 is needed too.
    shorter = kv.match(make([*range(38), 0, 0]))
    assert shorter.tables[0].room == 0
    begun = make(list(range(45)))
    kv.begin(begun, hit)
    assert kv.grow(begun, 45) and begun.block_tables[0].room == 48
    kv.check([first, begun])


def test_groups_agree_on_a_hit() -> None:
    """The full group has 40 tokens; the window has those around 16 and 32 alone."""
    kv = manager(40, FULL, KVCacheGroup("window", SIZE, 6))
    first = written(kv, list(range(40)))
    table = first.block_tables[1]
    assert (first.block_tables[0].begin, table.begin, table.room) == (0, 8, 40)
    hit = kv.match(make(list(range(60))))
    assert [(t.room, t.begin) for t in hit.tables] == [(40, 0), (40, 8)]
    assert [len(t.block_ids) for t in hit.tables] == [10, 2]
    assert hit.tables[0].block_ids == blocks(first, 0) and hit.tables[1].block_ids == blocks(first, 1)
    assert not set(blocks(first, 0)) & set(blocks(first, 1))


def test_the_longest_hit_is_found_whatever_was_forgotten(rng: random.Random) -> None:
    """Against the plain rule: every length tried, every block that it needs looked for."""
    groups = [FULL, KVCacheGroup("window", SIZE, 7), KVCacheGroup("window", 2 * SIZE, 11)]
    tokens = list(range(64))
    for _ in range(60):
        kv = manager(60, *groups)
        first = written(kv, tokens)
        kv.release(first)
        # Others take some blocks of the first's, the longest unused ones.
        taken = make([rng.randrange(1000) for _ in range(4 * rng.randint(1, 13))], None)
        kv.begin(taken, kv.match(taken))
        kv.grow(taken, min(len(taken.token_ids), 4 * (kv.pool.num_free // 3)))
        asked = make(tokens[: rng.randint(1, 64)])
        hit = kv.match(asked)
        assert hit.tables[0].room == _plain_hit(kv, groups, asked)
        kv.begin(asked, hit)
        kv.check([taken, asked])


def _plain_hit(kv: KVCacheManager, groups: list[KVCacheGroup], request: Request) -> int:
    for length in range(len(request.token_ids) - 1, 0, -1):
        if length % (2 * SIZE) == 0 and all(_has(kv, i, group, request, length) for i, group in enumerate(groups)):
            return length
    return 0


def _has(kv: KVCacheManager, index: int, group: KVCacheGroup, request: Request, length: int) -> bool:
    first = max(0, length - group.window + 1) // group.block_size if group.window else 0
    step = group.block_size // SIZE
    suffix = bytes([index]) if index else b""
    whole = make(list(range(64)))
    run(manager(100), whole)  # knows all hashes
    names = [whole.block_hashes[(i + 1) * step - 1] + suffix for i in range(first, length // group.block_size)]
    return all(kv.pool.find(name) is not None for name in names)


STATES = [KVCacheGroup("state", STATE_BLOCK_SIZE), FULL, KVCacheGroup("state", STATE_BLOCK_SIZE)]


@pytest.fixture
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_states, "STATE_INTERVAL", 8)


def begun(kv: KVCacheManager, tokens: Iterable[int]) -> Request:
    request = make(list(tokens))
    kv.begin(request, kv.match(request))
    return request


def keep(kv: KVCacheManager, request: Request, border: int) -> list[int]:
    """Compute the request to ``border``, and keep its states there; returns the pages of the copies."""
    kv.grow(request, border)
    request.num_computed_tokens = border
    pairs = kv.keep_states(request, kv.pool.num_free - kv.num_growing)
    own = [blocks(request, 0)[0], blocks(request, 2)[0]]
    assert pairs[::2] == (own if pairs else [])
    return pairs[1::2]


@pytest.mark.usefixtures("short_interval")
def test_states_are_found_where_they_were_kept() -> None:
    kv = manager(40, *STATES)
    first = begun(kv, range(30))
    assert first.states.planned == [12, 20, 28] and not keep(kv, first, 4)
    pages = keep(kv, first, 8)
    assert len(pages) == 2 and not keep(kv, first, 12)
    kv.note_written(first, 8)
    assert kv.match(make(list(range(30)))).length == 0, "the copies are in flight"
    kv.note_written(first, 9)
    hit = kv.match(make(list(range(9))))
    assert (hit.length, hit.attended, hit.kept) == (8, 8, pages) and len(hit.tables[1].block_ids) == 2
    keep(kv, first, 20)
    kv.grow(first, 24)
    kv.note_written(first, 24)
    hit = kv.match(make([*range(22), 0, 0]))
    assert (hit.length, hit.attended) == (20, 20)
    # The layers that attend have more than the states were kept for: the prompt's are kept there, for others like it.
    other = make([*range(19), *[0] * 20])
    hit = kv.match(other)
    assert (hit.length, hit.attended) == (8, 16)
    kv.begin(other, hit)
    assert other.states.planned == [16, 28, 36] and other.states.guessed == {28}
    assert kv.grow(other, 16) and kv.restore_states(other, hit)[::2] == pages
    kv.check([first, other])
    kv.release(first)
    kv.release(other)
    kv.check([])


@pytest.mark.usefixtures("short_interval")
def test_within_a_completion_only_the_latest_states_are_kept() -> None:
    kv = manager(40, *STATES)
    request = begun(kv, range(10))
    request.next_check_len = 11
    found = []
    for border in (8, 16, 24, 32):
        keep(kv, request, border)
        request.token_ids = list(range(border + 2))
        kv.note_written(request, border + 1)
        asked = [make(list(range(length + 1))) for length in (8, 16, 24, 32)]
        found.append([kv.match(request).length for request in asked])
    assert found == [[8, 8, 8, 8], [8, 16, 16, 16], [8, 8, 24, 24], [8, 8, 8, 32]]
    kv.check([request])
    assert kv.pool.num_blocks - kv.pool.num_free == kv.num_held(request) == 10
    kv.release(request)
    kv.check([])


@pytest.mark.usefixtures("short_interval")
def test_the_states_at_the_end_of_a_prompt_outlive_those_of_its_completion() -> None:
    kv = manager(40, *STATES)
    request = begun(kv, range(8))
    for border in (8, 16, 24):
        keep(kv, request, border)
        request.token_ids = list(range(border + 2))
        kv.note_written(request, border + 1)
    assert [kv.match(make(list(range(length + 1)))).length for length in (8, 16, 24)] == [8, 8, 24]


@pytest.mark.usefixtures("short_interval")
def test_states_are_as_old_as_the_end_of_their_request() -> None:
    kv = manager(16, *STATES)
    prompts = range(9), range(100, 109)
    for tokens in prompts:
        request = begun(kv, tokens)
        assert keep(kv, request, 8)
        kv.grow(request, 9)
        kv.note_written(request, 9)
        kv.release(request)
    assert [kv.match(make(list(tokens))).length for tokens in prompts] == [8, 8]
    kv.pool.allocate(kv.pool.num_free - 4)
    assert [kv.match(make(list(tokens))).length for tokens in prompts] == [0, 8]


@pytest.mark.usefixtures("short_interval")
def test_states_are_not_kept_at_the_cost_of_those_that_run() -> None:
    kv = manager(6, *STATES)
    request = begun(kv, range(20))
    assert keep(kv, request, 8) == [] and kv.pool.num_free == 2
    kv.grow(request, 16)
    kv.check([request])


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
