"""Rotary embedding of a model: frequencies and factors, in the words of config.json. Su et al. 2021,
https://arxiv.org/abs/2104.09864."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.value_reader import ValueReader
from ..errors import ModelLoadError
from ..kernels.rotary import Rope

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_NUMBERS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
"""Numbers without which a type means nothing."""
_SCALING = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "llama_4_scaling_beta",
)  # fmt: skip
"""Numbers that one type or another reads, all of them positive; 0 is as good as none."""


@dataclass(frozen=True, slots=True)
class LongRope:
    """Two sets of frequencies (Ding et al. 2024, arXiv:2402.13753): a request of up to ``border`` tokens uses the one,
    a longer one the other, for all its tokens.

    So the keys of a request that grows past the border while it decodes are computed again; the scheduler sees to it
    (docs/models.md). Which set holds follows from the request's own length alone.
    """

    border: int
    inv_freq: Tensor  # float32 [rotary_dim / 2], for requests beyond the border


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """A rotary embedding of the first ``rotary_dim`` elements of a head, or of all."""

    rope_type: str
    theta: float
    scaling: Mapping[str, Any]  # parameters of rope_type, as the checkpoint has them
    rotary_dim: int
    max_position_embeddings: int
    interleaved: bool = False  # True: element 2i is rotated with 2i + 1; False: i with i + rotary_dim / 2

    @classmethod
    def read(
        cls,
        parameters: Mapping[str, Any],
        *,
        head_dim: int,
        max_positions: int,
        theta: float = 10000.0,
        partial: float = 1.0,
        interleaved: bool = False,
    ) -> RopeConfig:
        """Read transformers 5's ``rope_parameters``, or ``rope_scaling`` with ``theta`` and ``partial`` (the share of a
        head that turns) beside it.

        Raises ModelLoadError that names what is missing or not supported.
        """
        values = ValueReader(parameters, "config.json: rope_parameters")
        rope_type = values.text("rope_type") or values.text("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise ModelLoadError(
                f"config.json: rope_type {rope_type!r:.80} is not supported; these are: {', '.join(ROPE_TYPES)}"
            )
        for key in _NUMBERS.get(rope_type, ()):
            if values.number_or_none(key, above=0) is None:
                raise ModelLoadError(f"config.json: rope_type {rope_type!r} needs a number for {key!r}, not None")
        share = values.number("partial_rotary_factor", partial, above=0)
        rotary_dim = int(head_dim * min(share, 2.0))
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ModelLoadError(
                f"config.json: partial_rotary_factor={share} of head_dim={head_dim} is {rotary_dim}, and rotary "
                f"embeddings rotate pairs of elements of a head"
            )
        scaling: dict[str, Any] = {key: values.number(key, above=0) for key in _SCALING if values.raw(key)}
        if values.raw("truncate") is not None:
            scaling["truncate"] = values.flag("truncate")
        if rope_type == "longrope":
            for key in ("short_factor", "long_factor"):
                scaling[key] = values.numbers(key)
                if len(scaling[key]) != rotary_dim // 2:
                    raise ModelLoadError(
                        f"config.json: rope_type 'longrope' needs {rotary_dim // 2} numbers for {key!r}"
                    )
        if "llama_4_scaling_beta" in scaling and "original_max_position_embeddings" not in scaling:
            raise values.missing("original_max_position_embeddings")
        theta = values.number("rope_theta", theta, above=0)
        return cls(rope_type, theta, scaling, rotary_dim, max_positions, interleaved)._checked(values)

    def _checked(self, values: ValueReader) -> RopeConfig:
        """Return self. Raises ModelLoadError where the numbers, each of them sound, together give no frequencies."""
        try:
            inv_freq, factor = self.inv_freq()
            parts = [inv_freq] if (long := self.long()) is None else [inv_freq, long.inv_freq]
            is_sound = all(bool(part.isfinite().all()) for part in parts) and math.isfinite(factor)
        except (ArithmeticError, ValueError):  # parameters for which a logarithm is 0, for example
            is_sound = False
        if not is_sound:
            shown = ", ".join(f"{key}={values.raw(key)!r:.40}" for key in values)
            raise ModelLoadError(
                f"config.json: there is no rotary embedding of rope_theta={self.theta:g} and {shown:.400}"
            )
        return self

    @property
    def _plain(self) -> Tensor:
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).float() / self.rotary_dim
        return 1.0 / (self.theta**exponents)

    def inv_freq(self) -> tuple[Tensor, float]:
        """Return float32 [rotary_dim / 2] frequencies, and the factor by which cos and sin are multiplied."""
        if self.rope_type == "linear":
            return self._plain / float(self.scaling["factor"]), 1.0
        if self.rope_type == "llama3":
            return self._llama3(self._plain), 1.0
        if self.rope_type == "yarn":
            return self._yarn(self._plain)
        if self.rope_type == "longrope":
            return self._stretched("short_factor"), self._longrope_attention_factor()
        # "dynamic" changes nothing up to max_position_embeddings, and no request gets beyond.
        return self._plain, 1.0

    def long(self) -> LongRope | None:
        """Return the frequencies for requests beyond the border (longrope); None: there is one set for all."""
        border = int(self.scaling.get("original_max_position_embeddings") or 0)
        if self.rope_type != "longrope" or border >= self.max_position_embeddings:
            return None
        return LongRope(border, self._stretched("long_factor"))

    def query_scale(self, positions: Tensor) -> Tensor | None:
        """Return float32 factors of the queries at ``positions`` (Llama 4's, also Ministral 3's); None: there are
        none."""
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
        """Return long waves are stretched, short ones kept, those between interpolated (Llama 3.1's release)."""
        factor = float(self.scaling["factor"])
        low, high = float(self.scaling["low_freq_factor"]), float(self.scaling["high_freq_factor"])
        context = float(self.scaling["original_max_position_embeddings"])
        waves_in_context = context * plain / (2 * math.pi)
        share = ((waves_in_context - low) / (high - low)).clamp(0, 1)  # 0: frequencies are stretched; 1: they are kept
        return (1 - share) * plain / factor + share * plain

    def _yarn(self, plain: Tensor) -> tuple[Tensor, float]:
        """Return the frequencies and factor of YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071, equations 17
        to 23)."""
        scaling = self.scaling
        factor = float(scaling["factor"])
        context = float(scaling.get("original_max_position_embeddings") or self.max_position_embeddings)

        def dimension_of(rotations: float) -> float:
            """Return the dimension whose wave has that many periods within the original context."""
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


def rope_tables(config: RopeConfig, num_positions: int, device: torch.device) -> Rope:
    """Return the cosines and sines of position times each frequency, times the factor.

    With longrope the positions of short requests come first, ``border`` of them, then those of long ones; the rows'
    shifts are the step's.
    """
    inv_freq, factor = config.inv_freq()
    positions, long = torch.arange(num_positions, dtype=torch.float32, device=device), config.long()
    angles = positions[:, None] * inv_freq.to(device)
    if long is not None:
        angles = torch.cat((angles[: long.border], positions[:, None] * long.inv_freq.to(device)))
        positions = torch.cat((positions[: long.border], positions))
    table = torch.cat((angles.cos(), angles.sin()), dim=1).mul_(factor)
    return Rope(table, config.interleaved, config.query_scale(positions))
