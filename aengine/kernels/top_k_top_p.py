"""The logit at which top-k, top-p and min-p cut a row.

Each of the three keeps the tokens at or above some logit, so they are three cutoffs, of which the highest holds.
With x_1 >= x_2 >= ... the row's logits in order, T its temperature, Z_k the sum of exp(x / T) over the first k:

    top-k   x_k
    top-p   x_j, j the least with Z_j >= top_p * Z_k   (k = vocab_size without top-k)
    min-p   x_1 + T * log(min_p)

A token whose logit equals the last one kept stays too. Logits of 16-bit models tie often, and so the outcome depends on
no sorting algorithm. Holtzman et al. 2020, https://arxiv.org/abs/1904.09751 (top-p); Nguyen et al. 2024,
https://arxiv.org/abs/2407.01082 (min-p).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import uses_triton

_FIRST_TRY = 128  # most nuclei are smaller; the next tries are 16 times larger each
_PIECE = 2**19  # logits that are scaled at a time on the CPU, so that the copy stays in the cache


def find_cutoff(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the highest of the three cutoffs of each row; -inf for greedy rows and for those without a cutoff.

    Args:
        logits: float32 [n, vocab_size], not scaled
        temperature: float32 [n]; 0: greedy
        top_k: int32 [n]; 0, or vocab_size and more: all
        top_p: float32 [n], 0 < top_p <= 1; 1: all
        min_p: float32 [n], 0 <= min_p <= 1; 0: all

    Returns:
        float32 [n], in the units of logits: tokens below are out. Of a row with NaN or +inf, any number that leaves the
        bad logit standing.
    """
    assert logits.dim() == 2 and top_k.shape == top_p.shape == min_p.shape == temperature.shape == logits.shape[:1]
    if uses_triton(logits):
        from .triton import top_k_top_p as triton_op

        return triton_op.find_cutoff(logits, temperature, top_k, top_p, min_p)
    vocab_size = logits.shape[1]
    cutoff = torch.full((len(logits), 1), -torch.inf)
    k = top_k.long().masked_fill((top_k <= 0) | (top_k > vocab_size), vocab_size)
    is_random = temperature > 0
    chosen = (is_random & ((k < vocab_size) | (top_p < 1))).nonzero()[:, 0]
    if len(chosen):
        few = _rows(logits, chosen)
        cutoff[chosen] = _top_k_top_p(few, temperature[chosen, None], k[chosen, None], top_p[chosen, None])
    chosen = (is_random & (min_p > 0)).nonzero()[:, 0]
    if len(chosen):
        lowest = _rows(logits, chosen).amax(dim=1) + temperature[chosen] * min_p[chosen].log()
        cutoff[chosen] = torch.maximum(cutoff[chosen], lowest[:, None])
    return cutoff.squeeze(1)


def _rows(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits if len(chosen) == len(logits) else logits.index_select(0, chosen)


def _top_k_top_p(logits: Tensor, temperature: Tensor, k: Tensor, top_p: Tensor) -> Tensor:
    """Return float32 [n, 1]: the higher of the two cutoffs; temperature, k >= 1 and top_p: [n, 1]."""
    vocab_size = logits.shape[1]
    max_k = int(k.masked_fill(k >= vocab_size, 0).max())
    if not (top_p < 1).any():
        return (
            logits.topk(max_k, dim=1)
            .values.gather(1, (k - 1).clamp(max=max_k - 1))
            .masked_fill_(k >= vocab_size, -torch.inf)
        )
    step = max(1, _PIECE // vocab_size)
    parts = [slice(i, i + step) for i in range(0, len(logits), step)]
    log_total = torch.cat([(logits[p] / temperature[p]).logsumexp(dim=1, keepdim=True) for p in parts]).double()
    cutoff = torch.full_like(log_total, -torch.inf, dtype=torch.float32)
    rows = torch.arange(logits.shape[0])
    width = min(vocab_size, max(_FIRST_TRY, max_k))
    # Sorting a whole vocabulary takes 2 to 4 ms a row, the 128 likeliest 0.1 ms, and it costs nothing to look whether
    # they were enough.
    while True:
        values = _rows(logits, rows).topk(width, dim=1).values
        mass = (values.double() / temperature[rows] - log_total[rows]).exp_().cumsum(dim=1)  # Z_j / Z
        found, enough = _cutoff_in_first(values, mass, k[rows], top_p[rows].double(), vocab_size)
        cutoff[rows] = found
        if width == vocab_size or bool(enough.all()):
            return cutoff
        rows = rows[~enough]
        width = min(vocab_size, 16 * width)


def _cutoff_in_first(values: Tensor, mass: Tensor, k: Tensor, top_p: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return ([n, 1] the cutoff, [n] bool whether it is among the likeliest, of which values, mass: [n, width]
    tell)."""
    width = values.shape[1]
    last = (k - 1).clamp(max=width - 1)
    whole = torch.where(k <= width, mass.gather(1, last), torch.ones_like(top_p))  # Z_k / Z
    below = (mass < top_p * whole).sum(dim=1, keepdim=True)  # j - 1, or width if not reached
    enough = ((k <= width) | (below < width)).squeeze(1)
    no_top_p = top_p >= 1
    index = torch.where(no_top_p, last, torch.minimum(below, last))
    cutoff = values.gather(1, index)
    everything = no_top_p & (k >= vocab_size)
    return cutoff.masked_fill_(everything, -torch.inf), enough | everything.squeeze(1)
