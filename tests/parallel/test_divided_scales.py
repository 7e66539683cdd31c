"""Scales of keys and values in FP8 that are measured by a divided model: those that the whole finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from driver import CPU, no_progress, source_of
from ranks_as_threads import ThreadGroup, run_ranks
from test_divided_models import MODELS, load
from test_pipeline import Lines, Link, make_setup, random_requests, run
from torch import Tensor

from aengine.checkpoint.source import ModelSource
from aengine.runner.attention.kv_format import KVFormat, ScaledKV
from aengine.runner.distributed.experts_group import ExpertsGroup
from aengine.runner.distributed.group import ALONE
from aengine.runner.distributed.stage import WHOLE, PipelineStage
from aengine.runner.models import build_model, read_config
from aengine.runner.startup.kv_scales import measured
from aengine.runner.startup.setup import RunnerSetup
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.sources.loader import load_weights

TinyModel = Callable[..., Path]


def to_measure(source: ModelSource, stage: PipelineStage = WHOLE, link: Link | None = None) -> RunnerSetup:
    return replace(make_setup(source, stage, link), kv_format=ScaledKV(source="calibrated"))


def scales_of(kept: KVFormat) -> Mapping[int, Tensor]:
    assert isinstance(kept, ScaledKV) and kept.by_layer
    return kept.by_layer


def of_whole(source: ModelSource) -> Mapping[int, Tensor]:
    with torch.inference_mode():
        return scales_of(measured(to_measure(source)).kv_format)


@pytest.mark.parametrize(
    ("name", "size"), [("llama-biases", 2), ("qwen3-two-kv-heads", 4), ("gemma2", 2), ("qwen3-next", 2)]
)
def test_ranks_have_those_of_their_heads(name: str, size: int, tiny_model: TinyModel) -> None:
    """Also where several ranks have the same key-value head, in windows, and beside recurrent states."""
    arch, overrides = MODELS[name]
    source = source_of(tiny_model(arch, seed=7, **overrides))
    whole = of_whole(source)

    def of_rank(group: ThreadGroup) -> tuple[Mapping[int, Tensor], int]:
        model, _ = load(source, group)
        setup = replace(to_measure(source), model=model, model_config=model.config, group=group)
        return scales_of(measured(setup).kv_format), model.config.kv_copies

    for rank, (found, copies) in enumerate(run_ranks(size, of_rank)):
        assert found.keys() == whole.keys()
        for layer, scales in found.items():
            first = rank // copies * scales.shape[1]
            assert torch.equal(scales, whole[layer][:, first : first + scales.shape[1]])


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_stages_have_those_of_their_layers(name: str, tiny_model: TinyModel) -> None:
    """And nothing is left on the way between them: the ids of the first requests are these requests' own."""
    arch, overrides = MODELS[name]
    source, vocab_size = source_of(tiny_model(arch, seed=7, **overrides)), overrides.get("vocab_size", 320)
    with torch.inference_mode():
        whole = measured(to_measure(source))
        lines = Lines(2)
        stages = [measured(to_measure(source, PipelineStage(i, 2), Link(lines, i))) for i in range(2)]
        assert not any(lines.hidden) and not lines.token_ids
        first, last = (scales_of(stage.kv_format) for stage in stages)
        assert not first.keys() & last.keys()
        wanted, found = scales_of(whole.kv_format), {**first, **last}
        assert found.keys() == wanted.keys() and all(torch.equal(found[i], wanted[i]) for i in wanted)
        expected = run([whole], random_requests(vocab_size, 11), 1)
        assert run(stages, random_requests(vocab_size, 11), 2, expected) == expected


def test_replicas_that_share_experts_have_the_same(tiny_model: TinyModel) -> None:
    arch, overrides = MODELS["qwen3-moe"]
    source = source_of(tiny_model(arch, seed=7, **overrides))
    whole = of_whole(source)

    def of_replica(group: ThreadGroup) -> Mapping[int, Tensor]:
        experts = ExpertsGroup(group, group.rank, group.size)
        config = read_config(source.hf_config).of_rank(1, divides_experts=True, num_replicas=group.size)
        model = build_model(config, choose_formats("float32", CPU, source.hf_config), ALONE, WHOLE, experts)
        load_weights(model, source, 5, no_progress)
        setup = replace(to_measure(source), model=model, model_config=config, experts_group=experts)
        return scales_of(measured(setup).kv_format)

    for found in run_ranks(2, of_replica):
        assert found.keys() == whole.keys() and all(torch.equal(found[i], whole[i]) for i in whole)
