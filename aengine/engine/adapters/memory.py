"""`LoraMemory`: an adapter that is given as tensors, kept as a file that has no place.

The tensors are written in safetensors' format, with the adapter's settings in its head, into memory of this process
that looks like a file: workers read it by /proc, as they read any other, also those that come in place of dead ones.
The kernel frees it with the last descriptor: nothing is left of it, however this process ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from ...checkpoint.lora import CONFIG_IN_HEADER, MOST_TENSORS
from ...errors import InvalidRequestError
from ...limits.values import is_unicode

MOST_BYTES = 16 << 30
MOST_KEPT = 256  # each has a descriptor of this process
_MOST_NAME = 1000
_MOST_CONFIG = 1 << 20  # characters of the settings
_PIECE = 16 << 20  # bytes that are written at a time
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


class LoraTensors(NamedTuple):
    """What a caller gives: tensors of numpy or torch by PEFT's names, and the content of adapter_config.json."""

    tensors: Mapping[str, Any]
    config: Mapping[str, Any]


class LoraMemory:
    """Held while the adapter is known or in use."""

    def __init__(self, descriptor: int) -> None:
        """``descriptor``: closed with this object."""
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def open(cls, path: str) -> LoraMemory:
        """Return another process' memory, which stays as long as this object. Raises InvalidRequestError: it's gone."""
        try:
            found = cls(descriptor := os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
            is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except (OSError, ValueError):
            is_sealed = False
        if not is_sealed:
            raise InvalidRequestError("the tensors have gone: the process that gave them has ended", param="source")
        return found

    @classmethod
    def of(cls, given: LoraTensors) -> LoraMemory:
        """Write tensors into memory. Blocking. Raises InvalidRequestError: they are none, or too many or too large."""
        sources, entries, end = [], [], 0  # entries are texts: json keeps all threads waiting while it writes many
        for name, tensor in _checked_names(given.tensors):
            source, dtype, shape, size = _source_of(name, tensor)
            entry = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            entries.append(f"{json.dumps(name)}:{json.dumps(entry)}")
            sources.append(source)
            end += size
            if end > MOST_BYTES:
                raise InvalidRequestError(f"the tensors have more than {MOST_BYTES >> 30} GiB", param="source")
        entries.append(f'"__metadata__":{json.dumps({CONFIG_IN_HEADER: _config_of(given.config)})}')
        header = f"{{{','.join(entries)}}}".encode()
        try:
            memory = cls(descriptor := os.memfd_create("lora", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            _write(descriptor, memoryview(len(header).to_bytes(8, "little") + header))
            while sources:
                _write(descriptor, sources.pop(0)())  # one tensor at a time comes from its device
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except (OSError, RuntimeError, TypeError, ValueError, AttributeError, MemoryError) as error:
            message = f"the tensors can't be copied: {type(error).__name__}: {error!s:.300}"
            raise InvalidRequestError(message, param="source") from error
        return memory


def _checked_names(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if len(tensors) > MOST_TENSORS:
        raise InvalidRequestError(f"{len(tensors)} tensors are too many: {MOST_TENSORS} at most", param="source")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME or not is_unicode(name):
            raise InvalidRequestError(f"{name!r:.80} is no name of a tensor", param="source")
        yield name, tensor


def _source_of(name: str, tensor: Any) -> tuple[Callable[[], memoryview], str, list[int], int]:
    """Return what reads a tensor's bytes, its dtype as files say it, its shape, and the number of its bytes."""
    try:
        shape = [int(size) for size in tensor.shape]
        dtype, itemsize = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        message = f"{name:.200} is no tensor of numpy or torch of float32, float16 or bfloat16"
        raise InvalidRequestError(message, param="source") from None
    size = prod(shape) * itemsize

    def read() -> memoryview:
        if not hasattr(tensor, "data_ptr"):
            import numpy as np

            return np.ascontiguousarray(tensor).view(np.uint8).reshape(-1).data
        whole = tensor.detach().cpu().resolve_neg().contiguous()
        if whole.numel() * whole.element_size() != size or not whole.data_ptr():
            raise ValueError(f"{name:.200} has no memory of its own: gather it first")
        content = (ctypes.c_ubyte * size).from_address(whole.data_ptr())
        content.held = whole  # type: ignore[attr-defined]  # as long as this view
        return memoryview(content).cast("B")

    return read, dtype, shape, size


def _config_of(config: Mapping[str, Any]) -> str:
    """Return the settings as JSON: what PEFT's ``to_dict`` has in sets and enumerations is as its files have it."""

    def plain(value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(map(str, value))
        raise TypeError(f"{type(value).__name__} is no value of adapter_config.json")

    try:
        text = json.dumps(dict(config), default=plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"config={error!s:.200}: give PEFT's config.to_dict()", param="config") from None
    if len(text) > _MOST_CONFIG:
        raise InvalidRequestError("config is longer than an adapter_config.json may be", param="config")
    return text


def _write(descriptor: int, content: memoryview) -> None:
    for begin in range(0, len(content), _PIECE):
        piece = content[begin : begin + _PIECE]
        while piece:
            piece = piece[os.write(descriptor, piece) :]
