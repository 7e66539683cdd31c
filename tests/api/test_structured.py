"""Structured output over a fake worker, which takes any token that the bitmask allows."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import pytest
from conftest_api import settled
from fakes import FakeExecutor
from pydantic import BaseModel, Field, field_validator

from aengine import (
    AsyncLLM,
    GrammarError,
    InternalError,
    InvalidRequestError,
    SamplingParams,
    StructuredOutput,
    WorkerDiedError,
)
from aengine.engine import recovery
from aengine.engine.speculation.drafts import Drafts
from aengine.engine.structured.backend import MatcherError, MatcherLimitError
from aengine.engine.structured.bitmasks import BitmaskFiller, RequestGrammar
from aengine.engine.structured.llguidance.matcher import LLGuidanceMatcher

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking")


class Place(BaseModel):
    name: str = Field(max_length=4)
    kind: Literal["town", "river"]
    sizes: list[Literal[1, 2]] = Field(max_length=3)


def constrained(**wanted: object) -> SamplingParams:
    return SamplingParams(max_tokens=400, structured_output=StructuredOutput(**wanted))


def any_token(engine: AsyncLLM, seed: int) -> None:
    """The worker picks among what is allowed, ends included."""
    engine.executor.choose = random.Random(seed).choice


async def test_generate_gives_an_instance(make_engine: Make, rng: random.Random) -> None:
    async with make_engine() as engine:
        any_token(engine, rng.randrange(10**6))
        completions = await asyncio.gather(*(engine.generate([5, i], output_type=Place) for i in range(6)))
        await settled(engine)
    for completion in completions:
        assert completion.finish_reason == "stop" and isinstance(completion.parsed, Place), completion
        assert json.loads(completion.text) == completion.parsed.model_dump()


async def test_partial_snapshots_grow(make_engine: Make, rng: random.Random) -> None:
    async with make_engine() as engine:
        any_token(engine, rng.randrange(10**6))
        stream = engine.stream([5, 6], output_type=Place)
        assert stream.partial is None
        snapshots = [stream.partial async for _ in stream]
        assert stream.partial == stream.completion.parsed.model_dump()
    keys = [list(s or {}) for s in snapshots]
    assert all(b[: len(a)] == a for a, b in zip(keys, keys[1:]))


async def test_plain_and_constrained_side_by_side(make_engine: Make) -> None:
    """Plain requests get what they get alone, in whatever step others are masked."""
    plain = SamplingParams(max_tokens=30, ignore_eos=True)
    async with make_engine() as engine:
        alone = await engine.generate([1, 2, 3], plain)
        any_token(engine, 1)
        both = await asyncio.gather(
            *(engine.generate([1, 2, 3], plain) for _ in range(5)),
            *(engine.generate([i], constrained(regex="[a-f]{3,30}")) for i in range(5)),
        )
        await settled(engine)
    assert all(c.token_ids == alone.token_ids for c in both[:5])
    assert all(3 <= len(c.text) <= 30 and set(c.text) <= set("abcdef") for c in both[5:])


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows are filled in the library's threads, as on a machine of eight cores; how many at once is noted."""
    counts: list[int] = []
    advance = LLGuidanceMatcher.advance_group

    def noted(items: Any, *args: Any) -> Any:
        counts.append(len(items))
        return advance(items, *args)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(LLGuidanceMatcher, "advance_group", staticmethod(noted))
    return counts


async def test_many_at_once_as_one_by_one(make_engine: Make, many_cores: list[int]) -> None:
    """Tokens come in order, each once, also those that are delivered while rows are filled; readers that stop, and
    requests that end, in the midst of it."""
    texts = {}
    params = constrained(regex="[a-z]{40}[0-9]{40}").replace(ignore_eos=True)

    async def read(engine: AsyncLLM, i: int, stop_after: int) -> None:
        ids = []
        async with engine.stream([i, 7], params) as stream:
            async for token in stream:
                assert token.position == len(ids)
                ids.append(token.token_id)
                if len(ids) == stop_after:
                    return
        assert stream.completion.token_ids == tuple(ids)
        texts[i] = stream.completion.text

    async with make_engine() as engine:
        plain = SamplingParams(max_tokens=60, ignore_eos=True)
        alone = await engine.generate([1, 2, 3], plain)
        beside = asyncio.gather(*(engine.generate([1, 2, 3], plain) for _ in range(4)))
        await asyncio.gather(*(read(engine, i, 3 + i if i % 5 == 0 else 0) for i in range(24)))
        assert all(completion.token_ids == alone.token_ids for completion in await beside)
        await settled(engine)
    assert max(many_cores) == 24
    assert len(texts) == 19 and all(re.fullmatch("[a-z]{40}[0-9]{40}", text) for text in texts.values())


