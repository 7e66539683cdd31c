"""`LoraRows`: which adapter each row's request has, and the adapters that the device has.

    load(slot, path) ─ thread ─> the slot's matrices of all weights         add_request ─> row -> slot, on the host
                                          │                                                     │ choose
    layer ─> LoraWeight ─ product + what its tokens' slots add to it <─ plan <─ begin <─ row -> slot, on the device

Steps are of two kinds: in those without an adapter nothing of this is launched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import InvalidRequestError
from ...ipc.messages import NewRequest
from ...kernels.expert_types import ExpertPlan
from ...kernels.lora import AdapterPlan, plan_adapters, plan_pairs
from ..distributed.shares import Share
from ..platforms.platform import Platform
from ..transfer import send
from ..weights.step_rows import Rows, TokenRows
from ..weights.weight import ExpertWeights, Weight
from .experts import LoraExperts
from .loading import LoraLoader
from .matrices import ExpertMatrices, SlotMatrices, in_layer, layer_of
from .weight import LoraWeight

_PATIENCE = 1.0  # seconds after which a load that goes on is said to
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Ends of names of matrices that route tokens, which are not changed."""


class LoraRows(TokenRows):
    extras = frozenset({"lora"})
    kinds = (0, 1)

    def __init__(
        self,
        num_slots: int,
        rank: int,
        max_num_seqs: int,
        dtype: torch.dtype,
        num_layers: int,
        platform: Platform,
        expert_rank: int = 0,
    ) -> None:
        """``num_slots``: adapters that the device has at a time, of at most ``rank``; ``dtype``: of activations;
        ``num_layers``: of the whole model, if some may be other stages'; ``expert_rank``: the largest of matrices of
        experts."""
        super().__init__()
        self.plan: AdapterPlan  # tokens of the step that is run, if it has an adapter
        self._of_experts: tuple[ExpertPlan, AdapterPlan] | None = None  # pairs of the layer that is run
        self._expert_rank = expert_rank
        self._num_layers = num_layers
        self._num_slots, self._rank, self._dtype, self._device = num_slots, rank, dtype, platform.device
        self.calls = {"load_lora": self.load}
        self._of_rows = np.full(max_num_seqs + 1, num_slots, dtype=np.int32)  # `num_slots`: none; the last: padding
        self._on_device = torch.full((max_num_seqs + 1,), num_slots, dtype=torch.int32, device=platform.device)
        self._is_sent = True  # the device has `_of_rows` as it is
        self._is_kept = False  # the kind stays what it is
        self._loads: dict[int, tuple[object, Future[None]]] = {}  # each slot's adapter that was asked for
        self._matrices: list[SlotMatrices] = []
        self._loader = LoraLoader(platform, (rank, expert_rank), num_layers)
        self._thread = ThreadPoolExecutor(1, "lora")

    # -- weights

    def wrap(self, parts: Mapping[str, Sequence[Share]], columns: Sequence[Share]) -> Callable[[Weight], Weight]:
        """See `StepRows`: of the matrices of layers alone."""
        if any(layer_of(name) is None or name.rpartition(".")[2] in _ROUTERS for name in parts):
            return super().wrap(parts, columns)
        own = SlotMatrices(parts, columns, self._num_slots, self._rank, self._dtype, self._device)
        self._matrices.append(own)
        return partial(LoraWeight, matrices=own, rows=self)

    def wrap_experts(
        self, parts: Mapping[str, Sequence[Share]], columns: Sequence[Share], experts: Share
    ) -> Callable[[ExpertWeights], ExpertWeights]:
        if not self._expert_rank:
            return super().wrap_experts(parts, columns, experts)
        sizes = self._num_slots, self._expert_rank, self._dtype, self._device
        own = ExpertMatrices(parts, columns, experts, *sizes)
        self._matrices.append(own)
        return partial(LoraExperts, matrices=own, rows=self)

    def pairs_of(self, plan: ExpertPlan) -> AdapterPlan:
        """Return the plan of the pairs of a layer, for both of its products."""
        if self._of_experts is None or self._of_experts[0] is not plan:
            pairs = plan_pairs(self.plan, plan.routing, self._num_slots, plan.shape.num_experts)
            self._of_experts = plan, pairs
        return self._of_experts[1]

    @property
    def facts(self) -> Mapping[str, Any]:
        """See `StepRows`: output and input features of the matrices that adapters can change, in all layers. Those that
        are other stages' are taken to be like one of this rank's."""
        own = {name: shape for matrices in self._matrices for name, shape in matrices.shapes.items()}
        others = set(range(self._num_layers)) - {layer_of(name) for name in own}
        there = {in_layer(name, index): shape for name, shape in own.items() for index in others}
        return {"lora_matrices": {name: list(shape) for name, shape in (own | there).items()}}

    def load(self, slot: int, path: str) -> Loading:
        """Begin to fill a slot, which no row has, from an adapter's folder, in a thread, or go on with it. What is
        ready stays so until there is another path, or other files."""
        if not 0 <= slot < self._num_slots:
            refused: Future[None] = Future()
            why = f"there is no slot {slot} for an adapter: max_loras={self._num_slots}"
            refused.set_exception(InvalidRequestError(why))
            return Loading(refused, lambda: None)
        own, files = self._loads.get(slot), _state_of(path)
        if own is None or own[0] != files:
            own = self._loads[slot] = files, self._thread.submit(self._loader.load, slot, path, self._matrices)
        return Loading(own[1], partial(self._loads.pop, slot, None))

    def settle(self) -> None:
        """See `StepRows`: of all loads that were begun, also of those that nobody waits for any more."""
        self._thread.submit(int).result()

    def _is_loaded(self, slot: int) -> bool:
        own = self._loads.get(slot)
        return own is not None and own[1].done() and own[1].exception() is None

    # -- rows

    def add_request(self, request: NewRequest) -> tuple[str, str] | None:
        values = request.extras.get("lora")
        slot = self._num_slots if values is None else int(np.frombuffer(values[0], dtype=np.int32)[0])
        is_there = values is None or self._is_loaded(slot)
        self._set(request.req_idx, slot if is_there else self._num_slots)
        return None if is_there else ("InvalidRequestError", f"there is no adapter in slot {slot}: it was not loaded")

    def remove_request(self, row: int) -> None:
        self._set(row, self._num_slots)

    def _set(self, row: int, slot: int) -> None:
        if self._of_rows[row] != slot:
            self._of_rows[row], self._is_sent = slot, False

    # -- steps

    def choose(self, rows: Rows) -> None:
        if not self._is_kept:
            self.kind = int((self._of_rows[rows] < self._num_slots).any())
        if self.kind and not self._is_sent:
            send(self._of_rows.copy(), self._on_device)
            self._is_sent = True

    @contextmanager
    def only(self, kind: int) -> Iterator[None]:
        before = self.kind, self._is_kept
        self.kind, self._is_kept = kind, True
        try:
            yield
        finally:
            self.kind, self._is_kept = before

    def begin(self, rows: Tensor, query_start_loc: Tensor | None = None, num_tokens: int = 0) -> None:
        if self.kind:
            super().begin(rows, query_start_loc, num_tokens)
            self.plan = plan_adapters(self._on_device[self.of_tokens], self._num_slots)


class Loading:
    """How far a load is: known when it has ended, or when it has gone on for a while since it was asked for."""

    def __init__(self, future: Future[None], forget: Callable[[], object]) -> None:
        """``forget``: called if it has failed."""
        self._future, self._forget = future, forget
        self._end = time.monotonic() + _PATIENCE

    def ready(self) -> bool:
        return self._future.done() or time.monotonic() > self._end

    def get(self) -> str:
        """Return "loading", "ready", or "refused: " and why."""
        if not self._future.done():
            return "loading"
        if (error := self._future.exception()) is None:
            return "ready"
        self._forget()
        if not isinstance(error, InvalidRequestError):
            raise error
        return f"refused: {error}"


def _state_of(path: str) -> object:
    """Return what is another value for other files, or for changed ones."""
    try:
        if os.path.isdir(path):
            return [(file.name, file.inode(), file.stat().st_mtime_ns) for file in os.scandir(path)], path
        return (own := os.stat(path)).st_ino, own.st_mtime_ns, path
    except OSError:  # the load says what is wrong
        return path
