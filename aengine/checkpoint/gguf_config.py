"""The settings of a GGUF model in the words of a Hugging Face config.json.

Sources: the keys are those of ggml-org/ggml docs/gguf.md; which key holds which HF setting is what
llama.cpp's convert_hf_to_gguf.py writes for these architectures.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from ..errors import ModelLoadError
from .gguf_file import GgufFile

__all__ = ["OTHER_ARCHITECTURE", "gguf_generation_config", "gguf_hf_config"]

_T = TypeVar("_T", int, float, str)

OTHER_ARCHITECTURE = (
    '`aengine models --json` lists the architectures whose GGUF files are read ("gguf"); of another one give the '
    "folder or hub id of the checkpoint that it was made from: of safetensors transformers computes what aengine has "
    "no file for"
)
"""The cure for a file of an architecture that is not read. Which are is the runner's to know."""


def gguf_hf_config(file: GgufFile) -> dict[str, Any]:
    """``file``'s settings, as config.json would have them, and ``gguf_architecture``.

    Raises ModelLoadError naming what is missing or not supported.
    """
    arch = _get(file, "general.architecture", str)
    if file.metadata.get(f"{arch}.attention.causal") is False:
        return _encoder_config(file, arch)
    hidden_size = _get(file, f"{arch}.embedding_length", int)
    num_heads = _get(file, f"{arch}.attention.head_count", int)
    num_kv_heads, attending = _kv_heads(file, arch, num_heads)
    if min(hidden_size, num_heads, num_kv_heads) < 1 or num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{file.path}: {num_heads} attention heads, {num_kv_heads} KV heads and "
            f"hidden size {hidden_size} don't go together"
        )
    sliding_window = _get(file, f"{arch}.attention.sliding_window", int, 0)
    head_dim = _head_dim(file, arch, hidden_size // num_heads)
    rope_theta = _get(file, f"{arch}.rope.freq_base", float, 10000.0)
    rotary_dim = _rotary_dim(file, arch, head_dim)
    return {
        "gguf_architecture": arch,
        **_factors(file, arch),
        **_classifier(file, arch),
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _get(file, f"{arch}.feed_forward_length", int),
        "num_hidden_layers": _get(file, f"{arch}.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": round_float32(_get(file, f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": rope_theta,
        "partial_rotary_factor": rotary_dim / head_dim,
        "rope_scaling": _rope_scaling(file, arch, head_dim, rope_theta),
        "max_position_embeddings": _get(file, f"{arch}.context_length", int),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": sliding_window or None,
        "use_sliding_window": bool(sliding_window),
        "num_local_experts": _get(file, f"{arch}.expert_count", int, 0),
        "num_experts_per_tok": _get(file, f"{arch}.expert_used_count", int, 0),
        "moe_intermediate_size": _get(file, f"{arch}.expert_feed_forward_length", int, 0),
        "full_attn_idxs": attending,
        "conv_L_cache": _get(file, f"{arch}.shortconv.l_cache", int, 0) or None,
    }


def _encoder_config(file: GgufFile, arch: str) -> dict[str, Any]:
    """The settings of a model whose tokens see later ones, too."""
    types, positions = file.tensors.get("token_types.weight"), file.tensors.get("position_embd.weight")
    theta = (
        {"rope_theta": _get(file, f"{arch}.rope.freq_base", float)} if f"{arch}.rope.freq_base" in file.metadata else {}
    )
    context = _get(file, f"{arch}.context_length", int)
    return {
        "gguf_architecture": arch,
        "model_type": arch,
        "hidden_act": "gelu",
        "hidden_size": _get(file, f"{arch}.embedding_length", int),
        "intermediate_size": _get(file, f"{arch}.feed_forward_length", int),
        "num_hidden_layers": _get(file, f"{arch}.block_count", int),
        "num_attention_heads": _get(file, f"{arch}.attention.head_count", int),
        "layer_norm_eps": round_float32(_get(file, f"{arch}.attention.layer_norm_epsilon", float)),
        "max_position_embeddings": context if positions is None else positions.shape[0],
        "type_vocab_size": 0 if types is None else types.shape[0],
        **theta,
        "vocab_size": _vocab_size(file),
    }


def _classifier(file: GgufFile, arch: str) -> dict[str, Any]:
    """The head of a reranker that is asked for yes or no: of its output matrix the file has these two rows alone. They
    score as a head of one class does, their difference."""
    if "cls.output.weight" not in file.tensors:
        return {}
    labels = file.metadata.get(f"{arch}.classifier.output_labels")
    if labels != ["yes", "no"]:
        raise ModelLoadError(
            f"{file.path} has a head of the classes {labels!r}; of a GGUF file that of a reranker asked for yes or no "
            f"is read: give the folder or hub id of the checkpoint that it was made from"
        )
    return {"architectures": ["ForSequenceClassification"], "id2label": {"0": "yes"}}


_FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}


def _factors(file: GgufFile, arch: str) -> dict[str, float]:
    """Read the numbers that only some families have (Granite's factors, Gemma's soft caps and its second rope)."""
    there = {key: name for key, name in _FACTORS.items() if f"{arch}.{key}" in file.metadata}
    return {name: round_float32(_get(file, f"{arch}.{key}", float)) for key, name in there.items()}


def gguf_generation_config(file: GgufFile) -> dict[str, Any]:
    """The ids that end a text and the one that begins it, as generation_config.json would have them."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.metadata.get(f"tokenizer.ggml.{name}") for name in names]
    ends = list(dict.fromkeys(i for i in found if isinstance(i, int)))
    config: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    if isinstance(bos, int):
        config["bos_token_id"] = bos
    return config


def round_float32(value: float) -> float:
    """The shortest decimal that is ``value`` in float32: 1e-5 is stored as 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _get(file: GgufFile, key: str, kind: type[_T], default: _T | None = None) -> _T:
    value = file.metadata.get(key, default)
    if value is None:
        raise ModelLoadError(
            f"{file.path} lacks the metadata {key!r}, which models that aengine runs have; {OTHER_ARCHITECTURE}"
        )
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        if isinstance(value, list) and len(set(value)) == 1 and isinstance(value[0], kind):
            return value[0]  # one value a layer, all alike
        raise ModelLoadError(f"{file.path}: the metadata {key!r} is {value!r:.80}, not one {kind.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ModelLoadError(f"{file.path}: the metadata {key!r} is {value}")
    return value


def _kv_heads(file: GgufFile, arch: str, num_heads: int) -> tuple[int, list[int] | None]:
    """Key-value heads, and the layers that attend, where others have none; None: all do."""
    key = f"{arch}.attention.head_count_kv"
    value = file.metadata.get(key)
    if isinstance(value, list) and 0 in value and len({count for count in value if count != 0}) == 1:
        return max(value), [i for i, count in enumerate(value) if count]
    return _get(file, key, int, num_heads), None


def _head_dim(file: GgufFile, arch: str, default: int) -> int:
    head_dim = _get(file, f"{arch}.attention.key_length", int, default)
    key = f"{arch}.attention.value_length"
    value = _get(file, key, int, head_dim)
    if value != head_dim:
        problem = f"{key} is {value}; aengine needs the head's size, {head_dim}"
        raise ModelLoadError(f"{file.path}: {problem}; {OTHER_ARCHITECTURE}")
    return head_dim


def _rotary_dim(file: GgufFile, arch: str, head_dim: int) -> int:
    """Elements of a head that are rotated."""
    key = f"{arch}.rope.dimension_count"
    rotary_dim = _get(file, key, int, head_dim)
    if not 0 < rotary_dim <= head_dim:
        raise ModelLoadError(f"{file.path}: {key} is {rotary_dim}, and heads have {head_dim} elements")
    return rotary_dim


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{file.path} lacks the matrix 'token_embd.weight'")
    return embedding.shape[0]


def _rope_scaling(file: GgufFile, arch: str, head_dim: int, rope_theta: float) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head_dim, rope_theta)
    if "rope_factors_long.weight" in file.tensors:
        return _longrope_scaling(file, arch)
    kind = _get(file, f"{arch}.rope.scaling.type", str, "none")
    old_factor = _get(file, f"{arch}.rope.scale_linear", float, 1.0)
    factor = _get(file, f"{arch}.rope.scaling.factor", float, old_factor)
    if kind == "none" and old_factor == 1.0:
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind != "yarn":
        raise ModelLoadError(f"{file.path}: rope scaling {kind!r} is not supported; linear, yarn and llama3 are")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = _get(file, f"{arch}.rope.scaling.original_context_length", int, 0)
    if original:
        scaling["original_max_position_embeddings"] = original
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        value = _get(file, f"{arch}.rope.scaling.{key}", float, 0.0)
        if value:
            scaling[name] = round_float32(value)
    return scaling


def _longrope_scaling(file: GgufFile, arch: str) -> dict[str, Any]:
    """The divisors of the frequencies are tensors, beside the factor of cosines and sines."""
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": _get(file, f"{arch}.rope.scaling.original_context_length", int),
        "attention_factor": round_float32(_get(file, f"{arch}.rope.scaling.attn_factor", float, 1.0)),
    }
    for key in ("short_factor", "long_factor"):
        name = f"rope_factors_{key.partition('_')[0]}.weight"
        if name not in file.tensors or file.tensors[name].type.name != "F32":
            raise ModelLoadError(f"{file.path} lacks {name!r} in float32, the {key} of its longrope")
        scaling[key] = file.tensor_data(name).tolist()
    return scaling


def _llama3_scaling(file: GgufFile, head_dim: int, rope_theta: float) -> dict[str, Any]:
    """The settings of Llama 3's scaling, found from its outcome: the stored divisor of each frequency."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelLoadError(f"{file.path}: 'rope_freqs.weight' must be {head_dim // 2} float32, one a frequency")
    stored = file.tensor_data("rope_freqs.weight").tolist()
    for original in (8192, 4096, 16384, 32768, 2048, 131072):
        scaling = {
            "rope_type": "llama3",
            "factor": float(f"{max(stored):.5g}"),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        wanted = _llama3_divisors(scaling, head_dim, rope_theta)
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(stored, wanted, strict=True)):
            return scaling
    raise ModelLoadError(
        f"{file.path}: the frequency factors in 'rope_freqs.weight' are not those of Llama 3's scaling"
    )


def _llama3_divisors(scaling: dict[str, Any], head_dim: int, rope_theta: float) -> list[float]:
    """Return the divisor of each rope frequency (Llama 3.1 model code, ``apply_scaling``)."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope_theta ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
