"""Which format each matrix of a model is kept in: each has its own, by what the checkpoint says of it.

    format     weights              activations   when
    float32    float32              float32       dtype="float32": exact
    bfloat16   bfloat16             bfloat16      dtype="bfloat16"
    float16    float16, twice       float32       on a CPU, dtype="auto" and "float16" (float16_cpu.py)
    float16    float16              float16       on a GPU, dtype="float16"
    int8       int8, a scale a row  as above      the checkpoint's quantization_config says so (quantised/int8.py)
    fp8        FP8, a scale a row   as above      it says so, or quantization="fp8" (quantised/fp8.py)
    int4, ...  codes and groups'    as above      it says so: compressed-tensors, AWQ, GPTQ, NVFP4, MXFP4
               scales                             (quantised/unpacked.py)
    q4_0, ...  a GGUF's blocks      as above      dtype="auto", each tensor in its type (quantised/gguf.py)
    int16      int16, a scale for   int16         an encoder's on a CPU with AVX-512 VNNI, dtype="float16"
               each 32 of a row                   (compiled.py)

To add a format of a quantization_config, write its file and name it in `_QUANTISED`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ...errors import ModelLoadError
from ...kernels.policy import FASTEST, KernelPolicy
from . import float16_cpu
from .plain import PlainFormat
from .quantised.awq import read_awq
from .quantised.compressed import read_compressed
from .quantised.fp4 import read_modelopt_fp4
from .quantised.fp8 import MadeFp8Format, read_fp8_matrices
from .quantised.gptq import read_gptq
from .quantised.matrices import NEVER_QUANTISED, UNQUANTISED, Asked, QuantisedMatrices
from .quantised.modelopt import read_modelopt_mixed
from .step_rows import ROWS_UNSEEN, StepRows
from .weight import WeightFormat

CPU = torch.device("cpu")
COMPILED_DTYPES = ("auto", "float16", "float32")
"""Settings of dtype with which compiled kernels of a CPU multiply."""

_QUANTISED: tuple[Callable[[Asked], QuantisedMatrices | None], ...] = (
    read_compressed,
    read_awq,
    read_gptq,
    read_modelopt_fp4,
    read_modelopt_mixed,
    read_fp8_matrices,
)
"""Each reads a quantization_config: the matrices that it describes, or None if it is of another method."""


class MadeFp8(NamedTuple):
    """`QuantisedMatrices` of a checkpoint in 16 or 32 bits that becomes FP8 as it is loaded."""

    format: WeightFormat

    @property
    def name(self) -> str:
        return self.format.name

    def of(self, name: str) -> WeightFormat | None:
        return None if NEVER_QUANTISED.search(name) else self.format


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
    dequantises: bool = False  # what a GPU can't multiply becomes plain numbers, else it is an error
    is_compiled: bool = False  # compiled kernels multiply, on a CPU, and weights give rows of their matrices
    has_coded_x: bool = False  # these round activations to 16 bits beside codes
    folder: str = ""  # the checkpoint's, which errors name

    @property
    def name(self) -> str:
        own = "" if self.quantised is None else self.quantised.name
        return own or self.plain.name  # a GGUF may have none of the types that are kept

    @property
    def precision(self) -> dict[str, str]:
        """The dtype of activations, and what they are where matrices multiply them."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"dtype": dtype, "activations": f"int16 beside codes, else {dtype}" if self.has_coded_x else dtype}

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
    stored: Collection[str] | None = (),
    dequantises: bool = False,
    is_compiled: bool = False,
    is_encoder: bool = False,
    folder: str = "",
) -> WeightFormats:
    """Return the formats for the setting ``dtype`` on a device, see the table above.

    Args:
        dtype: "auto" (float16 on a CPU that has FBGEMM, bfloat16 on a GPU) or a dtype's name
        hf_config: the content of config.json, for its quantization_config; None: nothing is quantised by it
        packed: the matrices that are kept in a GGUF file's own formats
        quantization: "fp8": matrices that the checkpoint keeps as plain numbers become FP8 as they are loaded
        stored: names of the tensors in the files, as transformers spells them; None: there are no files
        dequantises: what a GPU can't multiply becomes plain numbers, else it is an error
        is_compiled: the device is a CPU that has compiled kernels, for `COMPILED_DTYPES`
        is_encoder: a step has many tokens, whose products are bound by computing: of 16 bits, compiled kernels multiply
            int16 where the processor does that faster
        folder: of the checkpoint, for errors

    Raises:
        ModelLoadError: the checkpoint is quantised in a way that no format reads, or float16 was asked for on a CPU
            that has no product for it.
    """
    plain: WeightFormat

    def quantised(plain: WeightFormat) -> QuantisedMatrices | None:
        asked = Asked({}, folder, plain, device, stored, dequantises)
        return packed or _quantised(asked, hf_config or {}, quantization)

    if is_compiled and dtype in COMPILED_DTYPES:
        from ...kernels.cpu.compiler.target import host
        from .compiled import CompiledFormat

        kept = torch.float32 if dtype == "float32" else torch.float16
        as_int16 = is_encoder and kept == torch.float16 and host().has_vnni
        plain = CompiledFormat(kept, as_int16=as_int16)
        coded = as_int16 or (packed is not None and dtype == "auto" and packed.name != "")
        own = quantised(plain)
        compiled = WeightFormats(torch.float32, kept, plain, own, policy=policy, is_compiled=True, has_coded_x=coded)
        return replace(compiled, folder=folder)
    if device.type == "cpu" and dtype in ("auto", "float16"):
        if float16_cpu.has_fbgemm():
            float16_cpu.float16_plan()  # now, while nothing else runs that would disturb its measurement
            plain = float16_cpu.Float16Format()
            return WeightFormats(torch.float32, torch.float16, plain, quantised(plain), policy=policy, folder=folder)
        if dtype == "float16":
            raise ModelLoadError(
                "dtype='float16' on a CPU needs FBGEMM, which torch has for x86-64 with AVX2 only: use dtype='auto', "
                "'float32' or 'bfloat16'"
            )
        dtype = "float32"
    torch_dtype: torch.dtype = getattr(torch, "bfloat16" if dtype == "auto" else dtype)
    plain = PlainFormat(torch_dtype)
    own = quantised(plain)
    return WeightFormats(torch_dtype, torch_dtype, plain, own, device, policy, dequantises=dequantises, folder=folder)


