"""Draw one token a row from softmax(logits), by Gumbel-max in two levels and with stateless noise.

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

import torch
from torch import Tensor

from .philox import philox4x32
from .seat import no_body

__all__ = ["BLOCK", "gumbel_noise", "gumbel_sample"]

BLOCK = 256


def gumbel_noise(seeds: Tensor, positions: Tensor, num_draws: int) -> Tensor:
    """Standard Gumbel noise: float64 [n, num_draws] for seeds, positions int64 [n]. Finite always: 2**-33 <= u < 1."""
    counters = torch.arange((num_draws + 3) // 4, device=seeds.device)
    words = philox4x32(seeds, counters, positions).flatten(1)[:, :num_draws]
    uniform = words.double().add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()


def gumbel_sample(logits: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """One token id a row.

    Args:
        logits: float32 [n, vocab_size], scaled by temperature already; -inf where a token is cut off.
        seeds, positions: int64 [n]: the request's seed, and the absolute position that the token will have.

    Returns:
        ids int64 [n]; and float32 [n], finite exactly if the row can be sampled: NaN or +inf in its logits, or nothing
        but -inf, shows there.
    """
    assert logits.dim() == 2 and logits.dtype == torch.float32 and seeds.shape == positions.shape == logits.shape[:1]
    if logits.device.type != "cpu":
        raise no_body("gumbel_sample", logits)
    vocab_size = logits.shape[1]
    mass = _block_logsumexp(logits)
    noise = gumbel_noise(seeds, positions, BLOCK + mass.shape[1])
    block = (mass + noise[:, BLOCK:]).argmax(dim=1, keepdim=True)
    ids = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    inside = logits.gather(1, ids.clamp(max=vocab_size - 1)).masked_fill_(ids >= vocab_size, -torch.inf)
    choice = (inside + noise[:, :BLOCK]).argmax(dim=1, keepdim=True)
    sampled = (block * BLOCK + choice).clamp_(max=vocab_size - 1)  # a row of NaN may land in the padding
    return sampled.squeeze(1), mass.amax(dim=1)


def _block_logsumexp(logits: Tensor) -> Tensor:
    """float32 [n, ceil(vocab_size / BLOCK)], without copying the logits."""
    full = logits.shape[1] // BLOCK * BLOCK
    mass = logits[:, :full].unflatten(1, (-1, BLOCK)).logsumexp(dim=2) if full else logits[:, :0]
    if full == logits.shape[1]:
        return mass
    return torch.cat((mass, logits[:, full:].logsumexp(dim=1, keepdim=True)), dim=1)
