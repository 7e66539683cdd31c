"""The two-level draw in two launches: the best block of every chunk of logits, then the best token of each row.

    logits [n, V] ─ (n, V / CHUNK) programs ─> best, index, check [n, V / CHUNK] ─ n programs ─> ids, checks [n]

A random row's ``best`` is a block's noisy mass and ``index`` that block; a greedy row's are a logit and its token. In
both the highest wins, and of equals the first, so that the second launch treats all alike until it draws inside the
block. The chunk is the same for every n: a row rounds alike in every batch.

At least: 4 * V * n bytes read, which at n = 256 are 156 MB (32 us at 4.8 TB/s) for V = 151936, and 131 MB (27 us) for
V = 128256; at n = 1, 0.6 and 0.5 MB, where latency counts. Some 8 operations a logit, one of them an exponential.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import has_pdl, launch, launch_next_and_wait

_BLOCK = 256  # ids of a block, as kernels/gumbel.py defines the draw
_BLOCKS = 4  # blocks of a chunk; 4 with one warp were the fastest on an H200
_ROWS = 64  # rows that a program of `_best_kernel` takes
_LARGEST = tl.constexpr(3.0e38)
_NO_INDEX = tl.constexpr(2**31 - 1)


def gumbel_sample(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, cutoff: Tensor | None
) -> tuple[Tensor, Tensor]:
    n = len(logits)
    ids = torch.empty(n, dtype=torch.int64, device=logits.device)
    checks = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n:
        _draw(logits, temperature, seeds, positions, cutoff, ids, checks)
    return ids, checks


def draw_share(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, first_token: int, vocab_size: int
) -> Tensor:
    out = torch.empty((3, len(logits)), dtype=torch.float32, device=logits.device)
    if len(logits):
        _draw(logits, temperature, seeds, positions, None, out[1], out[2], out[0], first_token, vocab_size)
    return out


def best_of_shares(shares: Tensor) -> tuple[Tensor, Tensor]:
    num_shares, _, n = shares.shape
    assert shares.is_contiguous()
    ids = torch.empty(n, dtype=torch.int64, device=shares.device)
    checks = torch.empty(n, dtype=torch.float32, device=shares.device)
    if n:
        grid = (triton.cdiv(n, _ROWS),)
        launch(_best_kernel, grid, shares, ids, checks, n, SHARES=num_shares, ROWS=_ROWS, PDL=has_pdl(), num_warps=1)
    return ids, checks


def _draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    cutoff: Tensor | None,
    ids: Tensor,
    checks: Tensor,
    scores: Tensor | None = None,
    first_token: int = 0,
    last_token: int = 0,
) -> None:
    """Fill ids and checks [n]. Of a share that begins with ``first_token``, scores [n] too."""
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_chunks = triton.cdiv(vocab_size, _BLOCKS * _BLOCK)
    workspace = torch.empty(3, n, num_chunks, dtype=torch.float32, device=logits.device)
    common = (logits, temperature, seeds, positions, logits if cutoff is None else cutoff, workspace)
    strides = (logits.stride(0), temperature.stride(0), seeds.stride(0), positions.stride(0))
    constants = {"CUT": cutoff is not None, "BLOCK": _BLOCK, "PDL": has_pdl()}
    first_block = first_token // _BLOCK
    grid = (n, num_chunks)
    launch(_chunk_kernel, grid, *common, vocab_size, first_block, *strides, BLOCKS=_BLOCKS, num_warps=1, **constants)
    launch(
        _row_kernel,
        (n,),
        *common,
        ids,
        checks,
        scores,
        vocab_size,
        first_token,
        last_token,
        *strides,
        num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks),
        SHARE=scores is not None,
        num_warps=2,
        **constants,
    )


@triton.jit
def _draw_word(seed: tl.tensor, position: tl.tensor, draws: tl.tensor) -> tl.tensor:
    """Return uint32: word draws % 4 of Philox(seed, (draws / 4, position, 0, 0)), for a block of draws >= 0."""
    counters = (draws // 4).to(tl.uint32)
    zero = tl.zeros_like(counters)
    w0, w1, w2, w3 = tl.philox(seed, counters, position.to(tl.uint32) + zero, zero, zero)
    which = draws % 4
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))


@triton.jit
def _noise(seed: tl.tensor, position: tl.tensor, draws: tl.tensor) -> tl.tensor:
    """Return standard Gumbel noise -log(-log(u)), u = (word + 0.5) / 2**32, float32 and right to some 1e-6.

    For u near 1 a float32 has too few digits, and -log(u) = -log1p(-v) is summed from v = 1 - u, which has them all.
    """
    word = _draw_word(seed, position, draws)
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = v * (1.0 + v * (0.5 + v * (0.33333333 + v * (0.25 + v * (0.2 + v * 0.16666667)))))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(u)))


@triton.jit
def _scaled(x: tl.tensor, scale: tl.tensor, cut: tl.tensor, CUT: tl.constexpr) -> tl.tensor:
    """Return x / temperature, finite or -inf: an index is found in any row, and `check` finds whether it is valid."""
    y = tl.where(x == x, x * scale, float("-inf"))
    if CUT:
        y = tl.where(x < cut, float("-inf"), y)
    return tl.minimum(y, _LARGEST)


@triton.jit(do_not_specialize=["first_block"])
def _chunk_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    cutoff: tl.tensor,
    workspace: tl.tensor,
    vocab_size: tl.tensor,
    first_block: tl.tensor,
    logits_stride: tl.tensor,
    temperature_stride: tl.tensor,
    seed_stride: tl.tensor,
    position_stride: tl.tensor,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    blocks = chunk * BLOCKS + tl.arange(0, BLOCKS)
    token = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
    is_nan = tl.max(tl.max((x != x).to(tl.int32), axis=1), axis=0) > 0
    t = tl.load(temperature + row * temperature_stride)
    if t > 0:
        cut = tl.load(cutoff + row) if CUT else 0.0
        y = _scaled(x, 1.0 / t, cut, CUT)
        peak = tl.max(y, axis=1)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        sums = tl.sum(tl.exp(y - base[:, None]), axis=1)
        mass = tl.where(peak == float("-inf"), peak, peak + tl.log(tl.maximum(sums, 1.0)))
        seed, position = tl.load(seeds + row * seed_stride), tl.load(positions + row * position_stride)
        noisy = mass + _noise(seed, position, BLOCK + first_block + blocks)
        best = tl.max(noisy, axis=0)
        index = tl.min(tl.where(noisy == best, blocks, _NO_INDEX), axis=0)
        highest = tl.max(peak, axis=0)
    else:
        y = tl.where(x == x, x, float("-inf"))
        best = tl.max(tl.max(y, axis=1), axis=0)
        index = tl.min(tl.min(tl.where(y == best, token, _NO_INDEX), axis=1), axis=0)
        highest = best
    # +inf was brought down to _LARGEST for the draw.
    highest = tl.where(highest >= _LARGEST, float("inf"), highest)
    chunks = tl.num_programs(1)
    out = workspace + row * chunks + chunk
    step = tl.num_programs(0).to(tl.int64) * chunks
    tl.store(out, best)
    tl.store((out + step).to(tl.pointer_type(tl.int32)), index)
    tl.store(out + 2 * step, tl.where(is_nan, float("nan"), highest))


@triton.jit(do_not_specialize=["first_token", "last_token"])
def _row_kernel(
    logits: tl.tensor,
    temperature: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    cutoff: tl.tensor,
    workspace: tl.tensor,
    ids: tl.tensor,
    checks: tl.tensor,
    scores: tl.tensor,
    vocab_size: tl.tensor,
    first_token: tl.tensor,
    last_token: tl.tensor,
    logits_stride: tl.tensor,
    temperature_stride: tl.tensor,
    seed_stride: tl.tensor,
    position_stride: tl.tensor,
    num_chunks: tl.tensor,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHARE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < num_chunks
    at = workspace + row * num_chunks + chunk
    step = tl.num_programs(0).to(tl.int64) * num_chunks
    score = tl.load(at, mask=there, other=float("-inf"))
    indices = tl.load((at + step).to(tl.pointer_type(tl.int32)), mask=there, other=_NO_INDEX)
    check = tl.load(at + 2 * step, mask=there, other=float("-inf"))
    is_nan = tl.max((check != check).to(tl.int32), axis=0) > 0
    highest = tl.max(tl.where(check == check, check, float("-inf")), axis=0)
    tl.store(checks + row, tl.where(is_nan, float("nan"), highest))
    best = tl.max(score, axis=0)
    index = tl.min(tl.where(score == best, indices, _NO_INDEX), axis=0)
    t = tl.load(temperature + row * temperature_stride)
    if t > 0:
        draws = tl.arange(0, BLOCK)
        token = index * BLOCK + draws
        x = tl.load(logits + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
        cut = tl.load(cutoff + row) if CUT else 0.0
        seed, position = tl.load(seeds + row * seed_stride), tl.load(positions + row * position_stride)
        noisy = _scaled(x, 1.0 / t, cut, CUT) + _noise(seed, position, draws)
        index = tl.min(tl.where(noisy == tl.max(noisy, axis=0), token, _NO_INDEX), axis=0)
    if SHARE:
        tl.store(scores + row, best)
        index = tl.minimum(index + first_token, last_token - 1)
    tl.store(ids + row, index.to(ids.dtype.element_ty))


@triton.jit(do_not_specialize=["n"])
def _best_kernel(
    shares: tl.tensor,
    ids: tl.tensor,
    checks: tl.tensor,
    n: tl.tensor,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_next_and_wait(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < n
    best = tl.load(shares + row, mask=there, other=0.0)
    token = tl.load(shares + n + row, mask=there, other=0.0)
    check = tl.load(shares + 2 * n + row, mask=there, other=0.0)
    for share in tl.static_range(1, SHARES):
        at = shares + 3 * n * share + row
        score = tl.load(at, mask=there, other=0.0)
        own = tl.load(at + 2 * n, mask=there, other=0.0)
        token = tl.where(score > best, tl.load(at + n, mask=there, other=0.0), token)
        best = tl.maximum(best, score)
        # A NaN of any share stays.
        check = tl.where((own != own) | (own > check), own, check)
    tl.store(ids + row, token.to(tl.int64), mask=there)
    tl.store(checks + row, check, mask=there)
