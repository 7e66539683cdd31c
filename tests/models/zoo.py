"""Tiny random checkpoints of any causal language model that transformers has, by its ``model_type``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny import _quietly, randomise
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCAB_SIZE = 320

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size": 48,
    "n_embd": 48,
    "d_model": 48,
    "embedding_size": 48,
    "embed_dim": 48,
    "word_embed_proj_dim": 48,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 80,
    "ffn_dim": 80,
    "ffn_hidden_size": 80,
    "n_inner": 80,
    "dff": 80,
    "decoder_ffn_dim": 80,
    "num_hidden_layers": 3,
    "n_layer": 3,
    "num_layers": 3,
    "decoder_layers": 3,
    "num_attention_heads": 6,
    "n_head": 6,
    "num_heads": 6,
    "decoder_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_sequence_length": 256,
    "sliding_window": 9,
    # Experts
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 2,
    "topk_group": 1,
    "num_expert_group": 2,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    # Latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "v_head_dim": 8,
    # Windows and shared layers
    "max_window_layers": 1,
    "num_kv_shared_layers": 1,
    # States
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "mamba_n_heads": 6,
    "mamba_num_heads": 6,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_d_ssm": 96,
    "ssm_state_size": 8,
    "state_size": 8,
    "mamba_d_conv": 4,
    "conv_kernel": 4,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "mamba_expand": 2,
    "mamba_dt_rank": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Whatever of these a config class has is set to it."""
ALIASES = {"layer_types": None, "mlp_layer_types": None, "tie_word_embeddings": False}
"""Unset, so that they follow from the sizes."""

_CONV = ["conv", "full_attention", "conv"]
_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_MAMBA = ["mamba", "attention", "mamba"]
OVERRIDES: dict[str, dict[str, Any]] = {
    "youtu": {"pad_token_id": None},  # transformers loads that token's embedding as zeros, whatever the file has
    "lfm2": {"layer_types": _CONV},
    "lfm2_moe": {"layer_types": _CONV},
    "qwen3_next": {"layer_types": _LINEAR},
    "qwen3_5_text": {"layer_types": _LINEAR},
    "qwen3_5_moe_text": {"layer_types": _LINEAR},
    "olmo_hybrid": {"layer_types": _LINEAR},
    "bamba": {"attn_layer_indices": [1]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe"]},
    "granitemoehybrid": {"layer_types": _MAMBA},
    "gemma4_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", *["full_attention"] * 2]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 6},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "helium": {"head_dim": 8},
    "llama4_text": {"attention_chunk_size": 128},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 3},
    "zamba2": {"layer_types": ["mamba", "hybrid", "mamba"]},
    "kimi_linear": {"num_experts": 6, "head_dim": 8, "linear_num_heads": 2, "linear_head_dim": 8},
    "mamba2": {"num_heads": 6, "head_dim": 16, "expand": 2},
    "hrm_text": {"head_dim": 8},
    "ministral": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mimo_v2_flash": {"head_dim": 12, "num_key_value_heads": 1},  # twice as many where there is a window
    "zaya": {"num_experts_per_tok": 1, "head_dim": 8, "router_hidden_size": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 9},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4, "n_head": 8},
    "longcat_flash": {"head_dim": 4, "zero_expert_num": 2},
    "gemma4_unified_text": {"num_kv_shared_layers": 0, "head_dim": 8},
}
"""By ``model_type``: what does not follow from the table."""


def causal_lms() -> Iterator[str]:
    """The ``model_type`` of every causal language model in transformers; of those that also see or hear, the text's."""
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        if not {"text_config", "vision_config"} & set(config_class.sub_configs):
            yield config_class.model_type


def tiny_config(model_type: str, **overrides: Any) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    names = set(inspect.signature(config_class.__init__).parameters)
    aliases = set(getattr(config_class, "attribute_map", {}).values()) | names
    settings = {key: value for key, value in SIZES.items() if key in aliases}
    settings |= {key: value for key, value in ALIASES.items() if key in aliases and key == "layer_types"}
    if "kv_lora_rank" in settings and "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]  # as latent attention has it, expanded
    settings |= OVERRIDES.get(model_type, {})
    return config_class(**{**settings, **overrides})


def write_zoo_model(folder: Path, model_type: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Write a tiny model, and return transformers' own reading of it, with its plainest attention."""

    def write() -> PreTrainedModel:
        config = tiny_config(model_type, **overrides)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = model_class(config).eval()
        randomise(model)
        model.save_pretrained(folder)
        return model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reference: PreTrainedModel = _quietly(write)
    return reference
