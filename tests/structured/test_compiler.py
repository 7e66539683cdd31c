"""The compiler: each grammar once, none for ever, and nothing left behind; with a backend that waits when told to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from grammar_helpers import tiny, vocabulary, wide

from aengine import StructuredOutput
from aengine.engine.structured.bitmasks import MaskJob, RequestGrammar
from aengine.engine.structured.compiler import GrammarCompiler
from aengine.engine.structured.service import GrammarService
from aengine.engine.structured.spec import GrammarSpec
from aengine.errors import EngineClosedError, EngineOverloadedError, GrammarError, InternalError

pytestmark = pytest.mark.usefixtures("no_blocking")


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """Files are read before a loop runs."""
    vocabulary("tiny")


@dataclass(frozen=True)
class FakeCompiled:
    spec: GrammarSpec
    num_bytes: int = 100
    warnings: tuple[str, ...] = ()

    def matcher(self) -> Any:
        raise NotImplementedError


class FakeBackend:
    """Compiles at once, but a text that begins with "wait" only when `gate` is opened, and one with "slow" only when
    `slow_gate` is; those are not quick. Whether "look" is quick (no), is known when `gate` is opened."""

    name = "fake"

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        self.slow_begun = threading.Semaphore(0)
        self.slow_gate = threading.Event()
        self.closed = False

    def is_quick(self, spec: GrammarSpec) -> bool:
        if spec.text.startswith("look"):
            self.begun.release()
            assert self.gate.wait(60)
        if spec.text.startswith("odd"):
            raise GrammarError("it is odd", kind="invalid")
        return not spec.text.startswith(("slow", "look"))

    def compile(self, spec: GrammarSpec, on_wait: Any = None) -> FakeCompiled:
        self.compiled.append(spec.text)
        if spec.text.startswith("wait"):
            self.begun.release()
            assert self.gate.wait(60)
        if spec.text.startswith("wait and fail"):
            raise GrammarError("it is bad", kind="invalid")
        if spec.text.startswith("slow"):
            self.slow_begun.release()
            assert self.slow_gate.wait(60)
        if spec.text.startswith("bad"):
            raise GrammarError("it is bad", kind="invalid", path="$.x")
        if spec.text.startswith("bug"):
            raise KeyError("bug")
        return FakeCompiled(spec)

    def close(self) -> None:
        self.closed = True


def regex(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


@asynccontextmanager
async def compiling(**options: Any) -> AsyncIterator[tuple[GrammarCompiler, FakeBackend]]:
    backend = FakeBackend()
    compiler = GrammarCompiler(lambda: vocabulary("tiny"), load=lambda *args: backend, **options)
    try:
        yield compiler, backend
    finally:
        backend.gate.set()
        backend.slow_gate.set()
        await compiler.aclose()
        assert backend.closed or not backend.compiled
        await no_threads()


def grammar_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("aengine-grammar-compile")]


async def no_threads() -> None:
    """Each ends by itself; a test that waits for ever fails."""
    for thread in grammar_threads():
        await asyncio.to_thread(thread.join)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def begun(backend: FakeBackend) -> None:
    await until(lambda: backend.begun.acquire(blocking=False))


def num_queued(compiler: GrammarCompiler) -> int:
    """Grammars that wait for a thread: nothing that a caller sees tells whether one was handed on already."""
    return len(compiler._queue)


async def slow_ones(
    compiler: GrammarCompiler, backend: FakeBackend, num: int, num_threads: int = 1
) -> list[asyncio.Task[Any]]:
    """So many in the works: the first in the slow threads, the others in their queue."""
    tasks: list[asyncio.Task[Any]] = []
    for i in range(num):
        tasks.append(asyncio.create_task(compiler.compile(regex(f"slow{i}"))))
        if i < num_threads:
            await until(lambda: backend.slow_begun.acquire(blocking=False))
    await until(lambda: num_queued(compiler) == compiler._slow_pool.num_queued == max(0, num - num_threads))
    return tasks


async def test_a_grammar_is_compiled_once() -> None:
    async with compiling() as (compiler, backend):
        first = await compiler.compile(regex("a"))
        assert await compiler.compile(regex("a")) is first
        assert await compiler.compile(GrammarSpec("lark", "a")) is not first
        assert backend.compiled == ["a", "a"]


async def test_equal_grammars_in_the_works_are_one() -> None:
    async with compiling() as (compiler, backend):
        tasks = [asyncio.create_task(compiler.compile(regex("wait"))) for _ in range(5)]
        await begun(backend)
        tasks[0].cancel()
        tasks[3].cancel()
        await asyncio.gather(tasks[0], tasks[3], return_exceptions=True)
        assert tasks[0].cancelled()
        backend.gate.set()
        results = await asyncio.gather(tasks[1], tasks[2], tasks[4])
        assert results[0] is results[1] is results[2]
        assert backend.compiled == ["wait"]


async def test_a_queued_grammar_that_nobody_wants_is_dropped() -> None:
    async with compiling(num_threads=1, max_queued=1) as (compiler, backend):
        busy = asyncio.create_task(compiler.compile(regex("wait")))
        await begun(backend)
        unwanted = [asyncio.create_task(compiler.compile(regex("b"))) for _ in range(2)]
        await asyncio.sleep(0)
        unwanted[0].cancel()
        await asyncio.gather(unwanted[0], return_exceptions=True)
        with pytest.raises(EngineOverloadedError):
            await compiler.compile(regex("c"))  # the other one still wants it
        unwanted[1].cancel()
        await asyncio.gather(unwanted[1], return_exceptions=True)
        last = asyncio.create_task(compiler.compile(regex("c")))
        backend.gate.set()
        await asyncio.gather(busy, last)
        assert backend.compiled == ["wait", "c"]
        assert (await compiler.compile(regex("b"))).spec == regex("b")


async def test_a_grammar_that_was_cancelled_in_progress_is_kept() -> None:
    async with compiling() as (compiler, backend):
        task = asyncio.create_task(compiler.compile(regex("wait")))
        await begun(backend)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        backend.gate.set()
        assert (await compiler.compile(regex("wait"))).spec == regex("wait")
        assert backend.compiled == ["wait"]


async def test_an_error_that_nobody_waits_for_any_more_is_nobody_s() -> None:
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["message"]))
    async with compiling() as (compiler, backend):
        asked = asyncio.create_task(compiler.compile(regex("wait and fail")))
        await begun(backend)
        asked.cancel()
        await asyncio.wait([asked])
        backend.gate.set()
        with pytest.raises(GrammarError):
            await compiler.compile(regex("wait and fail"))
    gc.collect()
    assert not [message for message in told if "never retrieved" in message]


async def test_a_full_queue_is_an_error_at_once() -> None:
    async with compiling(num_threads=1, max_queued=2) as (compiler, backend):
        busy = asyncio.create_task(compiler.compile(regex("wait")))
        await begun(backend)
        await until(lambda: num_queued(compiler) == 0)
        queued = [asyncio.create_task(compiler.compile(regex(text))) for text in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloadedError) as caught:
            await compiler.compile(regex("c"))
        assert caught.value.retry_after > 0
        again = asyncio.create_task(compiler.compile(regex("a")))  # no new work
        backend.gate.set()
        await asyncio.gather(busy, *queued, again)
        assert (await compiler.compile(regex("c"))).spec == regex("c")


async def test_the_least_recently_used_go_first() -> None:
    async with compiling(cache_bytes=300) as (compiler, backend):
        for text in "abcadb":
            await compiler.compile(regex(text))
        assert backend.compiled == ["a", "b", "c", "d", "b"]
        for text in "adb":
            await compiler.compile(regex(text))
        assert len(backend.compiled) == 5
        await compiler.compile(regex("c"))
        assert backend.compiled[5:] == ["c"]


async def test_a_grammar_that_comes_twice_counts_once() -> None:
    """One that was late is compiled again by the next who asks, and both arrive."""
    async with compiling(cache_bytes=300) as (compiler, backend):
        for _ in range(3):
            compiler._remember(FakeCompiled(regex("a")))  # as one does that comes after its waiters' time
        for text in "bca":
            await compiler.compile(regex(text))
        assert backend.compiled == ["b", "c"]


async def test_a_grammar_larger_than_the_cache_is_served_all_the_same() -> None:
    async with compiling(cache_bytes=50) as (compiler, backend):
        for _ in range(2):
            assert (await compiler.compile(regex("a"))).spec == regex("a")
        assert backend.compiled == ["a", "a"]
    async with compiling(cache_bytes=199) as (compiler, backend):
        for text in "aba":
            await compiler.compile(regex(text))
        assert backend.compiled == ["a", "b", "a"]


async def test_one_that_takes_too_long_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first time it has not ended yet."""
    monkeypatch.setattr("aengine.engine.structured.compiler._FAILURE_SECONDS", 0.0)
    async with compiling(timeout=0.01, num_threads=2) as (compiler, backend):
        for _ in range(2):
            with pytest.raises(GrammarError, match="took longer"):
                await compiler.compile(regex("wait"))
        backend.gate.set()
        await until(lambda: backend.compiled == ["wait", "wait"])


