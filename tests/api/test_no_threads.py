"""No thread can be started any more: a request that needs one gets a typed error, and the engine lives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import llguidance
import pytest
from conftest_api import settled

from aengine import AsyncLLM, EngineError, EngineOverloadedError, SamplingParams, StructuredOutput
from aengine.engine.structured.llguidance.backend import LLGuidanceBackend

Make = Callable[..., AsyncLLM]

JSON = SamplingParams(max_tokens=40, structured_output=StructuredOutput(regex="[a-f]{3,30}"))
PLAIN = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture
def without_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    @contextmanager
    def refusing() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            yield

    return refusing


async def test_a_first_grammar_without_threads(make_engine: Make, without_threads: Callable) -> None:
    """The failure is not for ever: who asks when there are threads again gets a grammar."""
    async with make_engine() as engine:
        await engine.generate("plain", PLAIN)
        with without_threads():
            for _ in range(2):
                with pytest.raises(EngineOverloadedError, match=r"no thread can be started.*ulimit -u") as caught:
                    await engine.generate([1], JSON)
                assert caught.value.retry_after > 0
            results = await asyncio.gather(*(engine.generate([i], JSON) for i in range(5)), return_exceptions=True)
            assert {type(result) for result in results} == {EngineOverloadedError}
            assert len((await engine.generate("plain", PLAIN)).token_ids) == 3
        assert (await engine.generate([1], JSON)).text
        assert engine.state == "running" and engine.statistics().num_restarts == 0
        await settled(engine)


async def test_grammars_go_on_in_the_threads_that_there_are(make_engine: Make, without_threads: Callable) -> None:
    async with make_engine() as engine:
        await engine.generate([1], JSON)
        with without_threads():
            completions = await asyncio.gather(*(engine.generate([i], JSON) for i in range(6)))
        assert all(3 <= len(completion.text) for completion in completions)
        await settled(engine)


async def test_a_prompt_without_a_thread_to_encode_it(make_engine: Make, without_threads: Callable) -> None:
    async with make_engine() as engine:
        with without_threads(), pytest.raises(EngineOverloadedError, match="no thread can be started"):
            await engine.generate("plain", PLAIN)
        await engine.generate("plain", PLAIN)
        await settled(engine)


async def test_a_start_without_threads(make_engine: Make, without_threads: Callable) -> None:
    engine = make_engine()
    with without_threads(), pytest.raises(EngineError, match="no thread can be started"):
        await engine.start()
    async with engine:
        await engine.generate([1], PLAIN)


async def test_a_library_that_can_start_no_threads(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(num_threads: int) -> None:
        raise ValueError("Resource temporarily unavailable (os error 11)")

    monkeypatch.setattr(llguidance, "LLExecutor", refuse)
    monkeypatch.setattr("aengine.engine.structured.llguidance.backend.num_usable_cpus", lambda: 8)
    asked: list[object] = []
    executor = LLGuidanceBackend.executor
    monkeypatch.setattr(LLGuidanceBackend, "executor", lambda self: asked.append(1) or executor(self))
    async with make_engine() as engine:
        completions = await asyncio.gather(*(engine.generate([i], JSON) for i in range(12)))
        assert all(3 <= len(completion.text) for completion in completions) and asked
        await settled(engine)
    assert caplog.text.count("bitmasks are filled in one thread") == 1
