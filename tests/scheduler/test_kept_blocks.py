"""Idle blocks that sessions keep: which are given away first, for how long, and how many."""

from __future__ import annotations

import math
import random

import pytest

from aengine.engine.keeping.kept_blocks import ANYBODY, Keeper, KeptBlocks, KeptHits, Session
from aengine.engine.scheduler.block_pool import BlockPool
from aengine.engine.tenants.fair_share import Account
from aengine.limits.tenants import Tenant

A, B, C = (b"", "a", ""), (b"", "b", ""), (b"", "c", "")


def make(num_blocks: int, fraction: float = 1.0) -> tuple[BlockPool, KeptBlocks, KeptHits]:
    hits = KeptHits()
    pool = BlockPool(num_blocks, lambda number: KeptBlocks(number, fraction, hits))
    assert isinstance(pool.idle, KeptBlocks)
    return pool, pool.idle, hits


def computed(pool: BlockPool, count: int) -> list[int]:
    """Blocks with a known content, the first ones those of a prefix' beginning, not in use any more."""
    table = pool.allocate(count)
    for block_id in table:
        pool.offer(block_id, b"%d" % block_id)
    pool.release(table)
    pool.check([])
    return table


def taken(pool: BlockPool, count: int) -> list[int]:
    """The next blocks that are given away, which stay in use."""
    return pool.allocate(count)


def test_kept_blocks_go_after_all_others_the_last_tokens_first() -> None:
    pool, idle, _ = make(6)
    kept, others = computed(pool, 3), computed(pool, 3)
    idle.keep(A, kept, math.inf)
    assert pool.num_free == 6
    assert taken(pool, 4) == [*others[::-1], kept[2]]
    assert idle.num_kept == 2 and len(idle) == 2
    assert taken(pool, 2) == [kept[1], kept[0]]
    assert idle.num_kept == 0 and not idle.end(A)


def test_the_session_whose_turn_is_longest_ago_gives_way_first() -> None:
    pool, idle, _ = make(6)
    first, second, third = computed(pool, 2), computed(pool, 2), computed(pool, 2)
    for session, blocks in ((A, first), (B, second), (C, third)):
        idle.keep(session, blocks, math.inf)
    idle.keep(A, first, math.inf)  # another turn of it has ended
    idle.keep_until(B, 1000.0)  # this says for how long, not that it came back
    assert taken(pool, 5) == [second[1], second[0], third[1], third[0], first[1]]


def test_a_keeper_has_its_part_by_weight_beside_others_and_all_alone() -> None:
    pool, idle, _ = make(12, 0.75)
    flood, other = Account("flood", Tenant()), Account("other", Tenant(weight=2))
    tables = [computed(pool, 3) for _ in range(4)]
    for number, table in enumerate(tables[:3]):
        idle.keep((b"", str(number), ""), table, math.inf, flood)
    assert idle.num_kept == 9
    idle.keep(B, tables[3], math.inf, other)
    pool.check([])
    assert idle.num_kept == 9 and not idle.end((b"", "0", "")) and idle.end((b"", "1", ""))
    assert taken(pool, 6) == [*tables[0][::-1], *tables[1][::-1]]  # kept by nobody
    assert taken(pool, 3) == tables[2][::-1]  # three blocks are more than three for twice the weight
    assert idle.end(B)


def test_what_was_brought_for_one_in_the_queue_goes_last() -> None:
    pool, idle, _ = make(12)
    kept, brought, other = computed(pool, 3), computed(pool, 3), computed(pool, 6)
    idle.keep(A, kept, math.inf)
    idle.expect(brought)
    pool.check([])
    assert len(idle) == 12
    table = taken(pool, 6)
    assert set(table) == set(other)
    pool.acquire(brought[:1])  # its request begins
    pool.release(brought[:1])
    pool.check([table])
    assert taken(pool, 4) == [brought[0], *kept[::-1]] and taken(pool, 2) == brought[1:]
    assert not len(idle)


def test_what_several_sessions_keep_goes_with_the_last_of_them() -> None:
    pool, idle, _ = make(4)
    common = computed(pool, 2)
    own = [computed(pool, 1) for _ in range(2)]
    idle.keep(A, common + own[0], math.inf)
    idle.keep(B, common + own[1], math.inf)
    assert idle.num_kept == 4
    assert taken(pool, 2) == [own[0][0], own[1][0]]
    assert set(taken(pool, 2)) == set(common)


def test_the_bound_is_of_different_blocks_and_the_oldest_session_gives_way() -> None:
    pool, idle, _ = make(10, 0.5)
    first, second, other = computed(pool, 4), computed(pool, 3), computed(pool, 3)
    idle.keep(A, first, math.inf)
    idle.keep(B, second, math.inf)
    pool.check([])
    assert idle.num_kept == 5  # two of the first ones are kept no more, and are the oldest
    assert taken(pool, 5) == [first[3], first[2], *other[::-1]]
    assert taken(pool, 5) == [first[1], first[0], *second[::-1]]


