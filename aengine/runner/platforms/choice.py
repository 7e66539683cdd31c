"""The platform of the setting ``device``."""

from __future__ import annotations

import logging
from importlib import import_module

from ...errors import ModelLoadError
from ...plugins import PLATFORMS, registered, target_of
from .cpu import CpuPlatform
from .cuda import CudaPlatform
from .platform import Platform, Unavailable

__all__ = ["choose_platform"]

logger = logging.getLogger("aengine.runner")


def choose_platform(device: str) -> Platform:
    """The platform of ``device``, checked to run kernels. "auto": an NVIDIA GPU, else what another package has a
    platform for, else the CPU.

    Raises ModelLoadError: there is no such device, it is too old, or what runs kernels on it can't be used; one line
    with what helps.
    """
    found = _find_any() if device == "auto" else _class_of(device.partition(":")[0]).find(device)
    if isinstance(found, Unavailable):
        raise ModelLoadError(f"device={device!r}: {found}, or use device='cpu'")
    found.check()
    logger.debug("%s", found)
    return found


def _find_any() -> Platform:
    gpu = CudaPlatform.find("cuda")
    if not isinstance(gpu, Unavailable):
        return gpu
    for name in registered(PLATFORMS):
        if name in ("cuda", "cpu"):
            continue
        try:
            found = _class_of(name).find(name)
        except ModelLoadError as error:
            logger.warning("device='auto' passes over %s: %s", name, error)
            continue
        if not isinstance(found, Unavailable):
            return found
        logger.debug("device='auto' passes over %s: %s", name, found)
    logger.log(logging.DEBUG if gpu.is_expected else logging.WARNING, "running on the CPU: %s", gpu)
    return CpuPlatform()


def _class_of(name: str) -> type[Platform]:
    """Raises ModelLoadError if it can't be imported."""
    target = target_of(PLATFORMS, name)
    if target is None:
        known = ", ".join(map(repr, registered(PLATFORMS)))
        raise ModelLoadError(f"device={name!r}: this worker finds no such platform; there are {known}")
    module, _, attribute = target.partition(":")
    try:
        platform: type[Platform] = getattr(import_module(module), attribute)
    except Exception as error:  # whatever another package's import may raise
        raise ModelLoadError(f"device={name!r}: its platform {target} can't be imported: {error!r}") from error
    return platform
