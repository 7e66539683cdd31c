"""`Results`: the features that make something of a step's hidden states beside tokens, walked as one.

add_request ─> the layers ─> compute ─> commit        SideOutput ─> the answer's `ResultColumns`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ...ipc.messages import ModelRunnerOutput, NewRequest, RowError
from ..async_output import NO_SIDE_OUTPUT, HostOutput, SideOutput
from ..input_batch import BatchPlan


class ResultFeature(Protocol):
    """One of the features."""

    extra: str
    """The name of what it reads of a request's extras."""

    def add_request(self, request: NewRequest) -> tuple[str, str] | None:
        """Note what the request of a new row asks for, if anything. Returns the type and the message of what is wrong
        with it."""

    def compute(self, plan: BatchPlan, hidden: Tensor) -> SideOutput:
        """Return what the step yields. hidden: [num_tokens or more, hidden_size]."""

    def commit(self) -> None:
        """Note that the step was computed. A step that is tried again before that must not count its tokens twice."""


class Results:
    """All of them."""

    def __init__(self, features: Sequence[ResultFeature]) -> None:
        self._features = features
        self.extras = frozenset(feature.extra for feature in features)

    def add_request(self, request: NewRequest) -> tuple[str, str] | None:
        """See `ResultFeature`."""
        faults = [feature.add_request(request) for feature in self._features]
        return next(filter(None, faults), None)

    def compute(self, plan: BatchPlan, hidden: Tensor) -> SideOutput:
        """See `ResultFeature`."""
        parts = [feature.compute(plan, hidden) for feature in self._features]
        parts = [part for part in parts if part.tensors]
        return _Joined(parts) if len(parts) > 1 else parts[0] if parts else NO_SIDE_OUTPUT

    def commit(self) -> None:
        """See `ResultFeature`."""
        for feature in self._features:
            feature.commit()


class _Joined(SideOutput):
    """What several features yield: float32 numbers one after the other, or bits of others."""

    def __init__(self, parts: Sequence[SideOutput]) -> None:
        self._parts = parts
        numbers = [part.tensors["side"] for part in parts]
        self._ends = torch.tensor([len(own) for own in numbers]).cumsum(0).tolist()
        self.tensors = {"side": torch.cat(numbers)}

    def add_to(self, output: ModelRunnerOutput, host: HostOutput, errors: dict[int, RowError]) -> None:
        begin = 0
        for part, end in zip(self._parts, self._ends, strict=True):
            assert host.side is not None, "it was copied"
            part.add_to(output, host._replace(side=host.side[begin:end]), errors)
            begin = end
