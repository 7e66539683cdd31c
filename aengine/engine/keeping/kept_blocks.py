"""`KeptBlocks`: idle blocks that somebody asked to keep are given away after all others.

    order     idle blocks by last use: the oldest is looked at first when a block is wanted
                nobody keeps it ──> it is given away
                it is kept ───────> passed over: it is looked at no more while it is kept
    passed    blocks that were passed over: only these are left once the order is empty. Of the keeper that has most for
              its weight the session whose last turn is longest ago gives way then, its last tokens first
    expected  blocks that were brought for a request in the queue, until it has them: they go last

Keeping is no reference: `BlockPool.num_free` counts kept blocks as free, and whoever runs may have them. Blocks that
are kept no more are the oldest again if they were passed over; those that others have used since have their place by
that.

Sessions together keep a share of the pool at most, beyond which one gives way in the same order. So a keeper (a tenant)
that is alone may have all of the share, and beside others that fill it their part by weight. There is no clock here:
the times are given.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Protocol

from ..scheduler.block_pool import IdleBlocks

_EXPECTED = 4
"""Blocks are expected of this part of the pool at most: who waited for some may have gone."""
_MOST_ENTRIES = 8
"""All sessions' lists of blocks together have so many times the pool's blocks: a block may be in many of them."""

Session = tuple[bytes, str, str]
"""The salt of its KV; its name, or else the id of a request that has none."""


class KeptHits:
    """How often what was kept came to use, over all of a replica's workers."""

    __slots__ = ("num_blocks",)

    def __init__(self) -> None:
        self.num_blocks = 0


class Keeper(Protocol):
    """Who asks to keep, known by identity."""

    @property
    def weight(self) -> float:
        """Its share beside others'."""


class Anybody:
    """Who keeps where all are alike."""

    weight = 1.0


ANYBODY = Anybody()


class _Kept:
    """The blocks of one session in the order of its tokens, until when they are kept, and for whom."""

    __slots__ = ("block_ids", "part", "until")

    def __init__(self, block_ids: list[int], until: float, part: _Part) -> None:
        self.block_ids = block_ids
        self.until = until
        self.part = part


class _Part:
    """What one keeper has."""

    __slots__ = ("keeper", "num_entries", "sessions")

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.num_entries = 0  # length of its sessions' lists
        self.sessions: OrderedDict[Session, None] = OrderedDict()  # the one that gives way first is first

    @property
    def size(self) -> float:
        """Its entries by its weight."""
        return self.num_entries / self.keeper.weight