async def test_a_matcher_that_fails_among_many_ends_its_request_alone(
    make_engine: Make, many_cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = LLGuidanceMatcher.advance_group

    def failing(items: Any, *args: Any) -> Any:
        done = advance(items, *args)
        bad = [row for row, matcher, _ in items if "y-z" in matcher._root.grammar and len(matcher._token_ids) > 5]
        return done | {row: MatcherError("a bug") for row in bad}

    monkeypatch.setattr(LLGuidanceMatcher, "advance_group", staticmethod(failing))
    async with make_engine() as engine:
        good = [engine.generate([i], constrained(regex="[a-f]{30}")) for i in range(12)]
        results = await asyncio.gather(
            *good, engine.generate([99], constrained(regex="[y-z]{30}")), return_exceptions=True
        )
        await settled(engine)
    assert all(re.fullmatch("[a-f]{30}", completion.text) for completion in results[:12])
    assert isinstance(results[12], InternalError) and "a bug" in str(results[12])


@pytest.mark.parametrize("count", [1, 4])
async def test_a_row_that_allows_nothing_ends_its_request_alone(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A bug of the host's: a bitmask that was not filled comes to the worker."""
    fill_rows = BitmaskFiller._fill_rows

    def forgetful(self: Any, jobs: Any, rows: Any, *args: Any) -> Any:
        filled = fill_rows(self, jobs, rows, *args)
        for row, job in enumerate(jobs):
            if "y-z" in job.grammar.matcher._root.grammar and len(job.grammar.matcher._token_ids) > 5:
                rows[row * self.row_bytes : (row + 1) * self.row_bytes] = bytes(self.row_bytes)
        return filled

    monkeypatch.setattr(BitmaskFiller, "_fill_rows", forgetful)
    async with make_engine() as engine:
        plain = engine.generate([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
        good = [engine.generate([i], constrained(regex="[a-f]{30}")) for i in range(count)]
        bad = engine.generate([99], constrained(regex="[y-z]{30}"))
        *others, failed = await asyncio.gather(plain, *good, bad, return_exceptions=True)
        await settled(engine)
    assert len(others[0].token_ids) == 30
    assert all(re.fullmatch("[a-f]{30}", completion.text) for completion in others[1:])
    assert isinstance(failed, InvalidRequestError) and "no token is left" in str(failed)


@pytest.mark.parametrize("count", [1, 10])
async def test_a_worker_that_dies_after_its_answer_leaves_the_matchers_right(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The answer and the death of its sender are seen in one turn of the loop: its tokens are known, and no bitmask can
    be asked for."""
    monkeypatch.setattr(recovery, "_LONGEST_DELAY", 1e-3)
    answer_later, num_answers = FakeExecutor.answer_later, 0

    def answer_and_die(self: FakeExecutor, future: Any, answer: Any) -> None:
        nonlocal num_answers
        num_answers += 1
        answer_later(self, future, answer)
        if num_answers in (4, 11):
            asyncio.get_running_loop().call_soon(lambda: self.fail(WorkerDiedError("killed")))

    monkeypatch.setattr(FakeExecutor, "answer_later", answer_and_die)
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    monkeypatch.setattr(Drafts, "propose", lambda *args, **how: 0)  # a token a step
    params = constrained(regex=alphabet)
    async with make_engine() as engine:
        completions = await asyncio.gather(*(engine.generate([1, i], params) for i in range(count)))
        assert engine.statistics().num_restarts == 2
    assert [completion.text for completion in completions] == [alphabet] * count


async def test_the_loop_does_not_hand_the_gil_to_whoever_computes(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema that is short enough to be read on it."""
    sleep, this = time.sleep, threading.get_ident()

    def noted(seconds: float) -> None:
        assert threading.get_ident() != this
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", noted)
    schema = {"enum": [None], "$defs": {f"a{i}": {} for i in range(190)}}
    async with make_engine() as engine:
        completion = await engine.generate([1], constrained(json_schema=json.dumps(schema, separators=(",", ":"))))
    assert completion.text == "null"


async def test_a_type_is_described_off_the_loop_once(make_engine: Make) -> None:
    """Hundreds of models would take pydantic 0.4 s."""
    threads: list[str] = []

    class Slow(BaseModel):
        x: Literal[1, 2]

        @classmethod
        def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
            threads.append(threading.current_thread().name)
            return handler(core_schema)

    class Rude(BaseModel):
        @classmethod
        def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> Any:
            raise SystemExit(1)

    async with make_engine() as engine:
        any_token(engine, 4)
        first = await engine.generate([5], output_type=Slow)
        stream = engine.stream([6], output_type=Slow)
        assert [token async for token in stream]
        with pytest.raises(InvalidRequestError, match="Callable"):
            await engine.generate([5], output_type=Callable[[int], int])
        with pytest.raises(InvalidRequestError, match="Callable"):
            await anext(engine.stream([5], output_type=list[Callable[[int], int]]))
        with pytest.raises(InvalidRequestError, match="a string"):
            engine.stream([5], output_type="Slow")
        with pytest.raises(InvalidRequestError, match="SystemExit"):
            await engine.generate([5], output_type=Rude)
        await settled(engine)
    assert isinstance(first.parsed, Slow) and isinstance(stream.completion.parsed, Slow)
    assert threads == ["aengine-grammar-plan"]


async def test_completions_of_one_prompt_each_have_their_place(make_engine: Make) -> None:
    async with make_engine() as engine:
        any_token(engine, 2)
        params = constrained(regex="[a-z]{1,9}").replace(n=4, ignore_eos=True)
        completion = await engine.generate(list(range(60)), params)
    assert len({choice.text for choice in completion.choices}) > 1
    assert all(choice.finish_reason == "stop" and choice.text.isalpha() for choice in completion.choices)


async def test_cut_off_by_max_tokens(make_engine: Make) -> None:
    async with make_engine() as engine:
        any_token(engine, 3)
        completion = await engine.generate([1], SamplingParams(max_tokens=4), output_type=Place)
    assert completion.finish_reason == "length" and completion.parsed is None and completion.text.startswith('{"')


async def test_a_validator_has_the_last_word(make_engine: Make) -> None:
    class Never(BaseModel):
        x: Literal[1]

        @field_validator("x")
        @classmethod
        def refuse(cls, value: int) -> int:
            raise ValueError("not this one")

    async with make_engine() as engine:
        completion = await engine.generate([1], output_type=Never)
    assert completion.parsed is None and "not this one" in str(completion.parse_error)


@pytest.mark.parametrize(
    ("wanted", "kind", "path"),
    [
        ({"json_schema": {"type": "objekt"}}, "invalid", "$.type"),
        ({"json_schema": {"properties": {"a": {"not": {}}}}}, "unsupported", "$.properties.a.not"),
        ({"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "unsatisfiable", "$"),
        ({"regex": "((("}, "invalid", ""),
        ({"grammar": "start: nothing"}, "invalid", ""),
        ({"choice": ["a"] * 3}, "invalid", ""),
    ],
)
async def test_a_bad_grammar_fails_its_request_only(make_engine: Make, wanted: dict, kind: str, path: str) -> None:
    async with make_engine() as engine:
        good = engine.stream([1, 2], SamplingParams(max_tokens=20, ignore_eos=True))
        with pytest.raises(GrammarError) as caught:
            await engine.generate([1], constrained(**wanted))
        assert caught.value.kind == kind and caught.value.path.startswith(path)
        assert len([token async for token in good]) == 20
        await settled(engine)


async def test_relaxed_keywords_are_told(make_engine: Make) -> None:
    schema = {"enum": ["abc"], "not": {"const": "x"}}
    async with make_engine() as engine:
        completion = await engine.generate([1], constrained(json_schema=schema, on_unsupported="relax"))
    assert completion.text == '"abc"' and any("not" in warning for warning in completion.warnings)


async def test_wrong_output_types(make_engine: Make) -> None:
    async with make_engine() as engine:
        for wrong in (print, {"type": "string"}, "Place", 3):
            with pytest.raises(InvalidRequestError) as caught:
                await engine.generate([1], output_type=wrong)
            assert caught.value.param == "output_type"
        with pytest.raises(InvalidRequestError, match="not both"):
            engine.stream([1], constrained(regex="a"), output_type=Place)


async def test_without_a_tokenizer_there_are_no_grammars(make_engine: Make) -> None:
    async with make_engine(skip_tokenizer=True) as engine:
        with pytest.raises(GrammarError, match="skip_tokenizer"):
            await engine.generate([1], constrained(regex="a").replace(detokenize=False))


@pytest.mark.parametrize(
    ("failure", "seen"), [(MatcherError("it broke"), InternalError), (MatcherLimitError("it broke"), GrammarError)]
)
async def test_a_matcher_that_fails_ends_its_request(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, failure: Exception, seen: type[Exception]
) -> None:
    made: list[RequestGrammar] = []
    init = RequestGrammar.__init__
    monkeypatch.setattr(RequestGrammar, "__init__", lambda self, c: (init(self, c), made.append(self))[0])

    class Broken:
        def accept(self, token_ids: list[int]) -> int:
            raise failure

    async with make_engine() as engine:
        any_token(engine, 4)
        first = engine.stream([1], constrained(regex="[a-z]{50}"))
        await anext(first)
        other = asyncio.create_task(engine.generate([2], constrained(regex="[0-9]{40}")))
        made[0]._matcher = Broken()
        with pytest.raises(seen, match="it broke") as caught:
            async for _ in first:
                pass
        assert getattr(caught.value, "kind", "too_complex") == "too_complex"
        assert (await other).text.isdigit()
        await settled(engine)


async def test_leaving_in_every_phase(make_engine: Make) -> None:
    """Cancelled after any number of turns of the loop: compiling, encoding, queued, between a step and its bitmask."""
    async with make_engine() as engine:
        any_token(engine, 5)
        steady = asyncio.create_task(engine.generate([9], constrained(regex="[a-z]{300}")))
        for turns in range(0, 60, 3):
            task = asyncio.create_task(engine.generate("Hello", constrained(regex=f"[a-z]{{{turns + 20}}}")))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len((await steady).text) == 300
        await settled(engine)


async def test_closing_while_a_grammar_is_compiled(make_engine: Make) -> None:
    engine = await make_engine().start()
    tasks = [asyncio.create_task(engine.generate([1], constrained(regex=f"a{i}"))) for i in range(3)]
    await asyncio.sleep(0)
    await engine.aclose()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, Exception) for result in results), results


async def test_many_in_flight_steps(make_engine: Make) -> None:
    async with make_engine(max_in_flight_steps=4) as engine:
        any_token(engine, 6)
        completions = await asyncio.gather(*(engine.generate([i], constrained(regex="[a-z]{30}")) for i in range(3)))
    assert all(len(c.text) == 30 for c in completions)


async def test_forced_tokens_take_no_steps_of_their_own(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[int | None, bool]] = set()
    propose = Drafts.propose

    def noted(self: Drafts, request: Any, token_ids: Any, *, are_certain: bool = False) -> int:
        asked.add((request.params.logprobs, are_certain))
        return propose(self, request, token_ids, are_certain=are_certain)

    monkeypatch.setattr(Drafts, "propose", noted)
    wanted = constrained(choice=["an answer that is long enough to be of many tokens"])
    async with make_engine() as engine:
        completion = await engine.generate([1, 2], wanted)
        num_steps = engine.statistics().num_steps
        stopped = await engine.generate([1, 2], wanted.replace(stop=["long"]))
        short = await engine.generate([1, 2], wanted.replace(max_tokens=5))
        with_logprobs = await engine.generate([1, 2], wanted.replace(logprobs=0))
        await settled(engine)
    assert completion.text == "an answer that is long enough to be of many tokens"
    assert num_steps < len(completion.token_ids) / 2
    assert stopped.text == "an answer that is " and stopped.finish_reason == "stop"
    assert short.token_ids == completion.token_ids[:5] and short.finish_reason == "length"
    assert with_logprobs.token_ids == completion.token_ids and len(with_logprobs.logprobs) == len(completion.token_ids)
    # Without log-probabilities the worker need not compute what is certain.
    assert asked == {(None, True), (0, False)}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grammars of "z" take so long that they are filled ahead; which threads filled is noted."""
    threads: list[str] = []
    fill = BitmaskFiller._fill_rows

    def noted(self: Any, jobs: Any, *args: Any) -> Any:
        if any("z" in job.grammar._compiled.spec.text for job in jobs):
            threads.append(threading.current_thread().name)
        return fill(self, jobs, *args)

    monkeypatch.setattr(BitmaskFiller, "_fill_rows", noted)
    monkeypatch.setattr(RequestGrammar, "is_slow", property(lambda self: "z" in self._compiled.spec.text))
    return threads


async def test_a_slow_grammar_holds_up_nobody(make_engine: Make, slow: list[str]) -> None:
    """It is filled in a thread of its own, and its request is in no step meanwhile; the texts are the same."""
    plain = SamplingParams(max_tokens=200, ignore_eos=True)
    async with make_engine() as engine:
        alone = await engine.generate([1, 2, 3], plain)
        any_token(engine, 1)
        tasks = [
            *(engine.generate([1, 2, 3], plain) for _ in range(3)),
            *(engine.generate([i], constrained(regex="[a-f]{3,30}")) for i in range(3)),
            *(engine.generate([i], constrained(regex="z[a-f]{30}z")) for i in range(3)),
            engine.generate([1], constrained(choice=["z" + "long" * 9]).replace(n=2)),
        ]
        done = await asyncio.gather(*tasks)
        await settled(engine)
    assert all(c.token_ids == alone.token_ids for c in done[:3])
    assert all(re.fullmatch("[a-f]{3,30}", c.text) for c in done[3:6])
    assert all(re.fullmatch("z[a-f]{30}z", c.text) for c in done[6:9])
    assert [choice.text for choice in done[9].choices] == ["z" + "long" * 9] * 2
    assert slow and set(slow) <= {"aengine-grammar-slow", "aengine-grammar"}
    assert slow.count("aengine-grammar-slow") > len(slow) / 2


async def test_leaving_while_rows_are_filled_ahead(make_engine: Make, slow: list[str]) -> None:
    async with make_engine() as engine:
        any_token(engine, 5)
        steady = asyncio.create_task(engine.generate([9], SamplingParams(max_tokens=900, ignore_eos=True)))
        for turns in range(0, 90, 3):
            task = asyncio.create_task(engine.generate([7], constrained(regex="z[a-z]{390}")))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await engine.generate([7], constrained(regex="z[a-z]{5}"))).text[0] == "z"
        assert len((await steady).token_ids) == 900
        await settled(engine)


async def test_a_slow_matcher_that_fails_ends_its_request(
    make_engine: Make, slow: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = LLGuidanceMatcher.accept

    def broken(self: Any, token_ids: Any) -> int:
        if len(self._token_ids) > 3:
            raise MatcherError("it broke")
        return accept(self, token_ids)

    async with make_engine() as engine:
        any_token(engine, 4)
        steady = asyncio.create_task(engine.generate([9], SamplingParams(max_tokens=200, ignore_eos=True)))
        with monkeypatch.context() as patch:
            patch.setattr(LLGuidanceMatcher, "accept", broken)
            with pytest.raises(InternalError, match="it broke"):
                await engine.generate([1], constrained(regex="z[a-z]{50}"))
        assert len((await steady).token_ids) == 200
        await settled(engine)


async def test_workers_die_while_rows_are_filled_ahead(
    make_engine: Make, slow: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_LONGEST_DELAY", 1e-3)
    params = constrained(regex="z[a-f]{40}z").replace(n=2)
    async with make_engine() as engine:
        expected = await engine.generate([1], params)
        steady = asyncio.create_task(engine.generate([9], SamplingParams(max_tokens=300, ignore_eos=True)))
        stream = engine.stream([1], params)
        num_tokens = 0
        async for _ in stream:
            num_tokens += 1
            if num_tokens % 20 == 0 and engine.statistics().num_restarts < 4:
                engine.executor.fail(WorkerDiedError("killed"))
        assert [c.token_ids for c in stream.completion.choices] == [c.token_ids for c in expected.choices]
        assert engine.statistics().num_restarts >= 3
        assert len((await steady).token_ids) == 300
        await settled(engine)