async def test_too_long_is_an_error_and_comes_later_all_the_same() -> None:
    async with compiling(timeout=0.01, num_threads=1) as (compiler, backend):
        tasks = [asyncio.create_task(compiler.compile(regex("wait"))) for _ in range(2)]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, GrammarError)
            assert result.kind == "too_complex"
        with pytest.raises(GrammarError, match="took longer"):  # not tried again
            await compiler.compile(regex("wait"))
        assert backend.compiled == ["wait"]
        backend.gate.set()
        compiled = None
        while compiled is None:
            with contextlib.suppress(GrammarError):
                compiled = await compiler.compile(regex("wait"))
            await asyncio.sleep(0)
        assert compiled.spec == regex("wait")
        assert backend.compiled == ["wait"]


async def test_failures_are_remembered_each_with_an_error_of_its_own() -> None:
    async with compiling() as (compiler, backend):
        errors = []
        for _ in range(2):
            with pytest.raises(GrammarError, match="it is bad") as caught:
                await compiler.compile(regex("bad"))
            errors.append(caught.value)
        assert errors[0] is not errors[1]
        assert [(e.kind, e.path) for e in errors] == [("invalid", "$.x")] * 2
        assert backend.compiled == ["bad"]
        for i in range(300):
            with pytest.raises(GrammarError):
                await compiler.compile(regex(f"bad{i}"))
        del backend.compiled[:]
        for text in ("bad299", "bad44", "bad43"):
            with pytest.raises(GrammarError):
                await compiler.compile(regex(text))
        assert backend.compiled == ["bad43"], "256 are remembered"


