"""Embeddings over the fake executor: batches, bounds, cancellation, deadlines, a typed error for each bad input."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest_api import core_of, settled
from fakes import FakeExecutor

from aengine import (
    AsyncLLM,
    ContextLengthError,
    DeadlineExceededError,
    EngineClosedError,
    EngineConfig,
    EngineOverloadedError,
    InvalidRequestError,
    PoolingRequest,
    RequestEnd,
    RequestError,
    SamplingParams,
)
from aengine.checkpoint.pooling import PoolingConfig
from aengine.ipc.messages import ModelRunnerOutput, NewRequest, ResultColumns, SchedulerOutput, float32, int32

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking", "no_thread_left")


class PoolingExecutor(FakeExecutor):
    """The vector of a text: the number of its tokens, their sum modulo 97, and a one."""

    def __init__(self, **fake: Any) -> None:
        super().__init__(**fake)
        self.ready |= {"tasks": ["generate", "embed"], "embedding_size": 3, "pooling": "last"}
        self.new: dict[int, NewRequest] = {}
        self.largest = 0

    def _begin(self, out: SchedulerOutput) -> list[bool]:
        self.new |= {new.req_idx: new for new in out.new_requests}
        self.largest = max(self.largest, len(out.req_idx))
        return super()._begin(out)

    def say(self, out: SchedulerOutput, due: list[bool], masks: dict[int, list[list[int]]]) -> ModelRunnerOutput:
        pooled = ["pooling" in self.new[row].extras for row in out.req_idx]
        answer = super().say(out, [is_due and not p for is_due, p in zip(due, pooled, strict=True)], masks)
        own = [i for i, p in enumerate(pooled) if p and due[i]]
        values = [vector_of(list(self.new[out.req_idx[i]].token_ids)) for i in own]
        if own:
            answer.results = ResultColumns(int32(own), int32([3] * len(own)), float32(x for v in values for x in v))
        return answer


def vector_of(ids: list[int]) -> list[float]:
    return [float(len(ids)), float(sum(ids) % 97), 1.0]


@pytest.fixture(params=["on this loop", "own thread"])
def make(make_engine: Make, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    def make_executor(self: Any, config: EngineConfig) -> FakeExecutor:
        self.executor = PoolingExecutor(**self.fake)
        return self.executor

    monkeypatch.setattr(make_engine, "_make_executor", make_executor)
    return lambda **config: make_engine(**{"own_thread": request.param == "own thread", **config})


async def test_rows_are_in_the_order_of_the_inputs(make: Make) -> None:
    inputs = ["a", [5, 6, 7], "a longer text than the others", *([i] for i in range(300)), "a"]
    async with make() as engine:
        found = await engine.embed(inputs, normalize=False)
        ids = [engine.tokenizer.encode(given) if isinstance(given, str) else given for given in inputs]
        assert found.dtype == np.float32 and found.tolist() == [vector_of(one) for one in ids]
        whole = await engine.pool(PoolingRequest("embed", inputs))
        assert whole.usage.prompt_tokens == sum(map(len, ids)) and whole.usage.completion_tokens == 0
        assert np.abs(np.linalg.norm(whole.values, axis=1) - 1).max() < 1e-6
        one = await engine.embed([5, 6, 7], dimensions=2)
        assert one.shape == (1, 2) and np.allclose(one[0], np.array([3, 18]) / math.hypot(3, 18))
        assert (await engine.embed([])).shape == (0, 3)
        await settled(engine)


class Ids(Sequence[int]):
    """Token ids that note whether an event loop's thread goes through them."""

    on_loop: ClassVar[set[bool]] = set()

    def __getitem__(self, place: Any) -> Any:
        self.on_loop.add(asyncio._get_running_loop() is not None)
        return (7, 8)[place]

    def __len__(self) -> int:
        self.on_loop.add(asyncio._get_running_loop() is not None)
        return 2


