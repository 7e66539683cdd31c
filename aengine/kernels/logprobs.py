"""Log-probabilities of a few tokens, without making those of the whole vocabulary."""

from __future__ import annotations

from torch import Tensor

from .dispatch import uses_triton

__all__ = ["by_logsumexp", "top_logprobs"]


def top_logprobs(logits: Tensor, sampled: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax(logits) of the sampled token and of the k likeliest.

    Args:
        logits: float32 [m, vocab_size]
        sampled: int64 [m]
        k: >= 0; at most vocab_size are found

    Returns:
        float32 [m] of the sampled token; int64 [m, k] the likeliest, in order; float32 [m, k] theirs
    """
    assert logits.dim() == 2 and sampled.shape == logits.shape[:1]
    if uses_triton(logits):
        from .triton import logprobs as triton_op

        return triton_op.top_logprobs(logits, sampled, k)
    return by_logsumexp(logits, sampled, k)


def by_logsumexp(logits: Tensor, sampled: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The reference."""
    values, ids = logits.topk(min(k, logits.shape[1]), dim=1)
    log_total = logits.logsumexp(dim=1, keepdim=True)
    return (logits.gather(1, sampled[:, None]) - log_total).squeeze(1), ids, values - log_total
