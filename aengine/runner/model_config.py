"""A model's shape, read and checked once; everything else takes it from here.

`ModelConfig` has what the runner needs of any model, and what dense decoders have in common. A family's own config, in
its file, adds what only its layers need, and has the rules by which a config.json is read (`ConfigReader` helps).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import ModelLoadError
from .kv_spec import FullKV, LayerKV, WindowKV

__all__ = ["ConfigReader", "ModelConfig", "RopeConfig"]

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. Su et al. 2021, https://arxiv.org/abs/2104.09864."""

    rope_type: str
    theta: float
    scaling: Mapping[str, Any]  # the checkpoint's parameters of its rope_type
    head_dim: int
    max_position_embeddings: int

    def inv_freq(self) -> tuple[Tensor, float]:
        """float32 [head_dim / 2] frequencies, and the factor by which cos and sin are multiplied."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        plain = 1.0 / (self.theta**exponents)
        if self.rope_type == "linear":
            return plain / float(self.scaling["factor"]), 1.0
        if self.rope_type == "llama3":
            return self._llama3(plain), 1.0
        if self.rope_type == "yarn":
            return self._yarn(plain)
        # "dynamic" only changes anything beyond max_position_embeddings, and no request gets there.
        return plain, 1.0

    def _llama3(self, plain: Tensor) -> Tensor:
        """Long waves are stretched, short ones kept, those between interpolated (Llama 3.1's release)."""
        factor = float(self.scaling["factor"])
        low, high = float(self.scaling["low_freq_factor"]), float(self.scaling["high_freq_factor"])
        context = float(self.scaling["original_max_position_embeddings"])
        waves_in_context = context * plain / (2 * math.pi)
        share = ((waves_in_context - low) / (high - low)).clamp(0, 1)  # 0: stretch, 1: keep
        return (1 - share) * plain / factor + share * plain

    def _yarn(self, plain: Tensor) -> tuple[Tensor, float]:
        """Peng et al. 2023, https://arxiv.org/abs/2309.00071, equations 17 to 23."""
        scaling = self.scaling
        factor = float(scaling["factor"])
        context = float(scaling.get("original_max_position_embeddings") or self.max_position_embeddings)

        def dimension_of(rotations: float) -> float:
            """The dimension whose wave has that many periods within the original context."""
            return self.head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        first = dimension_of(float(scaling.get("beta_fast") or 32))
        last = dimension_of(float(scaling.get("beta_slow") or 1))
        if scaling.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.head_dim - 1)
        if first == last:
            last += 0.001
        ramp = ((torch.arange(self.head_dim // 2).float() - first) / (last - first)).clamp(0, 1)
        return plain / factor * ramp + plain * (1 - ramp), self._yarn_attention_factor(factor)

    def _yarn_attention_factor(self, factor: float) -> float:
        scaling = self.scaling
        given = scaling.get("attention_factor")
        if given is not None:
            return float(given)

        def mscale(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            return mscale(float(scaling["mscale"])) / mscale(float(scaling["mscale_all_dim"]))
        return mscale(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder. Sizes in elements; one entry of ``sliding_windows`` a layer, in tokens, None: no window."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    checkpoint_dtype: str  # "float32", "bfloat16", "float16", or "" when the checkpoint does not say

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Read the content of a config.json by the family's rules.

        Raises ModelLoadError naming the key that is missing or unsupported.
        """
        raise NotImplementedError(f"{cls.__name__} is no family's config")

    @property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        """The specs of what each layer keeps of a sequence."""
        heads = self.num_kv_heads, self.head_dim
        return tuple(WindowKV(*heads, window) if window else FullKV(*heads) for window in self.sliding_windows)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class ConfigReader:
    """The content of a config.json. Whatever is missing or not supported raises a ModelLoadError that names the key."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        self._hf = hf

    def get(self, key: str) -> Any:
        """The value as it is; None if there is none."""
        return self._hf.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer >= 1; without a default the key must be there."""
        value = self._hf.get(key)
        if value is None:
            if default is None:
                raise ModelLoadError(f"config.json has no {key!r}, which this model needs")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelLoadError(f"config.json: {key}={value!r} must be an integer >= 1")
        return value

    def flag(self, key: str) -> bool:
        """Whether the key is there and true."""
        return bool(self._hf.get(key, False))

    def decoder(self) -> dict[str, Any]:
        """The fields of `ModelConfig` that all dense decoders spell alike; ``sliding_windows`` is the family's."""
        hf = self._hf
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        kv_heads = self.integer("num_key_value_heads", default=heads)
        head_dim = self.integer("head_dim", default=hidden // heads)
        max_positions = self.integer("max_position_embeddings")
        activation = hf.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ModelLoadError(f"config.json: hidden_act={activation!r} is not supported; only 'silu' is")
        if heads % kv_heads:
            raise ModelLoadError(f"config.json: {heads} attention heads can't share {kv_heads} key-value heads")
        if head_dim % 2:
            raise ModelLoadError(f"config.json: head_dim={head_dim} is odd, and rotary embeddings rotate pairs")
        for key in ("num_local_experts", "num_experts"):
            if hf.get(key):
                raise ModelLoadError(f"config.json: {key}={hf[key]!r}: mixtures of experts are not supported")
        return {
            "model_type": hf["model_type"],
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size"),
            "num_layers": self.integer("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
            "max_position_embeddings": max_positions,
            "tie_word_embeddings": self.flag("tie_word_embeddings"),
            "rope": self._rope(head_dim, max_positions),
            "checkpoint_dtype": str(hf.get("dtype") or hf.get("torch_dtype") or "").removeprefix("torch."),
        }

    def windows(self, window: int | None, first_layer: int = 0) -> tuple[int | None, ...]:
        """Return each layer's window: by ``layer_types``, else ``window`` from ``first_layer`` on; None: no window."""
        layers = self.integer("num_hidden_layers")
        kinds = self._hf.get("layer_types")
        if window is not None and kinds is not None:
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        return tuple(window if layer >= first_layer else None for layer in range(layers))

    def _rope(self, head_dim: int, max_positions: int) -> RopeConfig:
        """Both spellings: transformers 5's ``rope_parameters``, and ``rope_scaling`` with ``rope_theta`` beside it."""
        hf = self._hf
        scaling = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
        if rope_type not in ROPE_TYPES:
            raise ModelLoadError(f"rope_type {rope_type!r} is not supported; these are: {', '.join(ROPE_TYPES)}")
        if scaling.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
            raise ModelLoadError("partial_rotary_factor is not supported")
        needed = {
            "linear": ("factor",),
            "yarn": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        }
        for key in needed.get(rope_type, ()):
            if not isinstance(scaling.get(key), int | float):
                raise ModelLoadError(f"rope_type {rope_type!r} needs a number for {key!r}, not {scaling.get(key)!r}")
        theta = float(scaling.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0)
        return RopeConfig(rope_type, theta, scaling, head_dim, max_positions)