async def test_a_failure_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.engine.structured.compiler._FAILURE_SECONDS", 0.0)
    async with compiling() as (compiler, backend):
        for _ in range(2):
            with pytest.raises(GrammarError):
                await compiler.compile(regex("bad"))
        assert backend.compiled == ["bad", "bad"]


async def test_a_bug_is_an_internal_error_and_not_remembered() -> None:
    async with compiling() as (compiler, backend):
        for _ in range(2):
            with pytest.raises(InternalError, match="KeyError"):
                await compiler.compile(regex("bug"))
        assert backend.compiled == ["bug", "bug"]
        await compiler.compile(regex("a"))


async def test_closing_fails_who_waits() -> None:
    async with compiling(num_threads=1) as (compiler, backend):
        busy = asyncio.create_task(compiler.compile(regex("wait")))
        await begun(backend)
        queued = asyncio.create_task(compiler.compile(regex("a")))
        await asyncio.sleep(0)
        closing = asyncio.create_task(compiler.aclose())
        for result in await asyncio.gather(busy, queued, return_exceptions=True):
            assert isinstance(result, EngineClosedError)
        backend.gate.set()
        await closing
        assert backend.compiled == ["wait"]
        with pytest.raises(EngineClosedError):
            await compiler.compile(regex("b"))
        with pytest.raises(EngineClosedError):
            await compiler.warm_up()
        await compiler.aclose()


async def test_closing_ends_a_warm_up_that_is_queued() -> None:
    async with compiling(num_threads=1) as (compiler, backend):
        busy = asyncio.create_task(compiler.compile(regex("wait")))
        await begun(backend)
        warming = asyncio.create_task(compiler.warm_up())
        await asyncio.sleep(0)
        backend.gate.set()
        await compiler.aclose()
        for result in await asyncio.gather(busy, warming, return_exceptions=True):
            assert isinstance(result, EngineClosedError)


