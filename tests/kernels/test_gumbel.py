"""The draw: its distribution, and that it depends on seed, position and logits alone."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from scipy import stats

from aengine.kernels.gumbel import BLOCK, gumbel_noise, gumbel_sample
from aengine.kernels.philox import philox_rounds

DRAWS = 20_000
P_MIN = 1e-6


def seeds_of(rng: random.Random, n: int) -> torch.Tensor:
    return torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(n)])


def test_definition(rng: random.Random, gen: torch.Generator) -> None:
    """Which noise goes where, spelled out: what any other body of the op has to give as well."""
    for vocab_size in (100, BLOCK, 4 * BLOCK + 7):
        logits = torch.randn(vocab_size, generator=gen) * 3
        seed, position = rng.randrange(-(2**63), 2**63), rng.randrange(2**31)
        num_blocks = -(-vocab_size // BLOCK)
        noise = []
        for j in range(BLOCK + num_blocks):
            counter, key = [j // 4, position, 0, 0], [seed % 2**32, (seed >> 32) % 2**32]
            words = philox_rounds(torch.tensor(counter).view(4, 1), torch.tensor(key).view(2, 1)).flatten()
            noise.append(-math.log(-math.log((int(words[j % 4]) + 0.5) / 2**32)))
        x = logits.double().tolist()
        parts = [x[b * BLOCK : (b + 1) * BLOCK] for b in range(num_blocks)]
        scores = [math.log(sum(map(math.exp, part))) + noise[BLOCK + b] for b, part in enumerate(parts)]
        block = scores.index(max(scores))
        inside = [value + g for value, g in zip(parts[block], noise)]
        wanted = block * BLOCK + inside.index(max(inside))
        assert gumbel_sample(logits[None], torch.tensor([seed]), torch.tensor([position]))[0].tolist() == [wanted]


def test_noise_is_standard_gumbel(rng: random.Random) -> None:
    noise = gumbel_noise(seeds_of(rng, 20), torch.arange(20), 999).flatten().numpy()
    assert np.isfinite(noise).all()
    assert stats.kstest(noise, "gumbel_r").pvalue > P_MIN


@pytest.mark.parametrize("vocab_size", [2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000])
def test_distribution_is_softmax(rng: random.Random, gen: torch.Generator, vocab_size: int) -> None:
    logits = torch.randn(vocab_size, generator=gen) * 2
    logits[torch.rand(vocab_size, generator=gen) < 0.2] = -torch.inf
    logits[0] = 1.0
    # Both ways to fresh noise: new seeds, and new positions of one seed.
    half = DRAWS // 2
    seeds = torch.cat((seeds_of(rng, half), seeds_of(rng, 1).expand(half)))
    positions = torch.cat((torch.full((half,), 17), torch.arange(half)))
    counts = torch.zeros(vocab_size)
    for part in torch.arange(DRAWS).split(2000):
        ids, checks = gumbel_sample(logits.expand(len(part), -1), seeds[part], positions[part])
        assert checks.isfinite().all()
        counts += torch.bincount(ids, minlength=vocab_size)
    expected = torch.softmax(logits.double(), 0).numpy() * DRAWS
    assert counts.numpy()[expected == 0].sum() == 0
    assert chi_square(counts.numpy(), expected) > P_MIN


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value; cells expected under five times are taken together, as the test's approximation asks."""
    rare = expected < 5
    observed, wanted = counts[~rare], expected[~rare]
    if expected[rare].sum() >= 5:
        observed, wanted = np.append(observed, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    if len(wanted) < 2:
        return 1.0
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def test_consecutive_positions_and_seeds_are_independent(rng: random.Random) -> None:
    """Pairs of draws at (seed, p), (seed, p + 1), and at (seed, p), (seed + 1, p): all cells alike."""
    base = rng.randrange(2**40)
    seeds = torch.arange(base, base + 150).repeat_interleave(100)
    positions = torch.arange(100).repeat(150)
    grid = gumbel_sample(torch.zeros(len(seeds), 6), seeds, positions)[0].view(150, 100)
    for first, second in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):
        table = torch.bincount((first * 6 + second).flatten(), minlength=36).view(6, 6).numpy()
        assert stats.chi2_contingency(table).pvalue > P_MIN


def test_a_row_does_not_see_its_batch(rng: random.Random, gen: torch.Generator) -> None:
    n, vocab_size = 40, 700
    logits = torch.randn(n, vocab_size, generator=gen)
    seeds, positions = seeds_of(rng, n), torch.randint(0, 2**31 - 1, (n,), generator=gen)
    together = gumbel_sample(logits, seeds, positions)[0]
    order = torch.randperm(n, generator=gen)
    assert torch.equal(gumbel_sample(logits[order], seeds[order], positions[order])[0], together[order])
    for i in range(n):
        assert gumbel_sample(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1])[0].item() == together[i].item()


def test_rounding_of_logits_rarely_changes_a_token(rng: random.Random, gen: torch.Generator) -> None:
    """The reason for two levels: another batch rounds logits otherwise, and a replay should not notice."""
    logits = torch.randn(3000, 2000, generator=gen)
    seeds, positions = seeds_of(rng, 3000), torch.arange(3000)
    nudged = logits + torch.randn(logits.shape, generator=gen) * 1e-6
    changed = (gumbel_sample(logits, seeds, positions)[0] != gumbel_sample(nudged, seeds, positions)[0]).sum()
    assert changed <= 1


@pytest.mark.parametrize("vocab_size", [5, BLOCK, BLOCK + 3])
def test_bad_rows_show_and_harm_no_other(rng: random.Random, gen: torch.Generator, vocab_size: int) -> None:
    logits = torch.randn(5, vocab_size, generator=gen)
    good = logits[4:].clone()
    logits[0, vocab_size - 1] = torch.nan
    logits[1] = -torch.inf
    logits[2, 1] = torch.inf
    logits[3] = torch.nan
    seeds = seeds_of(rng, 5)
    ids, checks = gumbel_sample(logits, seeds, torch.arange(5))
    assert checks.isfinite().tolist() == [False, False, False, False, True]
    assert checks[1] == -torch.inf
    assert ((ids >= 0) & (ids < vocab_size)).all()
    assert ids[4] == gumbel_sample(good, seeds[4:], torch.tensor([4]))[0][0]
