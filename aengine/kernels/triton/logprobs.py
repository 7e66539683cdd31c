"""Log-probabilities in two launches: copies and statistics of blocks, before the logits change; then a program a row.

The likeliest tokens are taken one by one from the block whose next is the highest. So of k tokens k blocks are looked
at again, of 1 KB each. At least, a row that asks: 4 * V bytes read and written (n = 64, V = 151936: 78 MB, 18 us at 4.3
TB/s) with an exponential a logit; a row that asks for nothing costs nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import has_pdl, launch, launch_next_and_wait

_BLOCK = 256
_BLOCKS = 16  # blocks that a program of the first launch takes
_NO_INDEX = tl.constexpr(2**31 - 1)


def keep_logits(logits: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    n, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    kept = torch.empty(n, vocab_size, dtype=torch.float32, device=logits.device)
    stats = torch.empty(2, n, num_blocks, dtype=torch.float32, device=logits.device)
    if n:
        where = (logits, logits.stride(0), asked, asked.stride(0), kept, stats, vocab_size, num_blocks)
        grid = (n, triton.cdiv(num_blocks, _BLOCKS))
        launch(_keep_kernel, grid, *where, BLOCK=_BLOCK, BLOCKS=_BLOCKS, PDL=has_pdl())
    return kept, stats


def token_logprobs(kept: Tensor, stats: Tensor, sampled: Tensor, asked: Tensor, out: Tensor, slot: Tensor) -> None:
    n, vocab_size = kept.shape
    assert out.is_contiguous() and sampled.stride(0) == 1
    if n:
        width = out.shape[2]
        where = (kept, stats, sampled, asked, asked.stride(0), out, slot, vocab_size, stats.shape[2])
        padded = triton.next_power_of_2(stats.shape[2])
        constants = {"BLOCK": _BLOCK, "PADDED": padded, "PDL": has_pdl()}
        launch(_logprob_kernel, (n,), *where, out.shape[0], out.shape[1], width, **constants)


@triton.jit
def _keep_kernel(
    logits: tl.tensor,
    logits_stride: tl.tensor,
    asked: tl.tensor,
    asked_stride: tl.tensor,
    kept: tl.tensor,
    stats: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """stats: highest logit of each block; sum of exp(x - highest). NaN counts as -inf."""
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(asked + row * asked_stride) > 0:
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logits + row * logits_stride + token, mask=token < vocab_size, other=float("-inf"))
        tl.store(kept + row * vocab_size + token, x, mask=token < vocab_size)
        x = tl.where(x == x, x, float("-inf"))
        highest = tl.max(x, axis=1)
        base = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
        mass = tl.sum(tl.exp(x - base[:, None]), axis=1)
        at = stats + row * num_blocks + block
        tl.store(at, highest, mask=block < num_blocks)
        tl.store(at + tl.num_programs(0).to(tl.int64) * num_blocks, mass, mask=block < num_blocks)


@triton.jit(
    do_not_specialize=["num_slots", "num_rows", "width"], do_not_specialize_on_alignment=["sampled", "out", "slot"]
)
def _logprob_kernel(
    kept: tl.tensor,
    stats: tl.tensor,
    sampled: tl.tensor,
    asked: tl.tensor,
    asked_stride: tl.tensor,
    out: tl.tensor,
    slot: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    num_slots: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(asked + row * asked_stride) - 1
    if count >= 0:
        count = tl.minimum(count, vocab_size)
        own = out + ((tl.load(slot) % num_slots).to(tl.int64) * num_rows + row) * width
        most = (width - 1) // 2
        block = tl.arange(0, PADDED)
        at = stats + row * num_blocks + block
        # The highest token of each block that is not taken yet. Taken tokens of equal logit have ids up to ``done``.
        highest = tl.load(at, mask=block < num_blocks, other=float("-inf"))
        masses = tl.load(at + tl.num_programs(0).to(tl.int64) * num_blocks, mask=block < num_blocks, other=0.0)
        done = tl.full((PADDED,), -1, tl.int32)
        peak = tl.max(highest, axis=0)
        base = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
        total = base + tl.log(tl.sum(masses * tl.exp(highest - base), axis=0))
        logits = kept + row * vocab_size
        logit = tl.load(logits + tl.load(sampled + row))
        tl.store(own, (logit - total).to(tl.int32, bitcast=True))
        i = 0
        while i < count:
            value = tl.max(highest, axis=0)
            # Blocks that have nothing left are as low as those of banned tokens; ids tell them apart.
            which = tl.min(
                tl.where((highest == value) & (done < _NO_INDEX) & (block < num_blocks), block, PADDED), axis=0
            )
            last = tl.max(tl.where(block == which, done, -1), axis=0)
            token = which * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
            x = tl.where(x == x, x, float("-inf"))
            is_left = (token < vocab_size) & ((x < value) | ((x == value) & (token > last)))
            best = tl.min(tl.where(is_left & (x == value), token, _NO_INDEX), axis=0)
            is_left &= token != best
            following = tl.max(tl.where(is_left, x, float("-inf")), axis=0)
            has_more = tl.max(is_left.to(tl.int32), axis=0) > 0
            mark = tl.where(has_more, tl.where(following == value, best, -1), _NO_INDEX)
            highest = tl.where(block == which, following, highest)
            done = tl.where(block == which, mark, done)
            tl.store(own + 1 + i, best)
            tl.store(own + 1 + most + i, (value - total).to(tl.int32, bitcast=True))
            i += 1
