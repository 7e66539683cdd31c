"""Draw one token a row from softmax(logits / temperature), by Gumbel-max in two levels and with stateless noise.

Gumbel-max: argmax(logits + G), each G = -log(-log(u)), is a draw from softmax(logits) (Maddison et al. 2014,
https://arxiv.org/abs/1411.0030). Here the vocabulary is cut into blocks of 256 ids. A block is drawn from the
blocks' log-sum-exps, then a token inside it: the same distribution, with V / 256 + 256 noises a row instead of V.

    draw j of (seed, position) = word j % 4 of Philox(key = seed, counter = (j / 4, position, 0, 0))

         j:   0 ........ 255 | 256 ............ 256 + V / 256 - 1
              token in block | block

So a token depends on its row's seed, position and logits alone, never on the batch. Why not one uniform and a
cumulative sum: there a rounding error in any logit shifts every boundary after it, while here it matters only if it
overturns a maximum. A replay in another batch, whose matrix products round otherwise, so keeps its tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .dispatch import uses_triton
from .philox import philox4x32

BLOCK = 256
_PIECE = 2**19  # logits that are scaled at a time on the CPU, so that the copy stays in the cache


def gumbel_noise(seeds: NDArray[np.int64], positions: NDArray[np.int64], num_draws: int) -> NDArray[np.float64]:
    """Return standard Gumbel noise [n, num_draws] for seeds, positions [n]. Finite always: 2**-33 <= u < 1."""
    words = philox4x32(seeds, np.arange((num_draws + 3) // 4), positions).reshape(len(seeds), -1)[:, :num_draws]
    return -np.log(-np.log((words + 0.5) * 2.0**-32))


def gumbel_sample(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, cutoff: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample one token id a row; greedy and random rows in any mixture. The logits are not changed.

    Args:
        logits: float32 [n, vocab_size], not scaled; -inf where a token is banned.
        temperature: float32 [n], >= 0; 0: greedy, the first of the likeliest tokens.
        seeds, positions: int64 [n]: the request's seed, and the absolute position that the token will have (int32 will
            do). Greedy rows do not use them.
        cutoff: float32 [n]: no token whose logit is below is drawn (top_k_top_p.py). It is not above the row's maximum;
            -inf cuts nothing.

    Returns:
        ids int64 [n], always of the vocabulary; and checks float32 [n], finite exactly if the row can be sampled: NaN
        if the logits have a NaN, else +inf if they have a +inf, else -inf if they are nothing but -inf.
    """
    assert logits.dim() == 2 and logits.dtype == temperature.dtype == torch.float32
    assert temperature.shape == seeds.shape == positions.shape == logits.shape[:1]
    assert cutoff is None or cutoff.shape == seeds.shape
    if uses_triton(logits):
        from .triton import gumbel as triton_op

        return triton_op.gumbel_sample(logits, temperature, seeds, positions, cutoff)
    return draw_or_greedy(logits, temperature, seeds, positions, cutoff)


def draw_share(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, first_token: int, vocab_size: int
) -> Tensor:
    """Return the best token of a share of the vocabulary, for `best_of_shares` to compare with those of the others:
    together they draw what `gumbel_sample` draws from all logits.

    Args:
        logits: float32 [n, size] of the tokens from ``first_token`` on, a multiple of ``BLOCK``; -inf where there is
            none; the others as for `gumbel_sample`
        vocab_size: of the whole

    Returns [3, n], float64 on the CPU and float32 elsewhere: how the token compares, its id, and the row's check.
    """
    assert logits.dim() == 2 and logits.dtype == temperature.dtype == torch.float32 and first_token % BLOCK == 0
    assert temperature.shape == seeds.shape == positions.shape == logits.shape[:1]
    if uses_triton(logits):
        from .triton import gumbel as triton_op

        return triton_op.draw_share(logits, temperature, seeds, positions, first_token, vocab_size)
    best, values = likeliest(logits)
    out = torch.stack((values.double(), best.double() + first_token, values.double()))
    some = (temperature > 0).nonzero()[:, 0]
    if len(some):
        block = first_token // BLOCK
        ids, checks, scores = _draw_scored(logits[some], temperature[some], seeds[some], positions[some], None, block)
        out[:, some] = torch.stack((scores, ids.double() + first_token, checks.double()))
    out[1].clamp_(max=vocab_size - 1)  # a share may have no token
    return out


