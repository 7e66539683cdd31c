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
from typing import TYPE_CHECKING, Any

from ...config import EngineConfig
from ...workers.rank import Rank

if TYPE_CHECKING:
    from .encoder import LoadedEncoder
    from .load import LocalModel


def load_model(
    config: EngineConfig, source: Mapping[str, Any], rank: Rank, progress: Callable[[str, int, int, str], None]
) -> LocalModel | LoadedEncoder:
    """Load the model of one rank, as a worker asks for it: see `load.load_model`. Raises ModelLoadError."""
    with _gpu_opening(rank.device), _no_collections():
        from .load import load_model as load
    return load(config, source, rank, progress)


def import_all() -> None:
    """Import what `load_model` will need, and touch no device; of a process that is to load a model later."""
    with _no_collections():
        from . import load  # noqa: F401

        if _driver() is not None:
            _hash_triton()


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


@contextlib.contextmanager
def _gpu_opening(device: str) -> Iterator[None]:
    """Open the GPU of the setting ``device`` beside what runs within, if it is one of NVIDIA's. What fails is left to
    whoever needs it, and says why."""
    name, _, index = device.partition(":")
    if name not in ("auto", "cuda"):
        yield
        return
    thread = threading.Thread(target=_open_gpu, args=(int(index or 0),), name="open gpu", daemon=True)
    thread.start()
    yield
    thread.join()


def _driver() -> ctypes.CDLL | None:
    """Return the driver of NVIDIA's GPUs, if there is one."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _open_gpu(index: int) -> None:
    driver = _driver()
    if driver is None or driver.cuInit(0) != 0:
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
