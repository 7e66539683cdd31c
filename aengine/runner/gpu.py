"""The GPU that a worker runs on: found, checked, described."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from ..config import EngineConfig
from ..errors import ModelLoadError
from .model_config import ModelConfig

__all__ = ["GpuDevice", "gpu_dtype", "open_gpu"]

logger = logging.getLogger("aengine.runner")


@dataclass(frozen=True, slots=True)
class GpuDevice:
    device: torch.device
    name: str
    compute_capability: tuple[int, int]

    @property
    def supports_bf16(self) -> bool:
        return self.compute_capability >= (8, 0)


def open_gpu(config: EngineConfig) -> GpuDevice | None:
    """None: run on the CPU."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return None
    if not torch.cuda.is_available():
        raise ModelLoadError(f"device={config.device!r}, but torch {torch.__version__} sees no CUDA device: use 'cpu'")
    device = torch.device("cuda", int(config.device.partition(":")[2] or 0))
    return GpuDevice(device, torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def gpu_dtype(dtype: str, model_config: ModelConfig, gpu: GpuDevice) -> str:
    """The setting ``dtype``, "auto" resolved: the checkpoint's own 16-bit format, else bfloat16."""
    if dtype != "auto":
        return dtype
    own = model_config.checkpoint_dtype
    return own if own in ("float16", "bfloat16") else "bfloat16"
