"""Attention to the prompts of a step: what a back end for them is, and is told. `TritonPrefill` is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...kernels.paged_attention import Scores
from ..input_batch import Rows
from ..transfer import to_device
from .kv_pages import AttentionLayerKV


@dataclass(slots=True)
class PrefillMetadata:
    """The prompts of a step, or chunks of them: n sequences."""

    rows: Tensor  # int64 [n]
    block_table: Tensor  # int32 [num_groups, max_num_seqs, width], by KV group and row
    query_start_loc: Tensor  # int32 [n + 1], from 0 on
    query_lens: Rows  # [n], on the host
    seq_lens: Rows  # [n], on the host
    _gathered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)  # `places`, by group

    @classmethod
    def of(cls, rows: Tensor, block_table: Tensor, query_lens: Rows, seq_lens: Rows) -> PrefillMetadata:
        starts = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        return cls(rows, block_table, to_device(starts, rows.device), query_lens, seq_lens)

    @property
    def has_context(self) -> bool:
        """Whether any of the prompts had tokens before this step."""
        return bool((self.seq_lens > self.query_lens).any())

    def key_lens(self, window: int | None) -> Rows:
        """Host [n]: how many of the last tokens of each sequence any of its queries looks at."""
        return self.seq_lens if window is None else np.minimum(self.seq_lens, self.query_lens + window - 1)

    def places(self, group: int, block_size: int, window: int | None) -> tuple[Tensor, Tensor]:
        """Return the places of the tokens attended to: (int64 [2, total] block and offset, int32 [n + 1] starts)."""
        if group not in self._gathered:
            lens = self.key_lens(window)
            starts = np.zeros(len(lens) + 1, dtype=np.int32)
            np.cumsum(lens, out=starts[1:])
            owner = np.repeat(np.arange(len(lens)), lens)
            position = np.arange(starts[-1]) + (self.seq_lens - lens - starts[:-1])[owner]
            sent = to_device(np.stack((owner, position)), self.rows.device)
            blocks = self.block_table[group][self.rows[sent[0]], sent[1] // block_size].long()
            self._gathered[group] = torch.stack((blocks, sent[1] % block_size)), to_device(starts, self.rows.device)
        return self._gathered[group]


class PrefillBackend(Protocol):
    name: str

    def join(self) -> None:
        """Wait until it is ready. Raises ModelLoadError if it can't be used, and was asked for by name."""

    def preparations(self) -> list[Callable[[], None]]:
        """Return what is better done in idle time, in parts of a tenth of a second or less."""

    def is_faster(self, query_lens: Rows, seq_lens: Rows) -> bool:
        """Return whether `prefill` is faster for prompts, or chunks, of these lengths; if not, `varlen_attention` is
        called. ``seq_lens`` counts what was computed before."""

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, kept: AttentionLayerKV, metadata: PrefillMetadata, how: Scores
    ) -> Tensor | None:
        """Return [num_tokens, num_heads * head_dim]; None if it can't, and `varlen_attention` is called for the rest of
        the step. If it failed, `is_faster` is false from then on; if it had no memory, only this step is affected.

        Args:
            q, k, v: [num_tokens, heads, head_dim] of the new tokens, strided by token; in the cache already
            kept: the layer's cache, its group and window
        """


class TritonPrefill:
    """Attention to prompts without a library: all are computed by `varlen_attention`."""

    name = "triton"

    def join(self) -> None:
        pass

    def preparations(self) -> list[Callable[[], None]]:
        return []

    def is_faster(self, query_lens: Rows, seq_lens: Rows) -> bool:
        return False

    def prefill(self, *args: Any) -> Tensor | None:
        return None
