"""Weights from a GGUF file, dequantised to float32 on the CPU (numpy lets the GIL go)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ...checkpoint.gguf_file import GgufFile
from ...errors import ModelLoadError
from .gguf_names import GgufNames
from .reading import Named, Source, Target, in_threads

__all__ = ["read_gguf"]

_LONG_ROW = 2**14  # numbers
_MOST_EXPERTS = 2**14


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
        tensor = _dequantise(file, name, expert)
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


def _dequantise(file: GgufFile, name: str, expert: int | None = None) -> Tensor:
    """The tensor in float32; ``expert``: that one of a stack."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    tensor = file.tensors[name]
    try:
        stored = file.tensor_data(name) if expert is None else file.tensor_data(name)[expert]
        data = dequantize(_long_rows(stored, tensor.shape[-1]), GGMLQuantizationType(tensor.type_code))
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
