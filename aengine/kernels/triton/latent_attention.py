"""Attention to latents: some heads of one query, and a chunk of keys, a program; or some heads of a block of queries.

Bytes: the size of a latent a token of context, once for all heads of a program; operations: 2 * (size + value) a (query
head, key) pair. A tile of latents is read once, as keys and as values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..decode_plan import PLAN_COLUMNS, DecodeWorkspace, lanes_of
from ..rotary import Rope
from .decode_parts import empty_softmax, finish, plan_item, score_scale
from .launch import has_pdl, launch, launch_next, launch_next_and_wait, max_shared_memory, wait_for_previous
from .varlen_attention import FACTS, plan_tiles


def write_latents(
    q: Tensor, latents: Tensor, positions: Tensor, slots: Tensor, rope: Rope | None, kv_cache: Tensor
) -> None:
    _, num_heads, size = q.shape
    launch(
        _write_latents,
        (len(q),),
        q,
        latents,
        positions,
        slots,
        None if rope is None else rope.table,
        kv_cache,
        kv_cache.stride(0),
        kv_cache.stride(1),
        H=num_heads,
        HEADS=triton.next_power_of_2(num_heads + 1),
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
        ROTARY=0 if rope is None else rope.table.shape[1],
        HALF=1 if rope is None else triton.next_power_of_2(rope.table.shape[1] // 2),
        INTERLEAVED=rope is not None and rope.interleaved,
        BLOCK_SIZE=kv_cache.shape[1],
        PDL=has_pdl(),
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _write_latents(
    q, latents, positions, slots, rope, cache, stride_block, stride_token, H: tl.constexpr, HEADS: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    launch_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    place = cache + slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_token
    d = tl.arange(0, PADDED)
    latent = tl.load(latents + token * SIZE + d, mask=d < SIZE, other=0.0)
    tl.store(place + d, latent.to(cache.dtype.element_ty), mask=(d >= ROTARY) & (d < SIZE) & (slot >= 0))
    if ROTARY > 0:
        turn: tl.constexpr = ROTARY // 2
        head, i = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
        first = 2 * i if INTERLEAVED else i
        apart: tl.constexpr = 1 if INTERLEAVED else turn
        row = rope + tl.maximum(tl.load(positions + token), 0) * ROTARY
        cos, sin = tl.load(row + i, mask=i < turn, other=0.0), tl.load(row + turn + i, mask=i < turn, other=0.0)
        at = q + token * (H * SIZE) + head * SIZE + first
        known = (head < H) & (i < turn)
        x = tl.load(at, mask=known, other=0.0).to(tl.float32)
        y = tl.load(at + apart, mask=known, other=0.0).to(tl.float32)
        tl.store(at, (x * cos - y * sin).to(q.dtype.element_ty), mask=known)
        tl.store(at + apart, (y * cos + x * sin).to(q.dtype.element_ty), mask=known)
        at = latents + token * SIZE + first
        x = tl.load(at, mask=i < turn, other=0.0).to(tl.float32)
        y = tl.load(at + apart, mask=i < turn, other=0.0).to(tl.float32)
        known = (i < turn) & (slot >= 0)
        # Rounded as products are, whatever the cache's dtype is.
        tl.store(place + first, (x * cos - y * sin).to(q.dtype.element_ty).to(cache.dtype.element_ty), mask=known)
        tl.store(
            place + first + apart, (y * cos + x * sin).to(q.dtype.element_ty).to(cache.dtype.element_ty), mask=known
        )


class _Tile(NamedTuple):
    keys: int  # keys that a program reads at a time
    num_warps: int
    num_stages: int

    def shared_bytes(self, rows: int, row_bytes: int) -> int:
        """Shared memory needed at most: queries, keys under way, what turns of both, scores in float32."""
        return (rows + self.keys * self.num_stages) * row_bytes * 9 // 8 + 4 * rows * self.keys


def _tile(rows: int, dtype: torch.dtype, padded: int, keys: int) -> _Tile:
    """Return the tile of a program of so many rows, for values of so many elements, with as many ``keys`` as fit."""
    row_bytes = padded * dtype.itemsize
    tile = _Tile(keys, 8 if rows * row_bytes > 2**14 else 4, 2)
    while tile.keys > 16 and tile.shared_bytes(rows, row_bytes) > max_shared_memory():
        tile = tile._replace(keys=tile.keys // 2)
    return tile if tile.shared_bytes(rows, row_bytes) <= max_shared_memory() else tile._replace(num_stages=1)


def attend_to_decodes(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    scale: float,
    value_size: int,
    plan: Tensor,
    workspace: DecodeWorkspace,
    given: Tensor | None,
) -> Tensor:
    n, num_heads, size = q.shape
    lanes, padded = lanes_of(num_heads), max(16, triton.next_power_of_2(value_size))
    group = triton.next_power_of_2(num_heads // lanes)
    out = q.new_empty((n, num_heads * value_size)) if given is None else given
    tile = _tile(16, q.dtype, padded, 64)
    launch(
        _attend_to_decodes,
        (lanes, plan.shape[0]),
        q,
        kv_cache,
        block_table,
        out,
        plan,
        workspace.parts,
        workspace.counters,
        score_scale(scale, 0.0),
        q.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.stride(0),
        LANES=lanes,
        GROUP=num_heads // lanes,
        PADDED=group,
        D=value_size,
        DP=padded,
        R=size - value_size,
        RP=max(16, triton.next_power_of_2(size - value_size)),
        BLOCK_SIZE=kv_cache.shape[1],
        COLUMNS=PLAN_COLUMNS,
        BN=tile.keys,
        CLEAR=given is None,
        PDL=has_pdl(),
        STAGES=tile.num_stages,
        FEW=2,
        num_warps=tile.num_warps,
    )
    return out


@triton.jit
def _load_parts(at, known, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr):
    """What turns [rows, RP], and the rest [rows, DP], of the rows that begin at ``at`` [rows]."""
    r, d = tl.arange(0, RP), tl.arange(0, DP)
    turned = tl.load(at[:, None] + r[None, :], mask=known[:, None] & (r < R)[None, :], other=0.0)
    rest = tl.load(at[:, None] + R + d[None, :], mask=known[:, None] & (d < D)[None, :], other=0.0)
    return turned, rest


@triton.jit
def _add_keys(
    q, q_turned, cache, blocks, strides, j, end, position, scale, top, total, acc,
    D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The keys from j on into the running softmax of the queries at these positions [rows]."""
    stride_block, stride_token = strides
    t = j + tl.arange(0, BN)
    known = t < end
    block = tl.load(blocks + t // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
    turned, rest = _load_parts(cache + block * stride_block + (t % BLOCK_SIZE) * stride_token, known, D, DP, R, RP)
    turned, rest = turned.to(q.dtype), rest.to(q.dtype)
    s = tl.dot(q_turned, tl.trans(turned), input_precision="ieee")
    s = tl.dot(q, tl.trans(rest), s, input_precision="ieee") * scale
    s = tl.where((t[None, :] <= position[:, None]) & known[None, :], s, -float("inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(rest.dtype), rest, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit
def _attend_to_decodes(
    q, cache, table, out, plan, parts, counters, scale, stride_q, stride_block, stride_token, stride_table,
    LANES: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr, BN: tl.constexpr,
    CLEAR: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    lane, item = tl.program_id(0), tl.program_id(1)
    seq, row, seq_len, begin, end, first_item, num_splits, shared = plan_item(plan, item, COLUMNS)
    if seq < 0:
        return
    ROWS: tl.constexpr = PADDED if PADDED > 16 else 16
    g, d = tl.arange(0, ROWS), tl.arange(0, DP)
    out += seq.to(tl.int64) * (LANES * GROUP * D) + lane * (GROUP * D)
    wait_for_previous(PDL)
    if seq_len == 0:
        if CLEAR:
            is_value = (g < GROUP)[:, None] & (d < D)[None, :]
            tl.store(out + g[:, None] * D + d[None, :], tl.zeros((ROWS, DP), out.dtype.element_ty), mask=is_value)
        return
    at = q + seq.to(tl.int64) * stride_q + (lane * GROUP + g) * (R + D)
    q_turned, query = _load_parts(at, g < GROUP, D, DP, R, RP)
    top, total, acc = empty_softmax(ROWS, DP)
    blocks, position = table + row.to(tl.int64) * stride_table, tl.zeros((ROWS,), tl.int32) + (end - 1)
    for j in tl.range(begin, end, BN, num_stages=STAGES):
        how = (cache, blocks, (stride_block, stride_token), j, end, position, scale)
        top, total, acc = _add_keys(query, q_turned, *how, top, total, acc, D, DP, R, RP, BLOCK_SIZE, BN)
    where = (seq * LANES + lane, item, lane, first_item, num_splits, shared)
    finish(acc, top, total, out, parts, counters, None, where, 0, LANES, GROUP, PADDED, ROWS, D, DP, FEW)


def _rows(dtype: torch.dtype) -> int:
    """Return how many rows a program of prompts has: queries times heads."""
    if dtype.itemsize > 2:
        return 16
    return next(rows for rows in (64, 32, 16) if rows * 2**11 < max_shared_memory())


def _pack(num_heads: int) -> int:
    """Return how many heads of a query are in a program of prompts."""
    return min(16, num_heads & -num_heads)


def plan_prompts(
    rows: Tensor, query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int, num_heads: int, dtype: torch.dtype
) -> Tensor:
    queries = _rows(dtype) // _pack(num_heads)
    return plan_tiles(rows, query_start_loc, seq_lens, num_tokens, queries, skip_single=True)


def attend_to_prompts(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, plan: Tensor, scale: float, value_size: int
) -> Tensor:
    num_tokens, num_heads, size = q.shape
    pack, padded = _pack(num_heads), max(16, triton.next_power_of_2(value_size))
    tile = _tile(_rows(q.dtype), q.dtype, padded, 32)
    out = q.new_empty((num_tokens, num_heads * value_size))
    launch(
        _attend_to_prompts,
        (plan.shape[0], num_heads // pack),
        q,
        kv_cache,
        block_table,
        plan,
        out,
        score_scale(scale, 0.0),
        q.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.stride(0),
        H=num_heads,
        PACK=pack,
        D=value_size,
        DP=padded,
        R=size - value_size,
        RP=max(16, triton.next_power_of_2(size - value_size)),
        BLOCK_SIZE=kv_cache.shape[1],
        BM=_rows(q.dtype),
        BN=tile.keys,
        FACTS=FACTS,
        STAGES=tile.num_stages,
        PDL=has_pdl(),
        num_warps=tile.num_warps,
    )
    return out


@triton.jit
def _attend_to_prompts(
    q, cache, table, plan, out, scale, stride_q, stride_block, stride_token, stride_table,
    H: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FACTS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    launch_next(PDL)
    facts, head = plan + tl.program_id(0) * FACTS, tl.program_id(1) * PACK
    row, first_query, start = tl.load(facts), tl.load(facts + 1), tl.load(facts + 2)
    query_len, seq_len = tl.load(facts + 3), tl.load(facts + 4)
    wait_for_previous(PDL)
    if row >= 0:
        r, d = tl.arange(0, BM), tl.arange(0, DP)  # the rows are queries, and of each its PACK heads
        m = first_query + r // PACK
        begin = seq_len - query_len + first_query
        position = begin + r // PACK
        token = (start + m).to(tl.int64)
        heads = head + r % PACK
        q_turned, query = _load_parts(q + token * stride_q + heads * (R + D), m < query_len, D, DP, R, RP)
        top, total, acc = empty_softmax(BM, DP)
        end = tl.minimum(seq_len, begin + BM // PACK)
        blocks = table + row.to(tl.int64) * stride_table
        for j in tl.range(0, end, BN, num_stages=STAGES):
            how = (cache, blocks, (stride_block, stride_token), j, end, position, scale)
            top, total, acc = _add_keys(query, q_turned, *how, top, total, acc, D, DP, R, RP, BLOCK_SIZE, BN)
        y = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        place = out + (token * (H * D) + heads * D)[:, None] + d[None, :]
        tl.store(place, y.to(out.dtype.element_ty), mask=(m < query_len)[:, None] & (d < D)[None, :])
