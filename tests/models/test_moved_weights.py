"""Weights moved into memory that can go: every tensor of a model, whoever holds it; a second load goes there too."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import load, no_progress, source_of
from test_second_load import EXPERTS, logits, tensors_of

from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.platforms.virtual_memory import CpuMemory
from aengine.runner.sleeping.arena import Arena
from aengine.runner.sleeping.moving import made_in
from aengine.runner.weights.sources.loader import load_weights


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ("llama", {"attention_bias": True}),
        ("gemma3", {"head_dim": 16}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3_moe", EXPERTS),
        ("qwen3_next", EXPERTS | {"num_experts_per_tok": 2}),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    ],
)
def test_all_tensors_go_and_come(arch: str, fields: dict[str, Any], tiny_model: Callable[..., Path]) -> None:
    first, second = (source_of(tiny_model(arch, seed=seed, **fields)) for seed in (3, 4))
    wanted = [logits(load(source, "float32")[0]) for source in (first, second)]
    gc.collect()
    platform = CpuPlatform()
    arena = Arena(CpuMemory(), platform, keeps=True)
    with made_in(arena, platform):
        model, _ = load(first, "float32")
    spans = [(region.address, region.address + len(region.memory)) for region in arena.regions]

    def check(expected: torch.Tensor) -> None:
        tensors = dict(tensors_of(model))
        assert len(tensors) > 5
        for path, tensor in tensors.items():
            assert any(begin <= tensor.data_ptr() < end for begin, end in spans) or not tensor.numel(), path
        assert torch.equal(logits(model), expected)

    check(wanted[0])
    load_weights(model, second, 0, no_progress)
    for _ in range(2):
        arena.give_back()
        assert not any(bool(region.memory.any()) for region in arena.regions)  # a CPU's addresses can still be read
        arena.take_back()
        check(wanted[1])
