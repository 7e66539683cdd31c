"""Cutoffs against a naive float64 loop over sorted lists."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from aengine.kernels.top_k_top_p import apply_cutoff, min_p_cutoff, top_k_top_p_cutoff


def naive_cutoff(logits: list[float], top_k: int, top_p: float) -> float:
    ordered = sorted(logits, reverse=True)
    k = min(top_k, len(ordered)) if top_k > 0 else len(ordered)
    weights = np.exp(np.array(ordered[:k], dtype=np.float64) - ordered[0])
    if top_p >= 1:
        return ordered[k - 1]
    total, sum_ = weights.sum(), 0.0
    for value, weight in zip(ordered, weights):
        sum_ += weight
        if sum_ >= top_p * total:
            return value
    return ordered[k - 1]


@pytest.mark.parametrize("vocab_size", [1, 9, 127, 128, 129, 3000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_against_naive(rng: random.Random, gen: torch.Generator, vocab_size: int, spread: float) -> None:
    n = 12
    logits = torch.randn(n, vocab_size, generator=gen) * spread
    top_k = [rng.choice([0, 1, 2, 50, vocab_size, 2 * vocab_size]) for _ in range(n)]
    top_p = [rng.choice([1.0, rng.uniform(0.01, 1.0), 0.999]) for _ in range(n)]
    p = torch.tensor(top_p)
    max_top_k = max([k for k in top_k if k < vocab_size], default=0)
    cutoff = top_k_top_p_cutoff(logits, torch.tensor(top_k, dtype=torch.int32), p, max_top_k)
    assert cutoff.shape == (n, 1) and cutoff.dtype == torch.float32
    for i in range(n):
        # The total over a whole vocabulary is a float32 sum, so a nucleus may end where a slightly other top_p's does.
        slack = 3e-6 if p[i] < 1 else 0.0
        fewest, most = (
            int((logits[i] >= naive_cutoff(logits[i].tolist(), top_k[i], min(float(p[i]) * (1 + nudge), 1.0))).sum())
            for nudge in (-slack, slack)
        )
        assert fewest <= (logits[i] >= cutoff[i]).sum() <= most, (i, top_k[i], top_p[i])


def test_ties_with_the_last_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    assert top_k_top_p_cutoff(logits, torch.tensor([2]), torch.tensor([1.0]), 2).item() == 1.0
    logits = torch.zeros(1, 4)
    assert top_k_top_p_cutoff(logits, torch.tensor([0]), torch.tensor([0.5]), 0).item() == 0.0


def test_top_p_is_of_what_top_k_left() -> None:
    """Of 0.4 0.3 0.2 0.1, the two of top_k=2 are 0.57 and 0.43: top_p=0.5 keeps one; without top_k it keeps two."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    alone = top_k_top_p_cutoff(logits, torch.tensor([0]), torch.tensor([0.5]), 0)
    both = top_k_top_p_cutoff(logits, torch.tensor([2]), torch.tensor([0.5]), 2)
    assert (logits >= alone).sum() == 2 and (logits >= both).sum() == 1


def test_rows_do_not_see_each_other(gen: torch.Generator) -> None:
    """A row with a wide nucleus makes the search go on; that changes no other row."""
    logits = torch.cat((torch.randn(3, 5000, generator=gen) * 6, torch.randn(1, 5000, generator=gen) * 0.1))
    top_k, top_p = torch.tensor([0, 40, 0, 0]), torch.tensor([0.9, 0.8, 0.3, 0.99])
    together = top_k_top_p_cutoff(logits, top_k, top_p, 40)
    for i in range(4):
        row = slice(i, i + 1)
        assert torch.equal(top_k_top_p_cutoff(logits[row], top_k[row], top_p[row], int(top_k[i])), together[row])
    assert (logits[3] >= together[3]).sum() > 2048


def test_min_p_and_apply(gen: torch.Generator) -> None:
    logits = torch.randn(4, 300, generator=gen)
    min_p = torch.tensor([0.0, 0.1, 0.5, 1.0])
    probs = torch.softmax(logits.double(), 1)
    kept = probs >= min_p[:, None].double() * probs.amax(1, keepdim=True) * (1 - 1e-6)
    cut = logits.clone()
    apply_cutoff(cut, min_p_cutoff(logits, min_p))
    assert torch.equal(cut, logits.masked_fill(~kept, -torch.inf))


def test_nan_stays_to_be_found() -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0], [0.0, 2.0, 1.0]])
    cutoff = top_k_top_p_cutoff(logits, torch.tensor([1, 1]), torch.tensor([1.0, 1.0]), 1)
    apply_cutoff(logits, cutoff)
    assert logits[0].isnan().any() and logits[1].tolist() == [-torch.inf, 2.0, -torch.inf]
