"""The platform of the setting ``device``."""

from __future__ import annotations

import logging

from ...errors import ModelLoadError
from .cpu import CpuPlatform
from .cuda import CudaPlatform
from .platform import Platform, Unavailable

__all__ = ["choose_platform", "find_accelerator"]

logger = logging.getLogger("aengine.runner")

_PLATFORMS: dict[str, type[Platform]] = {"cuda": CudaPlatform, "cpu": CpuPlatform}


def choose_platform(device: str) -> Platform:
    """The platform of ``device``, checked to run kernels. "auto": an accelerator if there is one, else the CPU.

    Raises ModelLoadError: there is no such device, it is too old, or what runs kernels on it can't be used; one line
    with what helps.
    """
    if device == "auto":
        found = find_accelerator()
        if isinstance(found, Unavailable):
            logger.log(logging.DEBUG if found.is_expected else logging.WARNING, "running on the CPU: %s", found)
            found = CpuPlatform()
    else:
        found = _PLATFORMS[device.partition(":")[0]].find(device)
        if isinstance(found, Unavailable):
            raise ModelLoadError(f"device={device!r}: {found}, or use device='cpu'")
    found.check()
    logger.debug("%s", found)
    return found


def find_accelerator() -> Platform | Unavailable:
    """The one that device="auto" means, not checked yet; or why there is none."""
    return CudaPlatform.find("cuda")
