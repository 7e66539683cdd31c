"""Moves what a device has of a model into an arena, whoever holds it: weights, tables, places for adapters.

Tensors are found as the garbage collector sees them, and not by a walk over the model: one that a closure holds, say,
must follow when its storage moves, or it would go on with the old one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..platforms.platform import Platform
from .arena import Arena, aligned

_MOST_FREED = 1 << 30
"""Bytes of moved tensors that torch may keep before it is told to release them."""


@contextmanager
def made_in(arena: Arena, platform: Platform) -> Iterator[None]:
    """At the end, move what was made on the device within, and is held still, into the arena.

    What was there before stays: other ranks, or the driver, may know where it is.
    """
    gc.collect()
    before = set(_tensors_on(platform.device))
    yield
    platform.synchronize()
    gc.collect()
    made = [tensors for address, tensors in _tensors_on(platform.device).items() if address not in before]
    _move(made, arena, platform)


def _tensors_on(device: torch.device) -> dict[int, list[Tensor]]:
    """Return all tensors on a device that have memory, by the address of that."""
    found: dict[int, dict[int, Tensor]] = {}
    for one in gc.get_objects():
        # not isinstance: it asks some objects, proxies of modules say, for what they stand for
        if not issubclass(type(one), Tensor) or one.device != device or one.layout is not torch.strided:
            continue
        for tensor in (one, one._base):  # a view keeps the tensor that it was made of, and with it the memory
            if tensor is not None and tensor.untyped_storage().nbytes():
                found.setdefault(tensor.untyped_storage().data_ptr(), {})[id(tensor)] = tensor
    return {address: list(tensors.values()) for address, tensors in found.items()}


def _move(groups: list[list[Tensor]], arena: Arena, platform: Platform) -> None:
    """Move groups of tensors with one storage each. Takes the memory of some of them more, for a moment."""
    groups.sort(key=lambda tensors: tensors[0].untyped_storage().nbytes())
    to_come = sum(aligned(tensors[0].untyped_storage().nbytes()) for tensors in groups)
    num_freed = 0
    while groups:
        tensors = groups.pop()  # the largest first
        storage = tensors[0].untyped_storage()
        size = storage.nbytes()
        place = arena.place(size, to_come)
        to_come -= aligned(size)
        place[:size].copy_(torch.empty(0, dtype=torch.uint8, device=platform.device).set_(storage))
        del storage
        for tensor in tensors:
            at = place.storage_offset() // tensor.dtype.itemsize + tensor.storage_offset()
            tensor.data = place.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), at)
        num_freed += size
        if num_freed >= _MOST_FREED:
            platform.synchronize()
            platform.release_cached()
            num_freed = 0
    platform.synchronize()
    platform.release_cached()