class KeptBlocks(IdleBlocks):
    """Idle blocks, of which sessions keep the share ``fraction`` of the pool at most."""

    __slots__ = (
        *("_entries", "_expected", "_giving", "_hits", "_most", "_most_entries", "_most_expected", "_num_keepers"),
        *("_parts", "_passed", "_sessions"),
    )

    def __init__(self, num_blocks: int, fraction: float, hits: KeptHits) -> None:
        """``hits`` counts the kept idle blocks that come to use again."""
        super().__init__(num_blocks)
        self._hits = hits
        self._most = int(num_blocks * fraction)
        self._most_entries = num_blocks * _MOST_ENTRIES
        self._entries = 0  # length of all sessions' lists
        self._sessions: dict[Session, _Kept] = {}
        self._parts: dict[Keeper, _Part] = {}  # those of keepers with sessions
        self._giving: Session | None = None  # the session that gives way
        self._num_keepers: dict[int, int] = {}  # sessions that keep the block, for each kept one, idle or in use
        self._passed: dict[int, None] = {}
        self._expected: OrderedDict[int, None] = OrderedDict()
        self._most_expected = num_blocks // _EXPECTED

    @property
    def num_kept(self) -> int:
        return len(self._num_keepers)

    # -- sessions

    def keep(self, session: Session, block_ids: Sequence[int], until: float, keeper: Keeper = ANYBODY) -> None:
        """Keep these blocks, whose content is known, for the session, in place of those that it kept so far."""
        self._release(session)
        if not block_ids:
            return
        part = self._parts.setdefault(keeper, _Part(keeper))
        part.sessions[session] = None
        part.num_entries += len(block_ids)
        self._sessions[session] = _Kept(list(block_ids), until, part)
        self._entries += len(block_ids)
        num_keepers = self._num_keepers
        for block_id in block_ids:
            num_keepers[block_id] = num_keepers.get(block_id, 0) + 1
        too_many = []
        while len(num_keepers) > self._most or self._entries > self._most_entries:
            too_many.append(self._let_one_go())
        self._age(reversed(too_many))

    def keep_until(self, session: Session, until: float) -> bool:
        """Keep what the session keeps until then. Returns whether it keeps anything."""
        kept = self._sessions.get(session)
        if kept is None:
            return False
        kept.until = until
        return True

    def change(self, session: Session, until: float) -> bool:
        """Do as `keep_until`, unless a turn of the session has yet to end, which says for how long."""
        kept = self._sessions.get(session)
        return kept is not None and (kept.until == math.inf or self.keep_until(session, until))

    def end(self, session: Session) -> bool:
        """Keep nothing for the session any more. Returns whether anything was kept."""
        was_kept = session in self._sessions
        self._release(session)
        return was_kept

    def expire(self, now: float) -> float:
        """Keep nothing any more for sessions whose time has come. Returns when that of the next one comes."""
        for session in [session for session, kept in self._sessions.items() if kept.until <= now]:
            self._release(session)
        return min((kept.until for kept in self._sessions.values()), default=math.inf)

    def _release(self, session: Session) -> None:
        kept = self._sessions.get(session)
        if kept is None:
            return
        self._entries -= len(kept.block_ids)
        kept.part.num_entries -= len(kept.block_ids)
        self._forget(session, kept.part)
        self._age(filter(self._is_last_keeper, kept.block_ids))

    def _is_last_keeper(self, block_id: int) -> bool:
        """Count a keeper of the block less. Returns whether nobody keeps it any more."""
        count = self._num_keepers.pop(block_id) - 1
        if count:
            self._num_keepers[block_id] = count
        return not count

    def _age(self, block_ids: Iterable[int]) -> None:
        """Make those that were passed over the oldest, the last of them before all: the end of a prefix is given away
        before its beginning."""
        for block_id in block_ids:
            if block_id in self._passed:
                del self._passed[block_id]
                self._order[block_id] = None
                self._order.move_to_end(block_id, last=False)

    def _forget(self, session: Session, part: _Part) -> None:
        del self._sessions[session], part.sessions[session]
        if not part.sessions:
            del self._parts[part.keeper]
        if session == self._giving:
            self._giving = None

    def _let_one_go(self) -> int:
        """Make one block a kept one no more. Returns which."""
        while True:
            if self._giving is None:
                self._giving = next(iter(max(self._parts.values(), key=attrgetter("size")).sessions))
            kept = self._sessions[self._giving]
            block_id = kept.block_ids.pop()
            self._entries -= 1
            kept.part.num_entries -= 1
            if not kept.block_ids:
                self._forget(self._giving, kept.part)
            if self._is_last_keeper(block_id):
                return block_id

    # -- the verbs of `IdleBlocks`

    def __len__(self) -> int:
        return len(self._order) + len(self._passed) + len(self._expected)

    def __iter__(self) -> Iterator[int]:
        yield from self._order
        yield from self._passed
        yield from self._expected

    def expect(self, block_ids: Iterable[int]) -> None:
        order, expected = self._order, self._expected
        for block_id in block_ids:
            if block_id in order:
                del order[block_id]
                expected[block_id] = None
        while len(expected) > self._most_expected:
            order[expected.popitem(last=False)[0]] = None

    def remove(self, block_ids: Iterable[int]) -> None:
        order, num_keepers, expected = self._order, self._num_keepers, self._expected
        if not num_keepers and not expected:
            super().remove(block_ids)
            return
        for block_id in block_ids:
            if block_id in num_keepers:
                self._hits.num_blocks += 1
            if block_id in order:
                del order[block_id]
            elif block_id in expected:
                del expected[block_id]
            else:
                del self._passed[block_id]

    def pop(self) -> int:
        order, num_keepers = self._order, self._num_keepers
        while order:
            block_id, _ = order.popitem(last=False)
            if block_id not in num_keepers:
                return block_id
            self._passed[block_id] = None
        while self._passed:
            block_id = self._let_one_go()
            if block_id in self._passed:
                del self._passed[block_id]
                return block_id
        block_id, _ = self._expected.popitem(last=False)
        while block_id in num_keepers:  # nothing else of what is kept is idle
            self._let_one_go()
        return block_id

    def drop(self, block_id: int) -> bool:
        if block_id in self._num_keepers:
            return False
        return self._expected.pop(block_id, self) is None or super().drop(block_id)

    def clear(self) -> list[int]:
        block_ids = super().clear() + list(self._passed) + list(self._expected)
        self._passed.clear()
        self._expected.clear()
        self._sessions.clear()
        self._parts.clear()
        self._giving = None
        self._num_keepers.clear()
        self._entries = 0
        return block_ids

    def check(self, named: Collection[int]) -> None:
        super().check(named)
        num_keepers = self._num_keepers
        lists = [kept.block_ids for kept in self._sessions.values()]
        assert num_keepers == Counter(block_id for block_ids in lists for block_id in block_ids)
        assert self._entries == sum(map(len, lists)) <= self._most_entries and all(lists)
        for part in self._parts.values():
            own = [kept.block_ids for kept in self._sessions.values() if kept.part is part]
            assert len(own) == len(part.sessions) > 0 and part.num_entries == sum(map(len, own))
        assert self._giving is None or self._giving in self._sessions
        assert len(num_keepers) <= self._most, "more blocks are kept than the bound allows"
        assert num_keepers.keys() <= set(named), "a block without a name is kept"
        assert self._passed.keys() <= num_keepers.keys() - self._order.keys(), "a block was passed over wrongly"
        assert len(self._expected) <= self._most_expected
        assert self._expected.keys() <= set(named) - self._order.keys() - self._passed.keys()
