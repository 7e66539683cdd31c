"""A worker whose ranks share the first GPU, for machines that have no other; as ``worker="one_gpu:load_model"``.

torch's symmetric memory allows it with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 in the environment. Kernels are
launched one by one there: those that wait for their predecessors would keep the other rank's from the multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aengine.config import EngineConfig
from aengine.workers.rank import Rank

__all__ = ["load_model"]


def load_model(
    config: EngineConfig, source: Mapping[str, Any], rank: Rank, progress: Callable[[str, int, int, str], None]
) -> Any:
    from aengine.kernels.triton import launch

    launch.has_pdl = lambda: False  # before the kernels' modules import it
    from aengine.runner.distributed import opening
    from aengine.runner.startup import load

    opening._check_devices = lambda *args: None
    return load.load_model(config, source, replace(rank, device="cuda:0"), progress)
