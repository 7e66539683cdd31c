"""Grammars of the running requests: compiled before they are queued; advanced, and turned into bitmasks, beside the
forward.

    admission ──prepare──> Compiled ──RequestGrammar──> Request.grammar      (compile pool, never the loop)

    step N     [ forward N ][ sample N ]
    step N+1                [ forward N+1 ...........  ][ sample N+1 ]       a forward needs no grammar, sampling does
    host                    answer N ─> accept ids of N, fill rows ─> GRAMMAR frame N+1

The ids of an answer are only noted by the loop. The lane, one thread, lets the matchers accept them and fills the rows
of the next step, mostly without the GIL; so each matcher is touched by one thread at a time.

A step samples when all of its rows are filled. So that a grammar whose rows take long holds up nobody else, its request
is left out of the steps (`Scheduler.pause`) until its next row has been filled ahead, in a lane of its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import EngineClosedError, GrammarError, InternalError
from ..params import StructuredOutput
from .threads import Lane, run_in_thread

if TYPE_CHECKING:
    from ..grammar.backend import Compiled, Matcher
    from ..grammar.compiler import GrammarCompiler
    from ..grammar.spec import GrammarSpec
    from .tokenizer import Tokenizer

__all__ = ["Filled", "GrammarService", "MaskJob", "RequestGrammar"]


T = TypeVar("T")
_SHORT = 2000  # characters
_FEW_ROWS = 4
_SHORT_SECONDS = 0.0002
"""Rows that took no longer lately are filled on the loop: a thread's two turns take 100 us and more."""
_SLOW_SECONDS = 0.004
"""CPU time of a row from which it is filled ahead. Rows of ordinary schemas take 0.02 to 1.5 ms."""
_SURVEY_SECONDS = 0.006
"""A batch of rows that took longer is followed by one whose rows are timed, one by one,"""
_SURVEY_PERIOD = 1.0
"""at most so often."""


class RequestGrammar:
    """One request's place in its grammar, and the ids that it has got since."""

    __slots__ = ("_compiled", "_matcher", "_slowness", "ahead", "pending", "seconds")

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._matcher: Matcher | None = None
        self._slowness = 2.0 if compiled.mask_seconds > _SLOW_SECONDS else 0.0  # slow rows of late
        self.pending: list[int] = []  # committed, not yet accepted
        self.seconds = math.inf  # what a row of it took lately, at the worst
        self.ahead: asyncio.Future[tuple[bytearray, Filled]] | None = None  # its next row, filled or being filled

    @property
    def matcher(self) -> Matcher:
        """Made when first asked for, by the lane: it may take milliseconds."""
        if self._matcher is None:
            self._matcher = self._compiled.matcher()
        return self._matcher

    @property
    def is_slow(self) -> bool:
        """Whether its rows take so long that nobody else should wait for them."""
        return self._slowness > 1.2  # one alone may have come of something that is learnt once

    def note_time(self, seconds: float, cpu_seconds: float, *, is_first: bool) -> None:
        """What a row took, on the clock and of this thread. A first one, with its matcher, says nothing."""
        if is_first:
            self.seconds = 0.5
            return
        self.seconds = max(seconds, 0.9 * min(self.seconds, 0.002))
        # Forgotten slowly: where one row of ten takes long, nobody can tell which will be the next.
        self._slowness = min(4.0, 0.95 * self._slowness + (cpu_seconds > _SLOW_SECONDS))


class MaskJob(NamedTuple):
    """One row of a bitmask that is due."""

    batch_idx: int
    grammar: RequestGrammar
    token_ids: list[int]  # to accept first
    wants_forced: bool = False  # say what must come, if it is more than one token


class Filled(NamedTuple):
    """What has become of some jobs, by their place."""

    failed: dict[int, Exception]
    forced: dict[int, list[int]]  # where nothing else is allowed: the ids that must come, two at least


