"""ModelOpt's recipes that name each matrix with its own format: quant_algo "MIXED_PRECISION".

    "quantized_layers": {"model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}, ...}

What is not named is plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..weight import WeightFormat
from .fp4 import read_modelopt_fp4
from .fp8 import read_fp8_matrices
from .matrices import Asked, PlainMatrices, ignored_matrices, whole_names

_MIXED = "MIXED_PRECISION"


class NamedMatrices(NamedTuple):
    """`QuantisedMatrices` by their names."""

    formats: Mapping[str, WeightFormat]
    ignored: PlainMatrices

    @property
    def name(self) -> str:
        return ", ".join(sorted({form.name for form in self.formats.values()}))

    def of(self, name: str) -> WeightFormat | None:
        if name in self.ignored:
            return None
        return next((self.formats[own] for own in whole_names(name) if own in self.formats), None)


def read_modelopt_mixed(asked: Asked) -> NamedMatrices | None:
    """Return what a quantization_config of ModelOpt names; None if it names nothing. Raises ModelLoadError."""
    if asked.config.get("quant_method") != "modelopt" or asked.config.get("quant_algo") != _MIXED:
        return None
    layers, by_algorithm = asked.values.at("quantized_layers"), dict[str, WeightFormat]()
    formats = {}
    for name in layers:
        how = layers.at(name)
        algorithm, group = how.text("quant_algo"), how.integer("group_size", 16)
        if algorithm not in by_algorithm:
            alike = asked._replace(config={**asked.config, "quant_algo": algorithm})
            found = read_modelopt_fp4(alike) or read_fp8_matrices(alike)
            if found is None:
                raise asked.refusal(f"quantized_layers: {name:.80} in {algorithm!r:.40}")
            by_algorithm[algorithm] = found.format
        if by_algorithm[algorithm].name == "nvfp4" and group != 16:
            raise asked.refusal(f"quantized_layers: {name:.80} in {algorithm} with a scale for {group} columns")
        formats[name] = by_algorithm[algorithm]
    if not formats:
        raise asked.values.error("quantized_layers", "names no matrices")
    return NamedMatrices(formats, ignored_matrices(asked))
