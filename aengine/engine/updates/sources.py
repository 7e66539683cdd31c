"""What new weights may come from, beside a path: tensors of this process, memory of a GPU, a trainer's group.

The library of the tensors is the caller's: none is imported here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ...errors import InvalidRequestError
from ...limits.values import not_valid, shown

MOST_TENSORS = 1 << 19
_MOST_NAME = 512  # characters of a tensor's name
_MOST_DIMENSIONS = 8
_MOST_NUMBERS = 1 << 36  # that one tensor may have
_MOST_PATIENCE = 1e6  # seconds
_COPIED = 1 << 20  # bytes that are copied at a time, within which no other thread of this process runs


@dataclass(frozen=True, slots=True)
class IpcTensors:
    """Tensors on a GPU whose memory the workers, on that GPU or another, read as it is (CUDA IPC): plain data, for
    another process too. The tensors must stay as they are until `update_weights` has returned."""

    entries: Sequence[Sequence[Any]]  # name, dtype, shape, strides, offset, and the handle of the storage, of each

    @classmethod
    def of(cls, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> IpcTensors:
        """Share tensors of torch on a GPU, in the process that has made them. Raises InvalidRequestError."""
        entries = []
        for name, tensor in pairs_of(tensors):
            own = checked(name, tensor).tensor
            if not getattr(own, "is_cuda", False):
                raise InvalidRequestError(f"{shown(name)} is not on a GPU: give the tensors as they are")
            if own.is_neg():
                raise InvalidRequestError(
                    f"{shown(name)} is a view with other signs: give its resolve_neg(), and keep it"
                )
            handle = own.untyped_storage()._share_cuda_()
            where = [int(n) for n in own.stride()], int(own.storage_offset())
            entries.append([name, dtype_of(own), [int(n) for n in own.shape], *where, list(handle)])
        return cls(entries)


@dataclass(frozen=True, slots=True)
class TrainerGroup:
    """A process group of torch whose rank 0 is a trainer, and whose others are the engine's ranks, in their order: it
    sends each tensor to all of them by broadcast. See docs/training.md for its side."""

    host: str
    port: int
    tensors: Sequence[tuple[str, str, Sequence[int]]]  # name, dtype ("bfloat16") and shape of each, in this order
    backend: str = "gloo"  # "nccl": from GPU to GPU
    timeout: float = 60.0  # seconds that the trainer may take for each of them

    def checked(self) -> TrainerGroup:
        """Return it as it is. Raises InvalidRequestError: no such group can be met."""
        tensors = self.tensors if isinstance(self.tensors, Sequence) else (None,)
        if not isinstance(self.host, str) or not self.host:
            raise not_valid("host", self.host, "where the trainer's TCPStore is")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 < self.port < 1 << 16:
            raise not_valid("port", self.port, "1 to 65535")
        if self.backend not in ("gloo", "nccl"):
            raise not_valid("backend", self.backend, "'gloo' or 'nccl'")
        if not isinstance(self.timeout, int | float) or not 0 < self.timeout < _MOST_PATIENCE:
            raise not_valid("timeout", self.timeout, f"seconds, above 0 and below {_MOST_PATIENCE}")
        if len(tensors) > MOST_TENSORS or not all(map(_is_announced, tensors)):
            raise not_valid("tensors", tensors, "the name, the dtype ('bfloat16') and the shape of each")
        return self


def _is_announced(entry: Any) -> bool:
    match entry:
        case [str(name), str(_), [*shape]] if 0 < len(name) <= _MOST_NAME and len(shape) <= _MOST_DIMENSIONS:
            return all(type(n) is int and n >= 0 for n in shape) and prod(shape) < _MOST_NUMBERS
    return False


class Given(NamedTuple):
    """A tensor that was checked, and its bytes."""

    tensor: Any
    dtype: str
    shape: tuple[int, ...]


def pairs_of(source: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and tensors. Raises InvalidRequestError: they are none."""
    pairs = source.items() if isinstance(source, Mapping) else source
    for count, pair in enumerate(pairs):
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidRequestError(f"source gave {pair!r:.80}, which is no (name, tensor)", param="source")
        if count >= MOST_TENSORS:
            raise InvalidRequestError(f"source gave more than {MOST_TENSORS} tensors", param="source")
        yield pair


def dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def checked(name: str, tensor: Any) -> Given:
    """Return what a tensor of torch or an array of numpy is. Raises InvalidRequestError."""
    if not 0 < len(name) <= _MOST_NAME or not name.isprintable():
        raise InvalidRequestError(f"the name {shown(name)} is not that of a tensor", param="source")
    if type(tensor).__name__ == "DTensor":
        raise InvalidRequestError(f"{name} is a DTensor, of which each rank has a part: give its full_tensor()")
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):
        what = f"{name} is {tensor!r:.80}, and neither a tensor of torch nor an array of numpy"
        raise InvalidRequestError(what, param="source")
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided" or len(tensor.shape) > _MOST_DIMENSIONS:
        raise InvalidRequestError(f"{name} is no dense tensor of {_MOST_DIMENSIONS} dimensions or fewer")
    own = tensor.detach() if hasattr(tensor, "detach") else tensor
    return Given(own, dtype_of(own), tuple(int(n) for n in own.shape))


class WindowFiller:
    """Copies tensors, piece by piece, into a window of memory that workers see. Its calls are for a thread: what makes
    the tensors may take long, and copying does."""

    def __init__(self, source: Any, window: memoryview) -> None:
        self._pairs = pairs_of(source)
        self._window = window
        self._left: tuple[str, Given, memoryview, int, Any] | None = None  # a tensor of which a part was copied

    def fill(self) -> list[list[Any]]:
        """Fill the window. Returns a row a piece: name, dtype, shape, its first byte in the tensor and in the window,
        its bytes; none: there are no more tensors. Raises InvalidRequestError, and what the source raises."""
        entries: list[list[Any]] = []
        used = 0
        while used < len(self._window):
            if self._left is None and not self._next():
                break
            assert self._left is not None
            name, given, data, begin, keep = self._left
            size = min(len(data) - begin, len(self._window) - used)
            for at in range(0, size, _COPIED):
                end = min(at + _COPIED, size)
                self._window[used + at : used + end] = data[begin + at : begin + end]
            entries.append([name, given.dtype, list(given.shape), begin, used, size])
            self._left = (name, given, data, begin + size, keep) if begin + size < len(data) else None
            used += -(-size // 16) * 16
        return entries

    def _next(self) -> bool:
        pair = next(self._pairs, None)
        if pair is None:
            return False
        given = checked(*pair)
        try:
            data, keep = _bytes_of(given.tensor)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
            message = f"{pair[0]} can't be copied: {type(error).__name__}: {error!s:.300}"
            raise InvalidRequestError(message, param="source") from error
        self._left = pair[0], given, data, 0, keep
        return True


def _bytes_of(tensor: Any) -> tuple[memoryview, Any]:
    """Return the bytes of a tensor or array, and what has to live as long as they are read."""
    if hasattr(tensor, "data_ptr"):
        own = tensor.cpu().resolve_neg().contiguous()
        size, address = own.numel() * own.element_size(), own.data_ptr()
    else:
        own = tensor.copy(order="C") if not tensor.flags["C_CONTIGUOUS"] else tensor
        size, address = own.nbytes, own.ctypes.data
    if not size:
        return memoryview(b""), own
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B"), own
