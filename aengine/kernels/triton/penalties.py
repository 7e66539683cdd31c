"""Penalties in one launch, a look at every count; only logits of tokens that occur are read and written.

At least: 4 * V bytes read a penalized row (n = 64, V = 151936: 39 MB, 9 us at 4.3 TB/s), 8 a token that occurs. It
depends on nothing but the rows, so that a graph may hold it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from .launch import has_pdl, launch, launch_next_and_wait

if TYPE_CHECKING:
    from ..penalties import PenaltyInputs

_TILE = 1024
_LOGITS = 4096  # logits that a program changes
_IN_PROMPT = tl.constexpr(1 << 30)  # flag that kernels/penalties.py defines


def add_counts(counts: Tensor, token_ids: Tensor, num_prompt_tokens: int) -> None:
    assert counts.stride(0) == token_ids.stride(0) == 1
    m = token_ids.shape[0]
    if m:
        launch(_histogram_kernel, (triton.cdiv(m, _TILE),), counts, token_ids, m, num_prompt_tokens, TILE=_TILE)


def count_sampled(sampled: Tensor, inputs: PenaltyInputs) -> None:
    n, stride = sampled.shape[0], _stride(inputs)
    if n:
        where = (inputs.counts, inputs.counts.stride(0), inputs.rows, sampled, n)
        columns = (inputs.repetition, inputs.frequency, inputs.presence)
        launch(_count_kernel, (triton.cdiv(n, _TILE),), *where, *columns, stride, TILE=_TILE, PDL=has_pdl())


def apply_penalties(logits: Tensor, inputs: PenaltyInputs) -> None:
    assert logits.stride(1) == inputs.counts.stride(1) == 1
    n, vocab_size = logits.shape
    if n:
        where = (logits, logits.stride(0), inputs.counts, inputs.counts.stride(0), inputs.rows, vocab_size)
        columns = (inputs.repetition, inputs.frequency, inputs.presence, _stride(inputs))
        grid = (n, triton.cdiv(vocab_size, _LOGITS))
        launch(_penalty_kernel, grid, *where, *columns, TILE=_LOGITS, PDL=has_pdl())


def _stride(inputs: PenaltyInputs) -> int:
    stride = inputs.repetition.stride(0)
    assert inputs.frequency.stride(0) == inputs.presence.stride(0) == stride
    return stride


@triton.jit(do_not_specialize=["counts", "token_ids", "m", "num_prompt_tokens"])
def _histogram_kernel(
    counts: tl.tensor, token_ids: tl.tensor, m: tl.tensor, num_prompt_tokens: tl.tensor, TILE: tl.constexpr
) -> None:
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = counts + tl.load(token_ids + i, mask=i < m, other=0)
    is_prompt = i < num_prompt_tokens
    tl.atomic_or(place, tl.full((TILE,), _IN_PROMPT, tl.int32), mask=(i < m) & is_prompt, sem="relaxed")
    tl.atomic_add(place, tl.full((TILE,), 1, tl.int32), mask=(i < m) & ~is_prompt, sem="relaxed")


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["rows", "sampled"])
def _count_kernel(
    counts: tl.tensor,
    counts_stride: tl.tensor,
    rows: tl.tensor,
    sampled: tl.tensor,
    n: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    scalar_stride: tl.tensor,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_next_and_wait(PDL)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(rows + i, mask=i < n, other=-1)
    is_in = row >= 0
    at = i * scalar_stride
    is_penalized = tl.load(repetition + at, mask=is_in, other=1.0) != 1.0
    is_penalized |= tl.load(frequency + at, mask=is_in, other=0.0) != 0.0
    is_penalized |= tl.load(presence + at, mask=is_in, other=0.0) != 0.0
    is_in &= is_penalized
    place = counts + row * counts_stride + tl.load(sampled + i, mask=is_in, other=0)
    tl.store(place, tl.load(place, mask=is_in, other=0) + 1, mask=is_in)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _penalty_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    counts: tl.tensor,
    counts_stride: tl.tensor,
    rows: tl.tensor,
    vocab_size: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    scalar_stride: tl.tensor,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_next_and_wait(PDL)
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    factor = tl.load(repetition + i * scalar_stride)
    of_count = tl.load(frequency + i * scalar_stride)
    of_any = tl.load(presence + i * scalar_stride)
    if (row >= 0) & ((factor != 1.0) | (of_count != 0.0) | (of_any != 0.0)):
        token = tl.program_id(1) * TILE + tl.arange(0, TILE)
        found = tl.load(counts + row * counts_stride + token, mask=token < vocab_size, other=0)
        place = logits + i * logits_stride + token
        x = tl.load(place, mask=found != 0, other=0.0)
        count = (found & (_IN_PROMPT - 1)).to(tl.float32)
        x = tl.where(x > 0, x / factor, x * factor)
        x -= of_count * count
        x -= tl.where(count > 0, of_any, 0.0)
        tl.store(place, x, mask=found != 0)
