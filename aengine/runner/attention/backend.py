"""Attention backend of a platform: chosen before the weights are loaded; makes the KV cache when memory is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ...kernels.policy import FASTEST, KernelPolicy
from .kv_pages import KvCacheSpec
from .torch_attention import KvCache
from .triton_attention import GpuKvCache

if TYPE_CHECKING:
    from .prefill import PrefillBackend


class AttentionBackend(Protocol):
    """Interface of an attention backend: it makes the KV cache, whose `bind` computes attention."""

    @property
    def name(self) -> str:
        """Name of what computes attention to long prompts."""

    def join(self) -> None:
        """Wait until it is ready, before anything is captured. Raises ModelLoadError."""

    def make_cache(self, spec: KvCacheSpec) -> Any:
        """Allocate the KV cache."""


class TorchAttention:
    """Attention on a CPU: by torch, or of a model that is a tape by compiled kernels."""

    def __init__(self, policy: KernelPolicy = FASTEST) -> None:
        self._policy = policy
        self._is_taped: Callable[[], bool] = lambda: False

    @property
    def name(self) -> str:
        return "compiled" if self._is_taped() else "torch"

    def join(self) -> None:
        pass

    def make_cache(self, spec: KvCacheSpec) -> KvCache:
        cache = KvCache(spec, self._policy)
        self._is_taped = lambda: cache.is_taped
        return cache


class TritonAttention:
    """Attention by the Triton kernels, with ``prefill`` for long prompts."""

    def __init__(self, prefill: PrefillBackend) -> None:
        self._prefill = prefill

    @property
    def name(self) -> str:
        return self._prefill.name

    def join(self) -> None:
        self._prefill.join()

    def make_cache(self, spec: KvCacheSpec) -> GpuKvCache:
        return GpuKvCache(spec, self._prefill)
