"""A tape of compiled ops, which is to a CPU what a graph of launches is to a GPU.

    with record(rows=512) as tape:
        y = some_op(x)                # appended, not run; its memory is the tape's
    tape.run(rows=3)                  # all ops, over the first 3 rows of their tensors

Outside of `record` an op runs at once. An op is a kernel, its arguments and the number of its chunks: ``factor`` for
each ``grain`` rows, at most ``most``. What has rows has room for as many as a step may have; how many there are is said
at each run. A tensor may have several rows for each of them.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.autograd.profiler import record_function
from torch.overrides import TorchFunctionMode

from .library import library
from .team import ARGUMENTS, COUNTER_WORDS, OP_WORDS, aligned_words

Argument: TypeAlias = "Tensor | int | float | None"
"""A tensor's address, an int64, a float32 in the lower half of a word, or the address that is none."""


class NotRecorded(Exception):
    """What was to be recorded has an op that no tape can hold; the message names it."""


class Tape:
    """Ops in the order in which they run."""

    def __init__(self) -> None:
        self._kernels: list[str] = []
        self._words: list[list[int]] = []
        self._kept: list[object] = []  # owners of memory that the ops use

    def append(self, kernel: str, arguments: Sequence[Argument], factor: int, grain: int, most: int) -> None:
        assert len(arguments) <= OP_WORDS - ARGUMENTS
        self._kernels.append(kernel)
        self._words.append([0, factor, grain, most, *map(_word, arguments)])
        self._kept.extend(x for x in arguments if isinstance(x, Tensor) and not (_now.arena and _now.arena.owns(x)))

    def keep(self, owner: object) -> None:
        """Keep an object as long as the tape."""
        self._kept.append(owner)

    def finish(self) -> None:
        """Compile what is needed; from now on the tape can be run."""
        addresses = library().addresses(self._kernels)
        self._memory = aligned_words(OP_WORDS * len(self._words))
        for i, (kernel, words) in enumerate(zip(self._kernels, self._words, strict=True)):
            words[0] = addresses[kernel]
            self._memory[i * OP_WORDS : i * OP_WORDS + len(words)] = words
        self._counters = aligned_words(COUNTER_WORDS * len(self._words))
        self._address = self._memory.ctypes.data

    def run(self, rows: int) -> None:
        """Run all ops over this many rows; returns when they are done."""
        with _traced("tape"):
            library().team.run(self._address, len(self._words), rows, self._counters)

    def __len__(self) -> int:
        return len(self._words)


def _word(argument: Argument) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        return int.from_bytes(struct.pack("<f", argument), "little")
    return argument or 0


class Arena:
    """Memory of the tensors that a recording makes. When no tensor uses it any more, later ones of the size do."""

    def __init__(self, rows: int) -> None:
        """``rows``: most rows of a run."""
        self.rows = rows
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._places: set[int] = set()
        self.num_bytes = 0

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is the arena's: the arena keeps it, and a later tensor may have it."""
        with DisableTorchFunction():
            return tensor.untyped_storage().data_ptr() in self._places

    def empty(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A new tensor [rows, columns]."""
        size = rows * columns * dtype.itemsize
        free = self._free.setdefault(size, [])
        if free:
            memory = free.pop()
        else:
            memory = aligned_words(-(-size // 8)).view(np.uint8)
            self._places.add(memory.ctypes.data)
            self.num_bytes += size
        lent = memory[:size]  # an object of its own, which lives as long as the tensor's storage
        weakref.finalize(lent, free.append, memory)
        with DisableTorchFunction():
            return torch.from_numpy(lent).view(dtype).view(rows, columns)


class _OnlyViews(TorchFunctionMode):
    """Refuses what torch computes by itself. (A TorchDispatchMode would import its compiler, for a second.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in _NO_OPS and name not in _PERHAPS_NO_OPS:
            raise NotRecorded(name)
        result = func(*args, **(kwargs or {}))
        if name in _PERHAPS_NO_OPS and result is not args[0]:
            raise NotRecorded(name)
        return result


_NO_OPS = {
    "__get__", "__len__", "__hash__", "data_ptr", "dim", "is_contiguous", "numel", "size", "storage_offset", "stride",
    "element_size", "split", "unbind", "unflatten", "unsqueeze", "view",
}  # fmt: skip
_PERHAPS_NO_OPS = {"contiguous", "float"}
"""They may return the tensor itself."""


class _Recording:
    """What is being recorded now."""

    tape: Tape | None = None
    arena: Arena | None = None


_now = _Recording()


@contextmanager
def record(rows: int) -> Iterator[Tape]:
    """Append the ops that are launched to a tape, whose runs have at most ``rows`` rows. It is finished at the end.

    Raises NotRecorded: an op is torch's own.
    """
    tape = Tape()
    _now.tape, _now.arena = tape, Arena(rows)
    tape.keep(_now.arena)
    try:
        with _OnlyViews():
            yield tape
    finally:
        _now.tape = _now.arena = None
    tape.finish()


def is_recording() -> bool:
    return _now.tape is not None


def empty(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A new tensor [rows, columns] for an op to fill; of a recording, for as many rows as a run may have, or for each
    of them several."""
    if _now.arena is None:
        return torch.empty(rows, columns, dtype=dtype)
    assert rows % _now.arena.rows == 0
    return _now.arena.empty(rows, columns, dtype)


def launch(
    kernel: str, arguments: Sequence[Argument], rows: int, factor: int = 1, grain: int = 1, most: int = 0
) -> None:
    """Run an op over ``rows`` rows, or append it to the tape that is being recorded. ``most``: of chunks, if not 0."""
    if _now.tape is not None and _now.arena is not None:
        each = rows // _now.arena.rows
        assert each * _now.arena.rows == rows and (each == 1 or grain == 1)
        _now.tape.append(kernel, arguments, factor * each, grain, most)
        return
    with _traced(kernel):
        library().run_once(kernel, [0, factor, grain, most, *map(_word, arguments)], rows)


def _traced(name: str) -> AbstractContextManager[Any]:
    """Show what runs in torch's profile, while one is recorded."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()
