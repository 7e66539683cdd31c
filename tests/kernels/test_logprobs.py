"""Log-probabilities against log_softmax in float64."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.logprobs import by_logsumexp, top_logprobs


@pytest.mark.parametrize("k", [0, 1, 5, 64])
def test_against_log_softmax(gen: torch.Generator, k: int) -> None:
    logits = torch.randn(6, 40, generator=gen) * 10
    sampled = torch.randint(0, 40, (6,), generator=gen)
    wanted = torch.log_softmax(logits.double(), 1)
    of_sampled, ids, values = top_logprobs(logits, sampled, k)
    torch.testing.assert_close(of_sampled.double(), wanted.gather(1, sampled[:, None])[:, 0], atol=1e-5, rtol=0)
    assert ids.shape == values.shape == (6, min(k, 40))
    torch.testing.assert_close(values.double(), wanted.sort(1, descending=True).values[:, :k], atol=1e-5, rtol=0)
    torch.testing.assert_close(values.double(), wanted.gather(1, ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("vocab_size", [3, 256, 5000])
def test_triton_against_the_reference(
    gen: torch.Generator, triton_device: torch.device, vocab_size: int, k: int
) -> None:
    logits = torch.randn(4, vocab_size, generator=gen) * 10
    logits[0, 1:] = -torch.inf
    logits[2, torch.rand(vocab_size, generator=gen) < 0.5] = -torch.inf
    logits[2, 0] = 1.0
    sampled = torch.randint(0, vocab_size, (4,), generator=gen)
    of_sampled, ids, values = top_logprobs(logits.to(triton_device), sampled.to(triton_device), k)
    wanted = by_logsumexp(logits, sampled, k)
    torch.testing.assert_close(of_sampled.cpu(), wanted[0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(values.cpu(), wanted[2], atol=1e-5, rtol=1e-6)
    if k:
        exact = torch.log_softmax(logits.double(), 1).gather(1, ids.cpu())
        torch.testing.assert_close(values.cpu().double(), exact, atol=1e-5, rtol=1e-6)
