"""The platform of the setting ``device``."""

from __future__ import annotations

import logging
from pkgutil import resolve_name

from ...errors import ModelLoadError
from ...limits.registry import PLATFORMS, registered, target_of
from .cpu import CpuPlatform
from .cuda import CudaPlatform
from .platform import Platform, Unavailable

logger = logging.getLogger("aengine.runner")


def choose_platform(device: str) -> Platform:
    """Return the platform of ``device``, checked to run kernels. "auto": an NVIDIA GPU, else what another package has a
    platform for, else the CPU; "auto:N": the N-th of the former, counted from 0.

    Raises ModelLoadError: there is no such device, it is too old, or what runs kernels on it can't be used; one line
    with what helps.
    """
    name, _, index = device.partition(":")
    found = _find_any(index) if name == "auto" else _class_of(name).find(device)
    if isinstance(found, Unavailable):
        raise ModelLoadError(f"device={device!r}: {found}, or use device='cpu'")
    found.check()
    logger.debug("%s", found)
    return found


def _find_any(index: str) -> Platform | Unavailable:
    """Find a GPU, else the CPU's platform. ``index``: number of the device in its platform; "": the first. Returns
    Unavailable if there are GPUs, but not so many."""
    gpu = CudaPlatform.find(f"cuda:{index}" if index else "cuda")
    if not isinstance(gpu, Unavailable):
        return gpu
    if index not in ("", "0") and not isinstance(CudaPlatform.find("cuda"), Unavailable):
        return gpu  # there are GPUs, but too few: a replica on the CPU beside them is not what was asked for
    for name in registered(PLATFORMS):
        if name in ("cuda", "cpu"):
            continue
        try:
            found = _class_of(name).find(f"{name}:{index}" if index else name)
        except ModelLoadError as error:
            logger.warning("device='auto' passes over %s: %s", name, error)
            continue
        if not isinstance(found, Unavailable):
            return found
        logger.debug("device='auto' passes over %s: %s", name, found)
    logger.log(logging.DEBUG if gpu.is_expected else logging.WARNING, "running on the CPU: %s", gpu)
    return CpuPlatform()


def _class_of(name: str) -> type[Platform]:
    """Import the platform's class. Raises ModelLoadError if it can't be imported."""
    target = target_of(PLATFORMS, name)
    if target is None:
        known = ", ".join(map(repr, registered(PLATFORMS)))
        raise ModelLoadError(f"device={name!r}: this worker finds no such platform; there are {known}")
    try:
        platform: type[Platform] = resolve_name(target)
    except Exception as error:  # whatever another package's import may raise
        raise ModelLoadError(f"device={name!r}: its platform {target} can't be imported: {error!r}") from error
    return platform
