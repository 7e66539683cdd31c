"""The first second of a worker: torch is imported while an NVIDIA GPU opens, and Triton's own version is hashed.

Importing is bound by the GIL; the driver (half a second and more for a context) and the hash of Triton's compiler, by
which kernels are found in its cache on disk (400 MB to read), are not.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ...config import EngineConfig
from ...workers.rank import Rank
from .meta_kernels import meta_kernels_postponed

if TYPE_CHECKING:
    from .encoder import LoadedEncoder
    from .load import LocalModel


def load_model(
    config: EngineConfig, source: Mapping[str, Any], rank: Rank, progress: Callable[[str, int, int, str], None]
) -> LocalModel | LoadedEncoder:
    """Load the model of one rank, as a worker asks for it: see `load.load_model`. Raises ModelLoadError."""
    driver = _nvidia_driver(rank.device)
    needs_all = driver is not None or config.worker_extension is not None  # it may do anything with torch
    with _gpu_opening(driver, rank.device), _no_collections(), nullcontext() if needs_all else meta_kernels_postponed():
        from .load import load_model as load
    return load(config, source, rank, progress)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Collect no garbage meanwhile, and exempt what is there at the end: modules, half a million objects, of which each
    full collection would make a fifth of a second, while all requests wait."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _nvidia_driver(device: str) -> ctypes.CDLL | None:
    """Return the driver of NVIDIA's GPUs, if the setting ``device`` may mean one and there is a driver."""
    if device.partition(":")[0] not in ("auto", "cuda"):
        return None
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@contextlib.contextmanager
def _gpu_opening(driver: ctypes.CDLL | None, device: str) -> Iterator[None]:
    """Open the GPU of the setting ``device`` beside what runs within, if there is a driver. What fails is left to
    whoever needs it, and says why."""
    if driver is None:
        yield
        return
    index = int(device.partition(":")[2] or 0)
    thread = threading.Thread(target=_open_gpu, args=(driver, index), name="open gpu", daemon=True)
    thread.start()
    yield
    thread.join()


def _open_gpu(driver: ctypes.CDLL, index: int) -> None:
    if driver.cuInit(0) != 0:
        return
    hashing = threading.Thread(target=_hash_triton, name="hash triton", daemon=True)
    hashing.start()
    gpu, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuDeviceGet(ctypes.byref(gpu), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)  # the one that torch takes, too
    hashing.join()


def _hash_triton() -> None:
    """Have Triton compute the part of its cache keys that is the same for all kernels, ahead of the first kernel; it
    keeps the result."""
    with contextlib.suppress(Exception):  # Triton is not installed, or a version that hashes elsewhere
        from triton.runtime.cache import triton_key

        triton_key()
