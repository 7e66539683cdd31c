"""config.json's content into a ModelConfig: what is missing or not supported is named."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from aengine.errors import ModelLoadError
from aengine.runner.model_config import ModelConfig
from aengine.runner.models import build_model, read_config
from aengine.runner.weights.formats import choose_formats

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def config(**changes: Any) -> ModelConfig:
    return read_config({**BASE, **changes})


@pytest.mark.parametrize(
    "key",
    ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
)
def test_a_missing_key_is_named(key: str) -> None:
    settings = dict(BASE)
    del settings[key]
    with pytest.raises(ModelLoadError, match=key):
        read_config(settings)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "48"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": -6}, "num_attention_heads"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"num_key_value_heads": 4}, "4 key-value heads"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"rope_scaling": {"type": "mrope"}}, "mrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.4}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}, "original_max_position_embeddings"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "original_max_position_embeddings": 64}},
            "4 numbers for 'short_factor'",
        ),
        ({"num_local_experts": 8}, "no mixtures of experts"),
    ],
)
def test_an_unsupported_value_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        config(**changes)


def test_an_unknown_architecture_lists_those_there_are() -> None:
    with pytest.raises(ModelLoadError, match=r"'gpt_neox' .*llama, .*mistral, .*qwen2, qwen3"):
        read_config({**BASE, "model_type": "gpt_neox"}, model_impl="native")


def test_what_is_derived() -> None:
    plain = config()
    assert (plain.head_dim, plain.q_size, plain.kv_size) == (8, 48, 16)
    assert not plain.tie_word_embeddings and plain.sliding_windows == (None, None, None)
    assert config(head_dim=12).q_size == 72
    settings = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert read_config(settings).num_kv_heads == 6
    assert config(torch_dtype="bfloat16").checkpoint_dtype == config(dtype="bfloat16").checkpoint_dtype == "bfloat16"


def tensors_of_a_layer(**changes: Any) -> set[str]:
    """Names of the tensors that layer 1 wants, the last two parts of each."""
    model = build_model(config(**changes), choose_formats("float32", torch.device("cpu")))
    return {".".join(name.split(".")[-2:]) for name in model.weights.places if ".layers.1." in name}


def test_biases_and_norms_of_each_architecture() -> None:
    facts = {
        name: (*(f"{part}.bias" in wanted for part in ("q_proj", "o_proj", "up_proj")), "q_norm.weight" in wanted)
        for name in ("llama", "mistral", "qwen2", "qwen3")
        for wanted in [tensors_of_a_layer(model_type=name)]
    }
    assert facts == {
        "llama": (False, False, False, False),
        "mistral": (False, False, False, False),
        "qwen2": (True, False, False, False),
        "qwen3": (False, False, False, True),
    }
    assert {"q_proj.bias", "o_proj.bias", "down_proj.bias"} <= tensors_of_a_layer(attention_bias=True, mlp_bias=True)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 9}, (None, None, None)),
        ({"model_type": "llama", "sliding_window": 9, "gguf_architecture": "llama"}, (9, 9, 9)),
        ({"model_type": "mistral", "sliding_window": 9}, (9, 9, 9)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 0}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True}, (None, None, None)),
        (
            {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
            (None, 9, 9),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 9, None),
        ),
    ],
)
def test_sliding_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert config(**changes).sliding_windows == windows


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        config().head_dim = 4  # type: ignore[misc]
