"""The seam to the device: what start-up, the runner and its graphs ask of one kind of hardware.

`CpuPlatform` and `CudaPlatform` are one file each. Another kind is a file with a class like theirs, in a package that
names it as an entry point in the group ``aengine.platforms``; the setting ``device`` then takes that name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...config import EngineConfig
    from ..attention.backend import AttentionBackend
    from ..model_config import ModelConfig
    from .virtual_memory import VirtualMemory


class Event(Protocol):
    """A point in a device's queue of work."""

    def query(self) -> bool:
        """Return whether the device has reached this point."""

    def synchronize(self) -> None:
        """Block until the device has reached this point."""

    def wait(self) -> None:
        """Make what is queued from now on wait until the device has reached this point, in whatever queue that lies."""


class Graph(Protocol):
    """A captured graph of launches."""

    def replay(self) -> None:
        """Queue all launches of the graph."""


class SideStream(Protocol):
    """A queue of work beside the device's own."""

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Event | None]:
        """Queue copies to the host. Returns these, and the event after which they are filled; None: they are."""

    def launch(self, work: Callable[[], None], after: Event | None) -> Event | None:
        """Queue what ``work`` launches, behind all that this queue has and behind an event of another one; None: that
        is done. Returns the event that is done when the work is; None: it is."""


ProfilerRange = Callable[[], AbstractContextManager[Callable[[str], AbstractContextManager[object]]]]
"""Yields what names phases in the range."""


class DeviceMemory(NamedTuple):
    """Memory of a device, in bytes."""

    total: int
    free: int  # bytes that no process has taken
    allocated: int  # bytes of this process' tensors
    reserved: int  # bytes that this process has taken, those of its tensors included


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why a device can't be used, with the cure, as a clause."""

    reason: str
    is_expected: bool = False  # the machine has none: no warning is needed

    def __str__(self) -> str:
        return self.reason


class Platform(Protocol):
    """One device, open or about to be opened. Its methods raise torch.OutOfMemoryError where memory runs out."""

    device: torch.device
    name: str
    """The hardware's name, for logs and messages."""
    is_accelerator: bool
    """Has memory of its own and a queue of work, and runs the Triton kernels. Else: the CPU, where ops run in torch."""
    pins_memory: bool
    """Host memory that it reads and writes by itself is to be pinned."""
    default_batched_tokens: int
    """Most tokens computed in one step where max_num_batched_tokens is not set."""
    profiler_activities: ClassVar[Sequence[Any]]
    """Those of `torch.profiler` that record it, the CPU's aside."""

    @property
    def profiler_range(self) -> ProfilerRange | None:
        """What opens the range that profilers outside of this process record; None: the device has none."""

    @classmethod
    def find(cls, setting: str) -> Platform | Unavailable:
        """Return the device of ``setting``, the platform's name with perhaps ":" and an index, checked to compute at
        all."""

    def check(self) -> None:
        """Raise ModelLoadError, one line with its cure, if something beside the device keeps kernels from running."""

    def open(self) -> None:
        """Make the device the one that this process computes on. Called once, before the methods below."""

    # -- choices

    @property
    def adds_in_order(self) -> bool:
        """Whether it has the kernels of a batch-invariant `KernelPolicy`."""

    @property
    def compiled_types(self) -> Collection[str]:
        """Types of a GGUF's matrices that a CPU's compiled kernels multiply as they are; empty: it has no such
        kernels."""

    def choose_dtype(self, setting: str, checkpoint_dtype: str) -> str:
        """Return the setting ``dtype``, with "auto" resolved as far as the device decides it. Raises ModelLoadError."""

    def choose_attention(self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> AttentionBackend:
        """Choose the attention backend, which also makes the KV cache. Raises ModelLoadError."""

    # -- memory

    @property
    def virtual_memory(self) -> VirtualMemory:
        """Memory that can go and come back at the same addresses; `memory` counts it as this process'."""

    def memory(self) -> DeviceMemory:
        """Return the device's memory, and who has taken it, in bytes."""

    def memory_taken(self) -> int:
        """Return the bytes that this process has taken on the device; from any thread, also while it computes."""

    def release_cached(self) -> None:
        """Release the memory that torch has cached."""

    def peak_of(self, work: Callable[[], None]) -> int:
        """Return the most bytes that this process' tensors take while ``work`` runs, those that exist already
        included."""

    def can_read(self, other: torch.device) -> bool:
        """Return whether the device reads and writes the memory of ``other``, one of the same platform, by itself."""

    def share(self, memory: Tensor) -> bool:
        """Let the device read and write this host memory by itself, until the process ends. Returns whether it can."""

    # -- the order of work

    def synchronize(self) -> None:
        """Wait until all that was queued is done."""

    def record_event(self) -> Event | None:
        """Return an event that is done when all queued so far is; None: it is already."""

    def side_stream(self) -> SideStream:
        """Make a new side stream."""

    def graph_pool(self) -> Any:
        """Return a memory pool for graphs of which no two run at once."""

    def capture(self, pool: Any) -> AbstractContextManager[Graph]:
        """Record launches into a graph instead of running them; it is complete at the end. If capturing fails, the
        current stream is what it was."""
