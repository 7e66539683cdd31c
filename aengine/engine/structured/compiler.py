"""`GrammarCompiler`: grammars for requests, compiled off the loop, each once.

    compile(spec) ──cached?──────────────────────────────> Compiled, or the error of before
         │ no
         ├──in the works?──> wait for it with the others
         │ no
         └──queue ──> quick thread ──Backend.is_quick──> Backend.compile
                                          │ no
                                          └──queue ──> slow thread ──> Backend.compile ──> a process, to be killed

After `timeout`, counted from when its compile begins, the waiter gets a GrammarError; the thread is busy until it ends.
A compile can't be cancelled once begun, so backends run those that may take long where they can be killed, and threads
of their own wait for them: the quick ones never do. Both queues are bounded together, and the slow one to half of that;
each of several accounts has its part of them (threads/turns.py).

A caller who is cancelled only stops waiting; when nobody waits for a grammar that no thread has begun, it is taken out
of its queue. What comes out late is still kept: the next one who asks has it.

All state is the loop's; a thread only marks that it has begun. One compiler serves one event loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ...errors import AEngineError, EngineClosedError, EngineOverloadedError, GrammarError, InternalError
from ..threads.futures import error_for_waiter, settle
from ..threads.pools import ThreadPool, end_pools, tell
from ..threads.turns import Account, Places, acting_for
from .backend import Backend, Compiled
from .backends import Backends, Load, load_backend
from .spec import GrammarSpec
from .vocabulary import Vocabulary

logger = logging.getLogger("aengine.structured")

_FAILURE_SECONDS = 30.0
"""How long a grammar that failed is not tried again."""
_MAX_FAILURES = 256


@dataclass(slots=True, eq=False)
class _Work:
    """The compile of one grammar, for all who wait for it."""

    spec: GrammarSpec
    answer: asyncio.Future[Compiled]
    task: asyncio.Task[None] = field(init=False)
    account: Account  # the one for whom it was begun
    queues: list[Places] = field(default_factory=list)  # in which it has a place, until a thread compiles it
    num_waiters: int = 0
    is_taken: bool = False  # a thread has begun to look at it, or to compile it; set there
    timer: asyncio.TimerHandle | None = None
    begun: float = 0.0  # loop time at which the compile began

    def end(self, error: AEngineError) -> None:
        """Give up, and tell the waiters why."""
        settle(self.answer, None, error)
        self.task.cancel()


class GrammarCompiler:
    """Compiles `GrammarSpec`s for one vocabulary."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        num_threads: int = 2,
        max_queued: int = 256,
        timeout: float = 2.0,
        cache_bytes: int = 256 << 20,
        load: Load | None = None,
    ) -> None:
        """``make_vocabulary``: called in a thread, with the first grammar; ``num_threads``: for quick grammars, and as
        many for others; ``max_queued``: grammars that wait for a thread; ``load``: makes a backend by name (tests give
        their own)."""
        self._timeout = timeout
        self._queue = Places(max_queued)
        self._slow_queue = Places(max(1, max_queued // 2))  # quick ones would be refused for minutes otherwise
        self._cache_bytes = cache_bytes
        self._pool = ThreadPool("grammar-compile", num_threads)
        self._slow_pool = ThreadPool("grammar-compile-slow", num_threads)
        self._backends: Backends | None = Backends(make_vocabulary, timeout, load or load_backend)
        self._cache: OrderedDict[GrammarSpec, Compiled] = OrderedDict()
        self._cached_bytes = 0
        self._failures: OrderedDict[GrammarSpec, tuple[AEngineError, float]] = OrderedDict()
        self._works: dict[GrammarSpec, _Work] = {}
        self._seconds_each = 0.01  # moving average of the seconds of a compile
        self._closed = False
        self._finalizer = weakref.finalize(self, _stop, self._pool, self._slow_pool, self._backends)

    async def warm_up(self, backend: str = "llguidance") -> None:
        """Build a backend ahead of the first grammar, in a thread.

        Raises GrammarError when the backend can't serve this model.
        """
        backends = self._open_backends()
        try:
            await self._pool.run(backends.get, backend)
        except asyncio.CancelledError:
            if not self._closed:
                raise
            raise EngineClosedError("the engine was closed while its grammar library was loaded") from None

    async def compile(self, spec: GrammarSpec) -> Compiled:
        """Return the compiled grammar of ``spec``.

        Raises GrammarError: it can't be used, or took longer than the time limit (kind "too_complex");
        EngineOverloadedError: too many are queued; EngineClosedError; InternalError.
        """
        backends = self._open_backends()
        loop = asyncio.get_running_loop()
        found = self._cache.get(spec)
        if found is not None:
            self._cache.move_to_end(spec)
            return found
        self._raise_known_failure(spec, loop.time())
        work = self._works.get(spec) or self._begin(spec, loop, backends)
        work.num_waiters += 1
        try:
            return await asyncio.shield(work.answer)
        except AEngineError as error:
            own = error_for_waiter(error)
            raise own from own.__cause__
        finally:
            work.num_waiters -= 1
            if not work.num_waiters and not work.is_taken:
                self._forget(work)
                work.task.cancel()

    async def aclose(self) -> None:
        """Fail the waiters, end the threads; waits for a compile in progress a second at most. May be called twice."""
        self.drop_tables()
        await end_pools(self._pool, self._slow_pool)

    def abandon(self) -> None:
        """Close without waiting, from any thread: waiters are told when the loop runs next, if it does."""
        self._closed = True
        self._finalizer()
        for work in list(self._works.values()):
            tell(work.answer.get_loop(), work.end, EngineClosedError("the engine was closed"))

    # -- on the loop

    def drop_tables(self) -> None:
        """Abandon compiles as `abandon` does, and free the tables that grammars were compiled with; a compile in
        progress keeps them until it ends."""
        self.abandon()
        self._cache.clear()
        self._backends = None

    def _open_backends(self) -> Backends:
        if self._closed or self._backends is None:
            raise EngineClosedError("the engine is closed: it compiles no more grammars")
        return self._backends

    def _raise_known_failure(self, spec: GrammarSpec, now: float) -> None:
        known = self._failures.get(spec)
        if known is None:
            return
        error, until = known
        if now < until:
            raise error_for_waiter(error)
        del self._failures[spec]

    def _begin(self, spec: GrammarSpec, loop: asyncio.AbstractEventLoop, backends: Backends) -> _Work:
        account = acting_for.get()
        if not self._queue.has_room(account):
            raise EngineOverloadedError(
                f"{len(self._queue)} grammars are waiting to be compiled, the most allowed: try again later",
                retry_after=max(0.1, len(self._queue) * self._seconds_each),
            )
        work = self._works[spec] = _Work(spec, loop.create_future(), account)
        # The error is retrieved even if nobody waits: asyncio would log it as never retrieved.
        work.answer.add_done_callback(lambda answer: answer.exception())
        _join(work, self._queue)
        work.task = loop.create_task(self._work(work, backends), name="aengine-grammar-compile")
        return work

    async def _work(self, work: _Work, backends: Backends) -> None:
        """Compile a grammar in a thread, keep what comes out, and tell the waiters."""
        compiled: Compiled | None = None
        error: AEngineError | None = None
        try:
            compiled = await self._compile(work, backends)
        except asyncio.CancelledError:  # nobody waits any more, or the threads have ended
            error = EngineClosedError("the engine was closed while the grammar was compiled")
        except (GrammarError, EngineOverloadedError, EngineClosedError) as known:
            error = known
        except Exception as bug:
            logger.error("compiling a grammar failed", exc_info=bug)
            error = InternalError(f"compiling the grammar failed: {type(bug).__name__}: {bug}")
        self._set_waiting(work, True)
        self._forget(work)
        if work.begun:
            self._seconds_each += 0.1 * (asyncio.get_running_loop().time() - work.begun - self._seconds_each)
        if self._closed:
            error = EngineClosedError("the engine was closed while the grammar was compiled")
        elif compiled is not None:
            self._remember(compiled)  # though it may have taken longer than allowed
        elif isinstance(error, GrammarError):
            self._remember_failure(work.spec, error)
        settle(work.answer, compiled, error)

    async def _compile(self, work: _Work, backends: Backends) -> Compiled | None:
        """Compile in a quick thread, or if it may take long, in a slow one; None: nobody waits for it any more."""
        backend, compiled = await self._pool.run(self._compile_if_quick, work, backends)
        if compiled is not None or not work.num_waiters:
            return compiled
        if not self._slow_queue.has_room(work.account):
            message = (
                f"{len(self._slow_queue)} grammars that may take long are waiting to be compiled, the most allowed"
            )
            raise EngineOverloadedError(f"{message}: try again later", retry_after=self._timeout)
        _join(work, self._slow_queue)
        work.is_taken = False
        return await self._slow_pool.run(self._compile_now, work, backend)

    def _begun(self, work: _Work) -> None:
        work.begun = asyncio.get_running_loop().time()
        _leave_queues(work)
        self._set_waiting(work, False)

    def _set_waiting(self, work: _Work, is_waiting: bool) -> None:
        """Stop the time of a compile while a process is started for it; start it anew when it runs."""
        if work.timer is not None:
            work.timer.cancel()
            work.timer = None
        if not is_waiting and self._works.get(work.spec) is work and not self._closed:
            work.timer = asyncio.get_running_loop().call_later(self._timeout, self._timed_out, work)

    def _timed_out(self, work: _Work) -> None:
        error = GrammarError(
            f"the grammar took longer than {self._timeout:g} s to compile: make it smaller, or less ambiguous",
            kind="too_complex",
        )
        self._forget(work)
        self._remember_failure(work.spec, error)
        settle(work.answer, None, error)

    def _forget(self, work: _Work) -> None:
        _leave_queues(work)
        if self._works.get(work.spec) is work:
            del self._works[work.spec]

    def _remember(self, compiled: Compiled) -> None:
        before = self._cache.pop(compiled.spec, None)
        self._cached_bytes += compiled.num_bytes - (before.num_bytes if before is not None else 0)
        self._cache[compiled.spec] = compiled
        while self._cached_bytes > self._cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.num_bytes

    def _remember_failure(self, spec: GrammarSpec, error: AEngineError) -> None:
        self._failures[spec] = (error, asyncio.get_running_loop().time() + _FAILURE_SECONDS)
        self._failures.move_to_end(spec)
        while len(self._failures) > _MAX_FAILURES:
            self._failures.popitem(last=False)

    # -- in a thread of a pool

    def _compile_if_quick(self, work: _Work, backends: Backends) -> tuple[Backend, Compiled | None]:
        work.is_taken = True
        backend = backends.get(work.spec.backend)
        return backend, self._compile_now(work, backend) if backend.is_quick(work.spec) else None

    def _compile_now(self, work: _Work, backend: Backend) -> Compiled:
        work.is_taken, loop = True, work.answer.get_loop()
        tell(loop, self._begun, work)  # the limit on its time counts from here
        return backend.compile(work.spec, functools.partial(tell, loop, self._set_waiting, work))


def _join(work: _Work, queue: Places) -> None:
    queue.take(work.account)
    work.queues.append(queue)


def _leave_queues(work: _Work) -> None:
    while work.queues:
        work.queues.pop().leave(work.account)


def _stop(pool: ThreadPool, slow_pool: ThreadPool, backends: Backends) -> None:
    pool.close()
    slow_pool.close()
    backends.close()
