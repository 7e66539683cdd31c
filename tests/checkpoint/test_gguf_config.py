"""GGUF metadata as a Hugging Face config."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from aengine.checkpoint import GgufFile
from aengine.checkpoint.gguf_config import gguf_generation_config, gguf_hf_config
from aengine.checkpoint.pooling import gguf_pooling
from aengine.errors import ModelLoadError

BASE: dict[str, Any] = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
}


def write(
    path: Path,
    arch: str = "llama",
    *,
    tensors: tuple[str, ...] = (),
    rope_freqs: Any = None,
    factors: dict[str, list[float]] | None = None,
    **changes: Any,
) -> GgufFile:
    """``changes``: keys of BASE with "__" for "."; None leaves one out."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**BASE, **{k.replace("__", "."): v for k, v in changes.items()}}.items():
        name = key[1:] if key.startswith("/") else f"{arch}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
    for name in ("token_embd.weight", "blk.0.attn_norm.weight", "blk.1.attn_norm.weight", *tensors):
        writer.add_tensor(name, np.zeros((64, 32), np.float32))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, np.float32))
    for name, values in (factors or {}).items():
        writer.add_tensor(f"{name}.weight", np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def test_llama(tmp_path: Path) -> None:
    config = gguf_hf_config(write(tmp_path / "m.gguf"))
    assert {key: value for key, value in config.items() if value is not None} == {
        "gguf_architecture": "llama",
        "gguf_file": str(tmp_path / "m.gguf"),
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "max_position_embeddings": 512,
        "vocab_size": 64,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "moe_intermediate_size": 0,
    }


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_facts_that_tensors_tell(tmp_path: Path, arch: str) -> None:
    config = gguf_hf_config(write(tmp_path / "m.gguf", arch, tensors=("output.weight", "blk.0.attn_q.bias")))
    assert config["model_type"] == arch
    assert config["tie_word_embeddings"] is False
    assert config["attention_bias"] is True


def test_optional_settings(tmp_path: Path) -> None:
    file = write(
        tmp_path / "m.gguf",
        attention__key_length=16,
        attention__value_length=16,
        rope__dimension_count=16,
        attention__sliding_window=128,
        attention__head_count_kv=[2, 2],
        expert_count=8,
    )
    config = gguf_hf_config(file)
    assert config["num_local_experts"] == 8
    assert config["head_dim"] == 16
    assert config["num_key_value_heads"] == 2
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 128)
    without = gguf_hf_config(write(tmp_path / "n.gguf", attention__head_count_kv=None, rope__freq_base=None))
    assert without["num_key_value_heads"] == 4
    assert without["rope_theta"] == 10000.0


