"""Common parts of the sources of weights: tensors by name, read in threads, a few ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ..scope import Place
from ..weight import NotMultiplied

NUMBERS = frozenset({torch.float16, torch.bfloat16, torch.float32})
"""Formats whose elements are the weights themselves; others are codes, which mean nothing without their scales."""

_CURE = "fetch the model again"

T = TypeVar("T")


class Named(NamedTuple):
    name: str  # the tensor's name in transformers' spelling
    tensor: Tensor | None  # as it was read, or the wanted part of it; None: it is not wanted, and was not read
    num_bytes: int = 0  # bytes of the whole tensor in the checkpoint's format
    shape: tuple[int, ...] = ()  # shape of the whole tensor
    is_idle: bool = False  # it is not wanted, and says nothing that would be missed


class Source(NamedTuple):
    """A checkpoint as a stream of tensors, ``total`` bytes in all."""

    tensors: Iterator[Named]
    total: int


class Target(NamedTuple):
    """The tensors to read of a checkpoint, by name, and the model's device."""

    places: Mapping[str, Place]
    device: torch.device
    name_in_file: Callable[[str], str] = str  # for errors
    where: str = ""  # the checkpoint's path, likewise
    has_numbers: bool = True  # False: shapes and dtypes alone are looked at, by the headers of safetensors files

    def named(self, name: str, tensor: Tensor, *, keep: bool) -> Named:
        """Return what a source yields for a ``tensor`` of the checkpoint: the part that its place wants.

        ``keep``: the whole may stay in memory, as that of a mapped file, where the part is a view of it.
        """
        place, shape = self.places[name], tuple(tensor.shape)
        own = tensor if place.part is None or shape != place.shape else place.part.of(tensor)
        if not keep and own.untyped_storage().nbytes() > own.nbytes:
            own = own.clone()
        return Named(name, own, tensor.nbytes, shape)

    def put(self, places: Sequence[Place], tensor: Tensor) -> None:
        """Hand a tensor over to its places, of which the first says how it comes to the device. Raises ModelLoadError:
        their format can't make a weight of it."""
        tensor = places[0].take(tensor, self.device)
        what = f"{self.where}: {self.name_in_file(places[0].name)}"
        if (fault := places[0].fault) is not None and (problem := fault(tensor)):
            raise ModelLoadError(f"{what} {problem}; {_CURE}")
        if len(places) > 1 and len({place.dtype for place in places}) == 1:
            tensor = tensor.to(places[0].dtype)  # once, so that a tied table is in memory once
        try:
            for place in places:
                place.put(tensor)
        except ValueError as error:
            cure = "" if isinstance(error, NotMultiplied) else f"; {_CURE}"
            raise ModelLoadError(f"{what}, or a matrix that is multiplied together with it: {error}{cure}") from error


def in_threads(jobs: Iterable[Callable[[], T]], num_threads: int) -> Iterator[T]:
    """Yield what the jobs return, in their order; no more than one a thread is ahead of the consumer."""
    # pool.map would take all jobs at once, and read a model larger than memory into it.
    ahead: deque[Future[T]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
        for job in jobs:
            ahead.append(pool.submit(job))
            if len(ahead) > num_threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