class GrammarService:
    """Compiles and fills for one engine; lives on its loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._row_words = (vocab_size + 31) // 32
        self._compiler: GrammarCompiler | None = None
        self._starting: asyncio.Task[GrammarCompiler] | None = None
        self._lane = Lane("grammar")
        self._slow_lane = Lane("grammar-slow")
        self._planner = Lane("grammar-plan", 2)
        self._is_surveying = False  # the next rows are timed one by one
        self._surveyed = -math.inf
        self._warming: asyncio.Task[None] | None = None
        self._closed = False

    def begin_warm_up(self) -> None:
        """Load the grammar library while the engine starts: it holds the GIL for up to 2 s, at the first use of all."""
        self._warming = asyncio.get_running_loop().create_task(self._warm_up(), name="aengine-grammar-warm-up")

    async def _warm_up(self) -> None:
        try:
            await (await self._started()).warm_up()
        except (GrammarError, EngineClosedError):
            pass  # whoever asks for a grammar is told

    async def _started(self) -> GrammarCompiler:
        if self._closed:
            raise EngineClosedError("the engine is closed: it compiles no more grammars")
        if self._compiler is not None:
            return self._compiler
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start(), name="aengine-grammar-start")
        return await asyncio.shield(self._starting)

    async def _start(self) -> GrammarCompiler:
        from ..grammar.compiler import GrammarCompiler
        from ..grammar.vocabulary import Vocabulary

        vocabulary = await run_in_thread("vocabulary", Vocabulary.of, self._tokenizer, self.vocab_size)
        if self._closed:
            raise EngineClosedError("the engine is closed: it compiles no more grammars")
        self._compiler = GrammarCompiler(vocabulary)
        return self._compiler

    async def prepare(self, wanted: StructuredOutput | GrammarSpec) -> Compiled:
        """The compiled grammar. Raises GrammarError, EngineOverloadedError, EngineClosedError, InternalError."""
        from ..grammar.spec import spec_of

        if isinstance(wanted, StructuredOutput):
            # A large schema is walked for some 50 ms: not on the loop.
            wanted = spec_of(wanted) if _is_short(wanted) else await self.run(spec_of, wanted)
        return await (await self._started()).compile(wanted)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """In one of the two threads that all requests share for what precedes a grammar."""
        if self._closed:
            raise EngineClosedError("the engine is closed")
        return await self._planner.run(function, *args)

    @property
    def row_bytes(self) -> int:
        return 4 * self._row_words

    async def fill(self, jobs: Sequence[MaskJob], rows: memoryview | bytearray) -> Filled:
        """Fill ``rows``, int32 [len(jobs), ceil(vocab_size / 32)]. Those that failed allow all."""
        if any(job.grammar.ahead is not None for job in jobs):
            return await self._fill_with_ahead(jobs, rows)
        if len(jobs) <= _FEW_ROWS and sum(job.grammar.seconds for job in jobs) < _SHORT_SECONDS:
            return self._fill(jobs, rows)  # sooner done than a thread is woken
        self._check_open()
        return await self._lane.run(self._fill, jobs, rows)

    def fill_ahead(
        self, grammar: RequestGrammar, is_wanted: Callable[[], bool]
    ) -> asyncio.Future[tuple[bytearray, Filled]]:
        """Begin to fill its next row, which `fill` will find, if it is still wanted when its turn comes.

        Nobody else may touch the grammar until it is done.
        """
        self._check_open()
        job = MaskJob(0, grammar, grammar.pending)
        grammar.pending = []
        grammar.ahead = self._slow_lane.run(self._fill_one, job, is_wanted)
        return grammar.ahead

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed: it fills no more bitmasks")

    def _fill_one(self, job: MaskJob, is_wanted: Callable[[], bool]) -> tuple[bytearray, Filled]:
        rows = bytearray(self.row_bytes)
        return rows, self._fill([job], rows) if is_wanted() else Filled({}, {})

    async def _fill_with_ahead(self, jobs: Sequence[MaskJob], rows: memoryview | bytearray) -> Filled:
        """The others first; by then what was begun ahead is most likely done."""
        size = self.row_bytes
        others = [row for row, job in enumerate(jobs) if job.grammar.ahead is None]
        target = bytearray(size * len(others))
        filled = await self.fill([jobs[row] for row in others], target)
        for i, row in enumerate(others):
            rows[row * size : (row + 1) * size] = target[i * size : (i + 1) * size]
        failed = {others[i]: error for i, error in filled.failed.items()}
        forced = {others[i]: token_ids for i, token_ids in filled.forced.items()}
        for row, job in enumerate(jobs):
            if job.grammar.ahead is not None:
                ready, one = await job.grammar.ahead
                job.grammar.ahead = None
                rows[row * size : (row + 1) * size] = ready
                if one.failed:
                    failed[row] = one.failed[0]
        return Filled(failed, forced)

    def _fill(self, jobs: Sequence[MaskJob], rows: memoryview | bytearray) -> Filled:
        """In whatever thread; the jobs' grammars are its own meanwhile."""
        if len(jobs) > _FEW_ROWS and not self._is_surveying:
            begun = time.perf_counter()
            filled = self._fill_rows(jobs, rows)
            ended = time.perf_counter()
            self._is_surveying = ended - begun > _SURVEY_SECONDS and ended - self._surveyed > _SURVEY_PERIOD
            return filled
        if len(jobs) > _FEW_ROWS:
            self._is_surveying, self._surveyed = False, time.perf_counter()
        failed: dict[int, Exception] = {}
        forced: dict[int, list[int]] = {}
        size = self.row_bytes
        view = memoryview(rows)
        for row, job in enumerate(jobs):
            is_first = job.grammar.seconds == math.inf and not job.token_ids
            begun, begun_cpu = time.perf_counter(), time.thread_time()
            one = self._fill_rows([job], view[row * size : (row + 1) * size])
            if one.failed:
                failed[row] = one.failed[0]
            if one.forced:
                forced[row] = one.forced[0]
            seconds, cpu_seconds = time.perf_counter() - begun, time.thread_time() - begun_cpu
            job.grammar.note_time(seconds, cpu_seconds, is_first=is_first)
        return Filled(failed, forced)

    def _fill_rows(self, jobs: Sequence[MaskJob], rows: memoryview | bytearray) -> Filled:
        from ..grammar.backend import MatcherError, accept_batch, fill_batch

        bitmask = memoryview(rows).cast("i", shape=[len(jobs), self._row_words])
        failed: dict[int, Exception] = {}
        due = []
        matchers = [job.grammar.matcher for job in jobs]
        accepted = accept_batch([(m, job.token_ids) for m, job in zip(matchers, jobs, strict=True)])
        for row, (matcher, job, result) in enumerate(zip(matchers, jobs, accepted, strict=True)):
            if isinstance(result, MatcherError):
                failed[row] = result
            elif result == len(job.token_ids):
                due.append((matcher, row))
            else:
                refused = job.token_ids[result]
                failed[row] = InternalError(f"token {refused} was sampled, which the grammar does not allow here")
        failed |= fill_batch(due, bitmask)
        size = self.row_bytes
        for row in failed:
            rows[row * size : (row + 1) * size] = b"\xff" * size
        forced = {}
        for row, matcher in ((row, matcher) for matcher, row in due if jobs[row].wants_forced and row not in failed):
            ids = _forced_ids(matcher, rows[row * size : (row + 1) * size])
            if len(ids) > 1:
                forced[row] = ids
        return Filled(failed, forced)

    def close(self) -> None:
        """From any thread; nothing is awaited. Threads end by themselves."""
        self._closed = True
        if self._compiler is not None:
            self._compiler.abandon()
        for lane in (self._lane, self._slow_lane, self._planner):
            lane.close()

    async def aclose(self) -> None:
        """`close`, and wait for the threads; for a compile in progress a second at most."""
        self._closed = True
        tasks = [task for task in (self._warming, self._starting) if task is not None]
        for task in tasks:
            task.cancel()
        for task in tasks:
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()
        if self._compiler is not None:
            await self._compiler.aclose()
        for lane in (self._lane, self._slow_lane, self._planner):
            await lane.aclose()


def _forced_ids(matcher: Matcher, row: memoryview | bytearray) -> list[int]:
    """What must come, if the bitmask says so too: for a grammar with several ways to write a text it may not."""
    from ..grammar.backend import MatcherError

    try:
        ids = matcher.forced_tokens()
    except MatcherError:  # the next row will say it
        return []
    if len(ids) < 2 or int.from_bytes(row, "little") != 1 << ids[0]:
        return []
    return ids


def _is_short(wanted: StructuredOutput) -> bool:
    """Whether it is read faster than a thread is asked to."""
    text = wanted.json_schema if isinstance(wanted.json_schema, str) else wanted.regex or wanted.grammar
    return wanted.json_object or (text is not None and len(text) < _SHORT)