async def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.engine.threads.pools._END_SECONDS", 0.01)
    async with compiling() as (compiler, backend):
        busy = asyncio.create_task(compiler.compile(regex("wait")))
        await begun(backend)
        await compiler.aclose()
        assert len(grammar_threads()) == 1
        with pytest.raises(EngineClosedError):
            await busy
        backend.gate.set()
        await no_threads()


async def test_abandoned_from_another_thread() -> None:
    async with compiling(num_threads=1) as (compiler, backend):
        await compiler.compile(regex("known"))
        busy = asyncio.create_task(compiler.compile(regex("wait")))
        await begun(backend)
        queued = asyncio.create_task(compiler.compile(regex("a")))
        await asyncio.sleep(0)
        await asyncio.to_thread(compiler.abandon)
        for result in await asyncio.gather(busy, queued, return_exceptions=True):
            assert isinstance(result, EngineClosedError)
        with pytest.raises(EngineClosedError):
            await compiler.compile(regex("known"))
        backend.gate.set()
        await no_threads()
        assert backend.compiled == ["known", "wait"]


async def test_a_compiler_that_is_dropped_takes_its_threads_along() -> None:
    backend = FakeBackend()
    compiler = GrammarCompiler(lambda: vocabulary("tiny"), load=lambda *args: backend)
    await compiler.compile(regex("a"))
    (thread,) = grammar_threads()
    gone = weakref.ref(compiler)
    del compiler
    gc.collect()
    assert gone() is None
    await asyncio.to_thread(thread.join)
    assert backend.closed


@pytest.mark.parametrize("end", [GrammarCompiler.aclose, GrammarCompiler.drop_tables])
async def test_a_closed_compiler_keeps_no_grammar(end: Callable[[GrammarCompiler], Any]) -> None:
    async with compiling() as (compiler, _):
        compiled = weakref.ref(await compiler.compile(regex("a")))
        assert compiled() is not None, "it is kept for the next request"
        if (waiting := end(compiler)) is not None:
            await waiting
        await no_threads()
        gc.collect()
        assert compiled() is None


async def test_threads_are_as_many_as_needed_and_no_more() -> None:
    async with compiling(num_threads=3) as (compiler, backend):
        for text in "abc":
            await compiler.compile(regex(text))
            await until(lambda: len(compiler._pool._work.idle) == 1)  # it answers a moment before it is free again
        assert len(grammar_threads()) == 1
        tasks = [asyncio.create_task(compiler.compile(regex(f"wait{i}"))) for i in range(7)]
        for _ in range(3):
            await begun(backend)
        assert len(grammar_threads()) == 3
        assert len(backend.compiled) == 6
        backend.gate.set()
        await asyncio.gather(*tasks)


async def test_a_backend_is_built_once_and_its_refusal_is_the_grammars() -> None:
    builds: list[str] = []

    def load(name: str, *args: Any) -> FakeBackend:
        builds.append(name)
        if name == "other":
            raise GrammarError("not installed", kind="unsupported")
        return FakeBackend()

    compiler = GrammarCompiler(lambda: vocabulary("tiny"), load=load)
    await asyncio.gather(compiler.warm_up(), compiler.warm_up(), compiler.compile(regex("a")))
    assert builds == ["llguidance"]
    for text in "ab":
        with pytest.raises(GrammarError, match="not installed"):
            await compiler.compile(GrammarSpec("regex", text, backend="other"))
    with pytest.raises(GrammarError, match="not installed"):
        await compiler.warm_up("other")
    assert builds == ["llguidance", "other"]
    await compiler.aclose()


# -- grammars that may take long


async def test_slow_grammars_do_not_hold_up_a_quick_one() -> None:
    async with compiling() as (compiler, backend):
        slow = await slow_ones(compiler, backend, 12, num_threads=2)
        assert (await compiler.compile(regex("a"))).spec == regex("a")
        assert backend.compiled == ["slow0", "slow1", "a"]
        backend.slow_gate.set()
        results = await asyncio.gather(*slow)
        assert [result.spec.text for result in results] == [f"slow{i}" for i in range(12)]
        assert num_queued(compiler) == 0
        assert await compiler.compile(regex("slow3")) is results[3]


