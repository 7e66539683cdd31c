"""Native families in every scenario of an engine, against transformers; and the scenarios themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import some
from scenarios import check_scenarios, reference_of
from tiny import load_reference

TinyModel = Callable[..., Path]
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
"""Prompts are on both sides of the original context."""
GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "attention_bias": True,
    "hidden_act": "gelu",
}
OLMO3_ROPES = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": YARN}
GLM4_MOE = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
}
GLM4_MOE |= {"moe_intermediate_size": 24, "head_dim": 16}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
LATENT_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
DEEPSEEK_V3 = LATENT | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("cohere", {"logit_scale": 0.3, "attention_bias": True, "tie_word_embeddings": False}),
    "cohere-plus": ("cohere", {"use_qk_norm": True, "layer_norm_eps": 0.1}),
    "cohere2": ("cohere2", {"sliding_window": 9, "sliding_window_pattern": 2, "hidden_act": "gelu"}),
    "deepseek-v2": (
        "deepseek_v2",
        LATENT
        | {"q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"attention_bias": True, "mlp_bias": True, "routed_scaling_factor": 2.0},
    ),
    "deepseek-v2-lite": ("deepseek_v2", LATENT | {"q_lora_rank": None, "rope_parameters": LATENT_YARN}),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK_V3 | {"rope_parameters": LATENT_YARN}),
    "deepseek-v3-plain": (
        "deepseek_v3",
        DEEPSEEK_V3 | {"rope_interleave": False, "norm_topk_prob": False, "v_head_dim": 36, "n_shared_experts": 2},
    ),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "hidden_act": "gelu"}),
    "exaone4-windows": ("exaone4", {"sliding_window": 9, "sliding_window_pattern": 2, "head_dim": 12}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3", {"head_dim": 16, "sliding_window": 9, "layer_types": LAYER_TYPES}),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4-tied": (
        "glm4",
        {"head_dim": 24, "attention_bias": False, "tie_word_embeddings": True, "partial_rotary_factor": 0.25},
    ),
    "glm4-moe": ("glm4_moe", GLM4_MOE | {"n_group": 1, "topk_group": 1, "use_qk_norm": True, "attention_bias": True}),
    "glm4-moe-groups": ("glm4_moe", GLM4_MOE | {"n_shared_experts": 2, "first_k_dense_replace": 2}),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        LATENT | {"q_lora_rank": 24, "attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "granite": ("granite", GRANITE),
    "llama": ("llama", {"attention_bias": True}),
    "llama-yarn": ("llama", {"head_dim": 64, "rope_parameters": YARN}),
    "olmo2": ("olmo2", {"rms_norm_eps": 0.1, "attention_bias": True}),
    "olmo3": (
        "olmo3",
        {"head_dim": 64, "sliding_window": 9, "layer_types": LAYER_TYPES, "rope_parameters": OLMO3_ROPES},
    ),
    "phi": ("phi", {"num_key_value_heads": 6, "layer_norm_eps": 0.1}),
    "qwen2": ("qwen2", {}),
    "qwen3-windows": ("qwen3", {"sliding_window": 9, "use_sliding_window": True, "layer_types": LAYER_TYPES}),
    "smollm3": (
        "smollm3",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "layer_norm_eps": 0.1}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "partial_rotary_factor": 0.5}),
    "starcoder2": ("starcoder2", {"sliding_window": 9, "norm_epsilon": 0.1}),
    "starcoder2-without-biases": (
        "starcoder2",
        {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "silu"},
    ),
    "gpt-oss": ("gpt_oss", {"sliding_window": 7, "swiglu_limit": 1.0}),
    "mixtral": ("mixtral", {"sliding_window": 9, "hidden_act": "gelu"}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [1], "hidden_act": "gelu"}),
}

KEPT = (
    "cohere",
    "cohere2",
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "exaone4-windows",
    "gemma3",
    "glm4",
    "glm4-moe",
    "glm4-moe-groups",
    "glm4-moe-lite",
    "granite",
    "llama-yarn",
    "olmo2",
    "olmo3",
    "phi",
    "smollm3",
    "stablelm",
    "starcoder2",
    "gpt-oss",
    "qwen3-moe",
)
"""One of each family. The logits of the others are compared by test_architectures.py, and their scenarios by
`make test-all`."""


@pytest.mark.parametrize("name", some(MODELS, *KEPT))
def test_every_scenario(name: str, tiny_model: TinyModel) -> None:
    arch, overrides = MODELS[name]
    folder = tiny_model(arch, seed=7, **overrides)
    check_scenarios(folder, load_reference(folder, arch))


def test_the_scenarios_can_fail(tiny_model: TinyModel) -> None:
    """A reference whose context is one token shorter."""
    folder, has_grad = tiny_model("llama", seed=7), torch.is_grad_enabled()
    right = reference_of(load_reference(folder, "llama"))

    def wrong(token_ids: torch.Tensor) -> torch.Tensor:
        logits = right(token_ids)
        return torch.cat((logits[:30], right(token_ids[1:])[29:])) if len(token_ids) > 30 else logits

    with pytest.raises(AssertionError, match="batched, prompt of 23"):
        check_scenarios(folder, wrong)
    assert torch.is_grad_enabled() == has_grad