def _quantised(asked: Asked, hf_config: Mapping[str, Any], quantization: str) -> QuantisedMatrices | None:
    found = _read_quantization(asked, hf_config)
    if quantization != "fp8":
        return found
    if found is not None and found.name != "fp8":
        raise ModelLoadError(f"quantization='fp8': the checkpoint is in {found.name} already: leave it at 'auto'")
    return found or MadeFp8(MadeFp8Format(asked.plain))


def _read_quantization(asked: Asked, hf_config: Mapping[str, Any]) -> QuantisedMatrices | None:
    for key in ("quantization_config", "compression_config"):  # the second: llm-compressor's, until 2024
        how = hf_config.get(key)
        if not how:
            continue
        how = how if isinstance(how, Mapping) else {}
        if how.get("quant_method") == "mxfp4":  # experts alone (packed_experts.py)
            continue
        where = f"{asked.where}/config.json" if asked.where else "config.json"
        own = asked._replace(config=how, where=f"{where}: {key}")
        for read in _QUANTISED:
            if (found := read(own)) is not None:
                return found if found.name else None
        method = str(how.get("quant_method") or how.get("format") or "no quant_method")
        method = f"{method:.80}" + (f" {how['quant_algo']!s:.80}" if how.get("quant_algo") else "")
        raise ModelLoadError(
            f"{asked.where or 'the checkpoint'}: the weights are quantised ({key} of config.json: {method}) in a way "
            f"that aengine does not read; it reads GGUF, FP8, compressed-tensors, AWQ, GPTQ, and of ModelOpt "
            f"FP8 and NVFP4: {UNQUANTISED}"
        )
    return None
