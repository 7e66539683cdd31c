"""A closed engine that is kept, and streams of it that are kept, hold none of what requests needed."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest_api import core_of, encoder_of

from aengine import AsyncLLM, EngineClosedError, SamplingParams, StructuredOutput
from aengine.engine import core as core_module
from aengine.engine.tokenizer.tokenizer import Tokenizer

Make = Callable[..., AsyncLLM]
SHAPE = SamplingParams(max_tokens=4, structured_output=StructuredOutput(regex="[ab]{2,8}"))


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Whatever is freed, is freed by reference counting."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tables_of(engine: AsyncLLM) -> dict[str, weakref.ref[Any]]:
    core = core_of(engine)
    assert core is not None and core.grammars is not None and core.grammars._compiler is not None
    backends = core.grammars._compiler._backends
    assert backends is not None
    assert core.tokenizer is not None
    tables: dict[str, Any] = {"tokenizer": core.tokenizer, "texts": core.tokenizer._table, "backends": backends}
    tables["llguidance"] = backends.get("llguidance")
    return {name: weakref.ref(table) for name, table in tables.items()}


async def freed(tables: dict[str, weakref.ref[Any]]) -> bool:
    """Once threads that ended with the engine have let go of their last job."""
    for _ in range(1000):
        if all(table() is None for table in tables.values()):
            return True
        await asyncio.sleep(0.005)
    return False


@pytest.fixture
def make_own(make_engine: Make, smollm2_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Engines whose tokenizer nobody else holds."""
    load = classmethod(lambda cls, *args: Tokenizer(encoder_of(smollm2_tokenizer)))
    monkeypatch.setattr(core_module.Tokenizer, "load", load)
    return make_engine


@pytest.mark.parametrize("end", ["aclose", "terminate"])
async def test_the_end_frees_tokenizer_and_grammars(make_own: Make, no_gc: None, end: str) -> None:
    engine = await make_own().start()
    stream = engine.stream("one two", SHAPE)
    texts = [token.text async for token in stream]
    completion = await stream.wait()
    tables = tables_of(engine)
    scheduler = core_of(engine).replicas[0].scheduler
    if end == "aclose":
        await engine.aclose()
    else:
        engine.terminate()
    assert await freed(tables), tables
    assert scheduler.num_blocks == 0 and scheduler.oldest_step is None
    # What users still hold works, and the engine says what it was.
    assert "".join(texts) == completion.text == (await stream.wait()).text
    await stream.aclose()
    assert engine.state == "closed" and "closed" in repr(engine)
    with pytest.raises(EngineClosedError, match="is closed"):
        engine.stream("x")
    await engine.aclose()  # after either
    async with engine:
        assert (await engine.generate("one two", SHAPE)).text == completion.text


async def test_a_running_stream_of_a_closed_engine_keeps_its_text(make_own: Make) -> None:
    engine = await make_own().start()
    stream = engine.stream("one two", SamplingParams(max_tokens=900))
    first = await anext(aiter(stream))
    await engine.aclose()
    with pytest.raises(EngineClosedError) as caught:
        await stream.wait()
    assert caught.value.completion is not None
    assert caught.value.completion.text.startswith(first.text)


async def test_a_tokenizer_that_was_taken_outlives_the_engine(make_own: Make) -> None:
    async with make_own() as engine:
        tokenizer = engine.tokenizer
    assert tokenizer.decode(tokenizer.encode("one two")) == "one two"
