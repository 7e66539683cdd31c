"""Where top-k, top-p and min-p cut a row's logits, and the cut.

Each of the three keeps the tokens at or above some logit, so they are three cutoffs, of which the highest holds.
With x_1 >= x_2 >= ... the row's scaled logits in order, Z_k the sum of exp over the first k:

    top-k   x_k
    top-p   x_j, j the least with Z_j >= top_p * Z_k   (k = vocab_size without top-k)
    min-p   x_1 + log(min_p)

A token whose logit equals the last one kept stays too. Logits of 16-bit models tie often, and so the outcome depends on
no sorting algorithm. Holtzman et al. 2020, https://arxiv.org/abs/1904.09751 (top-p); Nguyen et al. 2024,
https://arxiv.org/abs/2407.01082 (min-p).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .seat import no_body

__all__ = ["apply_cutoff", "min_p_cutoff", "top_k_top_p_cutoff"]

_FIRST_TRY = 128  # most nuclei are smaller; the next tries are 16 times larger each


def top_k_top_p_cutoff(logits: Tensor, top_k: Tensor, top_p: Tensor, max_top_k: int) -> Tensor:
    """The higher of the two cutoffs of each row.

    Args:
        logits: float32 [n, vocab_size], scaled by temperature
        top_k: int [n]; 0: all
        top_p: float32 [n], 0 < top_p <= 1
        max_top_k: the largest of top_k, which the caller knows without asking the device

    Returns:
        float32 [n, 1]
    """
    assert logits.dim() == 2 and top_k.shape == top_p.shape == logits.shape[:1]
    if logits.device.type != "cpu":
        raise no_body("top_k_top_p_cutoff", logits)
    vocab_size = logits.shape[1]
    k = top_k.long().masked_fill((top_k <= 0) | (top_k > vocab_size), vocab_size)[:, None]
    log_total = logits.logsumexp(dim=1, keepdim=True).double()
    cutoff = torch.full_like(log_total, -torch.inf, dtype=torch.float32)
    rows = torch.arange(logits.shape[0])
    width = min(vocab_size, max(_FIRST_TRY, max_top_k))
    # Sorting a whole vocabulary takes 2 to 4 ms a row, the 128 likeliest 0.1 ms. Here, on the CPU, it costs nothing to
    # look whether they were enough; a kernel would search by halving instead.
    while True:
        part = logits if len(rows) == logits.shape[0] else logits.index_select(0, rows)
        found, enough = _cutoff_in_first(part, width, k[rows], top_p[rows].double()[:, None], log_total[rows])
        cutoff[rows] = found
        if width == vocab_size or bool(enough.all()):
            return cutoff
        rows = rows[~enough]
        width = min(vocab_size, 16 * width)


def _cutoff_in_first(logits: Tensor, width: int, k: Tensor, top_p: Tensor, log_total: Tensor) -> tuple[Tensor, Tensor]:
    """([n, 1] the cutoff, [n] bool whether it lies among the ``width`` likeliest). k, top_p, log_total: [n, 1]."""
    values = logits.topk(width, dim=1).values  # [n, width], descending
    mass = (values.double() - log_total).exp_().cumsum(dim=1)  # Z_j / Z
    last = (k - 1).clamp(max=width - 1)
    whole = torch.where(k <= width, mass.gather(1, last), torch.ones_like(top_p))  # Z_k / Z
    below = (mass < top_p * whole).sum(dim=1, keepdim=True)  # j - 1, or width if not reached
    enough = ((k <= width) | (below < width)).squeeze(1)
    no_top_p = top_p >= 1
    index = torch.where(no_top_p, last, torch.minimum(below, last))
    cutoff = values.gather(1, index)
    everything = no_top_p & (k >= logits.shape[1])
    return cutoff.masked_fill_(everything, -torch.inf), enough | everything.squeeze(1)


def min_p_cutoff(logits: Tensor, min_p: Tensor) -> Tensor:
    """float32 [n, 1] for scaled logits float32 [n, vocab_size], min_p float32 [n]; min_p = 0 cuts nothing."""
    assert logits.dim() == 2 and min_p.shape == logits.shape[:1]
    if logits.device.type != "cpu":
        raise no_body("min_p_cutoff", logits)
    return logits.amax(dim=1, keepdim=True) + min_p.log()[:, None]


def apply_cutoff(logits: Tensor, cutoff: Tensor) -> None:
    """Set logits [n, vocab_size] below cutoff [n, 1] to -inf, in place. NaN stays, to be found by who samples."""
    assert cutoff.shape == (logits.shape[0], 1)
    if logits.device.type != "cpu":
        raise no_body("apply_cutoff", logits)
    logits.masked_fill_(logits < cutoff, -torch.inf)
