"""`WeightReceiver`: new weights for a model that is loaded, in pieces, as collective calls bring them.

    begin ──> check, put | put_shared | receive ... ──> end ──> sums of what has come
                                                   └──> forget: those that have come stay, the rest does not

Each tensor goes the way of a loaded one: this rank's part of it, joined with its neighbours, quantised, and copied into
the memory that the weight has. A call's tensors are checked before one of them is put. A refusal is part of the reply,
since the worker goes on.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import AEngineError, ModelLoadError
from ..models.causal_lm import CausalLM
from ..platforms.platform import Platform
from ..weights.sources.loader import IGNORED
from ..weights.sources.reading import NUMBERS, in_threads
from .broadcast import Broadcast
from .in_memory import NAMES_OF_DTYPES, Fitting
from .shared_memory import shared_tensor
from .sums import is_finite, sum_of

_MOST_NAMES = 8  # names that an error lists

Entry = Sequence[Any]
"""A tensor, or a piece of one: name, dtype, shape, first byte of the piece, its place in the window, its bytes."""


class _Partial:
    """A tensor of which some bytes have come. On the device, where its numbers are looked at in no time."""

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> None:
        self.tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        self.bytes = self.tensor.reshape(-1).view(torch.uint8)
        self.num_come = 0


class WeightReceiver:
    """Takes new weights into a model's memory. Each rank has one; its calls come between two steps."""

    def __init__(self, model: CausalLM, platform: Platform, rank: int) -> None:
        """``rank``: among those of its replica."""
        self._model = model
        self._platform = platform
        self.rank = rank
        self._fitting = Fitting(model.weights.places, platform.device)
        self._window: mmap.mmap | None = None
        self._begun: dict[str, _Partial] = {}  # tensors of which some bytes have come
        self._sums: dict[str, int] = {}  # sums of the tensors that have come, as they came
        self._filled: set[str] = set()  # names of the model's tensors that have come
        self._broadcast: Broadcast | None = None
        self.calls: Mapping[str, Callable[..., Any]] = {
            "begin_weights": self.begin,
            "put_weights": partial(answered, self.put),
            "put_shared_weights": partial(answered, self.put_shared),
            "join_weight_group": partial(answered, self.join_group),
            "receive_weights": partial(answered, self.receive),
            "end_weights": partial(answered, self.end),
            "forget_weights": self.forget,
        }

    def begin(self, pid: int, fd: int, num_bytes: int) -> dict[str, Any]:
        """Begin an update. ``pid``, ``fd``: the process that has the window open, a file of ``num_bytes`` in memory."""
        self.forget()
        self._sums.clear()
        self._filled.clear()
        self._platform.synchronize()  # no step reads weights any more
        try:
            window = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError as error:
            return {"refused": f"the worker can't open the memory in which tensors come ({error.strerror})"}
        try:
            self._window = mmap.mmap(window, num_bytes)
        finally:
            os.close(window)
        return {}

    def forget(self) -> dict[str, Any]:
        """Give up what has come in part. Returns how many of the model's tensors have been replaced. Idempotent."""
        for gathering in self._model.weights.gatherings:
            if gathering.is_under_way:
                gathering.forget()
        self._begun.clear()
        if self._window is not None:
            self._window.close()
            self._window = None
        return {"num_put": len(self._filled)}

    # -- tensors

    def put(self, entries: Sequence[Entry], allow_nan: bool) -> dict[str, Any]:
        """Take the pieces that lie in the window."""
        if self._window is None:
            raise ModelLoadError("no update is under way in this worker")
        unknown = self._check([(name, dtype, shape) for name, dtype, shape, begin, *_ in entries if begin == 0])
        whole: list[tuple[str, Tensor]] = []
        for name, dtype, shape, begin, place, size in entries:
            if begin == 0:
                self._begun[name] = _Partial(getattr(torch, dtype), shape, self._platform.device)
            come = self._begun[name]
            if size:
                come.bytes[begin : begin + size] = torch.frombuffer(self._window, dtype=torch.uint8)[place:][:size]
            come.num_come += size
            if come.num_come == len(come.bytes):
                whole.append((name, self._begun.pop(name).tensor))
        self._put_all(whole, allow_nan)
        return {"unknown": unknown}

    def put_shared(self, entries: Sequence[Sequence[Any]], allow_nan: bool) -> dict[str, Any]:
        """Take tensors that another process shares on this device: name, dtype, shape, and handles of each."""
        unknown = self._check([entry[:3] for entry in entries])
        self._put_all([(entry[0], shared_tensor(entry, self._platform.device)) for entry in entries], allow_nan)
        return {"unknown": unknown}

    def join_group(self, host: str, port: int, first: int, size: int, backend: str, timeout: float) -> dict[str, Any]:
        """Join the group in which a trainer is rank 0, and this replica's first rank is ``first``; see `Broadcast`."""
        device = self._platform.device
        self._broadcast = Broadcast(host, port, first + self.rank, size, backend, timeout, device)
        return {}

    def receive(self, entries: Sequence[Sequence[Any]], allow_nan: bool) -> dict[str, Any]:
        """Take tensors that the trainer sends to the whole group, in this order: name, dtype, shape."""
        if self._broadcast is None:
            raise ModelLoadError("this worker has joined no group: the update's first call says which")
        unknown = self._check(entries)
        problem: dict[str, Any] = {}
        for tensors in self._broadcast.receive(entries):
            # An error would leave the others of the group waiting: all are received, and the first error is told.
            problem = problem or answered(self._put_all, tensors, allow_nan)
        return problem or {"unknown": unknown}

    def _check(self, entries: Sequence[Sequence[Any]]) -> list[str]:
        """Raise ModelLoadError unless each of these tensors can be put: nothing has been put of them then. Returns the
        names that are no tensors of this stage of the model."""
        coming: set[str] = set()
        unknown: list[str] = []
        for name, dtype, shape in entries:
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype) or kind not in NAMES_OF_DTYPES:
                raise ModelLoadError(f"{name} is of {dtype}, which no weight is")
            if name in self._sums or name in self._begun or name in coming:
                raise ModelLoadError(f"{name} came twice in one update")
            coming.add(name)
            if not self._fitting.check(name, kind, tuple(shape)) and not IGNORED.search(name):
                unknown.append(name)
        if unknown and self._model.weights.stage.size == 1:
            some = _some(list(self._model.weights.places)[:2])
            raise ModelLoadError(f"{_some(unknown)}: the model has no tensor of this name; it has {some}, ...")
        return unknown

    def _put_all(self, tensors: Sequence[tuple[str, Tensor]], allow_nan: bool) -> dict[str, Any]:
        """Put whole tensors, which were checked. Raises ModelLoadError: a number is none; then none is put."""
        for name, tensor in tensors:
            if not allow_nan and tensor.dtype in NUMBERS and not is_finite(tensor):
                raise ModelLoadError(f"{name} has NaN or infinite numbers: allow_nan=True would take them")
        jobs = (partial(self._put_one, name, tensor) for name, tensor in tensors)
        for _ in in_threads(jobs, max(1, torch.get_num_threads())):
            pass
        self._platform.synchronize()  # the sender may change its memory now
        return {}

    def _put_one(self, name: str, tensor: Tensor) -> None:
        self._sums[name] = sum_of(tensor)
        names = self._fitting.check(name, tensor.dtype, tuple(tensor.shape))
        if names:
            self._fitting.put(name, tensor)
        self._filled.update(names)

    # -- the end

    def end(self, is_partial: bool) -> dict[str, Any]:
        """End the update. Returns the sums of what has come, by name. ``is_partial``: what has not come stays as it
        was. Raises ModelLoadError: some tensors lack, and the update goes on."""
        if self._begun:
            raise ModelLoadError(f"of {_some(list(self._begun))} the end has not come")
        weights = self._model.weights
        for gathering in weights.gatherings:
            if gathering.is_under_way:
                come = [name for name in gathering.names if name in self._filled]
                lack = [name for name in gathering.names if name not in self._filled]
                raise ModelLoadError(
                    f"{_some(lack)} did not come, and {_some(come)} did: they are kept as one weight, and come together"
                )
        missing = [name for name in weights.places if name not in self._filled]
        if missing and not is_partial:
            raise ModelLoadError(
                f"{len(missing)} of {len(weights.places)} tensors of the model did not come: {_some(missing)}; "
                f"is_partial=True leaves them as they were"
            )
        self.forget()
        return {"sums": [[name, hex(value)] for name, value in sorted(self._sums.items())]}


def _some(names: Sequence[str]) -> str:
    return ", ".join(name[:200] for name in names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


def answered(call: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Make a call; what it refuses is an answer: ``{"refused": why}``."""
    try:
        return call(*args)
    except (AEngineError, ValueError, RuntimeError) as error:
        return {"refused": str(error)}
