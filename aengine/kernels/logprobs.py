"""Log-probabilities of a few tokens, without making those of the whole vocabulary.

In two parts, since they are of the logits as the model gave them, and of a token that is sampled after these have been
changed: `keep_logits` before, `token_logprobs` after. What a row asks for is the number of alternatives and one, so
that 0 is nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import uses_triton


class KeptLogits(NamedTuple):
    """Logits of the rows that ask for log-probabilities; nothing is known of the others."""

    logits: Tensor  # float32 [n, vocab_size]
    stats: Tensor | None  # float32 [2, n, blocks], for the Triton kernels; None: torch computes


def keep_logits(logits: Tensor, asked: Tensor) -> KeptLogits:
    """Copy the logits float32 [n, vocab_size] of the rows with ``asked`` int32 [n] > 0."""
    assert asked.shape == logits.shape[:1] and asked.dtype == torch.int32
    if uses_triton(logits):
        from .triton import logprobs as triton_op

        return KeptLogits(*triton_op.keep_logits(logits, asked))
    return KeptLogits(logits.clone(), None)


def token_logprobs(kept: KeptLogits, sampled: Tensor, asked: Tensor, out: Tensor, slot: Tensor) -> None:
    """Find log_softmax of the kept logits for the sampled token and for the likeliest.

    Args:
        sampled: int64 [n]
        asked: int32 [n], with ``asked[i] - 1`` alternatives; at most vocab_size are found
        out: int32 [slots, m, 1 + 2 * k], m >= n, or memory of the host that the device sees: of row i of a slot the
            bits of float32 of the sampled token's; the alternatives' ids; the bits of theirs. Where fewer are asked
            for, and in rows that ask for none, the rest is left as it is.
        slot: int32 [1], which one, counted on past their number
    """
    assert sampled.shape == asked.shape == kept.logits.shape[:1] and out.shape[1] >= sampled.shape[0]
    if uses_triton(sampled):
        from .triton import logprobs as triton_op

        assert kept.stats is not None
        return triton_op.token_logprobs(kept.logits, kept.stats, sampled, asked, out, slot)
    by_logsumexp(kept.logits, sampled, asked, out[int(slot) % len(out)])
    return None


def by_logsumexp(logits: Tensor, sampled: Tensor, asked: Tensor, out: Tensor) -> None:
    """Compute the reference in torch, only for the rows that ask, which the CPU may look at. out: int32 [m, 1 + 2 *
    k]."""
    most = (out.shape[1] - 1) // 2
    chosen = (asked > 0).nonzero()[:, 0]
    if not len(chosen):
        return
    few, counts = logits.index_select(0, chosen), asked[chosen] - 1
    # Row by row: torch divides the sum of a single long row among threads, so that its last bits would depend on
    # whether other requests ask for log-probabilities too.
    log_total = torch.cat([row.logsumexp(dim=1, keepdim=True) for row in few.split(1)])
    out[chosen, 0] = (few.gather(1, sampled[chosen, None]) - log_total).squeeze(1).view(torch.int32)
    # Each number of alternatives by itself: which of equal logits torch takes depends on how many are taken.
    for count in counts.unique().tolist():
        own = (counts == count).nonzero()[:, 0]
        k, rows = min(count, few.shape[1]), chosen[own]
        values, ids = few[own].topk(k, dim=1)
        out[rows, 1 : 1 + k] = ids.int()
        out[rows, 1 + most : 1 + most + k] = (values - log_total[own]).view(torch.int32)