@pytest.mark.parametrize(("count", "on_loop"), [(3, {True}), (2000, {False})])
async def test_the_loop_does_not_go_through_many_inputs(make: Make, count: int, on_loop: set[bool]) -> None:
    Ids.on_loop.clear()
    async with make(max_num_seqs=512) as engine:
        found = await engine.embed([Ids() for _ in range(count)], normalize=False)
    assert found.tolist() == [vector_of([7, 8])] * count and Ids.on_loop == on_loop


async def test_beside_generation(make: Make) -> None:
    async with make() as engine:
        work = [engine.generate("Hello", SamplingParams(max_tokens=20, ignore_eos=True)) for _ in range(5)]
        *completions, found = await asyncio.gather(*work, engine.embed(["x"] * 50))
        assert [len(c.choices[0].token_ids) for c in completions] == [20] * 5 and len(found) == 50
        await settled(engine)


async def test_a_call_holds_its_own_back_when_the_queue_is_full(make: Make) -> None:
    """However many texts it has; a call of which none was taken is refused."""
    async with make(max_num_queued_requests=4, max_num_seqs=2, fake={"delay": 0.005}) as engine:
        assert len(await engine.embed([[i] for i in range(40)])) == 40
        assert engine.statistics().num_rejected == 0
        busy = []
        for enough in (lambda now: now.num_running == 2, lambda now: now.num_waiting == 4):
            while not enough(engine.statistics()):
                if len(busy) < 2 or engine.statistics().num_running == 2:
                    busy.append(
                        asyncio.ensure_future(engine.generate([1], SamplingParams(max_tokens=900, ignore_eos=True)))
                    )
                await asyncio.sleep(0.02)
        with pytest.raises(EngineOverloadedError):
            await engine.embed("x")
        engine.abort_all()
        await asyncio.gather(*busy)


async def test_a_cancelled_call_ends_its_requests(make: Make) -> None:
    async with make(fake={"delay": 0.05}) as engine:
        call = asyncio.ensure_future(engine.embed([[i] for i in range(500)]))
        while not engine.statistics().num_running:
            await asyncio.sleep(0.001)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await settled(engine)
        assert engine.statistics().num_aborted > 0


async def test_a_deadline_is_of_the_whole_call(make: Make) -> None:
    ends: list[RequestEnd] = []
    async with make(fake={"delay": 0.05}, max_num_seqs=1, on_request_end=ends.append) as engine:
        with pytest.raises(
            DeadlineExceededError, match="of 100 inputs were done within the deadline of 0.3 s"
        ) as caught:
            await engine.embed([[i] for i in range(100)], deadline=0.3)
        assert caught.value.deadline == 0.3
        await settled(engine)
        assert {str(end.finish_reason) for end in ends} <= {"stop", "error"}


async def test_an_abort_and_an_end_of_the_engine_are_errors(make: Make) -> None:
    engine = make(fake={"delay": 0.05}, max_num_seqs=1)
    async with engine:
        for end, error in ((engine.abort_all, RequestError), (engine.terminate, EngineClosedError)):
            call = asyncio.ensure_future(engine.embed([[i] for i in range(100)]))
            while not engine.statistics().num_running:
                await asyncio.sleep(0.001)
            end()
            with pytest.raises(error):
                await call


