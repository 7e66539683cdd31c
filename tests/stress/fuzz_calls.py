"""Malformed calls of the public interface, against an engine whose worker answers at once."""

from __future__ import annotations

import array
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from fuzz_frames import Report, mutated
from fuzz_values import HostileError, anything, async_function, nested, shuffled_text, some_function

from aengine import (
    AEngineError,
    AsyncLLM,
    ContextLengthError,
    EngineConfig,
    GrammarError,
    InternalError,
    InvalidRequestError,
    SamplingParams,
    StructuredOutput,
)
from aengine.ipc.messages import Kind, MessageError, ModelRunnerOutput, pack, unpack

sys.path.append(str(Path(__file__).parents[1]))
from conftest_api import core_of
from fakes import FakeExecutor

PATIENCE = 60.0  # seconds until a call is said to hang
SAMPLING: dict[str, list[Any]] = {
    "max_tokens": [1, 5, None],
    "min_tokens": [0],  # the fake worker would sample a stop token before
    "temperature": [0, 0.7],
    "top_p": [0.5, 1],
    "top_k": [-1, 0, 5],
    "min_p": [0.0, 0.1],
    "seed": [None, 0, 2**62],
    "stop": ["x", ["a", "b"], ()],
    "stop_token_ids": [[5], ()],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "presence_penalty": [0.5],
    "frequency_penalty": [-0.5],
    "repetition_penalty": [1.1],
    "logit_bias": [{5: 1.0}, {"7": -1}],
    "logprobs": [None, 0, 3, True],
    "n": [1, 3],
    "detokenize": [True, False],
    "skip_special_tokens": [True, False],
}
SHAPES: list[dict[str, Any]] = [
    {"regex": "[ab]{2}"},
    {"choice": ["yes", "no"]},
    {"json_object": True},
    {"grammar": 'start: "a" | "b"'},
    {"grammar": 'root ::= "a"'},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json_schema": '{"enum": [1, 2]}'},
    {"json_schema": True},
]
KEYWORDS = [
    *("type", "properties", "items", "enum", "const", "$ref", "$defs", "anyOf", "allOf", "pattern", "format"),
    *("minimum", "required"),
]
SHAPE_OPTIONS = ("json_schema", "regex", "choice", "grammar", "json_object", "backend", "on_unsupported", "whitespace")
OPTIONS: dict[str, list[Any]] = {
    "deadline": [None, 30, 5.5],
    "first_token_deadline": [None, 30, 5.5],
    "priority": [0, -3, 10],
    "request_id": [None, "mine"],
    "cache_salt": [None, "tenant"],
    "keep": [None, 0, 5.5],
    "session_id": [None, "agent"],
}
MESSAGES: list[Any] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}],
    [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ],
]  # fmt: skip
TOOL: dict[str, Any] = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"a": {}}}}
TOOLS: list[Any] = [None, [], [TOOL], [{"type": "function", "function": TOOL}], [some_function], [async_function, TOOL]]


PLACES = (
    *("nothing", "sampling", "sampling", "shape", "prompt", "options", "output_type"),
    *("tools", "tool_choice"),
)


class FuzzedLLM(AsyncLLM):
    def _make_executor(self, config: EngineConfig) -> FakeExecutor:
        return FakeExecutor(max_model_len=320, token=lambda req_idx, position: 260 + position % 997)


# -- calls


def spoiled(rng: random.Random, value: Any) -> Any:
    """A value in its place: some other, or one with a part replaced."""
    if rng.random() < 0.6 or not isinstance(value, list | dict) or not value:
        return anything(rng)
    copy = json.loads(json.dumps(value, default=lambda odd: None))
    part: Any = copy
    while True:
        key = rng.choice(list(range(len(part))) if isinstance(part, list) else list(part))
        if isinstance(part[key], list | dict) and part[key] and rng.random() < 0.6:
            part = part[key]
            continue
        if isinstance(part, dict) and rng.random() < 0.2:
            del part[key]
        else:
            part[key] = anything(rng)
        return copy