def test_zero_is_as_good_as_nothing(tmp_path: Path) -> None:
    zeros = ("attention__sliding_window", "expert_count", "expert_used_count", "expert_feed_forward_length")
    plain = gguf_hf_config(write(tmp_path / "m.gguf"))
    changes: dict[str, Any] = dict.fromkeys((*zeros, "shortconv__l_cache"), 0)
    assert gguf_hf_config(write(tmp_path / "m.gguf", attention__layer_norm_rms_epsilon=0.0, **changes)) == {
        **plain,
        "rms_norm_eps": 0.0,
    }
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 0}
    assert gguf_hf_config(write(tmp_path / "o.gguf", **yarn))["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0}


def test_tokens_are_rows_of_a_matrix(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf")
    for tensor in (replace(file.tensors["token_embd.weight"], shape=(64,)), None):
        if tensor is None:
            del file.tensors["token_embd.weight"]
        else:
            file.tensors["token_embd.weight"] = tensor
        with pytest.raises(ModelLoadError, match="lacks the matrix 'token_embd.weight'"):
            gguf_hf_config(file)


def test_rope_scaling(tmp_path: Path) -> None:
    linear = write(tmp_path / "a.gguf", rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert gguf_hf_config(linear)["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    old = write(tmp_path / "b.gguf", rope__scale_linear=2.0)
    assert gguf_hf_config(old)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    yarn = write(
        tmp_path / "c.gguf",
        "qwen2",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=256,
    )
    assert gguf_hf_config(yarn)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    with pytest.raises(ModelLoadError, match="longrope"):
        gguf_hf_config(write(tmp_path / "d.gguf", rope__scaling__type="longrope"))


def test_yarn_and_longrope_with_all_that_they_may_have(tmp_path: Path) -> None:
    yarn = write(
        tmp_path / "a.gguf",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__yarn_beta_fast=32.1,
        rope__scaling__yarn_beta_slow=1.5,
    )
    assert gguf_hf_config(yarn)["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32.1,
        "beta_slow": 1.5,
    }
    for kind, factor in (("linear", 1.0), ("none", 8.0)):
        file = write(tmp_path / "b.gguf", rope__scaling__type=kind, rope__scaling__factor=factor)
        assert gguf_hf_config(file)["rope_scaling"] is None
    longrope = {
        "rope__scaling__original_context_length": 128,
        "rope__scaling__attn_factor": 1.19,
        "factors": {"rope_factors_long": [4.0] * 4, "rope_factors_short": [1.0, 1.0, 1.5, 2.0]},
    }
    assert gguf_hf_config(write(tmp_path / "c.gguf", **longrope))["rope_scaling"] == {
        "rope_type": "longrope",
        "original_max_position_embeddings": 128,
        "attention_factor": 1.19,
        "short_factor": [1.0, 1.0, 1.5, 2.0],
        "long_factor": [4.0] * 4,
    }
    del longrope["factors"]["rope_factors_short"]  # type: ignore[attr-defined]
    with pytest.raises(ModelLoadError, match="lacks 'rope_factors_short.weight' in float32, the short_factor"):
        gguf_hf_config(write(tmp_path / "d.gguf", **longrope))


def test_what_only_some_families_have(tmp_path: Path) -> None:
    names = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale", "rope.freq_base_swa")
    wanted = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    factors = {name: 0.1 + i for i, name in enumerate(names)}
    config = gguf_hf_config(write(tmp_path / "m.gguf", "granite", **factors))
    assert {name: config[name] for name in (*wanted, "rope_local_base_freq")} == {
        name: 0.1 + i for i, name in enumerate((*wanted, "rope_local_base_freq"))
    }
    assert "attn_logit_softcapping" not in config
    mixed = write(tmp_path / "n.gguf", "lfm2", attention__head_count_kv=[0, 2], shortconv__l_cache=3)
    config = gguf_hf_config(mixed)
    assert (config["num_key_value_heads"], config["full_attn_idxs"], config["conv_L_cache"]) == (2, [1], 3)
    experts = {"expert_used_count": 2, "expert_feed_forward_length": 24}
    config = gguf_hf_config(write(tmp_path / "o.gguf", "qwen3moe", **experts))
    assert (config["num_experts_per_tok"], config["moe_intermediate_size"]) == (2, 24)
    assert (config["full_attn_idxs"], config["conv_L_cache"], config["sliding_window"]) == (None, None, None)


def test_an_encoder(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"attention__causal": False, "attention__layer_norm_epsilon": 1e-12}
    wanted = {
        "gguf_architecture": "bert",
        "gguf_file": str(tmp_path / "m.gguf"),
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "type_vocab_size": 0,
        "vocab_size": 64,
    }
    plain = write(tmp_path / "m.gguf", "bert", rope__freq_base=None, **changes)
    assert gguf_hf_config(plain) == wanted
    tensors = ("token_types.weight", "position_embd.weight")  # each of 64 rows
    file = write(tmp_path / "n.gguf", "bert", tensors=tensors, rope__freq_base=1000.0, **changes)
    assert gguf_hf_config(file) == wanted | {
        "gguf_file": str(tmp_path / "n.gguf"),
        "max_position_embeddings": 64,
        "type_vocab_size": 64,
        "rope_theta": 1000.0,
    }


def test_the_head_of_a_reranker(tmp_path: Path) -> None:
    head = ("cls.output.weight",)
    yes = write(tmp_path / "m.gguf", "qwen3", tensors=head, classifier__output_labels=["yes", "no"])
    config = gguf_hf_config(yes)
    assert config["architectures"] == ["ForSequenceClassification"] and config["id2label"] == {"0": "yes"}
    with pytest.raises(ModelLoadError, match=r"head of the classes \['a', 'b'\]"):
        gguf_hf_config(write(tmp_path / "n.gguf", "qwen3", tensors=head, classifier__output_labels=["a", "b"]))
    assert "architectures" not in gguf_hf_config(write(tmp_path / "o.gguf", "qwen3"))


@pytest.mark.parametrize(
    ("kind", "mode"), [(None, ""), (0, ""), (1, "mean"), (2, "cls"), (3, "last"), (4, "a reranker's head")]
)
def test_the_kind_of_pooling(tmp_path: Path, kind: int | None, mode: str) -> None:
    found = gguf_pooling(write(tmp_path / "m.gguf", "bert", pooling_type=kind))
    assert (found.mode, found.fault) == (mode, "") if kind != 4 else mode in found.fault and not found.mode
    assert type(found).from_wire(found.to_wire()) == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "original"), [(32.0, 2048), (8.0, 4096), (4.0, 8192), (32.0, 16384), (8.0, 32768), (4.0, 131072)]
)
def test_llama3_scaling_is_found_from_its_factors(tmp_path: Path, factor: float, original: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    theirs = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500000.0, **scaling},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    plain = [500000.0 ** (-i / 128) for i in range(0, 128, 2)]
    divisors = [p / s for p, s in zip(plain, scaled.tolist(), strict=True)]
    settings = {"rope__freq_base": 500000.0, "embedding_length": 256, "attention__head_count": 2}
    file = write(tmp_path / "m.gguf", rope_freqs=divisors, **settings)
    assert gguf_hf_config(file)["rope_scaling"] == scaling
    broken = [d * (1.5 if 20 < i < 40 else 1) for i, d in enumerate(divisors)]
    with pytest.raises(ModelLoadError, match="rope_freqs"):
        gguf_hf_config(write(tmp_path / "n.gguf", rope_freqs=broken, **settings))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"embedding_length": None}, "lacks the metadata 'llama.embedding_length'"),
        ({"attention__layer_norm_rms_epsilon": None}, "lacks the metadata .*of another one give the folder or hub id"),
        ({"block_count": "two"}, "block_count.*'two'"),
        ({"block_count": True}, "block_count"),
        ({"attention__head_count_kv": [2, 1]}, "head_count_kv"),
        ({"attention__head_count_kv": 3}, "don't go together"),
        ({"attention__head_count": 0}, "head_count=0 must be an integer >= 1"),
        ({"attention__layer_norm_rms_epsilon": math.nan}, "nan"),
        ({"rope__dimension_count": 64}, "dimension_count is 64, and heads have"),
        ({"rope__dimension_count": 9}, "dimension_count is 9, and heads have"),
        ({"attention__value_length": 16}, "value_length is 16; aengine needs the head's size, 8"),
        ({"block_count": 3}, "block_count is 3, and the file has tensors of 2 layers"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    file = write(tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelLoadError, match=problem):
        gguf_hf_config(file)


def test_generation_config(tmp_path: Path) -> None:
    ids = {"eos_token_id": 2, "eot_token_id": 5, "eom_token_id": 2, "bos_token_id": 1}
    file = write(tmp_path / "m.gguf", **{f"/tokenizer.ggml.{k}": v for k, v in ids.items()})
    assert gguf_generation_config(file) == {"eos_token_id": [2, 5], "bos_token_id": 1}
    ids = {"/tokenizer__ggml__eos_token_id": 2, "/tokenizer__ggml__eom_token_id": 7}
    assert gguf_generation_config(write(tmp_path / "o.gguf", **ids)) == {"eos_token_id": [2, 7]}
    assert gguf_generation_config(write(tmp_path / "n.gguf")) == {}
