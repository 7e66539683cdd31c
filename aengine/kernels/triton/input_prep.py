"""Between the persistent rows and a batch. A few words a token: the time is that of one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..step_inputs import DecodeInputs, PreparedInputs, ScalarColumns
from .launch import bucket, has_pdl, launch, launch_next_and_wait

_BLOCK = 128


def prepare_inputs(
    token_ids: Tensor,
    num_computed_tokens: Tensor,
    block_table: Tensor,
    idx_mapping: Tensor,
    num_scheduled_tokens: Tensor,
    block_sizes: Tensor,
    num_tokens: int,
) -> PreparedInputs:
    num_reqs, device = idx_mapping.shape[0], idx_mapping.device
    num_groups = len(block_sizes)
    words = torch.empty((2 + num_groups, num_tokens), dtype=torch.int64, device=device)
    counts = torch.empty(2 * num_reqs + 1, dtype=torch.int32, device=device)
    out = PreparedInputs(words[0], words[1], words[2:], counts[: num_reqs + 1], counts[num_reqs + 1 :])
    launch(
        _prepare_inputs,
        (num_reqs + 1, num_groups),
        token_ids,
        num_computed_tokens,
        block_table,
        idx_mapping,
        num_scheduled_tokens,
        block_sizes,
        *out,
        num_reqs,
        num_tokens,
        token_ids.stride(0),
        num_computed_tokens.stride(0),
        block_table.stride(0),
        block_table.stride(1),
        BLOCK=_BLOCK,
        REQS=bucket(num_reqs),
    )
    return out


_SMALL = ["idx_mapping", "num_scheduled", "input_ids", "positions", "slots", "query_start_loc", "seq_lens"]


@triton.jit(do_not_specialize=["num_reqs", "num_tokens"], do_not_specialize_on_alignment=_SMALL)
def _prepare_inputs(
    token_ids,
    num_computed,
    table,
    idx_mapping,
    num_scheduled,
    block_sizes,
    input_ids,
    positions,
    slots,
    query_start_loc,
    seq_lens,
    num_reqs,
    num_tokens,
    stride_ids,
    stride_computed,
    stride_group,
    stride_table,
    BLOCK: tl.constexpr,
    REQS: tl.constexpr,
):
    request = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)  # what is equal for all groups is written by the program of each
    slots += group * num_tokens
    others = tl.arange(0, REQS)
    lens = tl.load(num_scheduled + others, mask=others < num_reqs, other=0)
    begin = tl.sum(tl.where(others < request, lens, 0), 0)
    tl.store(query_start_loc + request, begin.to(tl.int32))
    if request == num_reqs:  # the programs past the last request write the padding
        i = begin
        while i < num_tokens:
            at = i + tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), tl.int64)
            tl.store(input_ids + at, zeros, mask=at < num_tokens)
            tl.store(positions + at, zeros, mask=at < num_tokens)
            tl.store(slots + at, zeros - 1, mask=at < num_tokens)
            i += BLOCK
    else:
        row = tl.load(idx_mapping + request)
        count = tl.load(num_scheduled + request)
        first = tl.load(num_computed + row * stride_computed, mask=row >= 0, other=0).to(tl.int64)
        tl.store(seq_lens + request, tl.where(row >= 0, first + count, 0).to(tl.int32))
        own_table = table + group * stride_group + row * stride_table
        block_size = tl.load(block_sizes + group).to(tl.int64)
        i = count * 0
        while i < count:
            at = i + tl.arange(0, BLOCK)
            own = at < count
            position = first + at
            ids = tl.load(token_ids + row * stride_ids + position, mask=own, other=0)
            block = tl.load(own_table + position // block_size, mask=own, other=0).to(tl.int64)
            tl.store(input_ids + begin + at, ids.to(tl.int64), mask=own)
            tl.store(positions + begin + at, position, mask=own)
            tl.store(slots + begin + at, block * block_size + position % block_size, mask=own)
            i += BLOCK


def append_tokens(token_ids: Tensor, num_tokens: Tensor, rows: Tensor, sampled: Tensor) -> None:
    n = rows.shape[0]
    strides = (token_ids.stride(0), num_tokens.stride(0))
    launch(_append_tokens, (triton.cdiv(n, _BLOCK),), token_ids, num_tokens, rows, sampled, n, *strides, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["rows", "sampled", "num_tokens"])
def _append_tokens(token_ids, num_tokens, rows, sampled, n, stride_ids, stride_num, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < n, other=-1)
    real = row >= 0
    end = tl.load(num_tokens + row * stride_num, mask=real, other=0)
    tl.store(token_ids + row * stride_ids + end, tl.load(sampled + i, mask=real, other=0).to(tl.int32), mask=real)
    tl.store(num_tokens + row * stride_num, end + 1, mask=real)


def advance_rows(num_computed_tokens: Tensor, rows: Tensor, seq_lens: Tensor) -> None:
    n = rows.shape[0]
    where = (num_computed_tokens, num_computed_tokens.stride(0))
    launch(_advance_rows, (triton.cdiv(n, _BLOCK),), *where, rows, seq_lens, n, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["rows", "seq_lens", "num_computed"])
def _advance_rows(num_computed, stride, rows, seq_lens, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i, mask=i < n, other=-1)
    real = row >= 0
    tl.store(num_computed + row * stride, tl.load(seq_lens + i, mask=real, other=0), mask=real)


def prepare_decode(
    token_ids: Tensor,
    scalars: Tensor,
    columns: ScalarColumns,
    rows: Tensor,
    places: Tensor | None,
    drafts: Tensor | None,
) -> DecodeInputs:
    n, device = rows.shape[0], rows.device
    wide = torch.empty((4, n), dtype=torch.int64, device=device)
    seq_lens = torch.empty(n, dtype=torch.int32, device=device)
    temperature = torch.empty(n, dtype=torch.float32, device=device)
    out = DecodeInputs(wide[0], wide[1], seq_lens, temperature, wide[2], wide[3])
    launch(
        _prepare_decode,
        (triton.cdiv(n, _BLOCK),),
        token_ids,
        scalars,
        scalars.view(torch.float32),
        rows,
        places,
        drafts,
        *out,
        n,
        token_ids.stride(0),
        scalars.stride(0),
        SEED=columns.seed,
        TEMPERATURE=columns.temperature,
        TOKENS=columns.num_tokens,
        COMPUTED=columns.num_computed_tokens,
        BLOCK=_BLOCK,
        PDL=has_pdl(),
    )
    return out


_WIDE = ["rows", "places", "drafts", "input_ids", "positions", "seeds", "sample_positions"]


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=_WIDE)
def _prepare_decode(
    token_ids,
    scalars,
    numbers,
    rows,
    places,
    drafts,
    input_ids,
    positions,
    seq_lens,
    temperature,
    seeds,
    sample_positions,
    n,
    stride_ids,
    stride_scalars,
    SEED: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    TOKENS: tl.constexpr,
    COMPUTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next_and_wait(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    row = tl.load(rows + i, mask=inside, other=-1)
    real = row >= 0
    begin = row * stride_scalars
    position = tl.load(scalars + begin + COMPUTED, mask=real, other=0)
    tokens = tl.load(scalars + begin + TOKENS, mask=real, other=0).to(tl.int64)
    if places is not None:
        place = tl.load(places + i, mask=real, other=0)
        position += place.to(tl.int32)
        tokens += place
    at = token_ids + row * stride_ids + position
    ids = tl.load(at, mask=real, other=0)
    if drafts is not None:
        draft = tl.load(drafts + i, mask=real, other=-1).to(tl.int32)
        ids = tl.where(draft < 0, ids, draft)
        tl.store(at, ids, mask=real)
    low = tl.load(scalars + begin + SEED, mask=real, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(scalars + begin + SEED + 1, mask=real, other=0).to(tl.int64)
    tl.store(input_ids + i, ids.to(tl.int64), mask=inside)
    tl.store(positions + i, position.to(tl.int64), mask=inside)
    tl.store(seq_lens + i, tl.where(real, position + 1, 0), mask=inside)
    tl.store(temperature + i, tl.load(numbers + begin + TEMPERATURE, mask=real, other=0.0), mask=inside)
    tl.store(seeds + i, (high << 32) | low, mask=inside)
    tl.store(sample_positions + i, tokens, mask=inside)


def state_pages(block_table: Tensor, rows: Tensor, seq_lens: Tensor, spare_page: int) -> tuple[Tensor, Tensor]:
    """Launched without overlap: kernels of layers read the pages ahead of their wait."""
    n = rows.shape[0]
    pages, begins = torch.empty_like(rows), torch.empty_like(rows, dtype=torch.bool)
    where = block_table, rows, seq_lens, pages, begins.view(torch.uint8)
    launch(_state_pages, (1,), *where, n, block_table.stride(0), spare_page, BLOCK=bucket(n))
    return pages, begins


@triton.jit(do_not_specialize=["n", "spare_page"])
def _state_pages(block_table, rows, seq_lens, pages, begins, n, stride, spare_page, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    inside = i < n
    row = tl.load(rows + i, mask=inside, other=-1)
    page = tl.load(block_table + row * stride, mask=row >= 0, other=0)
    tl.store(pages + i, tl.where(row >= 0, page, spare_page).to(tl.int64), mask=inside)
    is_first = tl.load(seq_lens + i, mask=inside, other=0) <= 1
    tl.store(begins + i, is_first.to(tl.uint8), mask=inside)


def commit_decode(
    token_ids: Tensor,
    scalars: Tensor,
    columns: ScalarColumns,
    rows: Tensor,
    sampled: Tensor,
    checks: Tensor,
    published: Tensor,
    cursor: Tensor,
) -> None:
    n = rows.shape[0]
    launch(
        _commit_decode,
        (1,),
        token_ids,
        scalars,
        rows,
        sampled,
        checks.view(torch.int32),
        published,
        cursor,
        n,
        token_ids.stride(0),
        scalars.stride(0),
        NUM_SLOTS=published.shape[0],
        WIDTH=published.shape[2],
        TOKENS=columns.num_tokens,
        COMPUTED=columns.num_computed_tokens,
        BLOCK=bucket(n),
        PDL=has_pdl(),
    )


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["rows", "sampled", "checks", "published"])
def _commit_decode(
    token_ids,
    scalars,
    rows,
    sampled,
    checks,
    published,
    cursor,
    n,
    stride_ids,
    stride_scalars,
    NUM_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    COMPUTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next_and_wait(PDL)
    i = tl.arange(0, BLOCK)
    inside = i < n
    row = tl.load(rows + i, mask=inside, other=-1)
    real = row >= 0
    begin = row * stride_scalars
    token = tl.load(sampled + i, mask=inside, other=0).to(tl.int32)
    end = tl.load(scalars + begin + TOKENS, mask=real, other=0)
    tl.store(token_ids + row * stride_ids + end, token, mask=real)
    tl.store(scalars + begin + TOKENS, end + 1, mask=real)
    tl.store(scalars + begin + COMPUTED, end, mask=real)
    slot = tl.load(cursor)
    out = published + slot * (2 * WIDTH) + i
    tl.store(out, token, mask=inside)
    tl.store(out + WIDTH, tl.load(checks + i, mask=inside, other=0), mask=inside)
    tl.debug_barrier()  # every warp has read the slot: one that is late would publish its rows into the next
    tl.store(cursor, (slot + 1) % NUM_SLOTS)