class Choice:
    """What one call is made of. At most one part of it is spoiled, so that the others don't hide it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.place = rng.choice(
            ["nothing", "sampling", "sampling", "shape", "prompt", "options", "output_type", "tools", "tool_choice"]
        )
        self.wrong: set[str] = set()

    def spoil(self, place: str, names: set[str], value: Any) -> Any:
        """``value``, or something else in its place if that is the one to be spoiled."""
        if place != self.place:
            return value
        self.wrong |= names
        return spoiled(self.rng, value)

    def sampling(self) -> dict[str, Any]:
        rng = self.rng
        values = {name: rng.choice(given) for name, given in SAMPLING.items() if rng.random() < 0.12}
        values.setdefault("max_tokens", 5)
        if self.place == "sampling":
            name = rng.choice([*SAMPLING, "structured_output", "bogus"])
            values[name] = self.spoil("sampling", {name}, values.get(name))
        return values

    def shape(self) -> StructuredOutput:
        rng = self.rng
        values = dict(rng.choice(SHAPES))
        if self.place == "shape":
            name = rng.choice([*values, *values, *SHAPE_OPTIONS])
            values[name] = self.spoil("shape", {name, "structured_output"}, values.get(name))
            if rng.random() < 0.3 and "json_schema" in values:
                odd = {shuffled_text(rng): nested(rng, 2), rng.choice(KEYWORDS): anything(rng)}
                values["json_schema"] = {
                    "type": "object",
                    "properties": {"a": odd},
                    rng.choice(KEYWORDS): nested(rng, 3),
                }
        return StructuredOutput(**values)

    def prompt(self) -> Any:
        right = [
            "Hello there",
            [5, 6, 7],
            (1, 2),
            array.array("i", [9, 8]),
            range(4),
            self.rng.choice(MESSAGES),
            "é" * 20,
        ]
        return self.spoil("prompt", {"prompt", "messages"}, self.rng.choice(right))

    def options(self) -> dict[str, Any]:
        rng = self.rng
        values = {name: rng.choice(given) for name, given in OPTIONS.items() if rng.random() < 0.2}
        if self.place == "options":
            name = rng.choice([*OPTIONS, "params", "bogus", "parallel_tool_calls"])
            values[name] = self.spoil("options", {name}, values.get(name))
        return values


async def plain(engine: AsyncLLM, choice: Choice, *, streamed: bool) -> Any:
    rng, values = choice.rng, choice.sampling()
    if choice.place == "shape" or rng.random() < 0.2:
        values["structured_output"] = choice.shape()
    asked: dict[str, Any] = {"params": SamplingParams(**values)} | choice.options()
    if choice.place == "output_type":
        asked["output_type"] = choice.spoil("output_type", {"output_type"}, None)
    if not streamed:
        return await engine.generate(choice.prompt(), **asked)
    stream = engine.stream(choice.prompt(), **asked)
    async for token in stream:
        assert isinstance(token.text, str)
        if rng.random() < 0.02:
            break
    await stream.aclose()
    return None


async def chat(engine: AsyncLLM, choice: Choice) -> Any:
    rng = choice.rng
    messages = choice.spoil("prompt", {"messages"}, rng.choice(MESSAGES))
    asked = choice.options()
    asked.setdefault("params", SamplingParams(**({"max_tokens": 5} if rng.random() < 0.7 else choice.sampling())))
    right: dict[str, list[Any]] = {
        "tools": TOOLS,
        "tool_choice": [None, "auto", "none", "required", "add"],
        "output_type": [None],
    }
    for name, values in right.items():
        if choice.place == name or rng.random() < 0.5:
            asked[name] = choice.spoil(name, {name}, rng.choice(values))
    if rng.random() < 0.2:
        async with engine.stream_chat(messages, **asked) as stream:
            async for _ in stream:
                pass
        return stream.message
    return await engine.chat(messages, **asked)


async def one_call(engine: AsyncLLM, choice: Choice) -> Any:
    rng = choice.rng
    kind = rng.randrange(20)
    if kind < 8:
        return await plain(engine, choice, streamed=False)
    if kind < 12:
        return await plain(engine, choice, streamed=True)
    if kind < 19:
        return await chat(engine, choice)
    choice.wrong |= {"request_id", "seed"}
    if rng.random() < 0.5:
        return SamplingParams.from_dict({"temperature": 0, rng.choice(["seed", "sead"]): anything(rng)})
    return engine.abort(anything(rng))


# -- what may come of it


def judge(error: BaseException, wrong: set[str]) -> str:
    """What is wrong with an error; "" if nothing is."""
    text = str(error)
    if isinstance(error, HostileError) or isinstance(error.__cause__, HostileError):
        return ""  # the caller's own object
    if isinstance(error, InternalError) or not isinstance(error, AEngineError | TypeError):
        return "not an error that a caller may get"
    if isinstance(error, TypeError) and "argument" not in text:
        return "a TypeError from inside"
    if len(text) > 2000:
        return f"a message of {len(text)} characters"
    if isinstance(error, InvalidRequestError):
        names = {error.param} if error.param else set()
        if not (names or any(name in text for name in wrong)):
            return "it names no argument"
    if isinstance(error, GrammarError) and not (error.kind and text):
        return "an empty GrammarError"
    if isinstance(error, ContextLengthError) and "prompt" not in text:
        return "it does not name the prompt"
    return ""


async def check_alive(engine: AsyncLLM, to: Report, after: int) -> None:
    """A plain request is served, and nothing of the others is left."""
    completion = await asyncio.wait_for(
        engine.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True)), PATIENCE
    )
    if len(completion.token_ids) != 3:
        to.found(f"after call {after}: a plain request gave {completion}")
    core = core_of(engine)
    assert core is not None
    for _ in range(500):
        now = engine.statistics()
        is_free = now.num_free_blocks == now.num_blocks and not now.num_running and not now.num_waiting
        if is_free and core.admission.is_empty:
            return
        await asyncio.sleep(0.01)
    to.found(f"after call {after}: something is left: {now}")


def shown(value: Any) -> str:
    try:
        return f"{value!r:.300}"
    except BaseException:
        return f"<{type(value).__name__}>"


async def fuzz_calls(count: int, seed: int, every: int = 100, first: int = 0) -> Report:
    """Each call has random numbers of its own, so that it can be made again alone: ``first`` is its number."""
    to = Report()
    async with FuzzedLLM("smollm2-135m") as engine:
        for number in range(first, first + count):
            choice = Choice(random.Random(seed * 1_000_003 + number))
            wrong = choice.wrong
            begun = time.perf_counter()
            try:
                result = await asyncio.wait_for(one_call(engine, choice), PATIENCE)
                to.outcomes[f"result: {type(result).__name__}"] += 1
            except TimeoutError as error:
                to.found(f"call {number}: it hangs; spoiled: {sorted(wrong)}", error)
            except Exception as error:
                to.outcomes[type(error).__name__] += 1
                fault = judge(error, wrong)
                if fault:
                    to.found(f"call {number}: {fault}: {shown(error)}; spoiled: {sorted(wrong)}", error)
            to.took(time.perf_counter() - begun, f"call {number}, spoiled: {sorted(wrong)}")
            if number % every == every - 1:
                await check_alive(engine, to, number)
        await check_alive(engine, to, number)
    return to


# -- answers


class LyingExecutor(FakeExecutor):
    """Its answers are spoiled now and then, as a broken worker's would be."""

    def __init__(self, rng: random.Random, to: Report) -> None:
        super().__init__(max_model_len=320, token=lambda req_idx, position: 260 + position % 997)
        self._rng, self._report = rng, to

    def answer_later(self, future: asyncio.Future[ModelRunnerOutput], answer: ModelRunnerOutput) -> None:
        if self._rng.random() < 0.05:
            self._report.outcomes["answer: spoiled"] += 1
            payload = mutated(self._rng, pack(answer))
            try:
                answer = unpack(Kind.OUTPUT, payload)
            except MessageError as error:
                asyncio.get_running_loop().call_soon(self.fail, InternalError(f"the worker sent nonsense: {error}"))
                return
            self._report.outcomes["answer: spoiled, and of the right form"] += 1
        super().answer_later(future, answer)


