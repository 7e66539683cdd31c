"""The real runner, on a machine whose torch was built without CUDA although it has an NVIDIA driver."""

from __future__ import annotations

from typing import Any

import torch

from aengine.runner.platforms import cuda as gpu
from aengine.runner.startup import load as startup


class Driver:
    def read_text(self) -> str:
        return "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:17:28 UTC 2025"


def load_model(*args: Any) -> Any:
    gpu._DRIVER_VERSION = Driver()  # type: ignore[assignment]
    torch.cuda.is_available = lambda: False
    torch.version.cuda = None
    return startup.load_model(*args)
