"""Weights from a GGUF file: dequantised to float32 on the CPU as they are read (numpy lets the GIL go), or as the
blocks of the file, of which `GgufFormat` makes weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....checkpoint.gguf_file import GgufFile
from ....errors import ModelLoadError
from ..gguf_names import GgufNames
from ..quantised.gguf import GgufFormat, dequantised
from .reading import Named, Source, Target, in_threads

_MOST_EXPERTS = 2**14


class GgufMatrices(NamedTuple):
    """`QuantisedMatrices` of a GGUF file."""

    formats: Mapping[str, GgufFormat]  # the keys are transformers' names

    @classmethod
    def of_file(
        cls,
        path: str,
        names: GgufNames,
        types: Collection[str] | None = None,
        compiled: Literal["codes", "float32"] | None = None,
        has_stacks: bool = False,
    ) -> GgufMatrices:
        """
        Args:
            types: names of those that are kept, others become numbers; None: all that have blocks
            compiled: see `GgufFormat`
            has_stacks: matrices of experts are kept, too, but for gates and ups of different types
        """
        formats: dict[str, GgufFormat] = {}
        with GgufFile(path) as file:
            for tensor in file.tensors.values():
                hf_name = names.hf_name(tensor.name)
                is_kept = tensor.type.block_len > 1 and (types is None or tensor.type.name in types)
                form = GgufFormat(tensor.type_code, compiled)
                if isinstance(hf_name, str) and len(tensor.shape) == 2 and is_kept:
                    formats[hf_name.removesuffix(".weight")] = form
                elif has_stacks and not isinstance(hf_name, str) and len(tensor.shape) == 3 and is_kept:
                    before, after = hf_name
                    for expert in range(min(tensor.shape[0], _MOST_EXPERTS)):
                        formats[f"{before}{expert}{after.removesuffix('.weight')}"] = form
        experts = {name.rpartition(".")[0] for name in formats if ".experts." in name}
        for name in experts:  # gate and up are multiplied together
            if formats.get(f"{name}.gate_proj") != formats.get(f"{name}.up_proj"):
                formats.pop(f"{name}.gate_proj", None)
                formats.pop(f"{name}.up_proj", None)
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


def gguf_shape(path: str, name: str, shape: Sequence[int], are_blocks: bool) -> list[int]:
    """Return a shape as GGUF files have it, the columns first. ``are_blocks``: it is that of the tensor's blocks,
    [rows, blocks of a row, bytes of a block]."""
    if not are_blocks:
        return list(reversed(shape))
    with GgufFile(path) as file:
        rows, count, _ = shape
        return [count * file.tensors[name].type.block_len, rows]


def _read(file: GgufFile, names: GgufNames, head_dim: int, target: Target) -> Iterator[Named]:
    def read(name: str, hf_name: str, expert: int | None = None) -> Named:
        if hf_name not in target.places:
            return Named(hf_name, None)
        is_kept = target.places[hf_name].dtype == torch.uint8
        tensor = _blocks(file, name, expert) if is_kept else _dequantise(file, name, expert)
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
            else:  # a stack of experts, read one by one
                before, after = hf_name
                if tensor.shape[0] > _MOST_EXPERTS:
                    raise ModelLoadError(f"{file.path}: tensor {name} is a stack of {tensor.shape[0]} experts")
                yield from (partial(read, name, f"{before}{i}{after}", i) for i in range(tensor.shape[0]))

    return in_threads(jobs(), max(1, torch.get_num_threads()))


def _blocks(file: GgufFile, name: str, expert: int | None = None) -> Tensor:
    """uint8 [rows, blocks of a row, bytes of a block], a copy of what the file has; ``expert``: of a stack."""
    stored = np.array(file.tensor_data(name) if expert is None else file.tensor_data(name)[expert])
    return torch.from_numpy(stored.reshape(len(stored), -1, file.tensors[name].type.block_bytes))


def _dequantise(file: GgufFile, name: str, expert: int | None = None) -> Tensor:
    """Return the tensor in float32; ``expert``: that one of a stack."""
    tensor = file.tensors[name]
    try:
        stored = file.tensor_data(name) if expert is None else file.tensor_data(name)[expert]
        data = dequantised(stored, tensor.shape[-1], tensor.type_code)
    except (NotImplementedError, KeyError, ValueError) as error:
        raise ModelLoadError(
            f"{file.path}: tensor {name} is quantised as {tensor.type.name}, which the gguf package can't read: {error}"
        ) from error
    if not data.flags.writeable:  # float32 already: a view of the file
        data = data.copy()
    if data.size and not (np.isfinite(data.max()) and np.isfinite(data.min())):  # either is NaN if one number is
        raise ModelLoadError(f"{file.path}: tensor {name} holds NaN or infinity: the file is damaged, get it again")
    return torch.from_numpy(data.reshape(tensor.shape if expert is None else tensor.shape[1:]))


def _separate_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Put the first halves of each head's rotary pairs first, which the file has pair by pair: rows or a bias."""
    pairs = tensor.view(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
