"""The GPU that a worker runs on: found, checked, described.

A GPU that can't be used ends the start with one line that says why and what helps, or, with device="auto", is passed
over for the CPU with that line as a warning. What is missing beside a good GPU (Triton, a compiler) ends the start
either way: its cure is quick, and nobody who has the GPU wants the CPU.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from ...config import EngineConfig
from ...errors import ModelLoadError
from ..model_config import ModelConfig

__all__ = ["GpuDevice", "check_triton", "driver_version", "find_gpu", "gpu_dtype", "open_gpu"]

logger = logging.getLogger("aengine.runner")

_LEAST_CAPABILITY = (7, 5)  # Turing: what CUDA 13 and Triton still compile for
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class GpuDevice:
    device: torch.device
    name: str
    compute_capability: tuple[int, int]

    @property
    def supports_bf16(self) -> bool:
        return self.compute_capability >= (8, 0)


def open_gpu(config: EngineConfig) -> GpuDevice | None:
    """The GPU of the setting ``device``, checked to run kernels; None: run on the CPU.

    Raises:
        ModelLoadError: there is no such GPU, it is too old, CUDA or Triton can't use it; one line with what helps.
    """
    if config.device == "cpu":
        return None
    found = find_gpu(config.device)
    if isinstance(found, str):
        if config.device != "auto":
            raise ModelLoadError(f"device={config.device!r}: {found}, or use device='cpu'")
        if driver_version() is None:
            logger.debug("running on the CPU: there is no NVIDIA driver")
        else:
            logger.warning("running on the CPU: %s", found)
        return None
    check_triton(found)
    logger.debug("%s", found)
    return found


def gpu_dtype(dtype: str, model_config: ModelConfig, gpu: GpuDevice) -> str:
    """The setting ``dtype``, "auto" resolved: the checkpoint's own 16-bit format, else bfloat16; float16 on a GPU that
    has no bfloat16.

    Raises ModelLoadError if bfloat16 was asked for and the GPU has none.
    """
    own = model_config.checkpoint_dtype
    wanted = dtype
    if dtype == "auto":
        wanted = own if own in ("float16", "bfloat16") else "bfloat16"
    if wanted != "bfloat16" or gpu.supports_bf16:
        return wanted
    why = f"{_title(gpu)} has no bfloat16, which needs compute capability 8.0"
    if dtype != "auto":
        raise ModelLoadError(f"dtype={dtype!r}: {why}: use dtype='auto', 'float16' or 'float32'")
    logger.warning("%s: running in float16; should logits overflow, use dtype='float32'", why)
    return "float16"


# -- the GPU


def find_gpu(setting: str) -> GpuDevice | str:
    """The GPU, or why there is none, with the cure, as a clause."""
    with warnings.catch_warnings(record=True) as caught:  # torch says there why it sees none
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        return _why_unavailable(" ".join(str(warning.message) for warning in caught))
    index, count = int(setting.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= count:
        there = "'cuda:0' is the only GPU" if count == 1 else f"there are {count} GPUs, 'cuda:0' to 'cuda:{count - 1}'"
        return f"{there} here: use one of them"
    device = torch.device("cuda", index)
    try:
        torch.empty(1, device=device).fill_(1).sum().item()  # a context, memory, a kernel of torch's own
        properties = torch.cuda.get_device_properties(device)
    except torch.OutOfMemoryError:
        return f"cuda:{index} ({torch.cuda.get_device_name(device)}) has no free memory: end other processes on it"
    except RuntimeError as error:
        return f"CUDA fails on cuda:{index}: {_first_line(error)}: see what nvidia-smi says of it"
    gpu = GpuDevice(
        device=device,
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
    )
    if gpu.compute_capability < _LEAST_CAPABILITY:
        return f"{_title(gpu)} is too old: use a GPU of compute capability 7.5 (Turing) or more"
    return gpu


def _why_unavailable(warning: str) -> str:
    """From what torch warned of when it looked for a GPU; "" if it did not."""
    built_for = torch.version.cuda
    driver = driver_version()
    if built_for is None:
        return f"torch {torch.__version__} was built without CUDA: install a torch that has it (pytorch.org says how)"
    too_old = "too old" in warning or "insufficient" in warning
    if driver is None and not too_old:
        return "there is no NVIDIA driver: install one, or start this container with its GPUs"
    if too_old:
        return (
            f"the NVIDIA driver {driver or 'here'} is too old for torch {torch.__version__}, which needs one for CUDA "
            f"{built_for}: update the driver, or install a torch for an older CUDA (pytorch.org says how)"
        )
    reason = f"CUDA did not start ({_first_line(warning)})" if warning else "torch sees no GPU"
    return (
        f"{reason}, with driver {driver} and torch {torch.__version__} for CUDA {built_for}: see what nvidia-smi says, "
        f"and whether CUDA_VISIBLE_DEVICES hides the GPU"
    )


def driver_version() -> str | None:
    """Of the loaded NVIDIA driver, such as "580.65"; None: there is none."""
    try:
        words = _DRIVER_VERSION.read_text().split()
    except OSError:
        return None
    return next((word for word in words if word.replace(".", "").isdecimal() and "." in word), "of unknown version")


# -- Triton


def check_triton(gpu: GpuDevice) -> None:
    """Raise ModelLoadError if Triton is missing, or can't launch kernels on ``gpu``; one line with what helps.

    Triton compiles with its own compiler, but what launches a kernel with the system's, on first use.
    """
    or_else = "or use device='cpu'"
    try:
        import triton
    except Exception as error:
        raise ModelLoadError(
            f"Triton, in which the GPU's kernels are written, can't be imported ({_first_line(error)}): "
            f"pip install triton, {or_else}"
        ) from error
    if triton.knobs.build.impl is None:
        named = triton.knobs.build.cc  # $CC
        if named is not None and shutil.which(named) is None:
            raise ModelLoadError(f"Triton needs a C compiler, and CC={named!r} is none: correct or unset CC, {or_else}")
        if named is None and shutil.which("gcc") is None and shutil.which("clang") is None:
            raise ModelLoadError(
                f"Triton needs a C compiler to launch kernels on {gpu.name}, and neither gcc nor clang is there: "
                f"install one (apt install gcc), or name one in CC, {or_else}"
            )
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:
        raise ModelLoadError(
            f"Triton {triton.__version__} can't use {gpu.name} ({_first_line(error)}): it compiles a launcher in C, "
            f"which needs Python's headers (apt install python3-dev) and a place for its cache (TRITON_CACHE_DIR), "
            f"{or_else}"
        ) from error


def _title(gpu: GpuDevice) -> str:
    major, minor = gpu.compute_capability
    return f"{gpu.name} (compute capability {major}.{minor})"


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
