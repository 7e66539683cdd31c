"""Report what torch finds on this machine and what the engine would choose, as JSON on stdout.

`aengine.cli.diagnosis` runs ``python -m aengine.runner.platforms.probe`` in a process of its own, as the host half
never imports torch. All checks are the functions that a worker calls when it starts.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sys
from itertools import combinations
from typing import Any

import torch

from ...config import EngineConfig, num_worker_threads
from ...errors import InvalidRequestError, ModelLoadError
from ...kernels.cpu.compiler.target import instructions, unavailable
from ...limits.memory import free_memory
from ..attention.library import choose_library
from ..startup.estimate import estimate
from ..startup.kv_memory import CPU_DEFAULT
from ..weights.float16_cpu import float16_plan
from ..weights.formats import COMPILED_DTYPES, choose_formats
from .cuda import CudaPlatform, driver_version
from .platform import Unavailable


def probe(model: EngineConfig | None = None) -> dict[str, Any]:
    """Return keys as below. ``gpu``: the first one; ``gpu_names``: of all; ``gpus_apart``: the pairs of them, by index,
    of which one can't read the other's memory. ``gpu_problem``, ``triton_problem``, ``cpu_problem``: "" or one line
    with its cure. ``compiler``: what compiles the CPU's kernels, and the instructions that it finds, or "torch's" for
    ``compiler_problem``. ``model``: settings whose model is looked at, too: "model", see `estimate`, or
    "model_problem"."""
    config = model or EngineConfig(model="-")  # the defaults are what is wanted of it
    torch.set_num_threads(num_worker_threads(config))
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "triton": _triton_version(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "free_memory": free_memory(),
        "gpu": None,
        "gpu_names": [],
        "gpus_apart": [],
        "gpu_problem": "",
        "triton_problem": "",
        "cpu_problem": "",
        "compiler": "torch's",
        "compiler_problem": unavailable() or "",
    }
    if not report["compiler_problem"]:
        found = f"llvmlite {importlib.metadata.version('llvmlite')}; {', '.join(instructions())}"
        codes = "a GGUF's, AWQ's, GPTQ's without act-order and compressed-tensors' INT4 and INT8, NVFP4 and MXFP4"
        report["compiler"] = f"{found}: matrices stay codes, fewer bytes than 16 bits: {codes}"
    gpu = CudaPlatform.find("cuda")
    if isinstance(gpu, Unavailable):
        report["gpu_problem"] = gpu.reason
        report["choices"] = _cpu_choices(config, report)
    else:
        report["choices"] = _gpu_choices(config, gpu, report)
        if config.device == "cpu":
            report["choices"] = _cpu_choices(config, report)
    if model is not None:
        try:
            told = report["model"] = estimate(model)
            for key in ("weights", "dtype", "activations"):
                report["choices"].pop(key, None)
            report["choices"] |= told["formats"]
        except (ModelLoadError, InvalidRequestError) as error:
            report["model_problem"] = str(error)
    return report


def _cpu_choices(config: EngineConfig, report: dict[str, Any]) -> dict[str, Any]:
    is_compiled = not report["compiler_problem"] and config.dtype in COMPILED_DTYPES
    choices = {
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "attention": "compiled kernels" if is_compiled else "torch",
        "kv_cache_bytes": config.kv_cache_memory_bytes or min(CPU_DEFAULT, report["free_memory"] // 4),
    }
    try:
        formats = choose_formats("auto", torch.device("cpu"), is_compiled=is_compiled)
        if formats.name == "float16" and not is_compiled:
            report["matrix_units"] = float16_plan().large is not None
    except RuntimeError as error:
        report["cpu_problem"] = str(error).splitlines()[0]
        return choices
    return choices | {"weights": formats.name, **formats.precision}


def _gpu_choices(config: EngineConfig, gpu: CudaPlatform, report: dict[str, Any]) -> dict[str, Any]:
    total, free, *_ = gpu.memory()
    capability = "{}.{}".format(*gpu.compute_capability)
    report["gpu"] = {"name": gpu.name, "capability": capability, "free_memory": free, "total_memory": total}
    indices = range(torch.cuda.device_count())
    report["gpu_names"] = [torch.cuda.get_device_name(i) for i in indices]
    report["gpus_apart"] = [[i, j] for i, j in combinations(indices, 2) if not _are_peers(i, j)]
    try:
        gpu.check()
    except ModelLoadError as error:
        report["triton_problem"] = str(error)
    dtype = torch.bfloat16 if gpu.supports_bf16 else torch.float16
    # The head size of most models; one with larger heads may get another library.
    attention, _ = choose_library(config.attention_backend, gpu.compute_capability, dtype, head_dim=128)
    name = str(dtype).removeprefix("torch.")
    return {
        "device": str(gpu.device),
        "threads": torch.get_num_threads(),
        "attention": attention,
        "kv_cache_bytes": max(0, int(total * config.gpu_memory_utilization) - (total - free)),
        **dict.fromkeys(("weights", "dtype", "activations"), name),
    }


def _are_peers(i: int, j: int) -> bool:
    return torch.cuda.can_device_access_peer(i, j) and torch.cuda.can_device_access_peer(j, i)


def _triton_version() -> str | None:
    try:
        import triton
    except Exception:  # whatever a broken installation raises; `CudaPlatform.check` says what of it on a GPU
        return None
    return str(triton.__version__)


if __name__ == "__main__":
    logging.disable()
    given = [EngineConfig.from_wire(json.loads(text)) for text in sys.argv[1:]]
    print(json.dumps(probe(*given)))  # noqa: T201
