"""`BitmaskFiller`: which tokens may come next, for the requests of a step that have a grammar.

    loop   answer N ─> fill(jobs) ..............................................> GRAMMAR frame N+1
    pool               └─> matchers accept the ids of N ─> rows are filled ─┘
                           (little Python)                (without the GIL: meanwhile the loop delivers N)

The ids of an answer are only noted by the loop. The pool, one thread, lets the matchers accept them and fills the rows,
in the grammar library's threads where there are many; so each matcher is touched by one thread at a time.

A step samples when all of its rows are filled. So that a grammar whose rows take long delays no other, its request
is left out of the steps (`Scheduler.pause`) until its next row has been filled ahead, in a pool of its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from ...errors import EngineClosedError
from ..threads.pools import ThreadPool, end_pools

if TYPE_CHECKING:
    from .backend import Compiled, Matcher

_FEW_ROWS = 4
_SHORT_SECONDS = 0.0002
"""Rows that took no longer lately are filled on the loop: a thread's two turns take 100 us and more."""
_SLOW_SECONDS = 0.004
"""CPU time of a row from which its grammar is filled ahead. Rows of ordinary schemas take 0.02 to 1.5 ms."""
_SLOW_ROWS = 150
"""A grammar is slow until so many rows were not: of 1,000 optional properties one row in 20 is."""
_MOST_SECONDS = 1.0
"""CPU time of a row beyond which its request ends: other slow grammars' rows wait for it in the same thread."""
_SURVEY_PERIOD = 1.0
"""Seconds: a batch of rows that took `_SLOW_SECONDS` is followed by one whose rows are timed, at most so often."""


class RequestGrammar:
    """Keeps one request's place in its grammar, and the ids that it has got since."""

    __slots__ = ("_compiled", "_lately", "_matcher", "_num_slow_rows", "ahead", "pending")

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._matcher: Matcher | None = None
        self._lately: deque[float] = deque(maxlen=4)  # seconds of the last rows
        self._num_slow_rows = _SLOW_ROWS if compiled.mask_seconds > _SLOW_SECONDS else 0
        self.pending: list[int] = []  # ids committed to the request and not accepted by the matcher yet
        # The next row, filled or being filled; None: it is filled with the step.
        self.ahead: asyncio.Future[tuple[bytearray, Filled]] | None = None

    @property
    def is_new(self) -> bool:
        """Whether the request has no matcher yet."""
        return self._matcher is None

    @property
    def matcher(self) -> Matcher:
        """Make the matcher when first asked for, by the pool: it may take milliseconds."""
        if self._matcher is None:
            self._matcher = self._compiled.matcher()
        return self._matcher

    def take_pending(self) -> list[int]:
        """Return the ids to accept; the caller advances the matcher by them."""
        token_ids, self.pending = self.pending, []
        return token_ids

    @property
    def is_slow(self) -> bool:
        """Whether its rows take so long that no other request should wait for them."""
        return self._num_slow_rows > 0

    @property
    def seconds(self) -> float:
        """Seconds of the slowest of the last rows; infinity while too few are known."""
        return max(self._lately) if len(self._lately) == self._lately.maxlen else math.inf

    def note_time(self, seconds: float, cpu_seconds: float) -> None:
        """Note how long filling a row took: in seconds of the clock and of this thread's CPU time."""
        self._lately.append(seconds)
        self._num_slow_rows = _SLOW_ROWS if cpu_seconds > _SLOW_SECONDS else max(0, self._num_slow_rows - 1)


class MaskJob(NamedTuple):
    """The rows of a bitmask that are due for a request: one, and one more after each of its drafts. If these are
    certain, one after all of them."""

    grammar: RequestGrammar
    token_ids: list[int]  # ids to accept before the row is filled
    drafts: Sequence[int] = ()
    are_certain: bool = False  # whether the drafts are certain
    wants_forced: bool = False  # whether to find the ids that must follow the drafts, if there are two or more

    @property
    def num_rows(self) -> int:
        return 1 if self.are_certain else 1 + len(self.drafts)


class Filled(NamedTuple):
    """The results of some jobs, by their index."""

    failed: dict[int, Exception]
    forced: dict[int, list[int]]  # ids that must come, two or more, by job: where nothing else is allowed


OnFill = Callable[[float], None]


