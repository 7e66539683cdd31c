"""A worker extension that takes the second rank's memory away for one step."""

from __future__ import annotations

from typing import Any

import torch

from aengine.workers.loaded import WorkerContext


class Extension:
    def __init__(self, context: WorkerContext) -> None:
        self._is_second = context.rank.tp_rank == 1
        self._model: Any = context.runner.model  # type: ignore[attr-defined]

    def fail_next_step(self) -> None:
        if self._is_second:
            self._forward, self._model.forward = self._model.forward, self._fail

    def _fail(self, *batch: Any) -> None:
        self._forward(*batch)  # the first rank is in the step, too
        raise torch.OutOfMemoryError("out of memory. Tried to allocate 1 GiB")
