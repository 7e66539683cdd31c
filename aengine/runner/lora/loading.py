"""`LoraLoader`: reads an adapter's files into a slot while steps go on.

The files are read, never mapped; each tensor is checked and copied by itself, in pieces that hold nothing up: on a GPU
in a queue of their own, on a CPU few numbers at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from ...checkpoint.lora import LoraFiles, check_matrices, model_name, read_lora
from ...checkpoint.safetensors_files import TensorPlace, tensor_places
from ...errors import InvalidRequestError, ModelLoadError
from ..platforms.platform import Platform
from .matrices import Factors, SlotMatrices, layer_of, row_pieces

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}
"""The bits that are all set in what is no finite number."""


class LoraLoader:
    def __init__(self, platform: Platform, max_ranks: tuple[int, int], num_layers: int) -> None:
        """``max_ranks``: of matrices, and of those of experts; ``num_layers``: of the whole model, if some may be on
        other ranks."""
        self._platform, self._max_ranks, self._num_layers = platform, max_ranks, num_layers
        self._stream = platform.side_stream()

    @torch.inference_mode()
    def load(self, slot: int, path: str, matrices: Sequence[SlotMatrices]) -> None:
        """Fill the slot of all weights. Raises InvalidRequestError: it is no adapter for this model; some of the slot's
        matrices may be its own then."""
        try:
            files = self._own(read_lora(Path(path), *self._max_ranks), matrices)
            with open(files.weights, "rb") as file:
                reader = _Reader(file, files, tensor_places(files.weights))
                for own in matrices:
                    own.fill(slot, reader.factors, self._copy)
        except (ModelLoadError, OSError, ValueError) as error:
            raise InvalidRequestError(f"the adapter can't be loaded: {error}") from error
        if (event := self._stream.launch(lambda: None, None)) is not None:
            event.synchronize()

    def _own(self, files: LoraFiles, matrices: Sequence[SlotMatrices]) -> LoraFiles:
        """Return the part of it that is of this rank's layers, by the model's names. Raises ModelLoadError."""
        known = {name: shape for own in matrices for name, shape in own.shapes.items()}
        layers = set(map(layer_of, known))
        found = {}
        for name, own in files.matrices.items():
            name = model_name(name, known)
            layer = layer_of(name)
            if layer is None or layer in layers or layer >= self._num_layers:  # others are other stages'
                found[name] = own
        own_files = replace(files, matrices=found)
        check_matrices(own_files, known)
        return own_files

    def _copy(self, to: Tensor, new: Tensor) -> None:
        for rows in [slice(None)] if self._platform.is_accelerator else row_pieces(new):
            self._stream.launch(partial(_put, to[rows], new[rows]), None)


def _put(to: Tensor, new: Tensor) -> None:
    to.copy_(new)


class _Reader:
    def __init__(self, file: BinaryIO, files: LoraFiles, places: dict[str, TensorPlace]) -> None:
        self._file, self._files, self._places = file, files, places

    def factors(self, name: str) -> Factors | None:
        own = self._files.matrices.get(name)
        if own is None:
            return None
        a, b = map(self._tensor, own.names)
        if own.num_experts:  # rows of A are by expert, columns of B by rank
            a, b = a.unflatten(0, (own.num_experts, -1)), b.unflatten(1, (-1, own.num_experts)).permute(2, 0, 1)
        return Factors(a, b, own.scale)

    def _tensor(self, name: str) -> Tensor:
        place = self._places[name]
        dtype = _DTYPES.get(place.dtype)
        if dtype is None:
            raise ModelLoadError(f"{name:.200} is stored as {place.dtype:.20}: an adapter's are F32, F16 or BF16")
        if prod(place.shape) * dtype.itemsize != place.end - place.begin:
            raise ModelLoadError(f"{name:.200} has {place.end - place.begin} bytes, which is not its shape's size")
        content = bytearray(place.end - place.begin)
        self._file.seek(place.begin)
        if self._file.readinto(content) != len(content):  # type: ignore[attr-defined]
            raise ModelLoadError(f"the file ends within {name:.200}: fetch it again")
        exponents = np.frombuffer(content, dtype=f"u{dtype.itemsize}") & _EXPONENTS[dtype]
        if exponents.max(initial=0) == _EXPONENTS[dtype]:
            raise ModelLoadError(f"{name:.200} has numbers that are not finite")
        return torch.frombuffer(content, dtype=dtype).view(place.shape)
