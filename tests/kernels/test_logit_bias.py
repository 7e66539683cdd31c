"""Biases and bans against loops."""

from __future__ import annotations

import torch

from aengine.kernels.logit_bias import add_bias, ban_tokens


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
