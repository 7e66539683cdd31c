"""Weights from a GGUF file: dequantised to float32 on the CPU as they are read (numpy lets the GIL go), or kept.

Kept, a matrix stays in memory as the blocks of the file, each matrix in its own type: a half (Q8_0) to a quarter (Q4_0,
Q4_K) of 16 bits. Each product dequantises it anew, some rows at a time, which takes some 30 times as long for one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ....checkpoint.gguf_file import GGML_TYPES, GgufFile
from ....errors import InternalError, ModelLoadError
from ..gguf_names import GgufNames
from ..weight import ExpertWeights, StoredTensor, Weight
from .reading import Named, Source, Target, in_threads

__all__ = ["GgufFormat", "GgufMatrices", "GgufWeight", "gguf_types", "read_gguf"]

_LONG_ROW = 2**14  # numbers
_MOST_EXPERTS = 2**14
_NUMBERS_AT_ONCE = 2**20
"""Numbers that a product dequantises at once: 4 MiB of float32, whatever the size of the matrix."""


class GgufWeight(Weight):
    """blocks uint8 [out_features, blocks of a row, bytes of a block]; ``type_code``: of ggml's type."""

    __slots__ = ("_blocks", "_type_code")

    def __init__(self, blocks: Tensor, type_code: int, bias: Tensor | None) -> None:
        self._blocks = blocks
        self._type_code = type_code
        self.bias = bias

    def multiply(self, x: Tensor) -> Tensor:
        row_size = x.shape[1]
        outs = []
        for rows in self._blocks.split(max(1, _NUMBERS_AT_ONCE // row_size)):
            numbers = _numbers(rows.flatten(1).numpy(), row_size, self._type_code)
            outs.append(F.linear(x, torch.from_numpy(numbers.reshape(-1, row_size)).to(x.dtype)))
        out = torch.cat(outs, 1)
        return out if self.bias is None else out.add_(self.bias)


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """Blocks of one of ggml's types, on a CPU."""

    type_code: int

    @property
    def name(self) -> str:
        return GGML_TYPES[self.type_code].name.lower()

    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        _, length, num_bytes = GGML_TYPES[self.type_code]
        shape = (out_features, in_features // length, num_bytes)
        found = [StoredTensor("weight", shape, torch.uint8, out_features * in_features, in_dim=1)]
        if has_bias:
            found.append(StoredTensor("bias", (out_features,), torch.float32, out_features))
        return found

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        """Raises ModelLoadError: the gguf package can't dequantise the type."""
        blocks, bias = tensors["weight"], tensors.get("bias")
        try:
            _numbers(
                blocks[:1].flatten(1).numpy(), blocks.shape[1] * GGML_TYPES[self.type_code].block_len, self.type_code
            )
        except (NotImplementedError, KeyError, ValueError) as error:
            raise ModelLoadError(f"a matrix is quantised as {self.name}, which the gguf package can't read") from error
        return GgufWeight(blocks, self.type_code, None if bias is None else bias.float())

    def make_experts(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> ExpertWeights:
        raise InternalError("stacks of experts become numbers as they are read")


class GgufMatrices(NamedTuple):
    """`QuantisedMatrices` of a GGUF file: those that are not stacks of experts, nor the table of embeddings."""

    formats: Mapping[str, GgufFormat]  # the keys are transformers' names

    @classmethod
    def of_file(cls, path: str, names: GgufNames) -> GgufMatrices:
        formats = {}
        with GgufFile(path) as file:
            for tensor in file.tensors.values():
                hf_name = names.hf_name(tensor.name)
                if isinstance(hf_name, str) and len(tensor.shape) == 2 and tensor.type.block_len > 1:
                    formats[hf_name.removesuffix(".weight")] = GgufFormat(tensor.type_code)
        return cls(formats)

    @property
    def name(self) -> str:
        return ", ".join(sorted({form.name for form in self.formats.values()}))

    def of(self, name: str) -> GgufFormat | None:
        return self.formats.get(name)


def gguf_types(path: str, names: GgufNames) -> dict[str, str]:
    """The types of matrices in blocks, by transformers' names of the matrices; of experts those of the first one."""
    types = {}
    with GgufFile(path) as file:
        for tensor in file.tensors.values():
            if tensor.type.block_len > 1:
                name = names.hf_name(tensor.name)
                full = name if isinstance(name, str) else "0".join(name)
                types[full.removesuffix(".weight")] = tensor.type.name.lower()
    return types


def read_gguf(path: str, names: GgufNames, head_dim: int, target: Target) -> Source:
    """``names``: of the model's family. Raises ModelLoadError: the file is damaged, or of a type that can't be read."""
    file = GgufFile(path)
    total = sum(4 * prod(tensor.shape) for tensor in file.tensors.values())
    return Source(_read(file, names, head_dim, target), total)


def read_gguf_tensor(path: str, name: str) -> Tensor:
    """One tensor in float32. Raises ModelLoadError as `read_gguf` does."""
    with GgufFile(path) as file:
        return _dequantise(file, name).clone()  # a copy: the file's map is closed here


def _read(file: GgufFile, names: GgufNames, head_dim: int, target: Target) -> Iterator[Named]:
    def read(name: str, hf_name: str, expert: int | None = None) -> Named:
        if hf_name not in target.places:
            return Named(hf_name, None)
        is_kept = target.places[hf_name].dtype == torch.uint8
        tensor = _blocks(file, name) if is_kept else _dequantise(file, name, expert)
        if names.is_interleaved(hf_name) and not tensor.shape[0] % head_dim:  # the loader reports another shape
            tensor = _separate_halves(tensor, head_dim)
        if names.is_less_one(hf_name):
            tensor = tensor - 1.0
        shape = target.places[hf_name].shape
        if tensor.dim() < len(shape) and tensor.shape == tuple(size for size in shape if size != 1):
            tensor = tensor.view(shape)  # llama.cpp's converter has dropped a dimension
        return target.named(hf_name, tensor, keep=False)

    def jobs() -> Iterator[Callable[[], Named]]:
        for name, tensor in file.tensors.items():
            hf_name = names.hf_name(name)
            if isinstance(hf_name, str):
                yield partial(read, name, hf_name)
            else:  # a stack of experts, dequantised one by one
                before, after = hf_name
                if tensor.shape[0] > _MOST_EXPERTS:
                    raise ModelLoadError(f"{file.path}: tensor {name} is a stack of {tensor.shape[0]} experts")
                yield from (partial(read, name, f"{before}{i}{after}", i) for i in range(tensor.shape[0]))

    return in_threads(jobs(), max(1, torch.get_num_threads()))


def _blocks(file: GgufFile, name: str) -> Tensor:
    """uint8 [rows, blocks of a row, bytes of a block], a copy of what the file has."""
    stored = np.array(file.tensor_data(name))
    return torch.from_numpy(stored.reshape(len(stored), -1, file.tensors[name].type.block_bytes))


def _numbers(stored: NDArray[Any], row_size: int, type_code: int) -> NDArray[Any]:
    """float32, several rows as one, of ``stored`` [..., bytes of a row]."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(_long_rows(stored, row_size), GGMLQuantizationType(type_code))


def _dequantise(file: GgufFile, name: str, expert: int | None = None) -> Tensor:
    """Return the tensor in float32; ``expert``: that one of a stack."""
    tensor = file.tensors[name]
    try:
        stored = file.tensor_data(name) if expert is None else file.tensor_data(name)[expert]
        data = _numbers(stored, tensor.shape[-1], tensor.type_code)
    except (NotImplementedError, KeyError, ValueError) as error:
        raise ModelLoadError(
            f"{file.path}: tensor {name} is quantised as {tensor.type.name}, which the gguf package can't read: {error}"
        ) from error
    if not data.flags.writeable:  # float32 already: a view of the file
        data = data.copy()
    return torch.from_numpy(data.reshape(tensor.shape if expert is None else tensor.shape[1:]))


def _long_rows(stored: NDArray[Any], row_size: int) -> NDArray[Any]:
    """``stored`` [..., bytes of a row], several rows as one. ``row_size``: numbers of a row.

    The gguf package takes 16 rows at a time. Of short ones that is mostly Python, for which threads wait.
    """
    rows = stored.reshape(-1, stored.shape[-1])
    most = min(len(rows), max(1, _LONG_ROW // row_size))
    count = next(count for count in range(most, 0, -1) if len(rows) % count == 0)
    return rows.reshape(len(rows) // count, -1)


def _separate_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Put the first halves of each head's rotary pairs first, which the file has pair by pair: rows or a bias."""
    pairs = tensor.view(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
