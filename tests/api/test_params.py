"""What a caller may ask for, and how a wrong value is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine import AsyncLLM, EngineConfig, InvalidRequestError, SamplingParams, StructuredOutput
from aengine.ipc.messages import SchedulerOutput

HUGE = 10**400
NESTED: list = []
for _ in range(5000):
    NESTED = [NESTED]


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


BAD = [
    ("temperature", HUGE),
    ("logit_bias", {1: HUGE}),
    ("logit_bias", {"9" * 5000: 1}),
    ("max_tokens", 10**5000),
    ("seed", 10**5000),
    ("stop", "\ud800"),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 65),
    ("prompt_logprobs", 1.5),
    ("max_tokens", 1.5),
    ("max_tokens", "16"),
    ("max_tokens", True),
    ("max_tokens", 2**31),
    ("min_tokens", -1),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", 2**63),
    ("seed", 1.0),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", 7),
    ("stop", ["x"] * 65),
    ("stop", "x" * 1025),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", 5),
    ("stop_token_ids", range(10**12)),  # as a tuple more than the memory of any machine
    ("stop_token_ids", range(1025)),
    ("ignore_eos", 1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-39),  # logits would be infinite
    ("temperature", 1e-39),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {-1: 1}),
    ("logit_bias", [1]),
    ("logit_bias", dict.fromkeys(range(1025), 1)),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [1, -1]),
    ("allowed_token_ids", [1, 2**31]),
    ("allowed_token_ids", [1, True]),
    ("allowed_token_ids", "12"),
    ("allowed_token_ids", range(16_385)),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("bad_words", [" "]),
    ("bad_words", [5]),
    ("bad_words", ["x"] * 257),
    ("bad_words", ["x" * 257]),
    ("bad_words", ["\ud800"]),
    ("bad_words", {"x": 1}),
    ("extra_args", ["a"]),
    ("extra_args", {1: 2}),
    ("extra_args", {"a": float("nan")}),
    ("extra_args", {"a": object()}),
    ("extra_args", {"a": "x" * 16_384}),
    ("extra_args", {"a": 10**5000}),
    ("extra_args", dict.fromkeys("abcdefghijklmnopq", 1)),
    ("logprobs", -1),
    ("logprobs", 65),
    ("n", 0),
    ("n", 1025),
    ("structured_output", "json"),
    ("detokenize", "no"),
    ("speculation", "none"),
    ("top_k", NESTED),
    ("stop", [Unprintable()]),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}-{i}" for i, (name, _) in enumerate(BAD)])
def test_wrong_values_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert isinstance(caught.value, ValueError)


def test_relations_between_parameters() -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_spellings_are_normalised() -> None:
    params = SamplingParams(stop="\n", top_k=-1, logprobs=True, logit_bias={"5": 1}, stop_token_ids=[3], temperature=1)
    more = SamplingParams(allowed_token_ids=range(16_384), bad_words=["a", " b"])
    assert more.allowed_token_ids == tuple(range(16_384)) and more.bad_words == ("a", " b")
    assert params.stop == ("\n",)
    assert params.top_k == 0
    assert params.logprobs == 1
    assert params.logit_bias == {5: 1.0}
    assert params.stop_token_ids == (3,)
    assert isinstance(params.temperature, float)
    given = {"a": {"b": (1, 2)}}
    params = SamplingParams(extra_args=given)
    given["a"].clear()
    assert params.extra_args == {"a": {"b": [1, 2]}} and params.replace(n=2).extra_args == params.extra_args
    assert (
        SamplingParams(extra_args=None, stop=None, logit_bias=None, stop_token_ids=None, bad_words=None)
        == SamplingParams()
    )


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(InvalidRequestError, match=r"temprature.*did you mean .temperature"):
        SamplingParams.from_dict({"temprature": 1})
    with pytest.raises(InvalidRequestError, match="max_num_seqs"):
        EngineConfig.create("m", {"max_num_seq": 1})
    assert SamplingParams.from_dict({"top_k": 4}).top_k == 4
    for make, wrong, right in (
        (lambda **values: EngineConfig.create("m", values), "modle", "model"),
        (EngineConfig, "modle", "model"),
        (SamplingParams, "temprature", "temperature"),
        (SamplingParams().replace, "topp", "top_p"),
        (StructuredOutput, "jsonschema", "json_schema"),
    ):
        with pytest.raises(InvalidRequestError, match=f"{wrong}.*did you mean '{right}'") as caught:
            make(**{wrong: 1})
        assert caught.value.param == wrong


@pytest.mark.parametrize("name", ["speculative_config", "context_parallel_size", "tokenizer_mode", "lora_modules"])
def test_other_engines_settings_get_no_misleading_hint(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        EngineConfig.create("m", {name: 1})
    assert f"there is no parameter '{name}'" in str(caught.value) and "did you mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["length_penalty", "logits_processors", "num_speculative_tokens"])
def test_other_engines_parameters_get_no_misleading_hint(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams.from_dict({name: 1})
    assert f"there is no parameter '{name}'" in str(caught.value) and "did you mean" not in str(caught.value)


def test_params_are_frozen_and_replaceable() -> None:
    params = SamplingParams(n=2)
    with pytest.raises(AttributeError):
        params.n = 3  # type: ignore[misc]
    assert params.replace(n=3).n == 3
    with pytest.raises(InvalidRequestError):
        params.replace(n=0)


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.sampled_from([name for name, _ in BAD]), st.one_of(st.none(), st.integers(), st.floats(), st.text())
    )
)
def test_anything_else_is_a_typed_error(values: dict) -> None:
    try:
        SamplingParams(**values)
    except InvalidRequestError as error:
        assert error.param is not None


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"regex": 3},
        {"choice": []},
        {"choice": "ab"},
        {"choice": 5},
        {"choice": ["a", 5]},
        {"choice": NESTED},
        {"json_object": "yes"},
        {"regex": Unprintable()},
    ],
)
def test_structured_output_needs_exactly_one_constraint(values: dict) -> None:
    with pytest.raises(InvalidRequestError):
        StructuredOutput(**values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", "8"),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("device", "cuda:x"),
        ("device", "cuda:"),
        ("device", "cuda:0,"),
        ("device", "cuda:0,1"),
        ("device", "cpu:0"),
        ("device", "cuda:" + "1" * 5000),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0),
        ("enable_prefix_caching", "yes"),
        ("admission", "drop"),
        ("progress", 3),
        ("kv_cache_memory_bytes", -5),
        ("max_in_flight_steps", 0),
        ("load_format", "pickle"),
        ("tokenizer", 5),
        ("tensor_parallel_size", 0),
        *((field.name, np.zeros(2)) for field in fields(EngineConfig)),
    ],
)
def test_config_names_wrong_values(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        EngineConfig(**{"model": "m", name: value})
    assert caught.value.param == name


def test_config_takes_limits_themselves() -> None:
    assert EngineConfig(model="m", gpu_memory_utilization=1.0).gpu_memory_utilization == 1.0


def test_config_survives_the_wire() -> None:
    config = EngineConfig.create("m", {"max_num_seqs": 3, "progress": print})
    assert EngineConfig.from_wire(config.to_wire()) == config.replace(progress=None)


@pytest.mark.parametrize(
    "setting",
    [
        {"hang_timeout": 10**400},
        {"unread_timeout": 10**400},
        {"startup_timeout": float("nan")},
        {"ring_bytes": 2**62},
        {"max_num_seqs": 2**62},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_that_no_machine_holds(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        EngineConfig.create("x", setting)
    assert caught.value.param == next(iter(setting)) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"top_k": 10**12}, "an integer from 1 to 2147483647, or 0 or -1 for all tokens"),
        ({"max_tokens": 2**31}, "an integer from 1 to 2147483647, or None"),
        ({"stop_token_ids": [2**40]}, "a list of token ids, each from 0 to 2147483647"),
        ({"stop": ["a", "\ud800"]}, "valid Unicode: it has a lone surrogate"),
    ],
)
def test_bounds_and_surrogates_are_named(values: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"it must be {text}"):
        SamplingParams(**values)


@pytest.mark.parametrize(("seed", "seeds"), [(5, [5, 6, 7]), (2**63 - 1, [2**63 - 1, -(2**63), 1 - 2**63])])
async def test_completions_of_one_call_have_seeds_of_their_own(
    make_engine: Callable[..., AsyncLLM], seed: int, seeds: list[int]
) -> None:
    """With one seed for all they would be equal."""
    async with make_engine() as engine:
        sent: list[int] = []
        execute = engine.executor.execute

        def noted(out: SchedulerOutput) -> Any:
            sent.extend(new.seed for new in out.new_requests)
            return execute(out)

        engine.executor.execute = noted
        await engine.generate([1, 2], SamplingParams(n=3, seed=seed, max_tokens=2, ignore_eos=True))
        assert sent == seeds
