"""Every family divided among ranks against the whole: logits within 1e-4 in float32, of prompts, chunks and decodes.

A layer divides itself, whatever family it is in: `make test` has each kind of layer, `make test-all` each family.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import CPU, Driver, no_progress, source_of
from pairs import some
from ranks_as_threads import ThreadGroup, run_ranks
from torch import Tensor

from aengine.checkpoint.source import ModelSource
from aengine.runner.distributed.group import ALONE, TensorGroup
from aengine.runner.models import build_model, read_config
from aengine.runner.models.causal_lm import CausalLM
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.sources.loader import LoadedWeights, load_weights, tensor_names

TinyModel = Callable[..., Path]

LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
DELTA = {
    **EIGHT,
    "num_hidden_layers": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 24}
GEMMA = {**EIGHT, "query_pre_attn_scalar": 20, "sliding_window": 9, "layer_types": LAYER_TYPES}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama", {**EIGHT, "attention_bias": True, "mlp_bias": True}),
    "llama-tied-one-kv-head": ("llama", {**EIGHT, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3-two-kv-heads": ("qwen3", {**EIGHT, "num_key_value_heads": 2, "vocab_size": 1100}),
    "qwen2": ("qwen2", EIGHT),
    "mistral": ("mistral", {**EIGHT, "sliding_window": 7}),
    "smollm3": ("smollm3", EIGHT),
    "granite": ("granite", {**EIGHT, "residual_multiplier": 0.3, "logits_scaling": 2.0, "embedding_multiplier": 3.0}),
    "olmo2": ("olmo2", {**EIGHT, "rms_norm_eps": 0.1}),
    "olmo3-two-kv-heads": ("olmo3", {**EIGHT, "num_key_value_heads": 2, "sliding_window": 9, "attention_bias": True}),
    "exaone4": ("exaone4", {**EIGHT, "sliding_window": 9, "sliding_window_pattern": 3}),
    "cohere": ("cohere", {**EIGHT, "hidden_size": 64, "num_key_value_heads": 2, "use_qk_norm": True}),
    "phi": ("phi", {**EIGHT, "hidden_size": 64}),
    "starcoder2": ("starcoder2", {**EIGHT, "hidden_size": 64}),
    "phi3": ("phi3", {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}),
    "glm4": ("glm4", EIGHT),
    "gemma": ("gemma", EIGHT),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0}),
    "gemma3": ("gemma3", {**GEMMA, "tie_word_embeddings": False}),
    "mixtral": ("mixtral", EIGHT),
    "qwen3-moe": ("qwen3_moe", {**EIGHT, **EXPERTS, "mlp_only_layers": [0]}),
    "gpt-oss": ("gpt_oss", {**EIGHT, "num_local_experts": 8, "sliding_window": 7, "swiglu_limit": 1.0}),
    "qwen3-next": ("qwen3_next", {**DELTA, **SHARED, "norm_topk_prob": False}),
    "qwen3.5": ("qwen3_5_text", {**DELTA, "attention_bias": True}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**DELTA, **SHARED}),
    "lfm2": ("lfm2", {**EIGHT, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "lfm2-biases": ("lfm2", {**EIGHT, "full_attn_idxs": [1], "conv_bias": True, "conv_L_cache": 4}),
}


def load(
    source: ModelSource, group: TensorGroup = ALONE, dtype: str = "float32", *, divides_experts: bool = False
) -> tuple[CausalLM, LoadedWeights]:
    """A rank's model."""
    stored = None if source.format == "dummy" else source.hf_config
    config = read_config(source.hf_config).of_rank(group.size, divides_experts=divides_experts)
    formats = choose_formats(dtype, CPU, stored, stored=tensor_names(source))
    model = build_model(config, formats, group)
    return model, load_weights(model, source, 5, no_progress)


def logits_of(model: CausalLM, vocab_size: int, seed: int) -> list[Tensor]:
    """float32 [n, vocab_size] each, of the same batches on every rank."""
    rng = random.Random(seed)
    driver = Driver(model, rng)
    tokens = [rng.randrange(vocab_size) for _ in range(40)]
    out = []
    for batch in (
        {"a": tokens[:17]},
        {"b": tokens[20:23], "a": tokens[17:19]},
        {"a": tokens[19:20], "b": tokens[23:24]},
        {"a": tokens[20:21], "b": tokens[24:40]},
    ):
        steps = driver.step(batch)
        out.append(torch.cat([steps[name] for name in batch]))
    return out


def check(source: ModelSource, size: int, dtype: str = "float32", tolerance: float = 1e-4, **how: Any) -> None:
    vocab_size = source.hf_config["vocab_size"]
    whole_model, whole_weights = load(source, dtype=dtype)
    with torch.inference_mode():
        wanted = logits_of(whole_model, vocab_size, 3)

    def of_rank(group: ThreadGroup) -> tuple[list[Tensor], LoadedWeights, list[tuple[str, tuple[int, ...]]]]:
        model, weights = load(source, group, dtype, **how)
        own = logits_of(model, vocab_size, 3)
        return [group.gather(x).movedim(0, 1).flatten(1) for x in own], weights, group.calls

    for out, weights, calls in run_ranks(size, of_rank):
        assert weights.num_parameters == whole_weights.num_parameters
        assert weights.own_bytes < 0.8 * whole_weights.own_bytes
        assert {name for name, _ in calls} <= {"add_sum", "sum", "gather"}
        for found, expected in zip(out, wanted, strict=True):
            assert found[:, vocab_size:].eq(-torch.inf).all()
            scale = float(expected.abs().max())
            worst = float((found[:, :vocab_size] - expected).abs().max())
            assert worst <= tolerance * scale, f"off by {worst:.2g}, of logits of size {scale:.2g}"


@pytest.mark.parametrize(
    ("name", "size"),
    some(
        itertools.product(MODELS, (2, 4)),
        ("llama-biases", 2),
        ("llama-tied-one-kv-head", 4),
        ("qwen3-two-kv-heads", 4),
        ("phi3", 2),
        ("glm4", 4),
        ("gemma2", 2),
        ("gpt-oss", 4),
        ("qwen3-next", 2),
        ("qwen3.5", 4),
        ("lfm2-biases", 2),
    ),
)
def test_families(name: str, size: int, tiny_model: TinyModel) -> None:
    arch, overrides = MODELS[name]
    check(source_of(tiny_model(arch, seed=7, **overrides)), size)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss", "qwen3-next"])
def test_divided_by_experts(name: str, tiny_model: TinyModel) -> None:
    arch, overrides = MODELS[name]
    check(source_of(tiny_model(arch, seed=7, **overrides)), 4, divides_experts=True)


def test_random_weights_are_those_of_one_rank(tiny_model: TinyModel) -> None:
    arch, overrides = MODELS["qwen3-two-kv-heads"]
    check(source_of(tiny_model(arch, seed=7, **overrides), load_format="dummy"), 4)