async def test_both_queues_are_bounded_together() -> None:
    async with compiling(num_threads=1, max_queued=4) as (compiler, backend):
        slow = await slow_ones(compiler, backend, 3)
        busy = asyncio.create_task(compiler.compile(regex("wait")))
        await begun(backend)
        await until(lambda: num_queued(compiler) == 2)
        quick = [asyncio.create_task(compiler.compile(regex(text))) for text in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloadedError):
            await compiler.compile(regex("c"))
        backend.gate.set()
        backend.slow_gate.set()
        await asyncio.gather(busy, *slow, *quick)
        assert num_queued(compiler) == 0


async def test_slow_grammars_leave_half_of_the_places() -> None:
    async with compiling(num_threads=1, max_queued=4) as (compiler, backend):
        slow = await slow_ones(compiler, backend, 3)
        refused = [asyncio.create_task(compiler.compile(regex("slow3"))) for _ in range(2)]
        for result in await asyncio.gather(*refused, return_exceptions=True):
            assert isinstance(result, EngineOverloadedError)
            assert result.retry_after > 0
        assert num_queued(compiler) == 2
        assert await compiler.compile(regex("a"))
        backend.slow_gate.set()
        assert await asyncio.gather(*slow)
        assert await compiler.compile(regex("slow3"))  # not remembered as a failure


async def test_a_slow_grammar_that_nobody_wants_is_dropped_from_its_queue() -> None:
    async with compiling(num_threads=1) as (compiler, backend):
        slow = await slow_ones(compiler, backend, 3)
        slow[1].cancel()
        await asyncio.gather(slow[1], return_exceptions=True)
        assert num_queued(compiler) == 1
        backend.slow_gate.set()
        await asyncio.gather(slow[0], slow[2])
        assert backend.compiled == ["slow0", "slow2"]


async def test_one_that_nobody_wants_any_more_is_not_handed_on() -> None:
    async with compiling(num_threads=1) as (compiler, backend):
        for keep in (False, True):
            task = asyncio.create_task(compiler.compile(regex("look")))
            await begun(backend)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            another = [asyncio.create_task(compiler.compile(regex("look")))] if keep else []
            await asyncio.sleep(0)
            backend.gate.set()
            await until(lambda: num_queued(compiler) == 0)
            await asyncio.gather(*another)
            assert backend.compiled == ["look"] * keep
            backend.gate.clear()


async def test_the_time_of_a_slow_grammar_begins_with_its_compile() -> None:
    async with compiling(num_threads=1, timeout=0.05) as (compiler, backend):
        slow = await slow_ones(compiler, backend, 2)
        with pytest.raises(GrammarError, match="took longer"):
            await slow[0]
        await asyncio.sleep(0.1)  # twice the time limit, which is what is tested here
        assert not slow[1].done()  # its thread is still busy with the other
        backend.slow_gate.set()
        assert await slow[1]


async def test_an_error_of_is_quick_is_the_grammars() -> None:
    async with compiling() as (compiler, backend):
        for _ in range(2):
            with pytest.raises(GrammarError, match="it is odd"):
                await compiler.compile(regex("odd"))
        assert num_queued(compiler) == 0
        assert not backend.compiled


async def test_no_thread_for_a_slow_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def no_slow_thread(thread: threading.Thread) -> None:
        if thread.name.endswith("-slow"):
            raise RuntimeError("can't start new thread")
        start(thread)

    async with compiling() as (compiler, backend):
        monkeypatch.setattr(threading.Thread, "start", no_slow_thread)
        for _ in range(2):
            with pytest.raises(EngineOverloadedError, match="can't start new thread"):
                await compiler.compile(regex("slow"))
        assert num_queued(compiler) == 0
        assert await compiler.compile(regex("a"))


@pytest.mark.parametrize("is_abandoned", [False, True])
async def test_closing_with_both_kinds_of_threads_busy(is_abandoned: bool) -> None:
    async with compiling(num_threads=1) as (compiler, backend):
        tasks = await slow_ones(compiler, backend, 2)
        tasks += [asyncio.create_task(compiler.compile(regex(text))) for text in ("wait", "a")]
        await begun(backend)
        if is_abandoned:
            await asyncio.to_thread(compiler.abandon)
        closing = asyncio.create_task(compiler.aclose())
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineClosedError)
        backend.gate.set()
        await until(lambda: [thread.name for thread in grammar_threads()] == ["aengine-grammar-compile-slow"])
        assert not closing.done()
        backend.slow_gate.set()
        await closing
        await no_threads()
        assert backend.compiled == ["slow0", "wait"]


