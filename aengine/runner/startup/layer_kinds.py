"""Which layers of a decoder are alike, so that the kernels of one are those of all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..distributed.shares import Share
from ..kv_spec import LayerPlace
from ..layers.decoder import Decoder

_PLAIN = (bool, int, float, str, type(None), range, torch.dtype, torch.device, Share)
_LOCK = type(threading.Lock())
_SHARED = ("group", "_group")  # the ranks that share all layers


@contextmanager
def one_layer_of_each_kind(model: Any, places: Sequence[LayerPlace | None]) -> Iterator[None]:
    """Let ``model`` consist of layers no two of which are alike, if it is a `Decoder`. ``places``: of the layers in the
    KV cache."""
    if not isinstance(model, Decoder):
        yield
        return

    def kept(index: int) -> tuple[Any, ...]:
        place = places[index]
        assert place is not None, f"layer {index} is another stage's"
        return place.kv, place.group, place.first_byte % 16

    layers, kinds = model.layers, dict[Any, Any]()
    for layer in layers:
        kinds.setdefault(_kind(layer, kept), layer)
    model.layers = list(kinds.values())
    try:
        yield
    finally:
        model.layers = layers


def _kind(value: Any, kept: Callable[[int], Any]) -> Any:
    """Return a value that is equal for what launches the same kernels: tensors count by what kernels depend on. An
    object that is not understood is like itself only."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.data_ptr() % 16
    if isinstance(value, _LOCK):
        return _LOCK
    if isinstance(value, list | tuple):
        return type(value), tuple(_kind(part, kept) for part in value)
    if isinstance(value, dict):
        return tuple((key, _kind(part, kept)) for key, part in value.items())
    if type(value).__module__.startswith("aengine."):
        return type(value), tuple(
            (name, id(part) if name in _SHARED else _kind(kept(part) if name in ("index", "_index") else part, kept))
            for name, part in _attributes(value)
        )
    return id(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    for owner in type(value).__mro__:
        for name in getattr(owner, "__slots__", ()):
            if hasattr(value, name):
                yield name, getattr(value, name)
