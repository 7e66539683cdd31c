"""Families whose layers keep a state of fixed size, in every scenario of an engine, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scenarios import check_scenarios
from tiny import load_reference

TinyModel = Callable[..., Path]
DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
NO_EXPERTS = {"num_experts": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "lfm2-biases": (
        "lfm2",
        {"full_attn_idxs": [1], "conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False},
    ),
    "qwen3-next": ("qwen3_next", {**DELTA, **NO_EXPERTS}),
    "qwen3.5": ("qwen3_5_text", {**DELTA, "attention_bias": True, "linear_conv_kernel_dim": 3}),
    "qwen3.5-every-fourth": ("qwen3_5_text", {**DELTA, "layer_types": None, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_scenario(name: str, tiny_model: TinyModel) -> None:
    arch, overrides = MODELS[name]
    folder = tiny_model(arch, seed=7, **overrides)
    check_scenarios(folder, load_reference(folder, arch))
