"""Attention to prompts on a GPU: by our own kernel, or by a library that is faster for long ones.

    triton          ours; reads the paged cache; works everywhere
    cudnn           comes with torch; prompts without a context (cudnn.py); Hopper and Blackwell
    flash-attn-4    pip install flash-attn-4; Hopper and later
    flash-attn-3    flash_attn_interface, built from source, or sglang-kernel; Hopper
    flash-attn-2    flash-attn; Ampere and later

The libraries get keys and values in one piece: those of this step where every prompt begins here, else a copy of them
together with their context. So no library depends on blocks or on their size.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ModelLoadError
from ...kernels.paged_attention import Scores
from ..input_batch import Rows
from .cudnn import CudnnPrefill, PromptHeads
from .kv_pages import AttentionLayerKV
from .prefill import PrefillBackend, PrefillMetadata, TritonPrefill

logger = logging.getLogger("aengine.runner")


Varlen = Callable[..., Any]


class LibraryPrefill:
    """A varlen function of the flash-attn family. If it fails, one warning is logged, and our own kernel is used.

    Importing such a library and compiling its kernel takes seconds, so a thread does it while the engine starts.
    """

    def __init__(self, name: str, load: Callable[[], Varlen], *, required: bool) -> None:
        self.name = name
        self._function: Varlen | None = None
        self._required = required
        self._error: Exception | None = None
        self._had_no_memory = False
        self._thread = threading.Thread(target=self._load, args=(load,), name=f"import {name}", daemon=True)
        self._thread.start()

    def _load(self, load: Callable[[], Varlen]) -> None:
        try:
            self._function = load()
        except Exception as error:  # an import of a library may raise anything
            self._error = error

    def join(self) -> None:
        self._thread.join()
        if self._error is None:
            return
        if self._required:
            raise ModelLoadError(
                f"attention_backend={self.name!r} can't be used: {self._error!r}; {_LIBRARIES[self.name].cure}, "
                f"or leave attention_backend at 'auto'"
            )
        logger.warning("%s is installed, but can't be used; prompts go through triton: %r", self.name, self._error)
        self.name = TritonPrefill.name

    def preparations(self) -> list[Callable[[], None]]:
        return []

    def is_faster(self, query_lens: Rows, seq_lens: Rows) -> bool:
        return self._function is not None and query_lens.sum() >= _WORTHWHILE and query_lens.max() >= _LONG

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, kept: AttentionLayerKV, metadata: PrefillMetadata, how: Scores
    ) -> Tensor | None:
        m = metadata
        if (
            self._function is None or how.softcap or how.sinks is not None
        ):  # the libraries do these in ways of their own
            return None
        starts_k = m.query_start_loc
        longest, longest_k = int(m.query_lens.max()), int(m.key_lens(how.window).max())
        try:
            if m.has_context:
                places, starts_k = m.places(kept.group, kept.cache.shape[1], how.window)
                k, v = kept.numbers(kept.cache[places[0], places[1]], q.dtype).unbind(1)
            else:
                k, v = kept.rounded(k, v)
            out = _call(self._function, q, k, v, m.query_start_loc, starts_k, longest, longest_k, how)
        # the copy of the contexts is in no profile, and may find no memory; our own kernel needs none
        except torch.OutOfMemoryError as error:
            if not self._had_no_memory:
                lacks = f"{self.name} has no memory for {int(m.seq_lens.sum())} tokens of prompts and their contexts"
                logger.warning("%s; such steps go through triton: lower gpu_memory_utilization (%s)", lacks, error)
            self._had_no_memory = True
            return None
        except Exception as error:
            logger.warning("%s failed and is not used any more; prompts go through triton: %r", self.name, error)
            self._function = None
            return None
        return out.flatten(1)


_WORTHWHILE = 2048
"""Prompt tokens in a step from which a library is faster; below, the layers are one launch with our own kernel."""
_LONG = 512
"""Tokens of the longest prompt from which it is faster: for many short ones our own kernel is faster."""


class _Library(NamedTuple):
    modules: tuple[str, ...]  # the first that is installed counts; none: it is part of torch
    least: tuple[int, int]  # compute capability
    below: tuple[int, int]
    cure: str


_LIBRARIES = {
    "flash-attn-4": _Library(("flash_attn.cute",), (9, 0), (13, 0), "pip install 'flash-attn-4[cu13]>=4.0.0b36'"),
    "flash-attn-3": _Library(
        ("flash_attn_interface", "sgl_kernel.flash_attn"), (9, 0), (10, 0), "pip install sglang-kernel"
    ),
    "flash-attn-2": _Library(("flash_attn",), (8, 0), (13, 0), "pip install flash-attn"),
    "cudnn": _Library((), (9, 0), (11, 0), ""),
}


def choose_prefill_backend(
    setting: str,
    capability: tuple[int, int],
    device: torch.device,
    aside: Callable[[], AbstractContextManager[None]],
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    most_tokens: int,
    is_uniform: bool,
) -> PrefillBackend:
    """``setting``: "triton", a library by name, or "auto": the first of the libraries that can be used, else triton.

    Args:
        aside: within, launches go to a stream of their own, and have run at its end
        num_heads, num_kv_heads, head_dim: of the layers with the largest heads
        most_tokens: of a step
        is_uniform: all layers have these heads, and none has a window

    Raises ModelLoadError if the library that was asked for can't be used here.
    """
    name, module = choose_library(setting, capability, dtype, head_dim)
    is_required = setting != "auto"
    if name == "cudnn" and (is_uniform or is_required):
        heads = PromptHeads(num_heads, num_kv_heads, head_dim, dtype)
        return CudnnPrefill(device, aside, heads, most_tokens, required=is_required)
    if not module:
        return TritonPrefill()
    load = partial(_load_varlen, module, device, aside, dtype, num_heads, num_kv_heads, head_dim)
    return LibraryPrefill(name, load, required=is_required)


def choose_library(setting: str, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """The library's name and its module, which is installed and not imported yet; "" for what is part of torch or ours:
    "cudnn", and "triton" if "auto" finds nothing else.

    Raises ModelLoadError if the library that was asked for can't be used here.
    """
    if setting == "triton":
        return setting, ""
    for name in list(_LIBRARIES) if setting == "auto" else [setting]:
        library = _LIBRARIES[name]
        reason, module = _why_not(library, capability, dtype, head_dim), ""
        if reason is None and library.modules:
            module = next((m for m in library.modules if _is_installed(m)), "")
            if not module:
                reason = f"it is not installed: {library.cure}"
        if reason is None:
            return name, module
        if setting != "auto":
            raise ModelLoadError(f"attention_backend={setting!r} can't be used: {reason}")
    return "triton", ""


def _why_not(library: _Library, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> str | None:
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it can't compute in {str(dtype).removeprefix('torch.')}: leave attention_backend at 'auto'"
    if not library.least <= capability < library.below:
        return f"it has no kernels for compute capability {capability[0]}.{capability[1]}: use 'triton'"
    if head_dim % 8 or head_dim > (128 if capability >= (10, 0) else 256):
        return f"it has no kernels for head_dim={head_dim}: use 'triton'"
    return None


def _is_installed(module: str) -> bool:
    """Whether a module is installed; only the packages around it are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _load_varlen(
    module: str,
    device: torch.device,
    aside: Callable[[], AbstractContextManager[None]],
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> Varlen:
    """Import it, and call it once, so that it is compiled. Raises what the library raises."""
    with warnings.catch_warnings(), aside():
        warnings.simplefilter("ignore")
        function: Varlen = importlib.import_module(module).flash_attn_varlen_func
        q, k, v = (
            torch.zeros((128, heads, head_dim), dtype=dtype, device=device)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        starts = torch.tensor([0, 128], dtype=torch.int32, device=device)
        _call(function, q, k, v, starts, starts, 128, 128, Scores(head_dim**-0.5))
    return function


def _call(
    function: Varlen,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    how: Scores,
) -> Tensor:
    out = function(
        q,
        k,
        v,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        softmax_scale=how.scale,
        causal=True,
        **({} if how.window is None else {"window_size": (how.window - 1, 0)}),
    )
    return out[0] if isinstance(out, tuple) else out
