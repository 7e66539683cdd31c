"""Which pages of KV are in the host's memory, by name, and the jobs that copy them there and back. Pure: no I/O.

    a block of the pool gets a name ──> unsaved ──save──> aside: page -> place ──> known by name, oldest use evicted
    a waiting request's prefix goes on here ─────fetch──> back: place -> page  ──> cached in the pool; the request is in
                                                                                   the queue again, and begins with it

Names chain through all tokens before and what else KV depends on (kv_cache_manager.py), so equal names are equal pages,
and a caller without the salt finds nothing. A worker's pages go with it; places are memory of this process, so that the
next worker finds them again.

A job holds its pages and its places, as a user of a block does: neither is evicted or given anew meanwhile. So jobs
need no order among steps. What is found of a request is brought once: what has gone by the time when it gets a row is
computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ..scheduler.block_pool import BlockPool
from ..scheduler.kv_cache_manager import KVCacheManager, Prefix
from ..scheduler.kv_elsewhere import KeptPages, KVElsewhere
from ..scheduler.request import Request, RequestStatus
from .below import NoStores, Search

LEAST_TOKENS = 32
"""Fewer are computed in no more time than it takes to send for them."""
MOST_SAVED = 128
"""Pages of one job that saves: they hold up the host's loop for less time than a short step takes."""


@dataclass(slots=True, eq=False)
class PageJob:
    """Pages to copy, all in one direction."""

    id: int
    is_fetch: bool  # from places to pages of the pool; else the other way
    pages: list[int]
    places: list[int]
    names: list[bytes]
    requests: list[Request] = field(default_factory=list)  # requests that wait for them
    held: list[int] = field(default_factory=list)  # blocks before them, which the pool has
    is_stale: bool = False  # what is copied is of no use any more


