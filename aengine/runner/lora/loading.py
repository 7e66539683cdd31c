"""`LoraLoader`: reads an adapter's files into a slot while steps go on.

    file ──a few MiB at a time──> host memory ──one copy──> device memory ──each tensor to its place──> slot
                                  (two, in turns)           on a CPU it is the host's

The files are read, never mapped. Whatever is done holds nothing up: on a GPU it is in a queue of its own, on a CPU of
few numbers at a time, which torch computes without the threads that steps run on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...checkpoint.lora import LoraFiles, check_matrices, model_name, read_lora
from ...checkpoint.safetensors_files import tensor_places
from ...errors import InvalidRequestError, ModelLoadError
from ..platforms.platform import Event, Platform
from .matrices import SlotMatrices, Target, layer_of

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_MOST_ALONE = 1 << 15  # numbers that torch computes without other threads
_ROOM = 4 << 20  # bytes that are read at a time, if no unit of a tensor has more


class _Chunk(NamedTuple):
    """Some units of a tensor."""

    begin: int  # its first byte in the file, and the one behind its last
    end: int
    dtype: torch.dtype
    first: int  # its first unit
    targets: Sequence[Target]  # those of the whole tensor


class LoraLoader:
    def __init__(self, platform: Platform, max_ranks: tuple[int, int], num_layers: int) -> None:
        """``max_ranks``: of matrices, and of those of experts; ``num_layers``: of the whole model, if some may be on
        other ranks."""
        self._platform, self._max_ranks, self._num_layers = platform, max_ranks, num_layers
        self._stream = platform.side_stream()
        self._most = sys.maxsize if platform.is_accelerator else _MOST_ALONE
        self._scale = 0.0, torch.zeros(1, device=platform.device)
        self._reserve(_ROOM)

    def _reserve(self, size: int) -> None:
        pinned = self._platform.pins_memory
        self._host = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._events: list[Event | None] = [None, None]  # after what reads each of these
        self._device = torch.empty(size, dtype=torch.uint8, device=self._platform.device)

    @torch.inference_mode()
    def load(self, slot: int, path: str, matrices: Sequence[SlotMatrices]) -> None:
        """Fill the slot of all weights. Raises InvalidRequestError: it is no adapter for this model; some of the slot's
        matrices may be its own then."""
        try:
            files = self._own(read_lora(Path(path), *self._max_ranks), matrices)
            targets: dict[str, list[Target]] = {}
            unfilled: list[Tensor] = []
            for own in matrices:
                found = list(own.targets(slot, files.matrices.get))
                for target in found:
                    targets.setdefault(target.name, []).append(target)
                if sum(target.to.numel() for target in found) < sum(part.numel() for part in own.of(slot)):
                    unfilled += own.of(slot)
            self._stream.launch(partial(self._clear, unfilled), None)
            self._fill(files.weights, targets)
            self._stream.launch(partial(self._check, slot, matrices), None)
        except (ModelLoadError, OSError, ValueError) as error:
            raise InvalidRequestError(f"the adapter can't be loaded: {error}") from error

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

    def _fill(self, path: Path, targets: Mapping[str, Sequence[Target]]) -> None:
        """Read the tensors that are wanted, in the order of the file, and queue what puts them into their places."""
        room = max([_ROOM, *(prod(own[0].unit) * 4 for own in targets.values())])
        if room > len(self._host[0]):
            self._reserve(room)
        with open(path, "rb") as file:
            for number, group in enumerate(_groups(_chunks(path, targets, room), room)):
                host, event = self._host[number % 2], self._events[number % 2]
                if event is not None:
                    event.synchronize()
                begin, size = group[0].begin, group[-1].end - group[0].begin
                file.seek(begin)
                if file.readinto(host.numpy().data[:size]) != size:
                    raise ModelLoadError(f"the file ends within {group[-1].targets[0].name:.200}: fetch it again")
                self._events[number % 2] = self._stream.launch(partial(self._put, host[:size], group), None)

    # -- what is queued

    def _clear(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            for (piece,) in _pieces(self._most, tensor):
                piece.zero_()

    def _put(self, raw: Tensor, group: Sequence[_Chunk]) -> None:
        if self._platform.is_accelerator:
            raw = self._device[: len(raw)].copy_(raw, non_blocking=True)
        for begin, end, dtype, first, targets in group:
            new = raw[begin - group[0].begin : end - group[0].begin].view(dtype).view(-1, *targets[0].unit)
            for own in targets:
                low, high = max(own.begin, first), min(own.begin + len(own.to), first + len(new))
                if low < high:
                    part = new[low - first : high - first, ..., own.last]
                    self._set(own.to[low - own.begin : high - own.begin], part, own.scale)

    def _set(self, to: Tensor, new: Tensor, scale: float) -> None:
        for own_to, own_new in _pieces(self._most, to, new):
            if scale == 1.0:
                own_to.copy_(own_new)
            else:  # in float32, rounded once
                torch.mul(own_new, self._factor(scale), out=own_to)

    def _factor(self, scale: float) -> Tensor:
        if self._scale[0] != scale:
            self._scale = scale, torch.full((1,), scale, device=self._platform.device)
        return self._scale[1]

    def _check(self, slot: int, matrices: Sequence[SlotMatrices]) -> None:
        """Raise ModelLoadError for numbers that are not finite, once all that was queued is done."""
        names, extremes = [], list[Tensor]()
        for own in matrices:
            for part in own.of(slot):
                for (piece,) in _pieces(self._most, part):
                    extremes += torch.aminmax(piece)
                    names += [own.names] * 2
        for name, is_finite in zip(names, torch.stack(extremes).float().isfinite().tolist(), strict=True):
            if not is_finite:
                raise ModelLoadError(f"the factors of {name:.200} have numbers that are not finite")


def _pieces(most: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors of one shape in pieces of at most so many numbers."""
    whole = tensors[0]
    if whole.numel() <= most:
        yield tensors
    elif len(whole) == 1:
        yield from _pieces(most, *(tensor[0] for tensor in tensors))
    else:
        rows = max(1, most * len(whole) // whole.numel())
        for begin in range(0, len(whole), rows):
            yield from _pieces(most, *(tensor[begin : begin + rows] for tensor in tensors))


def _chunks(path: Path, targets: Mapping[str, Sequence[Target]], room: int) -> Iterator[_Chunk]:
    """Yield the tensors that are wanted, in the order of the file: of one that is larger than ``room`` several chunks.
    Raises ModelLoadError."""
    places = tensor_places(path)
    for name in sorted(targets, key=lambda name: places[name].begin):
        own, place = targets[name], places[name]
        dtype = _DTYPES.get(place.dtype)
        if dtype is None:
            raise ModelLoadError(f"{name:.200} is stored as {place.dtype:.20}: an adapter's are F32, F16 or BF16")
        if prod(place.shape) * dtype.itemsize != place.end - place.begin:
            raise ModelLoadError(f"{name:.200} has {place.end - place.begin} bytes, which is not its shape's size")
        size = prod(own[0].unit) * dtype.itemsize
        units = room // size
        for first, begin in enumerate(range(place.begin, place.end, units * size)):
            yield _Chunk(begin, min(begin + units * size, place.end), dtype, first * units, own)


def _groups(chunks: Iterator[_Chunk], room: int) -> Iterator[list[_Chunk]]:
    """Yield chunks that are read together: they lie one behind the other in the file."""
    group: list[_Chunk] = []
    for chunk in chunks:
        place = chunk.begin - group[0].begin if group else 0
        is_next = not group or chunk.begin == group[-1].end
        if not is_next or place % chunk.dtype.itemsize or chunk.end - chunk.begin + place > room:
            yield group
            group = []
        group.append(chunk)
    yield group
