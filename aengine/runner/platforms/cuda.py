"""NVIDIA GPUs as a platform: found, checked, opened; and the one file that calls ``torch.cuda``.

A GPU that can't be used ends the start with one line that says why and what helps, or, with device="auto", is passed
over for the CPU with that line as a warning. What is missing beside a good GPU (Triton, a compiler) ends the start
either way: its cure is quick, and a GPU is there.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from ...config import EngineConfig
from ...errors import ModelLoadError
from ..attention.backend import AttentionBackend, TritonAttention
from ..attention.invariant import InvariantAttention
from ..attention.library import choose_prefill_backend
from ..kv_spec import WindowKV
from ..model_config import ModelConfig
from .cuda_memory import CudaMemory
from .platform import DeviceMemory, Event, Graph, Platform, SideStream, Unavailable

logger = logging.getLogger("aengine.runner")

_LEAST_CAPABILITY = (7, 5)  # Turing: what CUDA 13 and Triton still compile for
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")


@contextlib.contextmanager
def _profiler_range() -> Iterator[Callable[[str], contextlib.AbstractContextManager[object]]]:
    """See `Platform`: between cudaProfilerStart and cudaProfilerStop, where phases are ranges of NVTX."""
    with torch.cuda.profiler.profile():
        yield torch.cuda.nvtx.range


@dataclass
class CudaPlatform:
    """CUDA: one GPU."""

    device: torch.device
    name: str
    compute_capability: tuple[int, int]
    is_accelerator = True
    pins_memory = True
    compiled_types = ()
    default_batched_tokens = 8192
    profiler_activities: ClassVar[Sequence[Any]] = (ProfilerActivity.CUDA,)
    profiler_range = staticmethod(_profiler_range)

    def __post_init__(self) -> None:
        self.virtual_memory = CudaMemory(self.device)
        self.adds_in_order = self.compute_capability == (9, 0)

    @classmethod
    def find(cls, setting: str) -> CudaPlatform | Unavailable:
        """Find the device of ``setting``: "cuda" for the first, or "cuda:N"."""
        with warnings.catch_warnings(record=True) as caught:  # torch says there why it sees none
            warnings.simplefilter("always")
            available = torch.cuda.is_available()
        if not available:
            return _why_unavailable(" ".join(str(warning.message) for warning in caught))
        index, count = int(setting.partition(":")[2] or 0), torch.cuda.device_count()
        if index >= count:
            there = (
                "'cuda:0' is the only GPU" if count == 1 else f"there are {count} GPUs, 'cuda:0' to 'cuda:{count - 1}'"
            )
            return Unavailable(f"{there} here: use one of them")
        device = torch.device("cuda", index)
        try:
            torch.empty(1, device=device).fill_(1).sum().item()  # a context, memory, a kernel of torch's own
            properties = torch.cuda.get_device_properties(device)
        except torch.OutOfMemoryError:
            name = torch.cuda.get_device_name(device)
            return Unavailable(f"cuda:{index} ({name}) has no free memory: end other processes on it")
        except RuntimeError as error:
            return Unavailable(f"CUDA fails on cuda:{index}: {_first_line(error)}: see what nvidia-smi says of it")
        gpu = cls(device, properties.name, (properties.major, properties.minor))
        if gpu.compute_capability < _LEAST_CAPABILITY:
            return Unavailable(f"{gpu.title} is too old: use a GPU of compute capability 7.5 (Turing) or more")
        return gpu

    def check(self) -> None:
        """See `Platform`: Triton is looked for, and what it needs to launch kernels."""
        _check_triton(self)

    def open(self) -> None:
        torch.cuda.set_device(self.device)
        # cuBLAS may cut a product along K; the parts are then added in float32 too.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    @property
    def title(self) -> str:
        major, minor = self.compute_capability
        return f"{self.name} (compute capability {major}.{minor})"

    @property
    def supports_bf16(self) -> bool:
        return self.compute_capability >= (8, 0)

    # -- choices

    def choose_dtype(self, setting: str, checkpoint_dtype: str) -> str:
        """Return the setting ``dtype``, "auto" resolved: the checkpoint's own 16-bit format, else bfloat16; float16 on
        a GPU that has no bfloat16.

        Raises ModelLoadError if bfloat16 was asked for and the GPU has none.
        """
        wanted = setting
        if setting == "auto":
            wanted = checkpoint_dtype if checkpoint_dtype in ("float16", "bfloat16") else "bfloat16"
        if wanted != "bfloat16" or self.supports_bf16:
            return wanted
        why = f"{self.title} has no bfloat16, which needs compute capability 8.0"
        if setting != "auto":
            raise ModelLoadError(f"dtype={setting!r}: {why}: use dtype='auto', 'float16' or 'float32'")
        logger.warning("%s: running in float16; should logits overflow, use dtype='float32'", why)
        return "float16"

    def choose_attention(self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> AttentionBackend:
        """See `Platform`. A library for long prompts is imported in a thread, see `AttentionBackend.join`."""
        if config.batch_invariant:
            return InvariantAttention()
        heads = max(model_config.head_shapes, key=lambda shape: shape[2], default=(1, 1, 64))
        capability = self.compute_capability
        kept = model_config.kv_layers
        prefill = choose_prefill_backend(
            config.attention_backend,
            capability,
            self.device,
            self._aside,
            dtype,
            *heads,
            most_tokens=config.max_num_batched_tokens or self.default_batched_tokens,
            is_uniform=len(model_config.head_shapes) == 1 and not any(isinstance(kv, WindowKV) for kv in kept),
        )
        return TritonAttention(prefill)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Put this thread's launches on a stream of their own; at the end they have run."""
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield
            stream.synchronize()

    # -- memory

    def memory(self) -> DeviceMemory:
        free, total = torch.cuda.mem_get_info(self.device)
        allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        virtual = self.virtual_memory.mapped_bytes
        return DeviceMemory(total, free, allocated + virtual, reserved + virtual)

    def memory_taken(self) -> int:
        """See `Platform`: what torch and `virtual_memory` have taken; the driver's own share is not in it."""
        count: int = torch.cuda.memory_stats_as_nested_dict(self.device)["reserved_bytes"]["all"]["current"]
        return count + self.virtual_memory.mapped_bytes

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def peak_of(self, work: Callable[[], None]) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        return torch.cuda.max_memory_allocated(self.device) + self.virtual_memory.mapped_bytes

    def can_read(self, other: torch.device) -> bool:
        return torch.cuda.can_device_access_peer(self.device, other)

    def share(self, memory: Tensor) -> bool:
        if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
            return True
        with contextlib.suppress(RuntimeError):  # reads the failure, which the next call of CUDA would raise
            torch.zeros(1, device=self.device)
        return False

    # -- the order of work

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def record_event(self) -> Event | None:
        event = torch.cuda.Event()
        event.record()
        return event

    def side_stream(self) -> SideStream:
        return _SideStream(torch.cuda.Stream(self.device))

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def capture(self, pool: Any) -> Iterator[Graph]:
        """See `Platform`. No garbage is collected meanwhile: to free an old graph, say, would spoil the new one.

        Unlike `torch.cuda.graph`, neither waits for the device nor gives back what torch keeps, which the next steps
        would have to take anew, pinned memory included.
        """
        graph = torch.cuda.CUDAGraph()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._capture_stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    yield graph
                finally:
                    graph.capture_end()
        finally:
            if was_enabled:
                gc.enable()

    @cached_property
    def _capture_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)


class _SideStream:
    """See `SideStream`. Copies to the host go into pinned memory."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Event | None]:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        pinned = []
        with torch.cuda.stream(stream):
            for tensor in tensors:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)  # its memory is not given anew before the copy has run
                pinned.append(copy)
            event = torch.cuda.Event()
            event.record(stream)
        return pinned, event

    def launch(self, work: Callable[[], None], after: Any) -> Event | None:
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            work()
        return self._stream.record_event()


# -- what is missing


def _why_unavailable(warning: str) -> Unavailable:
    """Explain torch's warning from its search for a GPU; "" if it gave none. Expected where there is no driver."""
    driver = driver_version()
    return Unavailable(_reason(driver, warning), is_expected=driver is None)


def _reason(driver: str | None, warning: str) -> str:
    built_for = torch.version.cuda
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
    """Return the version of the loaded NVIDIA driver, such as "580.65"; None if there is none."""
    try:
        words = _DRIVER_VERSION.read_text().split()
    except OSError:
        return None
    return next((word for word in words if word.replace(".", "").isdecimal() and "." in word), "of unknown version")


# -- Triton


def _check_triton(gpu: CudaPlatform) -> None:
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


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


if TYPE_CHECKING:
    _: type[Platform] = CudaPlatform
