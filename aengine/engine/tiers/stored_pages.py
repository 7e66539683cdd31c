"""`StoredPages`: what stores have beyond the places of the host's memory, and what they get of them.

    a place gets a page and its name ──save──> each store: by key, in threads
    a waiting request's prefix goes on there ──query, load──> places, which have names then; the request is in the queue
                                                              again, and finds them like all that is kept here

A place is held from the begin of a call to its end, however long that takes, so nothing else lies in it meanwhile. A
request waits for a limited time. What it does not find in the stores then is computed, and so is what was damaged.

What takes longer to load than to compute is computed: by what the last loads took a page, and by what the replica's
steps with prompts take a token.

A key is a hash of what a rank's pages depend on (fingerprint.py), of a number that changes with the weights, and of the
block's name, which chains through all tokens and the salt.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import groupby
from typing import Any, NamedTuple

from ..scheduler.block_pool import BlockPool
from ..scheduler.kv_elsewhere import KeptPages
from ..scheduler.request import Request
from ..stores.asked_store import NUM_THREADS, AskedStore
from ..stores.store import KEY_BYTES, KVStore
from .below import NoStores, Search
from .host_memory import HostMemory
from .kv_tiers import KVTiers

_MOST_SOUGHT = 512
"""Pages that are sought for a request at a time."""
_MOST_IN_CALL = 64
_MOST_BYTES = 1 << 30
"""Bytes of what is sought at a time."""
_MOST_STATES = 128
"""Borders, from the end of a prefix on, at which a state is sought."""
_MOST_ROUNDS = 8
"""Questions for a request at a time: windows and states are asked for where the group with all tokens ends."""
_FORGOTTEN = 0.95  # factor on the seconds of a page each time that pages are computed because they take too long
_ROOM_SECONDS = 0.05  # seconds after which what is stored is sought again, if there was no place for it
_QUERY_SECONDS = 2.0
_LOAD_SECONDS = 5.0
_SAVE_SECONDS = 30.0  # nobody waits for that


class _Missing(NamedTuple):
    sought: list[bytes]  # names of the next blocks, of the group that has all tokens first
    needed: list[bytes]  # those of them, and of known states, that the longest prefix consists of
    states: list[bytes]  # names of states that may be there, of the longest prefix first
    num_tokens: int  # tokens of that prefix


class StoredPages(NoStores):
    """Runs on the engine's loop."""

    def __init__(
        self,
        tier: KVTiers,
        memory: HostMemory,
        stores: Sequence[AskedStore],
        wake: Callable[[], None],
        seconds_of: Callable[[int], float],
    ) -> None:
        """``wake``: called when requests need not wait any longer. ``seconds_of``: returns how long so many tokens of a
        prompt take to compute; 0: that is not known yet."""
        self._tier = tier
        self._stores = stores
        self._wake = wake
        self._seconds_of = seconds_of
        self._loop = asyncio.get_running_loop()
        self._keys = _Keys(memory.fingerprints)
        self._pages = _Pages(memory)
        self._most = max(1, min(_MOST_SOUGHT, _MOST_BYTES // memory.page_bytes, tier.places.num_blocks // 2))
        self._saves = [_Saves(store, tier.places, self._pages) for store in stores]
        self._searches: dict[bytes, Search] = {}  # searches under way, by the first name that they seek
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads: dict[asyncio.Future[list[bool]], list[int]] = {}  # places of the calls that have not returned
        self._is_arriving = False  # what gets a name was loaded, and is not saved
        self._page_bytes = memory.page_bytes
        tier.places.on_offer = self._note_kept
        tier.below = self

    @property
    def num_saving(self) -> int:
        """Number of pages that stores have not taken yet."""
        return sum(len(places) for saves in self._saves for places in saves.held())

    def held(self) -> Iterable[list[int]]:
        return [*self._loads.values(), *(places for saves in self._saves for places in saves.held())]

    # -- what is saved

    def _note_kept(self, place: int, name: bytes) -> None:
        if not self._is_arriving:
            keys = self._keys.of([name])
            for saves in self._saves:
                saves.add(place, keys)

    # -- what is found

    def seek(self, request: Request, least_tokens: int) -> Search | None:
        if request.was_sought or not any(store.is_asked for store in self._stores):
            return None
        names = self._missing(request, {}, ()).sought
        if len(names) * self._tier.kv.block_size < least_tokens:
            request.was_sought = True
            return None
        search = self._searches.get(names[0])
        if search is None:
            search = self._searches[names[0]] = Search()
            task = self._loop.create_task(self._find(search, request, names[0]), name="aengine-kv-search")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return search

    def _missing(self, request: Request, where: Mapping[bytes, AskedStore], absent: Collection[bytes]) -> _Missing:
        """Return what a request lacks of its longest prefix, if stores have all blocks but the ``absent``, and of
        states those of ``where`` alone."""
        blocks: dict[bytes, int] = {}  # names with numbers below 0, by which they are known in the prefix
        states: dict[bytes, None] = {}

        def find(name: bytes) -> int | None:
            found = self._tier.find(name)
            if found is not None or name in absent:
                return found
            if name not in where and self._tier.kv.is_state(name):
                states[name] = None
                return None
            if name in blocks or len(blocks) < self._most:
                return blocks.setdefault(name, -1 - len(blocks))
            return None

        prefix = self._tier.kv.match(request, find)
        sought, ids = list(blocks), [i for part in (*(t.block_ids for t in prefix.tables), prefix.kept) for i in part]
        needed = [sought[-1 - i] for i in ids if i < 0]
        return _Missing(sought, needed, list(states)[:_MOST_STATES], prefix.length)

    async def _find(self, search: Search, request: Request, first: bytes) -> None:
        try:
            # Where all of it came there may be more.
            request.was_sought = not await self._bring(request)
        finally:
            del self._searches[first]
            self._tier.end_wait(search)
            self._wake()

    async def _bring(self, request: Request) -> bool:
        """Load what the stores have of the next names that a request lacks. Returns whether that was all that was
        sought."""
        where: dict[bytes, AskedStore] = {}
        absent: set[bytes] = set()
        passed: set[bytes] = set()  # states that are not there, or of a longer prefix
        for _ in range(_MOST_ROUNDS):
            sought, needed, states, num_tokens = self._missing(request, where, absent | passed)
            unknown = [name for name in sought if name not in where]
            if unknown:
                found = await self._query(unknown)
                absent.update(unknown[len(found) : len(found) + 1])
            else:
                found = await self._query_any(states)
                if not found:
                    known = self._tier.kv.match(request, self._tier.find).length
                    if not needed or not self._is_faster(Counter(where[name] for name in needed), num_tokens - known):
                        return False
                    return await self._load(needed, where) and not absent
                passed.update(states)
                passed.difference_update(found)
            where.update(found)
        return False

    async def _query(self, names: Sequence[bytes]) -> dict[bytes, AskedStore]:
        """Return which store has each of the leading names."""
        where: dict[bytes, AskedStore] = {}
        for store in self._stores:
            if store.is_asked and (rest := names[len(where) :]):
                keys = self._keys.of(rest)
                found = await store.answer(store.begin(_query, store.store, keys), _QUERY_SECONDS)
                where.update(dict.fromkeys(rest[: (found or 0) // self._keys.num_ranks], store))
        return where

    async def _query_any(self, names: Sequence[bytes]) -> dict[bytes, AskedStore]:
        """Return which store has the first of the names that any has."""
        for store in self._stores:
            if store.is_asked and names:
                keys = [self._keys.of([name]) for name in names]
                index = await store.answer(store.begin(_first, store.store, keys), _QUERY_SECONDS)
                if index is not None and index < len(names):
                    return {names[index]: store}
        return {}

    def _is_faster(self, stores: Counter[AskedStore], num_tokens: int) -> bool:
        """Return whether to load so many pages of each store takes no longer than to compute so many tokens."""
        computed = self._seconds_of(num_tokens)
        if not computed or max(number * store.page_seconds for store, number in stores.items()) <= computed:
            return True
        for store in stores:  # what is not loaded is not measured: now and then it is tried again
            store.page_seconds *= _FORGOTTEN
        return False

    async def _load(self, names: Sequence[bytes], where: dict[bytes, AskedStore]) -> bool:
        """Load pages into places. Returns whether all have come in time, as far as there are places."""
        if not self._tier.places.num_free:  # they are being pinned, or others load
            await asyncio.sleep(_ROOM_SECONDS)
        names, begun = names[: self._tier.places.num_free], self._loop.time()
        answers: list[Coroutine[Any, Any, list[bool] | None]] = []
        for store, group in groupby(names, where.__getitem__):
            own = list(group)
            size = min(_MOST_IN_CALL, -(-len(own) // NUM_THREADS))
            for begin in range(0, len(own), size):
                part = own[begin : begin + size]
                keys, places = self._keys.of(part), self._tier.places.allocate(len(part))
                call = store.begin(_load, store.store, keys, self._pages.of(places))
                self._loads[call] = places
                call.add_done_callback(partial(self._arrive, store, part, self._keys.version))
                answer = store.answer(call, _LOAD_SECONDS)
                answers.append(answer)
        arrived = await asyncio.gather(*answers)
        for store, number in Counter(where[name] for name in names).items():
            store.note_loaded(number, self._loop.time() - begun)
        return all(filled and all(filled) for filled in arrived)

    def _arrive(self, store: AskedStore, names: list[bytes], version: bytes, call: asyncio.Future[list[bool]]) -> None:
        places, num_ranks = self._loads.pop(call), self._keys.num_ranks
        ended_well = not call.cancelled() and call.exception() is None and version == self._keys.version
        filled = call.result() if ended_well else []
        self._is_arriving = True
        for index, (name, place) in enumerate(zip(names, places, strict=True)):
            own = filled[index * num_ranks : (index + 1) * num_ranks]
            if own and all(own):
                self._tier.places.offer(place, name)
                store.num_fetched += 1
            else:
                store.num_lost += 1
        self._is_arriving = False
        self._tier.places.release(places)

    def counts(self) -> Sequence[KeptPages]:
        """See `KVElsewhere`. Others may have brought more to a store, and it may have dropped some."""
        return [
            KeptPages(
                *(one.name, one.num_saved, getattr(one.store, "num_bytes", one.num_saved * self._page_bytes)),
                *(one.num_saved, one.num_fetched, one.num_lost),
            )
            for one in self._stores
        ]

    # -- the end

    def forget(self) -> None:
        self._keys.version = os.urandom(KEY_BYTES)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for saves, store in zip(self._saves, self._stores, strict=True):
            saves.close()
            store.close()
        self._pages.close()


class _Saves:
    """What one store is given, a call at a time. What is more than it can take is not saved."""

    def __init__(self, store: AskedStore, places: BlockPool, pages: _Pages) -> None:
        self._store = store
        self._places = places
        self._pages = pages
        self._most = min(max(64, places.num_blocks // 8), max(1, places.num_blocks // 2))
        self._waiting: deque[tuple[int, list[bytes]]] = deque()  # places, and the keys of their pages
        self._calls: dict[asyncio.Future[None], list[int]] = {}  # places of the calls that have not returned
        self._task: asyncio.Task[None] | None = None

    def add(self, place: int, keys: list[bytes]) -> None:
        if len(self._waiting) < self._most and self._store.is_asked:
            self._places.acquire([place])
            self._waiting.append((place, keys))
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._run(), name="aengine-kv-saves")

    async def _run(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST_IN_CALL))]
            places, keys = [place for place, _ in batch], [key for _, keys in batch for key in keys]
            call = self._store.begin(self._store.store.save, keys, self._pages.of(places))
            self._calls[call] = places
            call.add_done_callback(self._end)
            await self._store.answer(call, _SAVE_SECONDS)
            if not self._store.is_asked:
                self._places.release([place for place, _ in self._waiting])
                self._waiting.clear()
        self._task = None

    def _end(self, call: asyncio.Future[None]) -> None:
        places = self._calls.pop(call)
        if not call.cancelled() and call.exception() is None:
            self._store.num_saved += len(places)
        self._places.release(places)

    def held(self) -> list[list[int]]:
        return [*self._calls.values(), *([place] for place, _ in self._waiting)]

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _Keys:
    """The keys of all ranks' pages."""

    def __init__(self, fingerprints: Sequence[bytes]) -> None:
        self._fingerprints = fingerprints
        self.num_ranks = len(fingerprints)
        self.version = bytes(KEY_BYTES)

    def of(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the keys of each name, one for each rank."""
        starts = [start + self.version for start in self._fingerprints]
        return [blake2b(start + name, digest_size=KEY_BYTES).digest() for name in names for start in starts]


class _Pages:
    """The host's memory, as stores see it."""

    def __init__(self, memory: HostMemory) -> None:
        sizes = [os.fstat(fd).st_size for fd in memory.fds]
        self._ranks = [
            (memoryview(mmap.mmap(fd, size)), size // memory.num_places)
            for fd, size in zip(memory.fds, sizes, strict=True)
        ]

    def of(self, places: Sequence[int]) -> list[memoryview]:
        """Return the pages in each place, one for each rank."""
        return [memory[place * size : (place + 1) * size] for place in places for memory, size in self._ranks]

    def close(self) -> None:
        """Let go of the memory. Calls that have not returned keep theirs."""
        self._ranks.clear()


def _query(store: KVStore, keys: Sequence[bytes]) -> int:
    number = store.query(keys)
    if not isinstance(number, int) or not 0 <= number <= len(keys):
        raise TypeError(f"query returned {number!r:.80}, which is no number of {len(keys)} keys")
    return number


def _first(store: KVStore, choices: Sequence[Sequence[bytes]]) -> int:
    """Return the index of the first choice of which the store has all; behind the last: there is none."""
    return next((i for i, keys in enumerate(choices) if _query(store, keys) == len(keys)), len(choices))


def _load(store: KVStore, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[bool]:
    filled = store.load(keys, pages)
    if not isinstance(filled, list) or len(filled) != len(keys):
        raise TypeError(f"load returned {filled!r:.80}, which is no list of {len(keys)} answers")
    return filled