def best_of_shares(shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return (ids int64 [n], checks float32 [n]) as `gumbel_sample` does, for what `draw_share` made of each share, in
    the order of the vocabulary: [shares, 3, n]. Of equal ones the first wins."""
    assert shares.dim() == 3 and shares.shape[1] == 3
    if uses_triton(shares):
        from .triton import gumbel as triton_op

        return triton_op.best_of_shares(shares)
    best = shares[:, 0].argmax(dim=0, keepdim=True)
    return shares[:, 1].gather(0, best)[0].long(), shares[:, 2].amax(dim=0).float()


def draw_or_greedy(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, cutoff: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the reference: rows of temperature 0 take the likeliest token, and only the others are drawn."""
    is_random = temperature > 0
    count = np.count_nonzero(is_random.numpy())
    if count == 0:
        return likeliest(logits)
    if count == len(logits):
        ids, checks, _ = _draw_scored(logits, temperature, seeds, positions, cutoff)
        return ids, checks
    ids = torch.empty(len(logits), dtype=torch.int64)
    checks = torch.empty(len(logits), dtype=torch.float32)
    some = is_random.nonzero()[:, 0]
    few = None if cutoff is None else cutoff[some]
    ids[some], checks[some], _ = _draw_scored(logits[some], temperature[some], seeds[some], positions[some], few)
    others = (~is_random).nonzero()[:, 0]
    ids[others], checks[others] = likeliest(logits[others])
    return ids, checks


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `gumbel_sample` does for rows that are all greedy, on the CPU. (Torch's maximum takes ten times as
    long as numpy's.)"""
    numbers = logits.numpy()
    ids = numbers.argmax(1)
    return torch.from_numpy(ids), torch.from_numpy(numbers[np.arange(len(ids)), ids])


def _draw_scored(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    cutoff: Tensor | None,
    first_block: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row, none of which is greedy, from logits that begin with block ``first_block``; also the noisy
    mass of its block, float64 [n], by which it was preferred to others. (Torch's ops take three times as long.)"""
    numbers, scale = logits.numpy(), temperature.numpy()[:, None]
    limit = np.full_like(scale, -np.inf) if cutoff is None else cutoff.numpy()[:, None]
    n, vocab_size = numbers.shape
    step, rows = max(1, _PIECE // vocab_size), np.arange(n)
    parts = [slice(i, i + step) for i in range(0, n, step)]
    with np.errstate(all="ignore"):
        mass = np.concatenate([_block_mass(numbers[p], scale[p], limit[p]) for p in parts])
        noise = gumbel_noise(seeds.numpy(), positions.numpy(), BLOCK + first_block + mass.shape[1])
        scores = mass + noise[:, BLOCK + first_block :]
        block = scores.argmax(1)
        ids = block[:, None] * BLOCK + np.arange(BLOCK)
        inside = numbers[rows[:, None], np.minimum(ids, vocab_size - 1)]
        inside[(ids >= vocab_size) | (inside < limit)] = -np.inf
        choice = (inside / scale + noise[:, :BLOCK]).argmax(1)
    sampled = np.minimum(block * BLOCK + choice, vocab_size - 1)  # a row of NaN may land in the padding
    return torch.from_numpy(sampled), torch.from_numpy(mass.max(1)), torch.from_numpy(scores[rows, block])


def _block_mass(
    logits: NDArray[np.float32], temperature: NDArray[np.float32], cutoff: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return log-sum-exp of each block of logits / temperature, [n, ceil(vocab_size / BLOCK)], or -inf of one that is
    smaller than the row's largest logit by a factor of e^87, which is never drawn; the others [n, 1]."""
    n, vocab_size = logits.shape
    scaled = np.empty((n, -(-vocab_size // BLOCK) * BLOCK), np.float32)
    scaled[:, vocab_size:] = -np.inf
    own = np.divide(logits, temperature, out=scaled[:, :vocab_size])
    if np.isfinite(cutoff).any():
        own[logits < cutoff] = -np.inf
    peak = own.max(1, keepdims=True)
    peak[np.isinf(peak)] = 0
    scaled -= peak
    blocks = np.exp(scaled, out=scaled).reshape(n, -1, BLOCK)
    return np.log(np.einsum("nbk->nb", blocks)) + peak  # einsum takes half of sum's time
