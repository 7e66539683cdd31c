"""Penalties against a loop over tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import torch

from aengine.kernels.dispatch import torch_reference
from aengine.kernels.penalties import IN_PROMPT, PenaltyInputs, apply_penalties, count_sampled, count_tokens

NUM_ROWS = 10  # of the table
KINDS = [*product((False, True), repeat=3)]  # which of the three penalties a row has


def random_inputs(rng: random.Random, vocab_size: int, width: int) -> tuple[PenaltyInputs, list[list[int]], list[int]]:
    """(the inputs of a row of each kind, and one of padding; their tokens; how many of these are the prompt's)"""
    kinds = [*KINDS, (True, True, True)]
    n, order = len(kinds), rng.sample(range(len(kinds)), len(kinds))
    rows = [0, *rng.sample(range(1, NUM_ROWS), n - 1)]
    tokens = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, width))] for _ in rows]
    prompts = [rng.randint(1, len(ids)) for ids in tokens]
    counts = torch.full((NUM_ROWS, vocab_size), 99, dtype=torch.int32)
    for row, ids, prompt in zip(rows, tokens, prompts):
        count_tokens(counts[row], torch.tensor(ids, dtype=torch.int32), prompt)
    words = torch.empty(n, 16)  # as in the runner, columns of one table
    for i in range(n):
        given = torch.tensor([rng.choice([0.4, 1.7]), rng.choice([-2.0, 1.0]), rng.choice([-1.0, 1.5])])
        words[i, 1:4] = torch.where(torch.tensor(kinds[order[i]]), given, torch.tensor([1.0, 0.0, 0.0]))
    rows = [-1 if kind == len(KINDS) else row for kind, row in zip(order, rows)]
    return PenaltyInputs(torch.tensor(rows), counts, words[:, 1], words[:, 2], words[:, 3]), tokens, prompts


def random_logits(gen: torch.Generator, n: int, vocab_size: int) -> torch.Tensor:
    logits = torch.randn(n, vocab_size, generator=gen) * 5
    logits[:, 1] = -torch.inf  # banned before: stays banned
    return logits


def on(inputs: PenaltyInputs, device: torch.device) -> PenaltyInputs:
    words = torch.stack((inputs.repetition, inputs.frequency, inputs.presence)).T.contiguous().to(device)
    columns = dict(zip(("repetition", "frequency", "presence"), words.T))
    return replace(inputs, rows=inputs.rows.to(device), counts=inputs.counts.clone().to(device), **columns)


def test_against_naive(rng: random.Random, gen: torch.Generator) -> None:
    for vocab_size in (5, 300) * 4:
        inputs, tokens, prompts = random_inputs(rng, vocab_size, 40)
        n = len(tokens)
        logits = random_logits(gen, n, vocab_size)
        wanted = logits.double()
        for i in (i for i in range(n) if inputs.rows[i] >= 0):
            repetition, frequency, presence = (
                float(column[i]) for column in (inputs.repetition, inputs.frequency, inputs.presence)
            )
            for token in set(tokens[i]):
                x = wanted[i, token]
                x = x / repetition if x > 0 else x * repetition
                count = tokens[i][prompts[i] :].count(token)
                wanted[i, token] = x - frequency * count - presence * (count > 0)
        apply_penalties(logits, inputs)
        torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)


def test_triton_against_the_reference(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    for vocab_size, width in ((5, 40), (300, 40), (5000, 1500)):
        inputs, _, _ = random_inputs(rng, vocab_size, width)
        n = len(inputs.rows)
        logits = random_logits(gen, n, vocab_size)
        got, there = logits.clone().to(triton_device), on(inputs, triton_device)
        apply_penalties(got, there)
        with torch_reference():
            apply_penalties(logits, inputs)
        torch.testing.assert_close(got.cpu(), logits, rtol=1e-5, atol=1e-5)
        sampled = torch.tensor([rng.randrange(vocab_size) for _ in range(n)])
        wanted = inputs.counts.clone()
        for i in inputs.are_penalized().nonzero()[:, 0].tolist():
            wanted[inputs.rows[i], sampled[i]] += 1
        count_sampled(sampled.to(triton_device), there)
        assert torch.equal(there.counts.cpu(), wanted)


def test_counts(rng: random.Random, triton_device: torch.device) -> None:
    for length in (0, 1, 40, 3000):
        num_prompt = rng.randint(0, length)
        ids = torch.tensor([rng.randrange(50) for _ in range(length)], dtype=torch.int32)
        wanted = torch.bincount(ids[num_prompt:], minlength=50).int()
        wanted[ids[:num_prompt].unique()] += IN_PROMPT
        counts = torch.full((2, 50), 99, dtype=torch.int32, device=triton_device)
        count_tokens(counts[1], ids.to(triton_device), num_prompt)
        assert torch.equal(counts[1].cpu(), wanted) and (counts[0] == 99).all()


def test_count_sampled(rng: random.Random) -> None:
    counts, ones = torch.zeros(NUM_ROWS, 50, dtype=torch.int32), torch.ones(4)
    frequency = torch.tensor([0.5, 0.0, -0.5, 0.5])
    inputs = PenaltyInputs(torch.tensor([4, 7, 2, -1]), counts, ones, frequency, torch.zeros(4))
    count_sampled(torch.tensor([49, 0, 9, 3]), inputs)
    assert counts.sum() == 2 and counts[2, 9] == counts[4, 49] == 1
