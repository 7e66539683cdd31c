"""Penalties in two launches: all new logits first, then all are written, as a token may occur more than once.

At least, a token that a row holds: 12 bytes read (id, count, logit), 4 written, about 8 operations; the values between
the launches are 8 bytes more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

if TYPE_CHECKING:
    from ..penalties import PenaltyInputs

__all__ = ["add_counts", "apply_penalties", "count_sampled"]

_TILE = 1024


def add_counts(counts: Tensor, token_ids: Tensor) -> None:
    assert counts.stride(0) == token_ids.stride(0) == 1
    m = token_ids.shape[0]
    if m:
        launch(_histogram_kernel, (triton.cdiv(m, _TILE),), counts, token_ids, m, TILE=_TILE)


def count_sampled(counts: Tensor, rows: Tensor, sampled: Tensor, batch_rows: Tensor) -> None:
    m = batch_rows.shape[0]
    if m:
        grid = (triton.cdiv(m, _TILE),)
        launch(_count_kernel, grid, counts, rows, sampled, batch_rows, m, counts.stride(0), TILE=_TILE)


def apply_penalties(logits: Tensor, batch_rows: Tensor, inputs: PenaltyInputs) -> None:
    scalars = (inputs.num_tokens, inputs.repetition, inputs.frequency, inputs.presence)
    stride = scalars[0].stride(0)
    assert logits.stride(1) == 1 and all(scalar.stride(0) == stride for scalar in scalars)
    m, width = batch_rows.shape[0], inputs.max_num_tokens
    if m == 0 or width == 0:
        return
    values = torch.empty(m, width, dtype=torch.float32, device=logits.device)
    grid = (m, triton.cdiv(width, _TILE))
    tables = (inputs.token_ids, inputs.token_ids.stride(0), values, width)
    common = (logits, logits.stride(0), batch_rows, inputs.rows, *tables, inputs.num_tokens, stride)
    launch(_value_kernel, grid, *common, inputs.counts, inputs.counts.stride(0), *scalars[1:], TILE=_TILE)
    launch(_scatter_kernel, grid, *common, TILE=_TILE)


@triton.jit(do_not_specialize=["counts", "token_ids", "m"])
def _histogram_kernel(counts: tl.tensor, token_ids: tl.tensor, m: tl.tensor, TILE: tl.constexpr) -> None:
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token = tl.load(token_ids + i, mask=i < m, other=0)
    tl.atomic_add(counts + token, tl.full((TILE,), 1, tl.int32), mask=i < m, sem="relaxed")


@triton.jit(do_not_specialize=["m"])
def _count_kernel(
    counts: tl.tensor,
    rows: tl.tensor,
    sampled: tl.tensor,
    batch_rows: tl.tensor,
    m: tl.tensor,
    counts_stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    b = tl.load(batch_rows + i, mask=i < m, other=0)
    row, token = tl.load(rows + b, mask=i < m, other=0), tl.load(sampled + b, mask=i < m, other=0)
    place = counts + row * counts_stride + token
    tl.store(place, tl.load(place, mask=i < m, other=0) + 1, mask=i < m)


@triton.jit(do_not_specialize=["width"])
def _value_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    batch_rows: tl.tensor,
    rows: tl.tensor,
    token_ids: tl.tensor,
    tokens_stride: tl.tensor,
    values: tl.tensor,
    width: tl.tensor,
    num_tokens: tl.tensor,
    scalar_stride: tl.tensor,
    counts: tl.tensor,
    counts_stride: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    b = tl.load(batch_rows + i)
    row = tl.load(rows + b)
    used = j < tl.load(num_tokens + b * scalar_stride)
    token = tl.load(token_ids + row * tokens_stride + j, mask=used, other=0)
    x = tl.load(logits + b * logits_stride + token, mask=used, other=0.0)
    count = tl.load(counts + row * counts_stride + token, mask=used, other=0).to(tl.float32)
    factor = tl.load(repetition + b * scalar_stride)
    x = tl.where(x > 0, x / factor, x * factor)
    x -= tl.load(frequency + b * scalar_stride) * count
    x -= tl.where(count > 0, tl.load(presence + b * scalar_stride), 0.0)
    tl.store(values + i * width + j, x, mask=used)


@triton.jit(do_not_specialize=["width"])
def _scatter_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    batch_rows: tl.tensor,
    rows: tl.tensor,
    token_ids: tl.tensor,
    tokens_stride: tl.tensor,
    values: tl.tensor,
    width: tl.tensor,
    num_tokens: tl.tensor,
    scalar_stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    b = tl.load(batch_rows + i)
    used = j < tl.load(num_tokens + b * scalar_stride)
    token = tl.load(token_ids + tl.load(rows + b) * tokens_stride + j, mask=used, other=0)
    tl.store(logits + b * logits_stride + token, tl.load(values + i * width + j, mask=used, other=0.0), mask=used)
