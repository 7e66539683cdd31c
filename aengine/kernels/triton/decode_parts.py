"""Parts of decode attention: norm and rotary, scores, keys and values, the token's own, and the end."""

from __future__ import annotations

import triton
import triton.language as tl

from .kv_codes import store_kept, times_scale

_LOG2_E = 1.4426950408889634  # scores are scaled by it, since the hardware computes exp2


def score_scale(scale: float, softcap: float) -> float:
    """Return the factor of q k^T with which scores are ready for exp2, or, with a soft cap, for `capped`."""
    return scale / softcap if softcap else scale * _LOG2_E


@triton.jit
def capped(s, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(s), ready for exp2. Large |s| give the limits: 2 / (1 + inf) is 0."""
    return (1.0 - 2.0 / (1.0 + tl.exp2(s * 2.8853900817779268))) * (SOFTCAP * 1.4426950408889634)


@triton.jit
def plan_item(plan, item, COLUMNS: tl.constexpr):
    """Load all columns of a decode plan's item but the last, see PLAN_COLUMNS."""
    at = plan + item * COLUMNS
    seq = tl.load(at)
    row = tl.load(at + 1)
    seq_len = tl.load(at + 2)
    begin = tl.load(at + 3)
    end = tl.load(at + 4)
    first_item = tl.load(at + 5)
    num_splits = tl.load(at + 6)
    return seq, row, seq_len, begin, end, first_item, num_splits


@triton.jit
def apply_rope(x, partner, weights, rotary, eps, D: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr):
    """Norm and rotary (unless ROTARY is 0) of rows x [rows, DP]. ``partner``: each element's other half of the pair;
    ``weights`` and ``rotary``: what `norm_weights` and `rotary_at` return."""
    _, cos, sin = rotary
    if NORM:
        weight, other_weight = weights
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
        x = x * scale[:, None] * weight[None, :]
        partner = partner * scale[:, None] * other_weight[None, :]
    if ROTARY > 0:
        x = x * cos[None, :] + partner * sin[None, :]
    return x


@triton.jit
def load_kv(keys, block, t, known, in_head, strides, BLOCK_SIZE: tl.constexpr, DP: tl.constexpr):
    """Keys and values [BN, DP] at the positions t [BN] of a sequence, which are in these blocks [BN]. ``strides``: of
    block, token, and keys to values."""
    stride_block, stride_token, stride_kv = strides
    d = tl.arange(0, DP)
    place = (keys + block.to(tl.int64) * stride_block + (t % BLOCK_SIZE) * stride_token)[:, None] + d[None, :]
    real = known[:, None] & in_head[None, :]
    return tl.load(place, mask=real, other=0.0), tl.load(place + stride_kv, mask=real, other=0.0)


@triton.jit
def rotary_at(rope, position, D: tl.constexpr, DP: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(each element's partner, cosines, signed sines) at a position of the table, [DP] each. What is past ROTARY is its
    own partner, and stays."""
    HALF: tl.constexpr = ROTARY // 2
    d = tl.arange(0, DP)
    if ROTARY == 0:
        other = d
        cos = tl.zeros((DP,), tl.float32)
        sin = cos
    else:
        if INTERLEAVED:
            is_first = d % 2 == 0
            other = tl.where(is_first, d + 1, d - 1)
            pair = d // 2
        else:
            is_first = d < HALF
            other = tl.where(is_first, d + HALF, d - HALF)
            pair = tl.where(is_first, d, d - HALF)
        row = rope + position.to(tl.int64) * ROTARY
        if ROTARY == D:
            cos = tl.load(row + pair, mask=d < D, other=0.0)
        else:
            other = tl.where(d < ROTARY, other, d)
            cos = tl.load(row + pair, mask=d < ROTARY, other=1.0)
        sin = tl.load(row + HALF + pair, mask=d < ROTARY, other=0.0)
        sin = tl.where(is_first, -sin, sin)
    return other, cos, sin


@triton.jit
def norm_weights(norm, other, D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr):
    """A norm's weights [DP] and those of the partners; zeros if there is no norm."""
    d = tl.arange(0, DP)
    if NORM:
        weight = tl.load(norm + d, mask=d < D, other=0.0).to(tl.float32)
        other_weight = tl.load(norm + other, mask=d < D, other=0.0).to(tl.float32)
    else:
        weight = tl.zeros((DP,), tl.float32)
        other_weight = weight
    return weight, other_weight


@triton.jit
def own_key_value(
    own,
    weights,
    rotary,
    eps,
    KV: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """Key and value [1, DP] of the token itself, out of the product; the key rotated, and rounded as in the cache."""
    d = tl.arange(0, DP)
    in_head = d < D
    raw = tl.load(own + d, mask=in_head, other=0.0)
    k = raw.to(tl.float32)[None, :]
    partner = tl.load(own + rotary[0], mask=in_head, other=0.0).to(tl.float32)[None, :]
    value = tl.load(own + KV * D + d, mask=in_head, other=0.0)[None, :]
    return apply_rope(k, partner, weights, rotary, eps, D, NORM, ROTARY).to(raw.dtype), value


@triton.jit
def write_own_kv(keys, blocks, position, k, v, strides, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Write a key and a value [1, DP], as the cache keeps them."""
    stride_block, stride_token, stride_kv = strides
    d = tl.arange(0, DP)[None, :]
    block = tl.load(blocks + position // BLOCK_SIZE).to(tl.int64)
    place = keys + block * stride_block + (position % BLOCK_SIZE) * stride_token + d
    store_kept(place, k, d < D)
    store_kept(place + stride_kv, v, d < D)


@triton.jit
def finish(
    acc,
    top,
    total,
    out,
    parts,
    counters,
    kv_scales,
    where,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    FEW: tl.constexpr,
):
    """Put the output of GROUP heads, the first of the ROWS rows, where ``out`` points.

    If the sequence has other items, this one's part of the softmax goes to ``parts``, where the last of them, by their
    counter, puts them together. ``where``: the counter, the item, which group of heads (of LANES), the sequence's
    first item, how many it has. ``kv_scales``: of LANES heads; None: values are plain numbers.
    """
    counter, item, lane, first_item, num_splits = where
    acc = times_scale(acc, kv_scales, LANES + lane)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    is_head = (g < GROUP)[:, None]
    if num_splits == 1:
        place = out + g[:, None] * D + d[None, :]
        tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_head & (d < D)[None, :])
    else:
        PART: tl.constexpr = DP + 2
        mine = parts + ((item * LANES + lane) * (GROUP * PART)).to(tl.int64)
        tl.store(mine + g[:, None] * PART + d[None, :], acc, mask=is_head)
        tl.store(mine + g * PART + DP, top, mask=g < GROUP)
        tl.store(mine + g * PART + DP + 1, total, mask=g < GROUP)
        tl.debug_barrier()  # all threads' parts are written before one of them counts
        num_done = tl.atomic_add(counters + counter, 1, sem="acq_rel", scope="gpu")
        if num_done == num_splits - 1:
            tl.store(counters + counter, 0)
            first_part = parts + ((first_item * LANES + lane) * (GROUP * PART)).to(tl.int64)
            _combine(first_part, num_splits, LANES * GROUP * PART, out, GROUP, PADDED, D, DP, FEW)


@triton.jit
def _combine(
    first,
    num_parts,
    STRIDE: tl.constexpr,
    out,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    FEW: tl.constexpr,
):
    """Return the output of GROUP heads from their parts, FEW parts at a time, so that their loads overlap."""
    g = tl.arange(0, PADDED)
    d = tl.arange(0, DP)
    is_head = g < GROUP
    top = tl.full((PADDED,), -float("inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    acc = tl.zeros((PADDED, DP), tl.float32)
    begin = num_parts * 0
    while begin < num_parts:
        i = begin + tl.arange(0, FEW)
        part = first + i[:, None] * STRIDE + g[None, :] * (DP + 2)
        known = (i < num_parts)[:, None] & is_head[None, :]
        # .cg: past the L1 cache, which is not updated when other multiprocessors write
        tops = tl.load(part + DP, mask=known, other=-float("inf"), cache_modifier=".cg")
        totals = tl.load(part + DP + 1, mask=known, other=0.0, cache_modifier=".cg")
        accs = tl.load(part[:, :, None] + d[None, None, :], mask=known[:, :, None], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(tops, 0))
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # -inf where all parts so far lie before the window
        shrink = tl.exp2(top - safe)
        share = tl.exp2(tops - safe[None, :])
        total = total * shrink + tl.sum(totals * share, 0)
        acc = acc * shrink[:, None] + tl.sum(accs * share[:, :, None], 0)
        top = higher
        begin += FEW
    total = tl.where(is_head, total, 1.0)
    place = out + g[:, None] * D + d[None, :]
    tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_head[:, None] & (d < D)[None, :])
