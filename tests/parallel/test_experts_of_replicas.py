"""Every family with experts, these divided among replicas that have tokens of their own, against the whole: logits
within 1e-4 in float32."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from driver import CPU, Driver, no_progress, source_of
from ranks_as_threads import ThreadGroup, run_ranks
from test_divided_models import MODELS, load
from torch import Tensor

from aengine.checkpoint.source import ModelSource
from aengine.errors import ModelLoadError
from aengine.runner.distributed.experts_group import ExpertsGroup
from aengine.runner.distributed.group import ALONE
from aengine.runner.distributed.stage import WHOLE
from aengine.runner.layers.decoder import Decoder
from aengine.runner.models import build_model, read_config
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.sources.loader import load_weights

TinyModel = Callable[..., Path]
Slices = Sequence[tuple[int, int] | None]

STEPS: Sequence[Slices] = (  # of each replica's one request; None: it has no step
    [(0, 17), (17, 18), (18, 19), None, (19, 30)],
    [(0, 1), None, (1, 12), (12, 13), (13, 14)],
)
IDLE: Slices = [None] * len(STEPS[0])


def tokens_of(replica: int, vocab_size: int) -> list[int]:
    rng = random.Random(replica)
    return [rng.randrange(vocab_size) for _ in range(40)]


def alone(source: ModelSource, replica: int, steps: Slices) -> list[Tensor]:
    model, _ = load(source)
    driver, tokens = Driver(model, random.Random(1)), tokens_of(replica, source.hf_config["vocab_size"])
    with torch.inference_mode():
        return [driver.step({"a": tokens[slice(*step)]})["a"] for step in steps if step is not None]


def together(source: ModelSource, steps: Sequence[Slices]) -> list[list[Tensor]]:
    """The logits of each replica."""

    def of_rank(group: ThreadGroup) -> list[Tensor]:
        experts = ExpertsGroup(group, group.rank, group.size)
        config = read_config(source.hf_config).of_rank(1, divides_experts=True, num_replicas=group.size)
        model = build_model(config, choose_formats("float32", CPU, source.hf_config), ALONE, WHOLE, experts)
        assert isinstance(model, Decoder)
        load_weights(model, source, 5, no_progress)
        driver, tokens = Driver(model, random.Random(1)), tokens_of(group.rank, config.vocab_size)
        out = []
        for round_ in zip(*steps, strict=True):
            sizes = [0 if step is None else step[1] - step[0] for step in round_]
            own = round_[group.rank]
            experts.begin(sizes)
            if own is None and not any(sizes):
                continue
            if own is None:
                model.join()
            else:
                out.append(driver.step({"a": tokens[slice(*own)]})["a"])
        return out

    with torch.inference_mode():
        return run_ranks(len(steps), of_rank)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss", "qwen3-next", "qwen3.5-moe"])
def test_families(name: str, tiny_model: TinyModel) -> None:
    arch, overrides = MODELS[name]
    source = source_of(tiny_model(arch, seed=7, **overrides))
    found = together(source, STEPS)
    for replica, steps in enumerate(STEPS):
        for logits, expected in zip(found[replica], alone(source, replica, steps), strict=True):
            worst = float((logits - expected).abs().max())
            assert worst <= 1e-4 * float(expected.abs().max())
    beside_nobody = together(source, [STEPS[0], IDLE])[0]
    for logits, beside_another in zip(beside_nobody, found[0], strict=True):
        assert torch.allclose(logits, beside_another, rtol=1e-5, atol=1e-5)


def test_a_number_that_does_not_divide(tiny_model: TinyModel) -> None:
    arch, overrides = MODELS["qwen3-moe"]
    config = read_config(source_of(tiny_model(arch, seed=7, **overrides)).hf_config)
    with pytest.raises(ModelLoadError, match=r"has 8 experts.*data_parallel_size=3"):
        config.of_rank(1, divides_experts=True, num_replicas=3)
    dense = read_config(source_of(tiny_model("qwen3", seed=7)).hf_config)
    assert dense.of_rank(1, divides_experts=True, num_replicas=3) is dense
