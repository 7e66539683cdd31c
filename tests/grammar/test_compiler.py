"""The compiler: each grammar once, none for ever, and nothing left behind; with a backend that waits when told to."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from grammar_helpers import NEEDS_XGRAMMAR, accepts, schema_spec, smollm2, tiny, vocabulary

from aengine.errors import EngineClosedError, EngineOverloadedError, GrammarError, InternalError
from aengine.grammar.compiler import GrammarCompiler
from aengine.grammar.spec import GrammarSpec

pytestmark = pytest.mark.usefixtures("no_blocking")


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    """Files are read before a loop runs."""
    vocabulary("tiny"), vocabulary("smollm2")


@dataclass(frozen=True)
class FakeCompiled:
    spec: GrammarSpec
    num_bytes: int = 100
    warnings: tuple[str, ...] = ()

    def matcher(self) -> Any:
        raise NotImplementedError


class FakeBackend:
    """Compiles at once, but a text that begins with "wait" only when `gate` is opened."""

    name = "fake"

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        self.closed = False

    def compile(self, spec: GrammarSpec, on_wait: Any = None) -> FakeCompiled:
        self.compiled.append(spec.text)
        if spec.text.startswith("wait"):
            self.begun.release()
            assert self.gate.wait(60)
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
    compiler = GrammarCompiler(vocabulary("tiny"), load=lambda *args: backend, **options)
    try:
        yield compiler, backend
    finally:
        backend.gate.set()
        await compiler.aclose()
        assert backend.closed or not backend.compiled
        await no_threads()


def grammar_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aengine-grammar"]


async def no_threads() -> None:
    """Each ends by itself; a test that waits for ever fails."""
    for thread in grammar_threads():
        await asyncio.to_thread(thread.join)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def begun(backend: FakeBackend) -> None:
    await until(lambda: backend.begun.acquire(blocking=False))


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


async def test_a_grammar_that_was_cancelled_in_progress_is_kept() -> None:
    async with compiling() as (compiler, backend):
        task = asyncio.create_task(compiler.compile(regex("wait")))
        await begun(backend)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        backend.gate.set()
        assert (await compiler.compile(regex("wait"))).spec == regex("wait")
        assert backend.compiled == ["wait"]


async def test_a_full_queue_is_an_error_at_once() -> None:
    async with compiling(num_threads=1, max_queued=2) as (compiler, backend):
        busy = asyncio.create_task(compiler.compile(regex("wait")))
        await begun(backend)
        await until(lambda: compiler._num_queued == 0)
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
        assert compiler._cached_bytes == 300
        assert [spec.text for spec in compiler._cache] == ["a", "d", "b"]


async def test_a_grammar_larger_than_the_cache_is_served_all_the_same() -> None:
    async with compiling(cache_bytes=50) as (compiler, backend):
        assert (await compiler.compile(regex("a"))).spec == regex("a")
        assert compiler._cached_bytes == 0
        assert not compiler._cache


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
        await until(lambda: regex("wait") in compiler._cache)
        assert (await compiler.compile(regex("wait"))).spec == regex("wait")
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
        assert len(compiler._failures) == 256


async def test_a_failure_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.grammar.compiler._FAILURE_SECONDS", 0.0)
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
    monkeypatch.setattr("aengine.grammar.compiler._CLOSE_SECONDS", 0.01)
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
        busy = asyncio.create_task(compiler.compile(regex("wait")))
        await begun(backend)
        queued = asyncio.create_task(compiler.compile(regex("a")))
        await asyncio.sleep(0)
        await asyncio.to_thread(compiler.abandon)
        for result in await asyncio.gather(busy, queued, return_exceptions=True):
            assert isinstance(result, EngineClosedError)
        backend.gate.set()
        await no_threads()
        assert backend.compiled == ["wait"]


async def test_a_compiler_that_is_dropped_takes_its_threads_along() -> None:
    backend = FakeBackend()
    compiler = GrammarCompiler(vocabulary("tiny"), load=lambda *args: backend)
    await compiler.compile(regex("a"))
    (thread,) = grammar_threads()
    gone = weakref.ref(compiler)
    del compiler
    gc.collect()
    assert gone() is None
    await asyncio.to_thread(thread.join)
    assert backend.closed


async def test_threads_are_as_many_as_needed_and_no_more() -> None:
    async with compiling(num_threads=3) as (compiler, backend):
        for text in "abc":
            await compiler.compile(regex(text))
            await until(lambda: compiler._pool._num_idle == 1)  # it answers a moment before it is free again
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
        if name == "xgrammar":
            raise GrammarError("not installed", kind="unsupported")
        return FakeBackend()

    compiler = GrammarCompiler(vocabulary("tiny"), load=load)
    await asyncio.gather(compiler.warm_up(), compiler.warm_up(), compiler.compile(regex("a")))
    assert builds == ["llguidance"]
    for text in "ab":
        with pytest.raises(GrammarError, match="not installed"):
            await compiler.compile(GrammarSpec("regex", text, backend="xgrammar"))
    with pytest.raises(GrammarError, match="not installed"):
        await compiler.warm_up("xgrammar")
    assert builds == ["llguidance", "xgrammar"]
    await compiler.aclose()


# -- with the real ones


async def test_real_grammars() -> None:
    compiler = GrammarCompiler(vocabulary("smollm2"))
    await compiler.warm_up()
    schemas = [schema_spec({"type": "object", "properties": {f"p{i}": {"type": "integer"}}}) for i in range(20)]
    grammars = await asyncio.gather(*(compiler.compile(spec) for spec in schemas))
    matchers = await asyncio.to_thread(lambda: [accepts(g.matcher(), smollm2(), '{"p3": 1}') for g in grammars])
    assert all(matchers)
    with pytest.raises(GrammarError) as caught:
        await compiler.compile(schema_spec({"not": {}}))
    assert caught.value.kind == "unsupported"
    await compiler.aclose()
    await no_threads()


async def test_a_bomb_holds_up_nobody() -> None:
    """A regex whose compile takes seconds: its request fails in time, and other grammars are compiled meanwhile."""
    compiler = GrammarCompiler(vocabulary("smollm2"), timeout=0.2, num_threads=2)
    await compiler.warm_up()
    bomb = asyncio.create_task(compiler.compile(regex("(((a{100}){100}){100}){100}")))
    assert (await compiler.compile(regex("a+"))).spec == regex("a+")
    with pytest.raises(GrammarError) as caught:
        await bomb
    assert caught.value.kind == "too_complex"
    await compiler.aclose()
    await no_threads()


@NEEDS_XGRAMMAR
async def test_xgrammar_leaves_no_process_behind() -> None:
    compiler = GrammarCompiler(vocabulary("tiny"), timeout=20.0)
    grammar = await compiler.compile(GrammarSpec("regex", "ab", backend="xgrammar"))
    assert await asyncio.to_thread(accepts, grammar.matcher(), tiny(), "ab")
    (process,) = compiler._backends.get("xgrammar")._processes._idle  # type: ignore[attr-defined]
    await compiler.aclose()
    assert await asyncio.to_thread(process._process.wait, 30) == -9
    for thread in threading.enumerate():
        if thread.name == "aengine-grammar-reaper":
            await asyncio.to_thread(thread.join)


@NEEDS_XGRAMMAR
async def test_a_slow_xgrammar_compile_is_killed_at_close() -> None:
    compiler = GrammarCompiler(vocabulary("smollm2"), timeout=600.0)
    slow = GrammarSpec("json_schema", '{"type":"string","maxLength":3000}', backend="xgrammar")
    await compiler.warm_up("xgrammar")
    (process,) = compiler._backends.get("xgrammar")._processes._idle  # type: ignore[attr-defined]
    task = asyncio.create_task(compiler.compile(slow))
    await until(lambda: not compiler._backends.get("xgrammar")._processes._idle)  # type: ignore[attr-defined]
    await compiler.aclose()
    with pytest.raises(EngineClosedError):
        await task
    assert await asyncio.to_thread(process._process.wait, 30) == -9
    await no_threads()
