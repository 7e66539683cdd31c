"""Workers whose ranks share the first GPU where there is no other; as ``worker="one_gpu:load_model"``.

torch's symmetric memory allows it with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 in the environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aengine.config import EngineConfig
from aengine.workers.rank import LOOPBACK, Rank

__all__ = ["MEETING_PORT", "load_apart", "load_model"]

MEETING_PORT = "AENGINE_TEST_MEETING_PORT"
"""The variable of the environment that has the port where the stages of `load_apart` meet."""


def load_model(
    config: EngineConfig, source: Mapping[str, Any], rank: Rank, progress: Callable[[str, int, int, str], None]
) -> Any:
    import torch

    if torch.cuda.device_count() == 1:
        from aengine.runner.distributed import opening

        opening._check_devices = lambda *args, **how: None
        rank = replace(rank, device="cuda:0")
    from aengine.runner.startup import load

    return load.load_model(config, source, rank, progress)


def load_apart(
    config: EngineConfig, source: Mapping[str, Any], rank: Rank, progress: Callable[[str, int, int, str], None]
) -> Any:
    """Each pipeline stage as if it were on a machine of its own: they meet at a port, and exchange over the network."""
    os.environ["NCCL_HOSTID"] = f"machine-{rank.pp_rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    port = int(os.environ[MEETING_PORT])
    fd = socket.create_server((LOOPBACK, port)).detach() if rank.leads else -1
    rank = replace(rank, stages_meet_at=f"{LOOPBACK}:{port}", meeting_fd=fd)
    return load_model(config, source, rank, progress)
