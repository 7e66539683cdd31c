"""Biases and bans against loops."""

from __future__ import annotations

import random

import numpy as np
import torch

from aengine.kernels.dispatch import torch_reference
from aengine.kernels.logit_bias import MOST_BANNED, MOST_BIASES, WIDTH, apply_lists, pack_lists

COUNTS = [(0, MOST_BANNED), (1, 300), (300, 1), (MOST_BIASES, 0), (300, 300), (MOST_BIASES, MOST_BANNED)]
"""Biases and banned ids of each row."""
UNTIL = [2**40, 7, 7, 7, 0, 2**40]
NUM_ROWS, VOCAB_SIZE = len(COUNTS), 3000


def random_lists(rng: random.Random) -> tuple[torch.Tensor, list[dict[int, float]], list[list[int]]]:
    """(the table; by row its biases, and its banned ids)"""
    table = torch.randint(0, 9, (NUM_ROWS, WIDTH), dtype=torch.int32)  # what lies behind the lists is another's
    biases, banned = [], []
    for row, counts in enumerate(COUNTS):
        biases.append({t: float(np.float32(rng.uniform(-100, 100))) for t in rng.sample(range(VOCAB_SIZE), counts[0])})
        banned.append(rng.sample(range(VOCAB_SIZE), counts[1]))
        for column, values in pack_lists(list(biases[row]), list(biases[row].values()), banned[row], UNTIL[row]):
            table[row, column : column + len(values)] = torch.from_numpy(values)
    return table, biases, banned


def test_both_against_loops(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    table, biases, banned = random_lists(rng)
    rows = [*rng.sample(range(NUM_ROWS), NUM_ROWS), -1]
    num_tokens = [6 if row == 1 else 7 for row in rows]
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=gen)
    wanted = logits.clone()
    for i, row in enumerate(rows[:-1]):
        for token, value in biases[row].items():
            wanted[i, token] += value
        if num_tokens[i] < UNTIL[row]:
            wanted[i, banned[row]] = -torch.inf
    columns = torch.tensor(rows), table, torch.tensor(num_tokens).int()
    got = logits.clone().to(triton_device)
    apply_lists(got, *(column.to(triton_device) for column in columns))
    assert torch.equal(got.cpu(), wanted)
    with torch_reference():
        apply_lists(logits, *columns)
    assert torch.equal(logits, wanted)
