"""Attention to long prompts by cuDNN, which comes with torch: for those that begin in this step, without a context.

cuDNN makes a plan for each length, 65 ms of the CPU on an H200's host. So prompts are padded to a length out of a few,
and the plans are made ahead: that of the longest at start, the others in idle time. Until then, and for whatever else
it can't do, prompts go through `varlen_attention`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...errors import ModelLoadError
from ...kernels.paged_attention import Scores
from ..input_batch import Rows
from .kv_pages import AttentionLayerKV
from .prefill import PrefillMetadata

logger = logging.getLogger("aengine.runner")

_SHORTEST = 2048
"""Tokens of a prompt from which cuDNN is faster than our own kernel, which attends to all prompts in one launch."""


class PromptHeads(NamedTuple):
    """The heads of all layers, and the dtype of q, k and v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class CudnnPrefill:
    """A `PrefillBackend` that uses `F.scaled_dot_product_attention`, a call for each prompt.

    Only a thread's own plans are used by it. So `join` and `prepare` belong to the thread that runs the model; another
    one loads cuDNN meanwhile, which takes a second.
    """

    def __init__(
        self,
        device: torch.device,
        aside: Callable[[], AbstractContextManager[None]],
        heads: PromptHeads,
        most_tokens: int,
        *,
        required: bool,
    ) -> None:
        """``most_tokens``: of a step."""
        self.name = "cudnn"
        self._device = device
        self._heads = heads
        self._lengths = padded_lengths(most_tokens)
        self._ready: set[int] = set()
        self._is_used = bool(self._lengths)
        self._required = required
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._load, args=(aside,), name="load cudnn", daemon=True)
        if self._is_used:
            self._thread.start()

    def _load(self, aside: Callable[[], AbstractContextManager[None]]) -> None:
        try:
            with aside(), torch.inference_mode():
                self._attend_to_nothing(_SHORTEST)
        except Exception as error:  # cuDNN's libraries are missing, or none of its kernels fits
            self._error = error

    def join(self) -> None:
        if not self._is_used:
            return
        self._thread.join()
        if self._error is None:
            self.prepare(self._lengths[-1])
            return
        if self._required:
            raise ModelLoadError(f"attention_backend='cudnn' can't be used: {self._error!r}; leave it at 'auto'")
        logger.info("cuDNN can't attend to prompts here; they go through triton: %r", self._error)
        self._give_up()

    def preparations(self) -> list[Callable[[], None]]:
        """Return what is to be done in idle time, a plan each, the shortest first."""
        missing = [length for length in self._lengths if self._is_used and length not in self._ready]
        return [partial(self.prepare, length) for length in missing]

    @torch.inference_mode()
    def prepare(self, length: int) -> None:
        self._attend_to_nothing(length)
        self._ready.add(length)

    def is_faster(self, query_lens: Rows, seq_lens: Rows) -> bool:
        return (
            self._is_used
            and int(query_lens.min()) >= _SHORTEST
            and bool((query_lens == seq_lens).all())
            and all(self._padded(length) in self._ready for length in query_lens.tolist())
        )

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, kept: AttentionLayerKV, metadata: PrefillMetadata, how: Scores
    ) -> Tensor | None:
        heads = PromptHeads(q.shape[1], k.shape[1], q.shape[2], q.dtype)
        if heads != self._heads or how.sinks is not None or how != Scores(heads.head_dim**-0.5):
            self._give_up()  # the model has such layers in every step
            return None
        k, v = kept.rounded(k, v)
        outs, begin = [], 0
        try:
            for length in metadata.query_lens.tolist():
                own = slice(begin, begin + length)
                outs.append(self._attend(self._padded(length), *(t[own] for t in (q, k, v)))[:length])
                begin += length
            return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)
        except torch.OutOfMemoryError:  # there is no memory for the padded copies; our own kernel needs none
            return None
        except Exception as error:
            logger.warning("cuDNN failed and is not used any more; prompts go through triton: %r", error)
            self._give_up()
            return None

    def _padded(self, length: int) -> int:
        return next(padded for padded in self._lengths if padded >= length)

    def _attend(self, padded: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[padded, num_heads, head_dim]. A plan is for certain strides, too: those of parts of qkv."""
        heads = self._heads
        shape = (padded, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
        if len(q) < padded or any(t.stride() != (shape[1] * shape[2], shape[2], 1) for t in (q, k, v)):
            qkv = q.new_empty(shape)
            torch.cat((q, k, v), 1, out=qkv[: len(q)])
            qkv[len(q) :].zero_()  # masked, but a NaN times zero is one
            q, k, v = self._split(qkv)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            is_grouped = heads.num_heads != heads.num_kv_heads
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        return out[0].transpose(0, 1)

    def _split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        heads = self._heads
        return qkv.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)

    def _attend_to_nothing(self, length: int) -> None:
        heads = self._heads
        size = (length, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
        self._attend(length, *self._split(torch.zeros(size, dtype=heads.dtype, device=self._device)))

    def _give_up(self) -> None:
        self.name, self._is_used = "triton", False


def padded_lengths(most_tokens: int) -> tuple[int, ...]:
    """Return the quarters between powers of two, from `_SHORTEST` to the first that holds ``most_tokens``.

    None if ``most_tokens`` is less. A quarter is added to a length at most, and so half of the arithmetic: about what
    cuDNN saves.
    """
    if most_tokens < _SHORTEST:
        return ()
    lengths: list[int] = []
    while not lengths or lengths[-1] < most_tokens:
        quarter = _SHORTEST // 4 << len(lengths) // 4
        lengths.append(quarter * (4 + len(lengths) % 4))
    return tuple(lengths)
