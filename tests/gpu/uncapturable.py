"""A worker whose layers have an op that no CUDA graph may hold; as ``worker="uncapturable:load_model"``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aengine.config import EngineConfig
from aengine.workers.rank import Rank


def load_model(
    config: EngineConfig, source: Mapping[str, Any], rank: Rank, progress: Callable[[str, int, int, str], None]
) -> Any:
    from torch import Tensor

    from aengine.runner.model_runner import ModelRunner
    from aengine.runner.startup import load

    decode = ModelRunner.decode

    def waiting(self: ModelRunner, inputs: Any, rows: Tensor, **how: Any) -> Tensor:
        hidden = decode(self, inputs, rows, **how)
        rows.sum().item()  # waits for the device
        return hidden

    ModelRunner.decode = waiting  # type: ignore[method-assign]
    return load.load_model(config, source, rank, progress)
