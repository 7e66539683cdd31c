"""The settings of a GGUF model in the words of a Hugging Face config.json.

Sources: the keys are those of ggml-org/ggml docs/gguf.md; which key holds which HF setting is what
llama.cpp's convert_hf_to_gguf.py writes for these architectures.
"""

from __future__ import annotations

import math
from typing import Any

from ..errors import ModelLoadError
from .gguf_file import GgufFile
from .value_reader import ValueReader

OTHER_ARCHITECTURE = (
    '`aengine models --json` lists the architectures whose GGUF files are read ("gguf"); of another one give the '
    "folder or hub id of the checkpoint that it was made from: of safetensors transformers computes what aengine has "
    "no file for"
)
"""The cure for a file of an architecture that is not read. Which are is the runner's to know."""

GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "conv_L_cache": "shortconv.l_cache",
}
"""Keys of config.json, and the metadata, behind the architecture's name, from which `gguf_hf_config` makes them."""


def gguf_hf_config(file: GgufFile) -> dict[str, Any]:
    """Return ``file``'s settings, as config.json would have them, and ``gguf_architecture``.

    Raises ModelLoadError naming what is missing or not supported.
    """
    values = _Metadata(file)
    arch = values.name("general.architecture")
    if not arch:
        raise values.missing("general.architecture")
    _check_layers(file, values.integer(f"{arch}.block_count"))
    if not values.flag(f"{arch}.attention.causal", True):
        return _encoder_config(file, values, arch)
    hidden_size = values.integer(f"{arch}.embedding_length")
    num_heads = values.integer(f"{arch}.attention.head_count")
    num_kv_heads, attending = _kv_heads(file, values, arch, num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"{file.path}: {num_heads} attention heads, {num_kv_heads} KV heads and "
            f"hidden size {hidden_size} don't go together"
        )
    sliding_window = values.integer(f"{arch}.attention.sliding_window", 0, least=0)
    head_dim = _head_dim(file, values, arch, hidden_size // num_heads)
    rope_theta = values.number(f"{arch}.rope.freq_base", 10000.0, above=0)
    rotary_dim = _rotary_dim(file, values, arch, head_dim)
    return {
        "gguf_architecture": arch,
        "gguf_file": str(file.path),
        **_factors(file, values, arch),
        **_classifier(file, arch),
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": values.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": values.integer(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": round_float32(values.number(f"{arch}.attention.layer_norm_rms_epsilon", least=0)),
        "rope_theta": rope_theta,
        "partial_rotary_factor": rotary_dim / head_dim,
        "rope_scaling": _rope_scaling(file, values, arch, head_dim, rope_theta),
        "max_position_embeddings": values.integer(f"{arch}.context_length"),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": sliding_window or None,
        "use_sliding_window": bool(sliding_window),
        "num_local_experts": values.integer(f"{arch}.expert_count", 0, least=0),
        "num_experts_per_tok": values.integer(f"{arch}.expert_used_count", 0, least=0),
        "moe_intermediate_size": values.integer(f"{arch}.expert_feed_forward_length", 0, least=0),
        "full_attn_idxs": attending,
        "conv_L_cache": values.integer(f"{arch}.shortconv.l_cache", 0, least=0) or None,
    }


def _check_layers(file: GgufFile, num_layers: int) -> None:
    """Raise ModelLoadError if there are other layers than the metadata says."""
    found = len({name.split(".", 2)[1] for name in file.tensors if name.startswith("blk.")})
    if num_layers != found:
        raise ModelLoadError(f"{file.path}: block_count is {num_layers}, and the file has tensors of {found} layers")


def _encoder_config(file: GgufFile, values: _Metadata, arch: str) -> dict[str, Any]:
    """Return the settings of an encoder, whose tokens attend to later ones too."""
    types, positions = file.tensors.get("token_types.weight"), file.tensors.get("position_embd.weight")
    base = values.number_or_none(f"{arch}.rope.freq_base", above=0)
    theta = {} if base is None else {"rope_theta": base}
    context = values.integer(f"{arch}.context_length")
    return {
        "gguf_architecture": arch,
        "gguf_file": str(file.path),
        "model_type": arch,
        "hidden_act": "silu" if arch == "nomic-bert" else "gelu",
        "hidden_size": values.integer(f"{arch}.embedding_length"),
        "intermediate_size": values.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": values.integer(f"{arch}.block_count"),
        "num_attention_heads": values.integer(f"{arch}.attention.head_count"),
        "layer_norm_eps": round_float32(values.number(f"{arch}.attention.layer_norm_epsilon", least=0)),
        "max_position_embeddings": context if positions is None else positions.shape[0],
        "type_vocab_size": 0 if types is None else types.shape[0],
        **theta,
        "vocab_size": _vocab_size(file),
    }


def _classifier(file: GgufFile, arch: str) -> dict[str, Any]:
    """Return the head of a reranker that is asked for yes or no: of its output matrix the file has these two rows
    alone. They score as a head of one class does, their difference."""
    if "cls.output.weight" not in file.tensors:
        return {}
    labels = file.metadata.get(f"{arch}.classifier.output_labels")
    if labels != ["yes", "no"]:
        raise ModelLoadError(
            f"{file.path} has a head of the classes {labels!r:.80}; of a GGUF file that of a reranker asked for yes "
            f"or no is read: give the folder or hub id of the checkpoint that it was made from"
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


def _factors(file: GgufFile, values: _Metadata, arch: str) -> dict[str, float]:
    """Read the numbers that only some families have (Granite's factors, Gemma's soft caps and its second rope)."""
    there = {key: name for key, name in _FACTORS.items() if f"{arch}.{key}" in file.metadata}
    return {name: round_float32(values.number(f"{arch}.{key}")) for key, name in there.items()}


def gguf_generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the ids that end a text and the one that begins it, as generation_config.json would have them."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.metadata.get(f"tokenizer.ggml.{name}") for name in names]
    ends: list[Any] = []
    for value in found:
        if value is not None and value not in ends:
            ends.append(value)
    config: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    if isinstance(bos, int):
        config["bos_token_id"] = bos
    return config


def round_float32(value: float) -> float:
    """Return the shortest decimal that is ``value`` in float32: 1e-5 is stored as 9.999999747378752e-06."""
    return float(f"{value:.7g}")


class _Metadata(ValueReader):
    """The metadata of a GGUF file. What is one number a layer counts as one where all are alike."""

    def __init__(self, file: GgufFile) -> None:
        super().__init__(file.metadata, str(file.path))

    def raw(self, key: str) -> Any:
        value = super().raw(key)
        is_one = isinstance(value, list) and value and isinstance(value[0], int | float)
        return value[0] if is_one and value.count(value[0]) == len(value) else value

    def missing(self, key: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self._where} lacks the metadata {key!r}, which models that aengine runs have; {OTHER_ARCHITECTURE}"
        )


def _kv_heads(file: GgufFile, values: _Metadata, arch: str, num_heads: int) -> tuple[int, list[int] | None]:
    """Return the key-value heads, and the layers that attend, where others have none; None: all do."""
    key = f"{arch}.attention.head_count_kv"
    value = file.metadata.get(key)
    if isinstance(value, list) and 0 in value:
        counts = values.integers(key)
        most = max(counts)
        if most and all(count in (0, most) for count in counts):
            return most, [i for i, count in enumerate(counts) if count]
    return values.integer(key, num_heads), None


def _head_dim(file: GgufFile, values: _Metadata, arch: str, default: int) -> int:
    head_dim = values.integer(f"{arch}.attention.key_length", default)
    key = f"{arch}.attention.value_length"
    value = values.integer(key, head_dim)
    if value != head_dim:
        problem = f"{key} is {value}; aengine needs the head's size, {head_dim}"
        raise ModelLoadError(f"{file.path}: {problem}; {OTHER_ARCHITECTURE}")
    return head_dim


def _rotary_dim(file: GgufFile, values: _Metadata, arch: str, head_dim: int) -> int:
    """Return how many elements of each head are rotated."""
    key = f"{arch}.rope.dimension_count"
    rotary_dim = values.integer(key, head_dim)
    if rotary_dim > head_dim:
        raise ModelLoadError(f"{file.path}: {key} is {rotary_dim}, and heads have {head_dim} elements")
    return rotary_dim


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{file.path} lacks the matrix 'token_embd.weight'")
    return embedding.shape[0]


def _rope_scaling(
    file: GgufFile, values: _Metadata, arch: str, head_dim: int, rope_theta: float
) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head_dim, rope_theta)
    if "rope_factors_long.weight" in file.tensors:
        return _longrope_scaling(file, values, arch)
    kind = values.text(f"{arch}.rope.scaling.type", "none")
    old_factor = values.number(f"{arch}.rope.scale_linear", 1.0)
    factor = values.number(f"{arch}.rope.scaling.factor", old_factor)
    if kind == "none" and old_factor == 1.0:
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind != "yarn":
        raise ModelLoadError(f"{file.path}: rope scaling {kind!r:.80} is not supported; linear, yarn and llama3 are")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = values.integer(f"{arch}.rope.scaling.original_context_length", 0, least=0)
    if original:
        scaling["original_max_position_embeddings"] = original
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        value = values.number(f"{arch}.rope.scaling.{key}", 0.0)
        if value:
            scaling[name] = round_float32(value)
    return scaling


def _longrope_scaling(file: GgufFile, values: _Metadata, arch: str) -> dict[str, Any]:
    """Return the scaling of longrope: the divisors of the frequencies are tensors, beside the factor of cos and sin."""
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": values.integer(f"{arch}.rope.scaling.original_context_length"),
        "attention_factor": round_float32(values.number(f"{arch}.rope.scaling.attn_factor", 1.0)),
    }
    for key in ("short_factor", "long_factor"):
        name = f"rope_factors_{key.partition('_')[0]}.weight"
        if name not in file.tensors or file.tensors[name].type.name != "F32":
            raise ModelLoadError(f"{file.path} lacks {name!r} in float32, the {key} of its longrope")
        scaling[key] = file.read_floats(name)
    return scaling


def _llama3_scaling(file: GgufFile, head_dim: int, rope_theta: float) -> dict[str, Any]:
    """Return the settings of Llama 3's scaling, found from its outcome: the stored divisor of each frequency."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelLoadError(f"{file.path}: 'rope_freqs.weight' must be {head_dim // 2} float32, one a frequency")
    stored = file.read_floats("rope_freqs.weight")
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