async def fuzz_answers(count: int, seed: int) -> Report:
    """Requests whose worker answers nonsense: each ends in a completion or one typed error, none waits for ever."""
    rng, to = random.Random(seed), Report()

    class LiedToLLM(AsyncLLM):
        def _make_executor(self, config: EngineConfig) -> LyingExecutor:
            return LyingExecutor(rng, to)

    async def one(engine: AsyncLLM) -> None:
        values = {name: rng.choice(given) for name, given in SAMPLING.items() if rng.random() < 0.12}
        try:
            params = SamplingParams(**({"max_tokens": 20} | values))
            await asyncio.wait_for(engine.generate([5] * rng.randrange(1, 200), params), PATIENCE)
            to.outcomes["result"] += 1
        except TimeoutError as error:
            to.found(f"a request hangs; the engine is {engine.state}", error)
        except AEngineError as error:
            to.outcomes[type(error).__name__] += 1
        except Exception as error:
            to.found(f"not an error that a caller may get: {shown(error)}", error)

    engine = LiedToLLM("smollm2-135m", max_num_seqs=8)
    for _ in range(0, count, 10):
        await engine.start()
        core_of(engine).replicas[0].worker._budget.next_delay = lambda now: 0.0  # type: ignore[method-assign]
        await asyncio.gather(*(one(engine) for _ in range(10)))
        to.outcomes[f"engine: {engine.state}"] += 1
    await engine.aclose()
    return to
