"""The CPU as a platform: what is called has run when the call returns, and memory is the machine's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...checkpoint.gguf_file import GGML_TYPES
from ...config import EngineConfig
from ...errors import InternalError
from ...kernels.cpu.compiler.target import unavailable
from ...kernels.policy import KernelPolicy
from ...limits.memory import free_memory
from ..attention.backend import AttentionBackend, TorchAttention
from ..model_config import ModelConfig
from .platform import DeviceMemory, Event, Graph, Platform, Unavailable
from .virtual_memory import CpuMemory

logger = logging.getLogger("aengine.runner")


class CpuPlatform:
    """The CPU as a platform: the cores that this process may use."""

    device = torch.device("cpu")
    name = "cpu"
    is_accelerator = False
    adds_in_order = True
    pins_memory = False
    default_batched_tokens = 512
    virtual_memory = CpuMemory()
    profiler_activities: ClassVar[Sequence[Any]] = ()
    profiler_range = None

    @classmethod
    def find(cls, setting: str) -> CpuPlatform | Unavailable:
        return cls()

    def check(self) -> None:
        pass

    def open(self) -> None:
        if reason := unavailable():
            logger.info("torch computes, as there are no compiled kernels, which are faster: %s", reason)
        else:
            from ...kernels.cpu.library import set_num_threads

            set_num_threads(torch.get_num_threads())

    def choose_dtype(self, setting: str, checkpoint_dtype: str) -> str:
        """Return the setting itself, also "auto", which depends on what the CPU's kernels are good at, see
        `choose_formats`."""
        if setting == "bfloat16" and unavailable() is None:
            logger.info(
                'torch computes, as compiled kernels, which are faster, have no dtype="bfloat16": '
                'dtype="auto" keeps 16-bit weights as they are'
            )
        return setting

    def choose_attention(self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> AttentionBackend:
        return TorchAttention(KernelPolicy(config.batch_invariant))

    @property
    def compiled_types(self) -> Collection[str]:
        if unavailable() is not None:
            return ()
        from ...kernels.cpu.packed.layouts import LAYOUTS

        return {kind.upper() for kind in LAYOUTS} & {kind.name for kind in GGML_TYPES.values()}

    def memory(self) -> DeviceMemory:
        free = free_memory()
        return DeviceMemory(free, free, 0, 0)

    def memory_taken(self) -> int:
        return 0

    def release_cached(self) -> None:
        pass

    def peak_of(self, work: Callable[[], None]) -> int:
        raise InternalError("the memory of a CPU is not profiled")

    def can_read(self, other: torch.device) -> bool:
        return True

    def share(self, memory: Tensor) -> bool:
        return False

    def synchronize(self) -> None:
        pass

    def record_event(self) -> Event | None:
        return None

    def side_stream(self) -> CpuPlatform:
        return self

    def launch(self, work: Callable[[], None], after: Event | None) -> Event | None:
        """See `SideStream`: it has been done."""
        work()
        return None

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Event | None]:
        """See `SideStream`: the tensors themselves."""
        return list(tensors), None

    def graph_pool(self) -> Any:
        return None

    def capture(self, pool: Any) -> AbstractContextManager[Graph]:
        raise InternalError("there are no graphs on a CPU")


if TYPE_CHECKING:
    _: type[Platform] = CpuPlatform