@pytest.mark.parametrize(
    ("call", "param", "message"),
    [
        (lambda e: e.embed(""), "inputs", r"inputs\[0\] is empty"),
        (lambda e: e.embed(["a", ""]), "inputs", r"inputs\[1\] is empty"),
        (lambda e: e.embed([[]]), "inputs", "and not empty"),
        (lambda e: e.embed(3), "inputs", "must be a text, token ids, or a list of either, not int"),
        (lambda e: e.embed([1.5]), "inputs", "token ids from 0 to 49151"),
        (lambda e: e.embed([[1, 49152]]), "inputs", "token ids from 0 to 49151"),
        (lambda e: e.embed([-1]), "inputs", "token ids from 0 to 49151"),
        (lambda e: e.embed("\ud800"), "inputs", "not valid Unicode"),
        (lambda e: e.embed("a", dimensions=4), "dimensions", "this model's embeddings have 3"),
        (lambda e: e.embed("a", dimensions=0), "dimensions", "an integer >= 1"),
        (lambda e: e.embed("a", normalize=1), "normalize", "True or False"),
        (lambda e: e.embed("a", prompt_name="query"), "prompt_name", "the checkpoint has no such prompt"),
        (lambda e: e.embed("a", prompt="q: ", prompt_name="query"), "prompt_name", "not both"),
        (lambda e: e.embed([1], prompt="q: "), "prompt", "token ids can't begin with a prompt"),
        (lambda e: e.embed("a", deadline=-1), "deadline", "above 0"),
        (lambda e: e.embed("a", priority="x"), "priority", "an integer"),
        (lambda e: e.embed("a", temperature=1), "temperature", "there is no parameter"),
        (lambda e: e.classify("a"), None, "no head that classifies"),
        (lambda e: e.score(["a", "b"], ["c"]), "queries", "2 queries and 1 documents"),
        (lambda e: e.score("a", [""]), "inputs", "pair 0 has an empty text"),
        (lambda e: e.rerank("a", ["b"], top_n=0), "top_n", "an integer >= 1"),
        (lambda e: e.rerank(["a"], ["b"]), "query", "must be a string"),
    ],
)
async def test_bad_input(make_engine: Make, make: Make, call: Any, param: str | None, message: str) -> None:
    async with make() as engine:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            await call(engine)
        assert caught.value.param == param


async def test_texts_that_are_too_long(make: Make) -> None:
    async with make(fake={"max_model_len": 32}) as engine:
        assert (await engine.embed([[1] * 32], normalize=False))[0, 0] == 32  # no room for a token is needed
        for given in ([1] * 33, "word " * 100):
            with pytest.raises(ContextLengthError, match="takes 32 at once: shorten it, or have its end cut off"):
                await engine.embed(["short", given])
            assert (await engine.embed([given], truncate=True, normalize=False))[0, 0] == 32
        await settled(engine)


async def test_prompts_of_the_checkpoint(make: Make) -> None:
    async with make() as engine:
        core_of(engine).pooling = PoolingConfig(prompts={"query": "Query: ", "none": ""}, default_prompt="Text: ")
        tokens = engine.tokenizer.encode

        async def length(**how: Any) -> float:
            return float((await engine.embed("hello", normalize=False, **how))[0, 0])

        assert await length() == len(tokens("Text: hello"))
        assert await length(prompt_name="query") == len(tokens("Query: hello"))
        assert await length(prompt_name="none") == await length(prompt="") == len(tokens("hello"))


async def test_a_model_without_pooling_says_what_helps(make_engine: Make) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequestError, match="pooling='last'"):
            await engine.embed("a")


async def test_an_encoder_generates_nothing(make: Make) -> None:
    engine = make()
    async with engine:
        core = core_of(engine)
        core.limits = core.admission._limits = replace(core.limits, tasks=frozenset({"embed"}), is_encoder=True)
        for begin in (engine.generate, lambda prompt: engine.chat([{"role": "user", "content": prompt}])):
            with pytest.raises(InvalidRequestError, match=r"an encoder, which generates no text: call embed\(\)"):
                await begin("Hello")


def test_blocking(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_engine, "_make_executor", lambda self, config: PoolingExecutor(**self.fake))
    with make_engine(own_thread=True).sync as engine:
        assert engine.embed(["a", [1, 2]], normalize=False)[:, 0].tolist() == [1, 2]
        assert [one.index for one in engine.rerank("a b", ["a b", "c d e f g h"])] == [0, 1]
        assert engine.score("a", ["a"])[0] == pytest.approx(1)
        with pytest.raises(InvalidRequestError, match="no head"):
            engine.classify("a")