class KVTiers(KVElsewhere):
    """A tier of ``num_places`` places in the host's memory, each of a page of ``page_bytes`` on all ranks together."""

    def __init__(self, num_places: int, *, page_bytes: int = 1, least_tokens: int = LEAST_TOKENS) -> None:
        self._page_bytes = page_bytes
        self.places = BlockPool(num_places)
        # places that are not used before `use_places` says so: a copy to memory that is not pinned holds up steps
        self.unusable: list[int] = []
        self._least_tokens = least_tokens
        self.waiting: dict[Request, PageJob | Search] = {}
        self.jobs: dict[int, PageJob] = {}  # jobs under way, by id
        self.fetches: list[PageJob] = []  # those of them that nobody has taken
        # blocks of the pool that are not here, by name, oldest first
        self.unsaved: OrderedDict[bytes, int] = OrderedDict()
        self._coming: dict[int, PageJob] = {}  # job that brings the page in a place back
        self._next_job = 0
        self.on_work: Callable[[], None] = lambda: None
        """Called when there may be a job to take."""
        self.on_close: Callable[[], None] = lambda: None
        self.below = NoStores()
        self.num_saved = self.num_fetched = self.num_lost = 0  # see `KeptPages`

    @property
    def num_kept(self) -> int:
        """Number of pages that are here."""
        return self.places.num_named

    @property
    def has_many_unsaved(self) -> bool:
        """Whether pages should be saved soon: a job's, or a part of the pool that might be given away."""
        return len(self.unsaved) >= self._many

    # -- the scheduler's side

    def begin_worker(self, kv: KVCacheManager, wake: Callable[[Request], None]) -> None:
        for awaited in self.waiting.values():
            awaited.requests.clear()
        for job in self.jobs.values():
            self.places.release(job.places)
        self.jobs.clear()
        self.fetches.clear()
        self.waiting.clear()
        self.unsaved.clear()
        self._coming.clear()
        self.kv, self._pool, self._wake = kv, kv.pool, wake
        kv.pool.on_offer = self._note_offered
        self._many = min(MOST_SAVED, kv.pool.num_blocks // 16)

    def _note_offered(self, block_id: int, name: bytes) -> None:
        if self.places.find(name) is None:
            self.unsaved[name] = block_id
            if len(self.unsaved) > self._pool.num_blocks:  # the block of one of them has another name by now
                self.unsaved.popitem(last=False)
            if len(self.unsaved) == 1 or self.has_many_unsaved:
                self.on_work()
        else:
            self.places.touch(name)

    def fetch(self, request: Request, prefix: Prefix, spare: int) -> bool:
        search = self.below.seek(request, self._least_tokens)
        if search is not None:
            self._await(request, search)
            return True
        if not self.num_kept:
            return False
        found = self.kv.match(request, self.find)
        if found.length <= request.num_fetched_tokens or found.length - prefix.length < self._least_tokens:
            self._touch(prefix)
            return False
        num_blocks = self._pool.num_blocks
        ids = [i for block_ids in (*(table.block_ids for table in found.tables), found.kept) for i in block_ids]
        held, places = [i for i in ids if i < num_blocks], [i - num_blocks for i in ids if i >= num_blocks]
        job = next((self._coming[place] for place in places if place in self._coming), None)
        if job is None:
            if len(places) + self._pool.count_idle(held) > spare:
                return False
            self._pool.acquire(held)
            self.places.acquire(places)
            job = self._begin(is_fetch=True, pages=self._pool.allocate(len(places)), places=places)
            job.held = held
            self._coming |= dict.fromkeys(places, job)
            self.fetches.append(job)
            request.num_fetched_tokens = found.length
            self.on_work()
        self._await(request, job)
        return True

    def _await(self, request: Request, awaited: PageJob | Search) -> None:
        awaited.requests.append(request)
        self.waiting[request] = awaited
        request.status = RequestStatus.WAITING_FOR_PAGES

    def end_wait(self, awaited: PageJob | Search) -> None:
        """Have those who wait for it wait in the queue again."""
        for request in awaited.requests:
            del self.waiting[request]
            self._wake(request)

    def find(self, name: bytes) -> int | None:
        """Return the block of this name; the numbers behind the pool's are places."""
        block_id = self._pool.find(name)
        if block_id is None:
            place = self.places.find(name)
            return None if place is None else self._pool.num_blocks + place
        return block_id

    def _touch(self, prefix: Prefix) -> None:
        """Mark what is used in the pool as used here: it is found here when the pool has evicted it."""
        for table in prefix.tables:
            for block_id in reversed(table.block_ids):
                name = self._pool.name_of(block_id)
                if name is not None:
                    self.places.touch(name)

    def discard(self, request: Request) -> None:
        self.waiting.pop(request).requests.remove(request)

    def forget(self, *, everywhere: bool) -> None:
        self.unsaved.clear()
        for job in self.jobs.values():
            job.is_stale |= everywhere or job.is_fetch  # the pool's memory may go; what was read of it has been read
        if everywhere:
            self.places.forget_all()
            self.below.forget()

    def held(self) -> Iterable[list[int]]:
        return [part for job in self.jobs.values() for part in (job.pages, job.held)]

    def counts(self) -> Sequence[KeptPages]:
        num_bytes = self.num_kept * self._page_bytes
        host = KeptPages("host", self.num_kept, num_bytes, self.num_saved, self.num_fetched, self.num_lost)
        return [host, *self.below.counts()]

    def close(self) -> None:
        self.below.close()
        self.on_close()

    # -- places

    def use_places(self, count: int) -> None:
        """Use the first ``count`` places from now on."""
        num_new = count - (self.places.num_blocks - len(self.unusable))
        if num_new > 0:
            self.places.release(self.unusable[:num_new])
            del self.unusable[:num_new]
        if self.unsaved:
            self.on_work()

    # -- jobs

    def take_fetches(self) -> list[PageJob]:
        """Return the jobs that bring pages back and were not taken yet."""
        fetches, self.fetches = self.fetches, []
        return fetches

    def take_saves(self) -> PageJob | None:
        """Return a job that saves pages; None: there is nothing to save, or no place for it."""
        names: list[bytes] = []
        pages: list[int] = []
        most = min(MOST_SAVED, self.places.num_free, max(1, self._pool.num_blocks // 2))
        while self.unsaved and len(names) < most:
            name, block_id = self.unsaved.popitem(last=False)
            if self._pool.find(name) == block_id and self.places.find(name) is None:
                names.append(name)
                pages.append(block_id)
        if not names:
            return None
        self._pool.acquire(pages)
        return self._begin(is_fetch=False, pages=pages, places=self.places.allocate(len(pages)), names=names)

    def _begin(self, *, is_fetch: bool, pages: list[int], places: list[int], names: Sequence[bytes] = ()) -> PageJob:
        known = names or [self.places.name_of(place) or b"" for place in places]
        job = self.jobs[self._next_job] = PageJob(self._next_job, is_fetch, pages, places, list(known))
        self._next_job += 1
        return job

    def end(self, job: PageJob, lost: Collection[int] = ()) -> None:
        """Note that a job is done, but for the entries ``lost`` of its lists. Those who wait for it wait in the queue
        again. Without effect if the worker is another one by now."""
        if self.jobs.pop(job.id, None) is None:
            return
        good = [i for i in range(len(job.names)) if i not in lost and not job.is_stale]
        target, ids = (self._pool, job.pages) if job.is_fetch else (self.places, job.places)
        for i in good:
            target.offer(ids[i], job.names[i])
        if job.is_fetch:
            self.num_fetched += len(good)
            self.num_lost += len(lost)
            for place in job.places:
                del self._coming[place]
        else:
            self.num_saved += len(good)
        self._pool.release(job.pages)
        self._pool.release(job.held)
        if job.requests:
            self._pool.idle.expect(job.pages)
        self.places.release(job.places)
        for i in lost if job.is_fetch else ():
            self.places.drop(job.names[i])
        self.end_wait(job)

    def check(self) -> None:
        """Assert that jobs, waiting requests and places agree."""
        self.places.check([self.unusable, *(job.places for job in self.jobs.values()), *self.below.held()])
        waiting = [request for awaited in set(self.waiting.values()) for request in awaited.requests]
        assert len(waiting) == len(self.waiting) and set(waiting) == self.waiting.keys()
        assert all(request.status is RequestStatus.WAITING_FOR_PAGES for request in waiting)
        assert all(job.id in self.jobs for job in (*self.fetches, *self._coming.values()))
