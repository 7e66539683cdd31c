"""Which format each matrix of a model is kept in: each has its own, by what the checkpoint says of it.

    format     weights              activations   when
    float32    float32              float32       dtype="float32": exact
    bfloat16   bfloat16             bfloat16      dtype="bfloat16"
    float16    float16, twice       float32       on a CPU, dtype="auto" and "float16" (float16_cpu.py)
    float16    float16              float16       on a GPU, dtype="float16"
    int8       int8, a scale a row  as above      the checkpoint's quantization_config says so (quantised/int8.py)
    fp8        FP8, a scale a row   as above      it says so, or quantization="fp8" (quantised/fp8.py)
    q4_0, ...  a GGUF's blocks      as above      quantization="gguf", for each tensor its type (sources/gguf_source.py)

To add a format of a quantization_config, write its file and name it in `_QUANTISED`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ...checkpoint.name_patterns import NamePatterns
from ...checkpoint.value_reader import ValueReader
from ...errors import ModelLoadError
from ...kernels.policy import FASTEST, KernelPolicy
from . import float16_cpu
from .plain import PlainFormat
from .quantised.fp8 import MadeFp8Format, read_fp8
from .quantised.int8 import read_int8
from .step_rows import ROWS_UNSEEN, StepRows
from .weight import WeightFormat

__all__ = ["AllButIgnored", "QuantisedMatrices", "WeightFormats", "choose_formats"]

CPU = torch.device("cpu")

_QUANTISED: tuple[Callable[[Mapping[str, Any], WeightFormat], WeightFormat | None], ...] = (read_int8, read_fp8)
"""Each reads a quantization_config: the format that it describes, or None if that is another one. The second argument
is that of plain numbers."""
_IGNORED = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
"""Keys of a quantization_config for the names of matrices that are left plain."""
_NEVER_QUANTISED = re.compile(r"(^|\.)(lm_head|embed_tokens|router|gate|shared_expert_gate)$")
"""Matrices that `quantization="fp8"` leaves plain: the head, and those that choose experts."""


class QuantisedMatrices(Protocol):
    """Which of a checkpoint's matrices are quantised, and how."""

    @property
    def name(self) -> str:
        """Name of their format, or names of their formats, for messages."""

    def of(self, name: str) -> WeightFormat | None:
        """Return the format of the matrix of this name, as transformers spells it; None: it is kept as plain
        numbers."""


class AllButIgnored(NamedTuple):
    """`QuantisedMatrices` by a quantization_config: one format, and the names of those that are left plain."""

    format: WeightFormat
    ignored: NamePatterns

    @property
    def name(self) -> str:
        return self.format.name

    def of(self, name: str) -> WeightFormat | None:
        return None if name in self.ignored else self.format


class MadeFp8(NamedTuple):
    """`QuantisedMatrices` of a checkpoint in 16 or 32 bits that becomes FP8 as it is loaded."""

    format: WeightFormat

    @property
    def name(self) -> str:
        return self.format.name

    def of(self, name: str) -> WeightFormat | None:
        return None if _NEVER_QUANTISED.search(name) else self.format


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats of a model's matrices, the dtypes of what is beside them, and the device of all."""

    dtype: torch.dtype  # dtype of activations and norms
    table_dtype: torch.dtype  # dtype of embeddings
    plain: WeightFormat  # format of the matrices that the checkpoint keeps as plain numbers
    quantised: QuantisedMatrices | None = None
    device: torch.device = CPU  # the device of the model
    policy: KernelPolicy = FASTEST  # the policy by which products are computed
    step_rows: StepRows = ROWS_UNSEEN  # what products see of whose tokens they multiply

    @property
    def name(self) -> str:
        return self.plain.name if self.quantised is None else self.quantised.name

    def of(self, name: str) -> WeightFormat:
        """Return the format of the matrix of this name."""
        found = None if self.quantised is None else self.quantised.of(name)
        return self.plain if found is None else found


def choose_formats(
    dtype: str,
    device: torch.device,
    hf_config: Mapping[str, Any] | None = None,
    policy: KernelPolicy = FASTEST,
    packed: QuantisedMatrices | None = None,
    quantization: str = "auto",
) -> WeightFormats:
    """Return the formats for the setting ``dtype`` on a device, see the table above.

    Args:
        dtype: "auto" (float16 on a CPU that has FBGEMM, bfloat16 on a GPU) or a dtype's name
        hf_config: the content of config.json, for its quantization_config; None: nothing is quantised by it
        packed: the matrices that are kept in a GGUF file's own formats
        quantization: "fp8": matrices that the checkpoint keeps as plain numbers become FP8 as they are loaded

    Raises:
        ModelLoadError: the checkpoint is quantised in a way that no format reads, or float16 was asked for on a CPU
            that has no product for it.
    """
    plain: WeightFormat
    if device.type == "cpu" and dtype in ("auto", "float16"):
        if float16_cpu.has_fbgemm():
            float16_cpu.float16_plan()  # now, while nothing else runs that would disturb its measurement
            plain = float16_cpu.Float16Format()
            quantised = packed or _quantised(hf_config, plain, quantization, device)
            return WeightFormats(torch.float32, torch.float16, plain, quantised, policy=policy)
        if dtype == "float16":
            raise ModelLoadError(
                "dtype='float16' on a CPU needs FBGEMM, which torch has for x86-64 with AVX2 only: use dtype='auto', "
                "'float32' or 'bfloat16'"
            )
        dtype = "float32"
    torch_dtype: torch.dtype = getattr(torch, "bfloat16" if dtype == "auto" else dtype)
    plain = PlainFormat(torch_dtype)
    quantised = packed or _quantised(hf_config, plain, quantization, device)
    return WeightFormats(torch_dtype, torch_dtype, plain, quantised, device, policy)


def _quantised(
    hf_config: Mapping[str, Any] | None, plain: WeightFormat, quantization: str, device: torch.device
) -> QuantisedMatrices | None:
    found = None if hf_config is None else _read_quantization(hf_config, plain)
    if quantization != "fp8":
        return found
    if found is not None and found.name != "fp8":
        raise ModelLoadError(f"quantization='fp8': the checkpoint is in {found.name} already: leave it at 'auto'")
    if device.type == "cpu":
        raise ModelLoadError("quantization='fp8' is for GPUs: leave it at 'auto' on a CPU")
    return found or MadeFp8(MadeFp8Format(plain))


def _read_quantization(hf_config: Mapping[str, Any], plain: WeightFormat) -> AllButIgnored | None:
    for key in ("quantization_config", "compression_config"):  # the second: llm-compressor's, until 2024
        how = hf_config.get(key)
        if not how:
            continue
        how = how if isinstance(how, Mapping) else {}
        if how.get("quant_method") == "mxfp4":  # experts alone, which become plain numbers (packed_experts.py)
            continue
        for read in _QUANTISED:
            if (found := read(how, plain)) is not None:
                at = ValueReader(hf_config).at(key)
                where, ignored = next(((name, at.texts(name)) for name in _IGNORED if how.get(name)), ("ignore", []))
                return AllButIgnored(found, NamePatterns(ignored, f"config.json: {key}: {where}"))
        method = f"{how.get('quant_method') or how.get('format') or 'unknown method'!s:.80}"
        raise ModelLoadError(
            f"the weights are quantised ({key} of config.json: {method}), and of quantised checkpoints aengine reads "
            f"GGUF, FP8, and 8-bit integers of compressed-tensors with a scale a row: give the checkpoint in 16 or 32 "
            f"bits that they were made from, or a .gguf file of the model"
        )
    return None
