"""A block of queries of one head a program. Operations: 4 * head_dim a (query, key) pair seen; bytes: q, out, and K and
V once a block of queries, mostly out of the L2 cache.

Which sequence a program belongs to is found on the device: the grid has room for every sequence's last, partly filled
block, so it depends on the number of tokens and of sequences alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import bucket, launch

__all__ = ["varlen_attention"]


def varlen_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    skip_single: bool,
) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    n = rows.shape[0]
    block_m, block_n, num_warps, num_stages = _tiling(q.dtype, num_tokens, n)
    launch(
        _varlen_attention,
        (triton.cdiv(num_tokens, block_m) + n, num_heads),
        q,
        kv_cache,
        block_table,
        rows,
        query_start_loc,
        seq_lens,
        out,
        scale * 1.4426950408889634,  # exp2 is what the hardware has
        n,
        q.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        block_table.stride(0),
        H=num_heads,
        GROUPS=num_heads // kv_cache.shape[3],
        D=head_dim,
        DP=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=kv_cache.shape[1],
        BM=block_m,
        BN=block_n,
        REQS=bucket(n),
        SHORTEST=2 if skip_single else 1,
        WINDOW=window or 0,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out


class _Tiling(NamedTuple):
    block_m: int  # queries
    block_n: int  # keys at a time
    num_warps: int
    num_stages: int


def _tiling(dtype: torch.dtype, num_tokens: int, num_seqs: int) -> _Tiling:
    if dtype == torch.float32 or num_tokens <= 64:
        return _Tiling(32, 32, 4, 2)
    # Measured on an H200 (benchmarks/gpu_attention.py): short prompts leave the larger tiles half empty.
    return _Tiling(64, 32, 4, 3) if num_tokens < 256 * num_seqs else _Tiling(128, 128, 8, 3)


# Where these begin depends on the batch; a kernel for each case would be compiled in the middle of serving.
_MOVING = ["rows", "query_start_loc", "seq_lens"]


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=_MOVING)  # large on purpose: one kernel
def _varlen_attention(
    q,
    cache,
    table,
    rows,
    query_start_loc,
    seq_lens,
    out,
    scale,
    n,
    stride_q,
    stride_block,
    stride_token,
    stride_kv,
    stride_head,
    stride_table,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    REQS: tl.constexpr,
    SHORTEST: tl.constexpr,
    WINDOW: tl.constexpr,
):
    # Sequence i has ceil(query_len / BM) blocks; this program's is the one in whose run of blocks its number falls.
    block = tl.program_id(0)
    head = tl.program_id(1)
    i = tl.arange(0, REQS)
    starts = tl.load(query_start_loc + i, mask=i < n, other=0)
    stops = tl.load(query_start_loc + i + 1, mask=i < n, other=0)
    lens = stops - starts
    ends = tl.cumsum(tl.where(lens >= SHORTEST, (lens + BM - 1) // BM, 0), 0)
    seq = tl.sum((ends <= block).to(tl.int32), 0)
    if seq < n:
        before = tl.max(tl.where(i < seq, ends, 0), 0)
        start = tl.load(query_start_loc + seq)
        query_len = tl.load(query_start_loc + seq + 1) - start
        seq_len = tl.load(seq_lens + seq)
        row = tl.load(rows + seq)
        # The last queries see the most keys: their programs come first, so that the short ones fill the end.
        place_in_seq = tl.cdiv(query_len, BM) - 1 - (block - before)
        m = place_in_seq * BM + tl.arange(0, BM)
        d = tl.arange(0, DP)
        position = seq_len - query_len + m
        is_query = (m < query_len)[:, None] & (d < D)[None, :]
        token = (start + m).to(tl.int64)
        tile = tl.load(q + token[:, None] * stride_q + head * D + d[None, :], mask=is_query, other=0.0)
        top = tl.full((BM,), -float("inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        acc = tl.zeros((BM, DP), tl.float32)
        last = tl.minimum(seq_len, seq_len - query_len + (place_in_seq + 1) * BM)
        first = last * 0
        if WINDOW > 0:
            first = tl.maximum(0, seq_len - query_len + place_in_seq * BM - WINDOW + 1) // BN * BN
        base = cache + (head // GROUPS) * stride_head
        for j in tl.range(first, last, BN):
            t = j + tl.arange(0, BN)
            known = t < last
            block_id = tl.load(table + row * stride_table + t // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
            place = base + block_id * stride_block + (t % BLOCK_SIZE) * stride_token
            real = known[:, None] & (d < D)[None, :]
            k = tl.load(place[:, None] + d[None, :], mask=real, other=0.0)
            v = tl.load(place[:, None] + stride_kv + d[None, :], mask=real, other=0.0)
            s = tl.dot(tile, tl.trans(k), input_precision="ieee") * scale
            seen = (t[None, :] <= position[:, None]) & known[None, :]
            if WINDOW > 0:
                seen = seen & (t[None, :] > position[:, None] - WINDOW)
            s = tl.where(seen, s, -float("inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            p = tl.exp2(s - safe[:, None])
            shrink = tl.exp2(top - safe)
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            top = higher
        y = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # 0: past the last query
        tl.store(out + token[:, None] * (H * D) + head * D + d[None, :], y.to(out.dtype.element_ty), mask=is_query)
