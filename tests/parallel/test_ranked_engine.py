"""Whole engines of several ranks against transformers, and against one rank: every situation of a request."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pairs import some
from ranked_engine import RankedEngine
from scenarios import Engine, check_scenarios
from test_divided_models import MODELS
from tiny import load_reference

TinyModel = Callable[..., Path]


@pytest.mark.parametrize("name, size", [("llama-biases", 2), ("qwen3-two-kv-heads", 4)])
def test_every_scenario(name: str, size: int, tiny_model: TinyModel) -> None:
    arch, overrides = MODELS[name]
    folder = tiny_model(arch, seed=7, **overrides)
    check_scenarios(folder, load_reference(folder, arch), engine_class=RankedEngine, tensor_parallel_size=size)


def test_logits_of_plain_rows_stay_where_they_are(tiny_model: TinyModel) -> None:
    """Of each row a rank tells the others its best token, and no more."""
    arch, overrides = MODELS["qwen3-two-kv-heads"]
    engine = RankedEngine(tiny_model(arch, seed=7, **overrides), tensor_parallel_size=2)
    engine.begin()
    prompts = [[30, 40], [50, 60, 70]]
    greedy = engine.generate(prompts)
    calls = [shape for name, shape in engine.model.groups[0].calls if name == "gather"]
    assert calls and all(math.prod(shape) <= 4 * len(prompts) for shape in calls)
    requests = engine.add(prompts)
    for request in requests:
        request.params = request.params.replace(logprobs=1)
    engine.run()
    assert [request.output_token_ids for request in requests] == greedy
    shapes = {shape for name, shape in engine.model.groups[0].calls if name == "gather"}
    assert max(map(math.prod, shapes)) == len(prompts) * 768  # the vocabulary of 1,100, cut at a multiple of 256


def test_memory_of_a_cpu_is_shared(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' parts of the KV cache take between them as much as the cache of one."""
    monkeypatch.setattr("aengine.runner.startup.profile.free_memory", lambda: 8 << 20)
    arch, overrides = MODELS["llama-biases"]
    folder = tiny_model(arch, seed=7, **overrides)
    settings: dict[str, Any] = {"kv_cache_memory_bytes": None, "max_model_len": 64}
    alone = Engine(folder, **settings).offer["num_blocks"]
    for size in (2, 4):
        found = RankedEngine(folder, tensor_parallel_size=size, **settings).offer["num_blocks"]
        assert 0.99 < found / alone < 1.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    some(
        [(name, 2) for name in MODELS if name not in ("llama-biases", "qwen3-two-kv-heads")]
        + [(name, 4) for name in ("qwen2", "gemma2", "gpt-oss", "qwen3-moe", "qwen3-next")],
        ("qwen3-next", 2),
        ("gpt-oss", 4),
    ),
)
def test_every_scenario_of_every_family(name: str, size: int, tiny_model: TinyModel) -> None:
    arch, overrides = MODELS[name]
    folder = tiny_model(arch, seed=7, **overrides)
    settings: dict[str, Any] = {"tensor_parallel_size": size, "enable_expert_parallel": size == 2}
    check_scenarios(folder, load_reference(folder, arch), engine_class=RankedEngine, **settings)