class Filling(NamedTuple):
    """Rows that a thread fills."""

    filled: asyncio.Future[Filled]
    free_until: asyncio.Future[float]
    """Done when the thread goes on without the GIL, or has ended. Until that time of ``perf_counter`` the loop may
    work; later the thread would have to wait for it."""


class BitmaskFiller:
    """Fills for one engine; `fill` and `fill_ahead` are for its loop."""

    def __init__(self, vocab_size: int) -> None:
        self._row_words = (vocab_size + 31) // 32
        self._pool = ThreadPool("grammar")
        self._slow_pool = ThreadPool("grammar-slow")
        self._is_surveying = False  # the next rows are timed one by one
        self._surveyed = -math.inf
        self._last_seconds = self._expected_seconds = 0.001  # seconds of a fill without the GIL: last, next
        self._closed = False

    @property
    def row_bytes(self) -> int:
        return 4 * self._row_words

    def begin(self) -> None:
        """Start the threads. Without them the step of a request that has a grammar could not go on, nor any other's.
        Raises EngineOverloadedError when they can't be started."""
        self._pool.begin()
        self._slow_pool.begin()

    def fill(self, jobs: Sequence[MaskJob], rows: memoryview | bytearray) -> Filled | Filling:
        """Fill ``rows``, int32 [rows of all jobs, ceil(vocab_size / 32)]: at once, or begin to. Failed ones allow all.

        Raises EngineClosedError after `close`, or the filling does, unless they are filled at once.
        """
        has_ahead = any(job.grammar.ahead is not None for job in jobs)
        if not has_ahead and _are_short(jobs):
            return self._fill(jobs, rows)  # waking a thread would take longer
        loop = asyncio.get_running_loop()
        free_until: asyncio.Future[float] = loop.create_future()
        filled: asyncio.Future[Filled]
        if has_ahead:
            filled = loop.create_task(self._fill_with_ahead(jobs, rows, free_until), name="aengine-fill")
        else:
            filled = self._begin_fill(jobs, rows, free_until)
        filled.add_done_callback(lambda filled: _settle(free_until, 0.0))
        return Filling(filled, free_until)

    def _begin_fill(
        self, jobs: Sequence[MaskJob], rows: memoryview | bytearray, free_until: asyncio.Future[float]
    ) -> asyncio.Future[Filled]:
        loop = free_until.get_loop()

        def on_fill(expected_seconds: float) -> None:
            loop.call_soon_threadsafe(_settle, free_until, time.perf_counter() + expected_seconds)

        return self._pool.run(self._fill, jobs, rows, on_fill)

    def fill_ahead(
        self, grammar: RequestGrammar, is_wanted: Callable[[], bool]
    ) -> asyncio.Future[tuple[bytearray, Filled]]:
        """Begin to fill its next row, which `fill` will find, if it is still wanted when its turn comes.

        Nobody else may touch the grammar until it is done. Raises EngineClosedError after `close`.
        """
        job = MaskJob(grammar, grammar.take_pending())
        grammar.ahead = self._slow_pool.run(self._fill_one, job, is_wanted)
        return grammar.ahead

    def check_open(self) -> None:
        """Raise EngineClosedError after `close`."""
        if self._closed:
            raise EngineClosedError("the engine is closed: it fills no more bitmasks")

    def _fill_one(self, job: MaskJob, is_wanted: Callable[[], bool]) -> tuple[bytearray, Filled]:
        rows = bytearray(b"\xff") * self.row_bytes
        return rows, self._fill([job], rows) if is_wanted() else Filled({}, {})

    async def _fill_with_ahead(
        self, jobs: Sequence[MaskJob], rows: memoryview | bytearray, free_until: asyncio.Future[float]
    ) -> Filled:
        """Fill the rows that were not begun ahead first; by then those that were are most likely done."""
        parts = self._parts(jobs)
        others = [place for place, job in enumerate(jobs) if job.grammar.ahead is None]
        target = bytearray(sum(parts[place].stop - parts[place].start for place in others))
        filled = await self._begin_fill([jobs[place] for place in others], target, free_until)
        for place, part in zip(others, self._parts([jobs[place] for place in others]), strict=True):
            rows[parts[place]] = target[part]
        failed = {others[i]: error for i, error in filled.failed.items()}
        forced = {others[i]: token_ids for i, token_ids in filled.forced.items()}
        for place, job in enumerate(jobs):
            if job.grammar.ahead is not None:
                ready, one = await job.grammar.ahead
                job.grammar.ahead = None
                assert not job.drafts, "a request that is left out of the steps has no drafts"
                rows[parts[place]] = ready
                if one.failed:
                    failed[place] = one.failed[0]
        return Filled(failed, forced)

    def _parts(self, jobs: Sequence[MaskJob]) -> list[slice]:
        """Return the place of each job's rows in the buffer, in bytes, one after the other."""
        ends = list(accumulate(self.row_bytes * job.num_rows for job in jobs))
        return [slice(begin, end) for begin, end in zip([0, *ends], ends)]

    def _fill(
        self, jobs: Sequence[MaskJob], rows: memoryview | bytearray, on_fill: OnFill = lambda expected_seconds: None
    ) -> Filled:
        """Fill, in whatever thread; the jobs' grammars are its own meanwhile. ``on_fill``: called when what is left is
        mostly done without the GIL, with the seconds that it may take."""
        drafted = {place for place, job in enumerate(jobs) if job.num_rows > 1}
        if drafted and len(jobs) - len(drafted) > _FEW_ROWS:
            return self._fill_apart(jobs, rows, drafted, on_fill)
        if drafted or len(jobs) <= _FEW_ROWS:
            on_fill(sum(min(job.grammar.seconds, 1.0) for job in jobs))
            return self._fill_one_by_one(jobs, rows)
        if self._is_surveying:
            self._is_surveying, self._surveyed = False, time.perf_counter()
            return self._fill_one_by_one(jobs, rows)
        waited = time.perf_counter()

        def note_fill() -> None:
            nonlocal waited
            waited = time.perf_counter()
            on_fill(self._expected_seconds)

        filled = self._fill_rows(jobs, rows, note_fill)
        ended = time.perf_counter()
        self._expected_seconds = min(ended - waited, self._last_seconds)  # a slow fill says little about the next
        self._last_seconds = ended - waited
        self._is_surveying = ended - waited > _SLOW_SECONDS and ended - self._surveyed > _SURVEY_PERIOD
        return filled

    def _fill_apart(
        self, jobs: Sequence[MaskJob], rows: memoryview | bytearray, drafted: set[int], on_fill: OnFill
    ) -> Filled:
        """Fill the rows of the jobs at the places ``drafted``, which follow their drafts one by one, then those of all
        others at once."""
        parts, found = self._parts(jobs), Filled({}, {})
        for some, tell in ((drafted, lambda expected_seconds: None), (set(range(len(jobs))) - drafted, on_fill)):
            places = sorted(some)
            own = [jobs[place] for place in places]
            target = bytearray(self.row_bytes * sum(job.num_rows for job in own))
            filled = self._fill(own, target, tell)
            for place, part in zip(places, self._parts(own), strict=True):
                rows[parts[place]] = target[part]
            found.failed.update((places[i], error) for i, error in filled.failed.items())
            found.forced.update((places[i], token_ids) for i, token_ids in filled.forced.items())
        return found

    def _fill_one_by_one(self, jobs: Sequence[MaskJob], rows: memoryview | bytearray) -> Filled:
        """Fill one row after the other, and note each one's time."""
        failed: dict[int, Exception] = {}
        forced: dict[int, list[int]] = {}
        view = memoryview(rows)
        for place, (job, part) in enumerate(zip(jobs, self._parts(jobs), strict=True)):
            is_first = job.grammar.is_new
            begun, begun_cpu = time.perf_counter(), time.thread_time()
            one = self._fill_drafted(job, view[part]) if job.num_rows > 1 else self._fill_rows([job], view[part])
            if one.failed:
                failed[place] = one.failed[0]
            if one.forced:
                forced[place] = one.forced[0]
            if not is_first:  # most of a first fill's time is making the matcher
                seconds, cpu_seconds = time.perf_counter() - begun, time.thread_time() - begun_cpu
                job.grammar.note_time(seconds / job.num_rows, cpu_seconds / job.num_rows)
                if cpu_seconds > _MOST_SECONDS * job.num_rows:
                    failed.setdefault(place, _took_too_long(cpu_seconds / job.num_rows))
        return Filled(failed, forced)

    def _fill_drafted(self, job: MaskJob, rows: memoryview) -> Filled:
        """Fill the rows of one request with drafts. The matcher follows the drafts to the first that it does not allow,
        and is rolled back: the answer tells which of them are accepted. Rows past a draft that is not allowed allow all
        tokens."""
        from .backend import refused

        matcher, drafts, size = job.grammar.matcher, job.drafts, self.row_bytes
        rows[:] = b"\xff" * len(rows)
        bitmask = rows.cast("i", shape=[job.num_rows, self._row_words])
        forced: list[int] = []
        num_accepted = 0
        try:
            accepted = matcher.accept(job.token_ids)
            if accepted < len(job.token_ids):
                raise refused(job.token_ids[accepted])
            known = matcher.forced_tokens()
            for row, draft in enumerate(drafts):
                if known[row : row + 1] == [draft]:  # no need to ask for a row with one bit
                    rows[row * size : (row + 1) * size] = (1 << draft).to_bytes(size, "little")
                else:
                    known = []
                    matcher.fill(bitmask, row)
                if not rows[row * size + draft // 8] >> draft % 8 & 1 or not matcher.accept([draft]):
                    break
                num_accepted += 1
            else:
                matcher.fill(bitmask, len(drafts))
                if job.wants_forced:
                    forced = _forced_ids(matcher, rows[len(drafts) * size :])
            matcher.rollback(num_accepted)
        except Exception as error:  # whatever a plug-in may raise
            rows[:] = b"\xff" * len(rows)
            return Filled({0: error}, {})
        return Filled({}, {0: forced} if len(forced) > 1 else {})

    def _fill_rows(
        self, jobs: Sequence[MaskJob], rows: memoryview | bytearray, on_fill: Callable[[], None] = lambda: None
    ) -> Filled:
        from .backend import advance_batch, note_failure

        bitmask = memoryview(rows).cast("i", shape=[len(jobs), self._row_words])
        items = [(job.grammar.matcher, [*job.token_ids, *job.drafts] if job.drafts else job.token_ids) for job in jobs]
        failed = advance_batch(items, bitmask, on_fill)
        size = self.row_bytes
        for row in failed:
            rows[row * size : (row + 1) * size] = b"\xff" * size
        forced = {}
        for row in (row for row, job in enumerate(jobs) if (job.wants_forced or job.drafts) and row not in failed):
            matcher, job = items[row][0], jobs[row]
            if job.wants_forced and (ids := _forced_ids(matcher, rows[row * size : (row + 1) * size])):
                forced[row] = ids
            if job.drafts:  # the answer brings the accepted drafts again
                note_failure(failed, row, matcher.rollback, len(job.drafts))
        return Filled(dict(failed), forced)

    def close(self) -> None:
        """End the threads, without waiting for them; from any thread."""
        self._closed = True
        for pool in (self._pool, self._slow_pool):
            pool.close()

    async def aclose(self) -> None:
        """Close, and wait for the threads."""
        self.close()
        await end_pools(self._pool, self._slow_pool)


def _are_short(jobs: Sequence[MaskJob]) -> bool:
    """Return whether the loop may fill them: not a slow grammar's, however quick its last rows were."""
    if len(jobs) > _FEW_ROWS or any(job.grammar.is_slow for job in jobs):
        return False
    return sum(job.grammar.seconds for job in jobs) <= _SHORT_SECONDS


def _forced_ids(matcher: Matcher, row: memoryview | bytearray) -> list[int]:
    """Return the matcher's forced ids if the bitmask agrees: a grammar with several ways to write a text may not. They
    are those that it forces after the first, too."""
    from .backend import MatcherError

    try:
        ids = matcher.forced_tokens()
        if len(ids) < 2 or int.from_bytes(row, "little") != 1 << ids[0] or not matcher.accept(ids[:1]):
            return []
        following = matcher.forced_tokens()
        matcher.rollback(1)
    except MatcherError:  # the next row reports the error
        return []
    return ids if following[: len(ids) - 1] == ids[1:] else []


def _took_too_long(seconds: float) -> Exception:
    from .backend import MatcherLimitError

    return MatcherLimitError(
        f"the grammar took {seconds:.1f} s to say which tokens may come next, and {_MOST_SECONDS:g} s is the most: "
        "make it smaller or less ambiguous"
    )


def _settle(free_until: asyncio.Future[float], value: float) -> None:
    if not free_until.done():
        free_until.set_result(value)
