"""What a checkpoint's generation_config.json says of sampling, and the requests that say otherwise."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from aengine import AsyncLLM, InvalidRequestError, SamplingParams
from aengine.checkpoint.sampling_defaults import SamplingDefaults
from aengine.engine.handles import start
from aengine.ipc.messages import NewRequest

Make = Callable[..., AsyncLLM]
QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True, "eos_token_id": 2}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Let the checkpoint have this generation_config.json."""
    resolve = start.resolve_model

    def say(generation_config: dict[str, Any]) -> None:
        monkeypatch.setattr(
            start,
            "resolve_model",
            lambda *args: dataclasses.replace(resolve(*args), generation_config=generation_config),
        )

    return say


async def sampled_with(engine: AsyncLLM, params: SamplingParams | None) -> dict[str, float]:
    """The sampling values that reach the worker."""
    seen: list[NewRequest] = []
    executor = engine.executor
    execute = executor.execute

    def noted(out: Any) -> Any:
        seen.extend(out.new_requests)
        return execute(out)

    executor.execute = noted
    stream = engine.stream([1, 2], params)
    async with stream:
        await anext(stream)
    executor.execute = execute
    return {name: getattr(seen[0], name) for name in NEUTRAL}


async def test_requests_that_do_not_say_are_sampled_as_the_checkpoint_says(make_engine: Make, says: Any) -> None:
    says(QWEN)
    expected = NEUTRAL | {name: value for name, value in QWEN.items() if name in NEUTRAL}
    async with make_engine() as engine:
        for params in (None, SamplingParams(), SamplingParams(max_tokens=5), SamplingParams().replace(n=1)):
            assert await sampled_with(engine, params) == expected
        copied = SamplingParams(max_tokens=9)
        for params in (copy.copy(copied), copy.deepcopy(copied), pickle.loads(pickle.dumps(copied)).replace(seed=1)):
            assert await sampled_with(engine, params) == expected
        assert engine.describe()["sampling_defaults"] == {k: v for k, v in QWEN.items() if k in NEUTRAL}


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1},
        {"top_p": 1.0, "top_k": 0},
        {"top_k": -1},
        {"repetition_penalty": 1.0, "min_p": 0.0},
        NEUTRAL,
    ],
)
@pytest.mark.parametrize("how", [SamplingParams, lambda **values: SamplingParams.from_dict(values)])
async def test_a_value_that_is_given_stays(make_engine: Make, says: Any, given: dict[str, float], how: Any) -> None:
    says(QWEN | {"min_p": 0.1})
    async with make_engine() as engine:
        got = await sampled_with(engine, how(**given))
        assert {name: got[name] for name in given} == {k: max(v, 0) for k, v in given.items()}
        got = await sampled_with(engine, SamplingParams(seed=1).replace(**given))
        assert {name: got[name] for name in given} == {k: max(v, 0) for k, v in given.items()}


async def test_the_engine_may_be_told_to_ignore_it(make_engine: Make, says: Any) -> None:
    says(QWEN)
    async with make_engine(generation_config="none") as engine:
        assert await sampled_with(engine, None) == NEUTRAL
        assert engine.describe()["sampling_defaults"] == {}
    with pytest.raises(InvalidRequestError) as caught:
        make_engine(generation_config="vllm")
    assert caught.value.param == "generation_config"


async def test_a_checkpoint_that_says_nothing(make_engine: Make) -> None:
    async with make_engine() as engine:
        assert await sampled_with(engine, None) == NEUTRAL


def test_a_value_that_can_not_be_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "aengine"):
        defaults = SamplingDefaults({"temperature": "hot", "top_p": 3, "top_k": None, "min_p": 0.1})
    assert defaults.values == {"min_p": 0.1}
    assert len(caplog.records) == 2 and "temperature='hot'" in caplog.text


async def test_without_max_tokens_the_context_is_the_end(make_engine: Make) -> None:
    async with make_engine(fake={"max_model_len": 64}) as engine:
        completion = await engine.generate([7] * 10, SamplingParams(ignore_eos=True))
        assert completion.finish_reason == "length" and completion.usage.total_tokens == 64
        completion = await engine.generate([7] * 10, SamplingParams(ignore_eos=True, max_tokens=1000))
        assert completion.finish_reason == "length" and completion.usage.total_tokens == 64
