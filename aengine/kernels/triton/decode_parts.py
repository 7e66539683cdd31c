"""Parts of decode attention: norm and rotary, keys and values, the running softmax, the token's own, and the end."""

from __future__ import annotations

import triton
import triton.language as tl

from ..decode_plan import MOST_SHARED_PARTS
from .kv_codes import numbers_of, store_kept, times_scale, values_of

MOST_SHARED = tl.constexpr(MOST_SHARED_PARTS)
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
    """Load all columns of a decode plan's item, see PLAN_COLUMNS."""
    at = plan + item * COLUMNS
    seq = tl.load(at)
    row = tl.load(at + 1)
    seq_len = tl.load(at + 2)
    begin = tl.load(at + 3)
    end = tl.load(at + 4)
    first_item = tl.load(at + 5)
    num_splits = tl.load(at + 6)
    shared = tl.load(at + 7)
    return seq, row, seq_len, begin, end, first_item, num_splits, shared


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
def empty_softmax(ROWS: tl.constexpr, DP: tl.constexpr):
    """Maximum and sum [ROWS] and weighted values [ROWS, DP] of a running softmax before the first key."""
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    return top, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, DP), tl.float32)


@triton.jit
def blocks_of(kv, begin, end, BLOCK_SIZE: tl.constexpr, BN: tl.constexpr):
    """Return the blocks [BN] of a stretch of keys from ``begin`` on, as far as they are before ``end``."""
    t = begin + tl.arange(0, BN)
    return tl.load(kv[1] + t // BLOCK_SIZE, mask=t < end, other=0)


@triton.jit
def load_stretch(kv, block, begin, end, D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BN: tl.constexpr):
    """A stretch of keys and values [BN, DP] from ``begin`` on, which are in these blocks, and which of them [BN] are
    before ``end``."""
    keys, _, strides = kv
    t = begin + tl.arange(0, BN)
    known = t < end
    k, v = load_kv(keys, block, t, known, tl.arange(0, DP) < D, strides, BLOCK_SIZE, DP)
    return k, v, known


@triton.jit
def attend(q, stretch, scale, top, total, acc, SOFTCAP: tl.constexpr):
    """Add one stretch of keys to the running softmax: maximum and sum [rows], weighted values [rows, DP]."""
    k, v, known = stretch
    k, v = numbers_of(k, q), values_of(v, q)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0:
        s = capped(s, SOFTCAP)
    s = tl.where(known[None, :], s, -float("inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)  # no key has been seen until now
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


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
    SHARED: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    FEW: tl.constexpr,
):
    """Put the output of GROUP heads, the first of the ROWS rows, where ``out`` points.

    If the sequence has other parts, this one goes to ``parts``, where the sequence's last item to end, by their
    counter, puts them together. ``where``: the counter, the item, which group of heads (of LANES), the sequence's first
    item, how many it has, and the plan's column of its parts that are shared, SHARED places from one to the next (0:
    there are none in this step). ``kv_scales``: of LANES heads; None: values are plain numbers.
    """
    counter, item, lane, first_item, num_splits, shared = where
    acc = times_scale(acc, kv_scales, LANES + lane)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    is_head = (g < GROUP)[:, None]
    num_shared = shared % MOST_SHARED if SHARED > 0 else 0
    if num_splits + num_shared == 1:
        place = out + g[:, None] * D + d[None, :]
        tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_head & (d < D)[None, :])
    else:
        PART: tl.constexpr = GROUP * (DP + 2)
        mine = parts + ((item * LANES + lane) * PART).to(tl.int64)
        tl.store(mine + g[:, None] * (DP + 2) + d[None, :], acc, mask=is_head)
        tl.store(mine + g * (DP + 2) + DP, top, mask=g < GROUP)
        tl.store(mine + g * (DP + 2) + DP + 1, total, mask=g < GROUP)
        tl.debug_barrier()  # all threads' parts are written before one of them counts
        num_done = tl.atomic_add(counters + counter, 1, sem="acq_rel", scope="gpu")
        if num_done == num_splits - 1:
            tl.store(counters + counter, 0)
            own = parts + (first_item * LANES + lane).to(tl.int64) * PART
            others = parts + (shared // MOST_SHARED * LANES + lane).to(tl.int64) * PART
            of_parts = (own, num_splits, others, num_shared)
            _combine(of_parts, LANES * PART, SHARED, out, GROUP, PADDED, D, DP, FEW)


@triton.jit
def _combine(
    of_parts,
    STRIDE: tl.constexpr,
    SHARED: tl.constexpr,
    out,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    FEW: tl.constexpr,
):
    """Store the output of GROUP heads. ``of_parts``: the first of the parts of own keys, how many there are, and the
    same of those that are shared."""
    own, num_splits, others, num_shared = of_parts
    g = tl.arange(0, PADDED)
    d = tl.arange(0, DP)
    top, total, acc = empty_softmax(PADDED, DP)
    top, total, acc = _add_parts(own, num_splits, STRIDE, top, total, acc, GROUP, PADDED, DP, FEW)
    if SHARED > 0:
        top, total, acc = _add_parts(others, num_shared, SHARED * STRIDE, top, total, acc, GROUP, PADDED, DP, FEW)
    total = tl.where(g < GROUP, total, 1.0)
    place = out + g[:, None] * D + d[None, :]
    tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=(g < GROUP)[:, None] & (d < D)[None, :])


@triton.jit
def _add_parts(
    first,
    num_parts,
    STRIDE: tl.constexpr,
    top,
    total,
    acc,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    DP: tl.constexpr,
    FEW: tl.constexpr,
):
    """Add parts of GROUP heads to their running softmax, FEW at a time, so that their loads overlap."""
    g = tl.arange(0, PADDED)
    d = tl.arange(0, DP)
    is_head = g < GROUP
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
    return top, total, acc
