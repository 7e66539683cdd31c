"""Biases and bans against loops."""

from __future__ import annotations

import torch

from aengine.kernels.logit_bias import add_bias, add_pairs, ban_pairs, ban_tokens


def test_pairs_and_nothing_else(gen: torch.Generator) -> None:
    logits = torch.randn(5, 40, generator=gen)
    wanted = logits.clone()
    rows, ids = torch.tensor([0, 0, 3, 4]), torch.tensor([7, 39, 7, 0])
    values = torch.randn(4, generator=gen) * 50
    for row, token, value in zip(rows, ids, values):
        wanted[row, token] += value
    add_bias(logits, rows, ids, values)
    assert torch.equal(logits, wanted)
    ban_tokens(logits, rows, ids)
    for row, token in zip(rows, ids):
        wanted[row, token] = -torch.inf
    assert torch.equal(logits, wanted)


def test_triton_against_the_reference(gen: torch.Generator, triton_device: torch.device) -> None:
    """A pair may come twice, and there may be more pairs than a program takes."""
    logits = torch.randn(7, 50, generator=gen)
    rows, ids = (torch.randint(0, high, (400,), generator=gen) for high in (7, 50))
    values = torch.randn(400, generator=gen)
    got = logits.clone().to(triton_device)
    pairs = rows.to(triton_device), ids.to(triton_device)
    add_bias(got, *pairs, values.to(triton_device))
    add_pairs(logits, rows, ids, values)
    torch.testing.assert_close(got.cpu(), logits)
    ban_tokens(got, pairs[0][:300], pairs[1][:300])
    ban_pairs(logits, rows[:300], ids[:300])
    torch.testing.assert_close(got.cpu(), logits)
