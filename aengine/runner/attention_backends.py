"""What attends to prompts on a GPU: our own kernel, or a library that is faster for long ones.

    triton          ours; reads the paged cache; works everywhere
    flash-attn-4    pip install flash-attn-4; Hopper and later
    flash-attn-3    flash_attn_interface, built from source; Hopper
    flash-attn-2    flash-attn; Ampere and later

The libraries get keys and values in one piece: those of this step where every prompt begins here, else a copy of them
together with their context. So they know nothing of blocks, and no block size suits one of them better.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import ModelLoadError
from ..kernels.varlen_attention import varlen_attention
from .input_batch import Rows
from .transfer import to_device

__all__ = ["PrefillBackend", "PrefillMetadata", "choose_prefill_backend"]

logger = logging.getLogger("aengine.runner")


@dataclass(slots=True)
class PrefillMetadata:
    """The prompts of a step, or chunks of them: n sequences."""

    rows: Tensor  # int64 [n]
    block_table: Tensor  # int32 [max_num_seqs, width], by row
    seq_lens: Tensor  # int32 [n]
    query_start_loc: Tensor  # int32 [n + 1], from 0 on
    query_lens: Rows  # host [n]
    seq_lens_host: Rows  # host [n]
    _gathered: tuple[Tensor, Tensor] | None = field(default=None, repr=False)  # places, cu_seqlens_k

    @classmethod
    def of(cls, rows: Tensor, seq_lens: Tensor, block_table: Tensor, query_lens: Rows, lens: Rows) -> PrefillMetadata:
        starts = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        return cls(rows, block_table, seq_lens, to_device(starts, rows.device), query_lens, lens)

    @property
    def has_context(self) -> bool:
        """Whether any of them had tokens before this step."""
        return bool((self.seq_lens_host > self.query_lens).any())

    def places(self, block_size: int) -> tuple[Tensor, Tensor]:
        """Where all tokens of all sequences are: (int64 [2, total] block and offset, int32 [n + 1] starts)."""
        if self._gathered is None:
            starts = np.zeros(len(self.seq_lens_host) + 1, dtype=np.int32)
            np.cumsum(self.seq_lens_host, out=starts[1:])
            owner = np.repeat(np.arange(len(self.seq_lens_host)), self.seq_lens_host)
            position = np.arange(starts[-1]) - starts[owner]
            sent = to_device(np.stack((owner, position)), self.rows.device)
            blocks = self.block_table[self.rows[sent[0]], sent[1] // block_size].long()
            self._gathered = torch.stack((blocks, sent[1] % block_size)), to_device(starts, self.rows.device)
        return self._gathered


class PrefillBackend(Protocol):
    name: str

    def pays(self, query_lens: Rows) -> bool:
        """Whether `prefill` is worth its start for prompts of these lengths; if not, `varlen_attention` is called."""

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: PrefillMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """[num_tokens, num_heads * head_dim].

        Args:
            q, k, v: [num_tokens, heads, head_dim] of the new tokens, strided by token; in the cache already
            kv_cache: [num_blocks, block_size, 2, num_kv_heads, head_dim]
        """


class TritonPrefill:
    name = "triton"

    def pays(self, query_lens: Rows) -> bool:
        return False

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: PrefillMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        m = metadata
        return varlen_attention(q, kv_cache, m.block_table, m.rows, m.query_start_loc, m.seq_lens, scale, window)


Varlen = Callable[..., Any]


class LibraryPrefill:
    """A varlen function of the flash-attn family. If it fails, it is said once, and our own kernel takes over."""

    def __init__(self, name: str, function: Varlen) -> None:
        self.name = name
        self._function: Varlen | None = function
        self._own = TritonPrefill()

    def pays(self, query_lens: Rows) -> bool:
        return self._function is not None and int(query_lens.max()) >= _WORTHWHILE

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: PrefillMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        m = metadata
        longest = int(m.query_lens.max())
        if self._function is None:
            return self._own.prefill(q, k, v, kv_cache, m, scale, window)
        starts_k = m.query_start_loc
        if m.has_context:
            places, starts_k = m.places(kv_cache.shape[1])
            k, v = kv_cache[places[0], places[1]].unbind(1)
        try:
            out = self._function(
                q,
                k,
                v,
                cu_seqlens_q=m.query_start_loc,
                cu_seqlens_k=starts_k,
                max_seqlen_q=longest,
                max_seqlen_k=int(m.seq_lens_host.max()),
                softmax_scale=scale,
                causal=True,
                **({} if window is None else {"window_size": (window - 1, 0)}),
            )
        except Exception as error:
            logger.warning("%s failed and is not used any more; prompts go through triton: %r", self.name, error)
            self._function = None
            return self._own.prefill(q, k, v, kv_cache, m, scale, window)
        return (out[0] if isinstance(out, tuple) else out).flatten(1)


_WORTHWHILE = 512
"""Query tokens of the longest prompt from which a library pays: below, its start on the host costs more than it saves."""

_LIBRARIES: dict[str, tuple[str, str, tuple[int, int], str]] = {
    # setting: module, function, least compute capability, how to get it
    "flash-attn-4": ("flash_attn.cute", "flash_attn_varlen_func", (9, 0), "pip install 'aengine[flash]'"),
    "flash-attn-3": ("flash_attn_interface", "flash_attn_varlen_func", (9, 0), "build flash-attention's hopper/"),
    "flash-attn-2": ("flash_attn", "flash_attn_varlen_func", (8, 0), "pip install flash-attn"),
}


def choose_prefill_backend(setting: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> PrefillBackend:
    """``setting``: "triton", a library by name, or "auto": the first of the libraries that can be used, else triton.

    Raises ModelLoadError if the library that was asked for can't be used here.
    """
    if setting == "triton":
        return TritonPrefill()
    names = list(_LIBRARIES) if setting == "auto" else [setting]
    for name in names:
        module, function, capability, cure = _LIBRARIES[name]
        reason = None
        if dtype not in (torch.float16, torch.bfloat16):
            reason = f"it can't compute in {str(dtype).removeprefix('torch.')}: leave attention_backend at 'auto'"
        elif torch.cuda.get_device_capability(device) < capability:
            reason = f"it needs a GPU of compute capability {capability[0]}.{capability[1]} or more: use 'triton'"
        elif head_dim % 8 or head_dim > 256:
            reason = f"it has no kernels for head_dim={head_dim}: use 'triton'"
        if reason is None:
            try:
                return LibraryPrefill(name, getattr(importlib.import_module(module), function))
            except (ImportError, AttributeError) as error:
                reason = f"it can't be imported ({error}): {cure}"
            except Exception as error:  # whatever a library's own import may do
                logger.warning("%s is installed, but its import failed: %r", name, error)
                reason = f"its import failed ({error!r})"
        if setting != "auto":
            raise ModelLoadError(f"attention_backend={setting!r} can't be used: {reason}")
    return TritonPrefill()