def test_a_session_larger_than_the_bound_keeps_its_beginning() -> None:
    pool, idle, _ = make(10, 0.3)
    table = computed(pool, 8)
    idle.keep(A, table, math.inf)
    assert idle.num_kept == 3
    taken(pool, 7)
    assert sorted(idle) == sorted(table[:3])


def test_nothing_is_kept_with_a_share_of_nothing() -> None:
    pool, idle, _ = make(4, 0.0)
    idle.keep(A, computed(pool, 4), math.inf)
    assert idle.num_kept == 0 and not idle.end(A)


def test_what_expires_is_the_oldest_again_unless_others_have_used_it() -> None:
    pool, idle, _ = make(8)
    table = computed(pool, 4)
    idle.keep(A, table, 10.0)
    computed(pool, 4)
    assert len(taken(pool, 1)) == 1  # all that are kept were passed over
    pool.acquire(table[:1])
    pool.release(table[:1])
    assert idle.expire(9.9) == 10.0 and idle.num_kept == 4
    assert idle.expire(10.0) == math.inf and idle.num_kept == 0
    pool.check([[7]] if pool.num_free == 7 else [])
    assert taken(pool, 3) == [table[3], table[2], table[1]]
    assert table[0] == taken(pool, 4)[-1]


def test_the_time_of_the_next_one_is_told() -> None:
    pool, idle, _ = make(4)
    idle.keep(A, computed(pool, 1), 5.0)
    idle.keep(B, computed(pool, 1), 3.0)
    idle.keep(C, computed(pool, 1), math.inf)
    assert idle.expire(0.0) == 3.0
    assert idle.keep_until(B, 7.0) and idle.expire(4.0) == 5.0
    assert not idle.keep_until((b"salt", "a", ""), 9.0)


def test_hits_are_counted_and_keep_the_blocks() -> None:
    pool, idle, hits = make(4)
    table = computed(pool, 2)
    idle.keep(A, table, math.inf)
    pool.acquire(table)
    assert hits.num_blocks == 2 and idle.num_kept == 2 and len(idle) == 0
    pool.check([table])
    pool.release(table)
    taken(pool, 2)
    assert sorted(idle) == sorted(table)


def test_a_state_that_is_kept_is_not_dropped() -> None:
    pool, idle, _ = make(2)
    kept, other = computed(pool, 2)
    idle.keep(A, [kept], math.inf)
    pool.drop(b"%d" % kept)
    pool.drop(b"%d" % other)
    assert list(idle) == [kept]
    pool.check([])


def test_nothing_is_kept_when_all_is_forgotten() -> None:
    pool, idle, _ = make(4)
    table = computed(pool, 4)
    idle.keep(A, table, math.inf)
    pool.acquire(table[:1])
    assert pool.forget_all() == 4
    assert idle.num_kept == len(idle) == 0
    pool.check([table[:1]])
    pool.release(table[:1])
    pool.check([])


def test_many_sessions_of_the_same_blocks_are_bounded() -> None:
    pool, idle, _ = make(4)
    table = computed(pool, 4)
    for number in range(100):
        idle.keep((b"", str(number), ""), table, math.inf)
    pool.check([])
    assert idle.num_kept == 4 and not idle.end((b"", "0", "")) and idle.end((b"", "99", ""))


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7, 1.0])
def test_random_lives(rng: random.Random, fraction: float) -> None:
    """Whatever is kept, in use, dropped or expired: no block is lost, and a kept one never goes while another could
    that is not expected: one of the first four."""
    pool, idle, _ = make(24, fraction)
    tables: list[list[int]] = []
    sessions: list[Session] = [(b"", str(number), "") for number in range(5)]
    keepers: list[Keeper] = [ANYBODY, *(Account(str(weight), Tenant(weight=weight)) for weight in (0.5, 3.0))]
    for _ in range(600):
        do = rng.randrange(9)
        named = [block_id for block_id in range(24) if pool.find(b"%d" % block_id) is not None]
        if do <= 2 and pool.num_free:
            count = rng.randint(1, min(8, pool.num_free))
            num_kept = idle.num_kept
            tables.append(pool.allocate(count))
            assert idle.num_kept == num_kept or not any(idle.drop(block_id) for block_id in [*idle] if block_id > 3)
        elif do == 3 and tables:
            table = tables.pop(rng.randrange(len(tables)))
            for block_id in table[: rng.randint(0, len(table))]:
                pool.offer(block_id, b"%d" % block_id)
            pool.release(table)
        elif do == 4 and named:
            table = rng.sample(named, rng.randint(1, len(named)))
            pool.acquire(table)
            tables.append(table)
        elif do == 5 and named:
            found = rng.sample(named, rng.randint(1, len(named)))
            idle.keep(rng.choice(sessions), found, rng.choice([5.0, 9.0, math.inf]), rng.choice(keepers))
        elif do == 6:
            idle.end(rng.choice(sessions))
        elif do == 7:
            idle.expire(rng.choice([0.0, 6.0, 10.0]))
            idle.expect(rng.sample(range(4), 2))
        elif named:
            pool.drop(b"%d" % rng.choice(named))
            pool.touch(b"%d" % rng.choice(named))
            if rng.random() < 0.03:
                pool.forget_all()
        pool.check(tables)
