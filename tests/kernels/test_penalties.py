"""Penalties against a loop over tokens."""

from __future__ import annotations

import random

import torch

from aengine.kernels.penalties import apply_penalties, count_tokens


def test_against_naive(rng: random.Random, gen: torch.Generator) -> None:
    for _ in range(10):
        n, vocab_size, width = 6, rng.choice([5, 300]), 40
        logits = torch.randn(n, vocab_size, generator=gen) * 5
        logits[:, 1] = -torch.inf  # banned before: stays banned
        rows = rng.sample(range(n), rng.randint(1, n))
        tokens = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, width))] for _ in rows]
        prompts = [rng.randint(1, len(t)) for t in tokens]
        values = [(rng.uniform(0.3, 2), rng.uniform(-2, 2), rng.uniform(-2, 2)) for _ in rows]
        wanted = logits.double()
        for row, ids, prompt, (repetition, frequency, presence) in zip(rows, tokens, prompts, values):
            for token in set(ids):
                x = wanted[row, token]
                x = x / repetition if x > 0 else x * repetition
                count = ids[prompt:].count(token)
                wanted[row, token] = x - frequency * count - presence * (count > 0)
        padded = torch.randint(0, vocab_size, (len(rows), width), generator=gen, dtype=torch.int32)
        counts = torch.full((len(rows), vocab_size), 99, dtype=torch.int32)
        for i, ids in enumerate(tokens):
            padded[i, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            count_tokens(counts[i], padded[i, prompts[i] : len(ids)])
        lengths = torch.tensor([len(ids) for ids in tokens], dtype=torch.int32)
        columns = [torch.tensor(column) for column in zip(*values)]
        apply_penalties(logits, torch.tensor(rows), padded, lengths, counts.gather(1, padded.long()), *columns)
        torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)
