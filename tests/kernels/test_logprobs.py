"""Log-probabilities against log_softmax in float64."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.logprobs import top_logprobs


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
