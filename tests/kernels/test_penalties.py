"""Penalties against a loop over tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from aengine.kernels.penalties import (
    PenaltyInputs,
    apply_penalties,
    count_sampled,
    count_tokens,
    penalize,
)

NUM_ROWS = 9  # of the tables


def random_inputs(
    rng: random.Random, gen: torch.Generator, n: int, vocab_size: int, width: int
) -> tuple[PenaltyInputs, list[list[int]], list[int]]:
    """(the inputs of n rows, their tokens, how many of these are the prompt's)"""
    rows = rng.sample(range(NUM_ROWS), n)
    tokens = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, width))] for _ in rows]
    prompts = [rng.randint(1, len(ids)) for ids in tokens]
    table = torch.randint(0, vocab_size, (NUM_ROWS, width + 3), generator=gen, dtype=torch.int32)
    counts = torch.full((NUM_ROWS, vocab_size), 99, dtype=torch.int32)
    for row, ids, prompt in zip(rows, tokens, prompts):
        table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        count_tokens(counts[row], table[row, prompt : len(ids)])
    # As in the runner, columns of one table.
    words = torch.empty(n, 16)
    for i, ids in enumerate(tokens):
        words[i, 1:4] = torch.tensor([rng.uniform(0.3, 2), rng.uniform(-2, 2), rng.uniform(-2, 2)])
        words.view(torch.int32)[i, 0] = len(ids)
    inputs = PenaltyInputs(
        rows=torch.tensor(rows),
        token_ids=table,
        counts=counts,
        num_tokens=words.view(torch.int32)[:, 0],
        repetition=words[:, 1],
        frequency=words[:, 2],
        presence=words[:, 3],
        max_num_tokens=max(map(len, tokens)),
    )
    return inputs, tokens, prompts


def random_logits(gen: torch.Generator, n: int, vocab_size: int) -> torch.Tensor:
    logits = torch.randn(n, vocab_size, generator=gen) * 5
    logits[:, 1] = -torch.inf  # banned before: stays banned
    return logits


def test_against_naive(rng: random.Random, gen: torch.Generator) -> None:
    for _ in range(10):
        n, vocab_size = 6, rng.choice([5, 300])
        inputs, tokens, prompts = random_inputs(rng, gen, n, vocab_size, 40)
        logits = random_logits(gen, n, vocab_size)
        chosen = rng.sample(range(n), rng.randint(1, n))
        wanted = logits.double()
        for i in chosen:
            repetition, frequency, presence = (
                float(column[i]) for column in (inputs.repetition, inputs.frequency, inputs.presence)
            )
            for token in set(tokens[i]):
                x = wanted[i, token]
                x = x / repetition if x > 0 else x * repetition
                count = tokens[i][prompts[i] :].count(token)
                wanted[i, token] = x - frequency * count - presence * (count > 0)
        apply_penalties(logits, torch.tensor(chosen), inputs)
        torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)


def test_triton_against_the_reference(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    for vocab_size, width in ((5, 40), (300, 40), (300, 1500)):
        n = 5
        inputs, _, _ = random_inputs(rng, gen, n, vocab_size, width)
        logits = random_logits(gen, n, vocab_size)
        chosen = torch.tensor(rng.sample(range(n), rng.randint(1, n)))
        got = logits.clone().to(triton_device)
        moved = {name: getattr(inputs, name).to(triton_device) for name in ("rows", "token_ids", "counts")}
        words = torch.stack(
            (inputs.num_tokens.view(torch.float32), inputs.repetition, inputs.frequency, inputs.presence)
        )
        words = words.T.contiguous().to(triton_device)
        columns = dict(zip(("repetition", "frequency", "presence"), words.T[1:]))
        there = replace(inputs, **moved, **columns, num_tokens=words.view(torch.int32)[:, 0])
        apply_penalties(got, chosen.to(triton_device), there)
        penalize(logits, chosen, inputs)
        torch.testing.assert_close(got.cpu(), logits, rtol=1e-5, atol=1e-5)


def test_triton_counts(rng: random.Random, triton_device: torch.device) -> None:
    for length in (0, 1, 40, 3000):
        ids = torch.tensor([rng.randrange(50) for _ in range(length)], dtype=torch.int32)
        counts = torch.full((2, 50), 99, dtype=torch.int32, device=triton_device)
        count_tokens(counts[1], ids.to(triton_device))
        assert torch.equal(counts[1].cpu(), torch.bincount(ids, minlength=50).int()) and (counts[0] == 99).all()
    counts = torch.randint(0, 9, (NUM_ROWS, 50), dtype=torch.int32)
    rows = torch.tensor(rng.sample(range(NUM_ROWS), 6))
    sampled, chosen = torch.randint(0, 50, (6,)), torch.tensor([5, 0, 3])
    got = counts.clone().to(triton_device)
    count_sampled(got, rows.to(triton_device), sampled.to(triton_device), chosen.to(triton_device))
    for i in chosen.tolist():
        counts[rows[i], sampled[i]] += 1
    assert torch.equal(got.cpu(), counts)


def test_count_sampled(rng: random.Random) -> None:
    counts = torch.zeros(NUM_ROWS, 50, dtype=torch.int32)
    count_sampled(counts, torch.tensor([4, 7, 2]), torch.tensor([49, 0, 9]), torch.tensor([2, 0]))
    assert counts.sum() == 2 and counts[2, 9] == counts[4, 49] == 1
