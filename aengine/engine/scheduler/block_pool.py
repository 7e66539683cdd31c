"""KV blocks in use, and those of the others that still hold a prefix worth finding. Ids only: the memory is the
worker's. A block is a page of the one pool that all KV groups share.

    a block is in one of three places

       empty (a stack)  ── allocate ──>  in use (ref_count >= 1)  ── release, name known ──> idle (in order)
       no content       <── release ──   in the tables of        <── acquire (a hit) ─────   ref_count 0, name known
                            no name      ref_count requests      <── allocate: when none is empty the oldest idle
                                                                     block is taken and its name forgotten

    Which idle block is the first to be taken, `IdleBlocks` says, and what is put in its place.

    free = empty + idle;  free + in use == num_blocks;  every move is O(1)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator

Find = Callable[[bytes], int | None]
"""Returns the block that has a name; None: there is none."""
_ABSENT = object()


class BlockTable:
    """The blocks of one request in one KV group. They hold its tokens up to ``room`` - 1, but for the ``begin`` first
    blocks, which have left the window."""

    __slots__ = ("begin", "block_ids", "block_size", "room")

    def __init__(self, block_size: int, begin: int, block_ids: list[int]) -> None:
        self.block_size = block_size
        self.begin = begin
        self.block_ids = block_ids
        self.room = (begin + len(block_ids)) * block_size

    def append(self, block_ids: list[int]) -> None:
        self.block_ids += block_ids
        self.room += len(block_ids) * self.block_size

    def pop(self) -> int:
        self.room -= self.block_size
        return self.block_ids.pop()


class IdleBlocks:
    """The blocks that are not in use and hold a known prefix, and which of them is given away first. Here: the one
    whose last use is longest ago."""

    __slots__ = ("_order",)

    def __init__(self, num_blocks: int) -> None:
        """``num_blocks``: those of the pool."""
        self._order: OrderedDict[int, None] = OrderedDict()  # oldest use first

    @property
    def num_kept(self) -> int:
        """Number of blocks, idle or in use, that somebody asked to keep."""
        return 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def add(self, block_ids: Iterable[int]) -> None:
        """Note that these are not in use any more, the first of them for longest."""
        order = self._order
        for block_id in block_ids:
            order[block_id] = None

    def remove(self, block_ids: Iterable[int]) -> None:
        """Note that these, which are idle, are in use again."""
        order = self._order
        for block_id in block_ids:
            del order[block_id]

    def pop(self) -> int:
        """Remove and return the block that is given away. There is one."""
        return self._order.popitem(last=False)[0]

    def drop(self, block_id: int) -> bool:
        """Remove a block whose content is of no more use, if it is idle. Returns whether it was removed."""
        return self._order.pop(block_id, _ABSENT) is None

    def touch(self, block_id: int) -> None:
        """Count this as a use of the block, if it is idle."""
        if block_id in self._order:
            self._order.move_to_end(block_id)

    def expect(self, block_ids: Iterable[int]) -> None:
        """Note that a request in the queue will begin with these, as far as they are idle: they were used last."""

    def clear(self) -> list[int]:
        """Remove and return all."""
        block_ids = list(self._order)
        self._order.clear()
        return block_ids

    def check(self, named: Collection[int]) -> None:
        """Assert that all is right, if ``named`` are the blocks whose content is known."""
        assert set(self._order) <= set(named), "idle blocks have a name"


class BlockPool:
    """The blocks 0 .. num_blocks - 1."""

    __slots__ = ("_by_name", "_empty", "_name_of", "_ref_counts", "idle", "num_blocks", "num_free", "on_offer")

    def __init__(self, num_blocks: int, new_idle: Callable[[int], IdleBlocks] = IdleBlocks) -> None:
        self.num_blocks = self.num_free = num_blocks
        self.on_offer: Callable[[int, bytes], None] = lambda block_id, name: None
        """Called with each block that gets a name, but for guesses: with these when somebody has found them."""
        self._ref_counts = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self.idle = new_idle(num_blocks)
        self._name_of: list[bytes | None] = [None] * num_blocks
        self._by_name: dict[bytes, int] = {}

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, whatever they hold; each has one user then. The caller has checked `num_free`."""
        assert count <= self.num_free, "allocate() beyond what is free"
        self.num_free -= count
        empty, idle, ref_counts = self._empty, self.idle, self._ref_counts
        taken = []
        for _ in range(count):
            if empty:
                block_id = empty.pop()
            else:
                block_id = idle.pop()
                self._forget(block_id)
            ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a user to each of these cached blocks."""
        ref_counts = self._ref_counts
        idle = []
        for block_id in block_ids:
            count = ref_counts[block_id]
            if not count:
                idle.append(block_id)
            ref_counts[block_id] = count + 1
        if idle:
            self.num_free -= len(idle)
            self.idle.remove(idle)

    def release(self, block_ids: list[int]) -> None:
        """Remove a user from each block of a table. The end of a table is evicted before its beginning."""
        ref_counts, name_of, idle = self._ref_counts, self._name_of, []
        for block_id in reversed(block_ids):
            ref_count = ref_counts[block_id] - 1
            assert ref_count >= 0, "a block was released more often than taken"
            ref_counts[block_id] = ref_count
            if ref_count == 0:
                self.num_free += 1
                if name_of[block_id] is None:
                    self._empty.append(block_id)
                else:
                    idle.append(block_id)
        self.idle.add(idle)

    def find(self, name: bytes) -> int | None:
        return self._by_name.get(name)

    def name_of(self, block_id: int) -> bytes | None:
        return self._name_of[block_id]

    @property
    def num_named(self) -> int:
        return len(self._by_name)

    def count_idle(self, block_ids: Iterable[int]) -> int:
        """Return how many of these would no longer be free once acquired."""
        ref_counts = self._ref_counts
        return sum([ref_counts[block_id] == 0 for block_id in block_ids])

    def offer(self, block_id: int, name: bytes, *, is_guess: bool = False) -> None:
        """Register this block's name for prefix hits. If another block has this content, the older keeps the name.
        ``is_guess``: it is not worth a place elsewhere before somebody has found it."""
        if name not in self._by_name and self._name_of[block_id] is None:
            self._by_name[name] = block_id
            self._name_of[block_id] = name
            if not is_guess:
                self.on_offer(block_id, name)

    def drop(self, name: bytes) -> None:
        """Make the block of this name empty, if it is idle."""
        block_id = self._by_name.get(name)
        if block_id is not None and self.idle.drop(block_id):
            self._forget(block_id)
            self._empty.append(block_id)

    def forget_all(self) -> int:
        """Forget all names, and so make all idle blocks empty. Returns how many there were."""
        count = len(self._by_name)
        self._empty.extend(self.idle.clear())
        self._by_name.clear()
        self._name_of = [None] * self.num_blocks
        return count

    def touch(self, name: bytes) -> None:
        """Make the block of this name the last to be evicted, if it is idle."""
        block_id = self._by_name.get(name)
        if block_id is not None:
            self.idle.touch(block_id)

    def _forget(self, block_id: int) -> None:
        name = self._name_of[block_id]
        if name is not None:
            del self._by_name[name]
            self._name_of[block_id] = None

    def check(self, tables: Iterable[list[int]]) -> None:
        """Assert that the picture above holds, given the block tables of all requests that hold blocks."""
        counts = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block twice in one table: {table}"
            for block_id in table:
                counts[block_id] += 1
        assert counts == self._ref_counts, "reference counts do not match the block tables"
        empty, idle = set(self._empty), set(self.idle)
        assert len(idle) == len(self.idle), "a block is idle twice"
        in_use = {block_id for block_id, count in enumerate(counts) if count}
        assert len(empty) == len(self._empty), "a block is empty twice"
        assert empty | idle | in_use == set(range(self.num_blocks)), "a block was lost"
        assert len(empty) + len(idle) + len(in_use) == self.num_blocks, "a block is in two places"
        assert self.num_free == len(empty) + len(idle), "free blocks were counted wrong"
        named = {block_id: n for block_id, n in enumerate(self._name_of) if n is not None}
        assert {n: block_id for block_id, n in named.items()} == self._by_name, "names and blocks disagree"
        assert not empty & named.keys(), "empty blocks have no name"
        self.idle.check(named.keys())
