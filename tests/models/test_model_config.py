"""config.json's content into a ModelConfig: what is missing or not supported is named."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from driver import CPU

from aengine.errors import ModelLoadError
from aengine.runner.layers.linear import LinearFormat
from aengine.runner.model_config import ModelConfig
from aengine.runner.models import build_model

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
    return ModelConfig.from_hf({**BASE, **changes})


@pytest.mark.parametrize(
    "key",
    ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
)
def test_a_missing_key_is_named(key: str) -> None:
    settings = dict(BASE)
    del settings[key]
    with pytest.raises(ModelLoadError, match=key):
        ModelConfig.from_hf(settings)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "48"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": -6}, "num_attention_heads"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 4}, "4 key-value heads"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"rope_scaling": {"type": "mrope"}}, "mrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_an_unsupported_value_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        config(**changes)


def test_an_unknown_architecture_lists_those_there_are() -> None:
    with pytest.raises(ModelLoadError, match=r"'gpt_neox' .*llama, mistral, qwen2, qwen3"):
        build_model(config(model_type="gpt_neox"), LinearFormat.choose("float32", CPU), CPU)


def test_what_is_derived() -> None:
    plain = config()
    assert (plain.head_dim, plain.q_size, plain.kv_size) == (8, 48, 16)
    assert not plain.tie_word_embeddings and plain.sliding_windows == (None, None, None)
    assert config(head_dim=12).q_size == 72
    settings = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_hf(settings).num_kv_heads == 6
    assert config(torch_dtype="bfloat16").checkpoint_dtype == config(dtype="bfloat16").checkpoint_dtype == "bfloat16"


def test_biases_and_norms_of_each_architecture() -> None:
    facts = {
        name: (c.qkv_bias, c.o_bias, c.mlp_bias, c.qk_norm)
        for name in ("llama", "mistral", "qwen2", "qwen3")
        for c in [config(model_type=name)]
    }
    assert facts == {
        "llama": (False, False, False, False),
        "mistral": (False, False, False, False),
        "qwen2": (True, False, False, False),
        "qwen3": (False, False, False, True),
    }
    llama = config(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 9}, (None, None, None)),
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