async def test_closed_while_one_is_handed_on() -> None:
    async with compiling(num_threads=1) as (compiler, backend):
        task = asyncio.create_task(compiler.compile(regex("look")))
        await begun(backend)
        closing = asyncio.create_task(compiler.aclose())
        await asyncio.gather(task, return_exceptions=True)
        backend.gate.set()
        await closing
        assert isinstance(task.exception(), EngineClosedError)
        assert not backend.compiled


# -- the compiler's owner: it is started once, however many ask, again after a failure, and closed at any moment


LETTERS = StructuredOutput(regex="a+")


def new_threads(before: set[threading.Thread]) -> set[str]:
    """The names of those that have begun since."""
    return {thread.name for thread in threading.enumerate() if thread not in before}


async def test_it_starts_once_for_all_that_ask() -> None:
    before = {*threading.enumerate()}
    service = GrammarService(tiny(), 300)
    assert not new_threads(before), "nobody has asked"
    first, second = await asyncio.gather(service.prepare(LETTERS), service.prepare(LETTERS))
    assert first is second is await service.prepare(GrammarSpec("regex", "a+"))
    assert not any(name.startswith("aengine-grammar-plan") for name in new_threads(before)), "it is read at once"
    assert (await service.prepare(StructuredOutput(json_object=True))).spec.kind == "json_schema"
    large = {"type": "object", "properties": wide(10)}
    assert "p9" in (await service.prepare(StructuredOutput(json_schema=large))).spec.text
    assert any(name.startswith("aengine-grammar-plan") for name in new_threads(before)), "a dict is walked in a thread"
    assert await service.run(len, "abc") == 3
    with pytest.raises(GrammarError):
        await service.prepare(StructuredOutput(regex="("))
    await service.aclose()
    await service.aclose()
    for asked in (service.prepare(LETTERS), service.run(len, "abc")):
        with pytest.raises(EngineClosedError):
            await asked
    assert not {name for name in new_threads(before) if name.startswith("aengine-grammar")}


async def test_a_start_that_fails_is_told_to_all_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    service = GrammarService(tiny(), 300)
    with monkeypatch.context() as patch:
        patch.setattr(service.bitmasks, "begin", overload)
        service.begin_warm_up()  # nobody waits for that, so its failure is nobody's
        for result in await asyncio.gather(*(service.prepare(LETTERS) for _ in "ab"), return_exceptions=True):
            assert isinstance(result, EngineOverloadedError)
    assert (await service.prepare(LETTERS)).spec.text == "a+"
    await service.aclose()


def overload() -> None:
    raise EngineOverloadedError("can't start new thread", retry_after=1.0)


async def test_closing_waits_for_the_rows_that_are_being_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.engine.threads.pools._END_SECONDS", 30.0)
    begun, gate = threading.Event(), threading.Event()

    def make() -> Any:
        begun.set()
        gate.wait(60)
        raise MemoryError

    service = GrammarService(tiny(), 32)
    compiled: Any = SimpleNamespace(mask_seconds=0.0, matcher=make)
    filling: Any = service.bitmasks.fill([MaskJob(RequestGrammar(compiled), [])], bytearray(4))
    assert await asyncio.to_thread(begun.wait, 60)
    closing = asyncio.create_task(service.aclose())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not closing.done()
    gate.set()
    await closing
    with pytest.raises(MemoryError):
        await filling.filled


@pytest.mark.parametrize("is_closed_first", [False, True])
@pytest.mark.parametrize("num_turns", [0, 1, 3])
async def test_it_is_closed_while_it_starts(is_closed_first: bool, num_turns: int) -> None:
    before = {*threading.enumerate()}
    service = GrammarService(tiny(), 300)
    service.begin_warm_up()
    asked = asyncio.ensure_future(service.prepare(LETTERS))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if is_closed_first:
        service.close()
        with pytest.raises(EngineClosedError):
            await asked
    await service.aclose()
    with pytest.raises((EngineClosedError, asyncio.CancelledError)):
        await asked
    assert not {name for name in new_threads(before) if name.startswith("aengine-grammar")}
