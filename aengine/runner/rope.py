"""Rotary embedding of a model: frequencies and factors, in the words of config.json. Su et al. 2021,
https://arxiv.org/abs/2104.09864."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelLoadError

__all__ = ["LongRope", "RopeConfig"]

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_NUMBERS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
"""Numbers without which a type means nothing."""


@dataclass(frozen=True, slots=True)
class LongRope:
    """Two sets of frequencies (Ding et al. 2024, arXiv:2402.13753): a request of up to ``border`` tokens uses the one,
    a longer one the other, for all its tokens.

    So the keys of a request that grows past the border while it decodes are computed again; the scheduler sees to it
    (docs/models.md). Which set holds follows from the request's own length alone.
    """

    border: int
    inv_freq: Tensor  # float32 [rotary_dim / 2], of requests beyond the border


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding of the first ``rotary_dim`` elements of a head, or of all."""

    rope_type: str
    theta: float
    scaling: Mapping[str, Any]  # the checkpoint's parameters of its rope_type
    rotary_dim: int
    max_position_embeddings: int
    interleaved: bool = False  # element 2i turns with 2i + 1; else i with i + rotary_dim / 2

    @classmethod
    def read(
        cls,
        parameters: Mapping[str, Any],
        *,
        head_dim: int,
        max_positions: int,
        theta: object = None,
        partial: object = None,
        interleaved: bool = False,
    ) -> RopeConfig:
        """Read transformers 5's ``rope_parameters``, or ``rope_scaling`` with ``theta`` and ``partial`` (the share of a
        head that turns) beside it.

        Raises ModelLoadError that names what is missing or not supported.
        """
        scaling = dict(parameters)
        named = scaling.pop("type", None)
        rope_type = scaling.pop("rope_type", None) or named or "default"
        if rope_type not in ROPE_TYPES:
            raise ModelLoadError(f"rope_type {rope_type!r} is not supported; these are: {', '.join(ROPE_TYPES)}")
        for key in _NUMBERS.get(rope_type, ()):
            if not isinstance(scaling.get(key), int | float):
                raise ModelLoadError(f"rope_type {rope_type!r} needs a number for {key!r}, not {scaling.get(key)!r}")
        theta = float(scaling.pop("rope_theta", None) or theta or 10000.0)  # type: ignore[arg-type]
        share = float(scaling.pop("partial_rotary_factor", None) or partial or 1.0)  # type: ignore[arg-type]
        rotary_dim = int(head_dim * share)
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ModelLoadError(
                f"config.json: partial_rotary_factor={share} of head_dim={head_dim} is {rotary_dim}, and rotary "
                f"embeddings rotate pairs of elements of a head"
            )
        if rope_type == "longrope":
            for key in ("short_factor", "long_factor"):
                factors = scaling.get(key)
                if not isinstance(factors, Sequence) or len(factors) != rotary_dim // 2:
                    raise ModelLoadError(f"rope_type 'longrope' needs {rotary_dim // 2} numbers for {key!r}")
        return cls(rope_type, theta, scaling, rotary_dim, max_positions, interleaved)

    @property
    def _plain(self) -> Tensor:
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).float() / self.rotary_dim
        return 1.0 / (self.theta**exponents)

    def inv_freq(self) -> tuple[Tensor, float]:
        """float32 [rotary_dim / 2] frequencies, and the factor by which cos and sin are multiplied."""
        if self.rope_type == "linear":
            return self._plain / float(self.scaling["factor"]), 1.0
        if self.rope_type == "llama3":
            return self._llama3(self._plain), 1.0
        if self.rope_type == "yarn":
            return self._yarn(self._plain)
        if self.rope_type == "longrope":
            return self._stretched("short_factor"), self._longrope_attention_factor()
        # "dynamic" only changes anything beyond max_position_embeddings, and no request gets there.
        return self._plain, 1.0

    def long(self) -> LongRope | None:
        """The second set of frequencies; None: there is one."""
        border = int(self.scaling.get("original_max_position_embeddings") or 0)
        if self.rope_type != "longrope" or border >= self.max_position_embeddings:
            return None
        return LongRope(border, self._stretched("long_factor"))

    def query_scale(self, positions: Tensor) -> Tensor | None:
        """float32 factors of the queries at ``positions`` (Llama 4's, also Ministral 3's); None: there are none."""
        beta = self.scaling.get("llama_4_scaling_beta")
        if not beta:
            return None
        context = float(self.scaling["original_max_position_embeddings"])
        return 1.0 + float(beta) * torch.log(1.0 + torch.floor(positions.float() / context))

    def _stretched(self, key: str) -> Tensor:
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).float() / self.rotary_dim
        return 1.0 / (torch.tensor(self.scaling[key], dtype=torch.float32) * self.theta**exponents)

    def _longrope_attention_factor(self) -> float:
        given, context = self.scaling.get("attention_factor"), float(self.scaling["original_max_position_embeddings"])
        if given is not None:
            return float(given)
        factor = float(self.scaling.get("factor") or self.max_position_embeddings / context)
        return math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0

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
            return self.rotary_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        first = dimension_of(float(scaling.get("beta_fast") or 32))
        last = dimension_of(float(scaling.get("beta_slow") or 1))
        if scaling.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.rotary_dim - 1)
        if first == last:
            last += 0.001
        ramp = ((torch.arange(self.rotary_dim // 2).float() - first) / (last - first)).clamp(0, 1)
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
