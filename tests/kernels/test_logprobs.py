"""Log-probabilities against log_softmax in float64."""

from __future__ import annotations

import random

import pytest
import torch

from aengine.kernels.dispatch import torch_reference
from aengine.kernels.logprobs import by_logsumexp, keep_logits, token_logprobs


def logprobs_of(
    logits: torch.Tensor, sampled: torch.Tensor, asked: torch.Tensor, width: int, device: torch.device
) -> torch.Tensor:
    """int32 [n, 1 + 2 * width]; 77 where nothing is written. The logits change in between."""
    given = logits.clone().to(device)
    kept = keep_logits(given, asked.to(device))
    given.fill_(torch.nan)
    out = torch.full((3, len(logits) + 2, 1 + 2 * width), 77, dtype=torch.int32, device=device)
    slot = torch.tensor([5], dtype=torch.int32, device=device)
    token_logprobs(kept, sampled.to(device), asked.to(device), out, slot)
    assert (out[:2] == 77).all() and (out[2, len(logits) :] == 77).all()
    return out[2, : len(logits)].cpu()


def check(
    logits: torch.Tensor, sampled: torch.Tensor, asked: torch.Tensor, got: torch.Tensor, *, ordered: bool
) -> None:
    """``ordered``: of equal ones those of lower ids come first."""
    width = (got.shape[1] - 1) // 2
    exact = torch.log_softmax(logits.double(), 1)
    for i, k in enumerate((asked - 1).tolist()):
        if k < 0:
            assert (got[i] == 77).all()
            continue
        k = min(k, logits.shape[1])
        ids, values = got[i, 1 : 1 + k].long(), got[i, 1 + width : 1 + width + k].view(torch.float32)
        torch.testing.assert_close(
            got[i, :1].view(torch.float32)[0].double(), exact[i, sampled[i]], atol=1e-5, rtol=1e-6
        )
        torch.testing.assert_close(values.double(), exact[i, ids], atol=1e-5, rtol=1e-6)
        wanted = logits[i].sort(descending=True, stable=True)
        assert torch.equal(logits[i, ids], wanted.values[:k]) and len(set(ids.tolist())) == k
        if ordered:
            assert torch.equal(ids, wanted.indices[:k])


@pytest.mark.parametrize("vocab_size", [3, 256, 5000])
def test_both_against_log_softmax(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, vocab_size: int
) -> None:
    """Rows of ties, of banned tokens, of none but one, and such that ask for nothing."""
    n = 7
    logits = torch.randn(n, vocab_size, generator=gen) * 10
    logits[0, 1:] = -torch.inf
    logits[2, torch.rand(vocab_size, generator=gen) < 0.5] = -torch.inf
    logits[2, 0] = 1.0
    logits[3:5] = logits[3:5].round()
    logits[5] = 2.0
    asked = torch.tensor([rng.choice([1, 2, 6, 65]) for _ in range(n)], dtype=torch.int32)
    asked[6] = 0
    asked[3] = 65
    sampled = torch.randint(0, vocab_size, (n,), generator=gen)
    check(logits, sampled, asked, logprobs_of(logits, sampled, asked, 64, triton_device), ordered=True)
    with torch_reference():
        got = logprobs_of(logits, sampled, asked, 64, torch.device("cpu"))
        check(logits, sampled, asked, got, ordered=False)


def test_which_of_equal_logits_are_found_does_not_depend_on_what_others_ask(gen: torch.Generator) -> None:
    logits = torch.randint(0, 3, (6, 3000), generator=gen).float()
    sampled, asked = torch.zeros(6, dtype=torch.int64), torch.tensor([3, 9, 3, 0, 33, 2], dtype=torch.int32)
    together = torch.zeros((6, 65), dtype=torch.int32)
    by_logsumexp(logits, sampled, asked, together)
    for i in range(6):
        alone = torch.zeros((1, 65), dtype=torch.int32)
        by_logsumexp(logits[i : i + 1], sampled[i : i + 1], asked[i : i + 1], alone)
        assert torch.equal(alone[0], together[i])


def test_a_row_does_not_depend_on_how_many_ask() -> None:
    """With several threads torch adds up a single long row in parts, and several rows one by one."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        logits = 3 * torch.randn(64, 49152, generator=torch.Generator().manual_seed(0))
        together, alone = (torch.empty((64, 3), dtype=torch.int32) for _ in range(2))
        sampled, asked = torch.arange(64), torch.full((64,), 2, dtype=torch.int32)
        by_logsumexp(logits, sampled, asked, together)
        for row in range(64):
            own = slice(row, row + 1)
            by_logsumexp(logits[own], sampled[own], asked[own], alone[own])
        assert torch.equal(together, alone)
    finally:
        torch.set_num_threads(threads)
