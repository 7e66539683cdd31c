"""The draw: its distribution, and that it depends on seed, position and logits alone."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from scipy import stats

from aengine.kernels.dispatch import torch_reference
from aengine.kernels.gumbel import BLOCK, best_of_shares, draw_or_greedy, draw_share, gumbel_noise, gumbel_sample
from aengine.kernels.philox import philox_rounds

DRAWS = 20_000
P_MIN = 1e-9  # with few draws in a cell, right samplers fall below 1e-6 ten times as often as one in a million


def seeds_of(rng: random.Random, n: int) -> torch.Tensor:
    return torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(n)])


def draw(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """At temperature 1."""
    return gumbel_sample(logits, torch.ones(len(logits)), seeds, positions)


def test_definition(rng: random.Random, gen: torch.Generator) -> None:
    """Which noise goes where, spelled out: what any other implementation of the op has to give as well."""
    for vocab_size in (100, BLOCK, 4 * BLOCK + 7):
        logits, temperature = torch.randn(vocab_size, generator=gen) * 3, rng.uniform(0.2, 2)
        seed, position = rng.randrange(-(2**63), 2**63), rng.randrange(2**31)
        num_blocks = -(-vocab_size // BLOCK)
        noise = []
        for j in range(BLOCK + num_blocks):
            counter, key = [j // 4, position, 0, 0], [seed % 2**32, (seed >> 32) % 2**32]
            words = philox_rounds(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None]).flatten()
            noise.append(-math.log(-math.log((int(words[j % 4]) + 0.5) / 2**32)))
        x = (logits.double() / temperature).tolist()
        parts = [x[b * BLOCK : (b + 1) * BLOCK] for b in range(num_blocks)]
        scores = [math.log(sum(map(math.exp, part))) + noise[BLOCK + b] for b, part in enumerate(parts)]
        block = scores.index(max(scores))
        inside = [value + g for value, g in zip(parts[block], noise)]
        wanted = block * BLOCK + inside.index(max(inside))
        columns = torch.tensor([temperature]), torch.tensor([seed]), torch.tensor([position])
        assert gumbel_sample(logits[None], *columns)[0].tolist() == [wanted]


def test_noise_is_standard_gumbel(rng: random.Random) -> None:
    noise = gumbel_noise(seeds_of(rng, 20).numpy(), np.arange(20), 999).flatten()
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
        ids, checks = draw(logits.expand(len(part), -1), seeds[part], positions[part])
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
    grid = draw(torch.zeros(len(seeds), 6), seeds, positions)[0].view(150, 100)
    for first, second in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):
        table = torch.bincount((first * 6 + second).flatten(), minlength=36).view(6, 6).numpy()
        assert stats.chi2_contingency(table).pvalue > P_MIN


def test_a_row_does_not_see_its_batch(rng: random.Random, gen: torch.Generator) -> None:
    n, vocab_size = 40, 700
    logits = torch.randn(n, vocab_size, generator=gen)
    seeds, positions = seeds_of(rng, n), torch.randint(0, 2**31 - 1, (n,), generator=gen)
    together = draw(logits, seeds, positions)[0]
    order = torch.randperm(n, generator=gen)
    assert torch.equal(draw(logits[order], seeds[order], positions[order])[0], together[order])
    for i in range(n):
        assert draw(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1])[0].item() == together[i].item()


def test_rounding_of_logits_rarely_changes_a_token(rng: random.Random, gen: torch.Generator) -> None:
    """The reason for two levels: another batch rounds logits otherwise, and a replay should not notice."""
    logits = torch.randn(3000, 2000, generator=gen)
    seeds, positions = seeds_of(rng, 3000), torch.arange(3000)
    nudged = logits + torch.randn(logits.shape, generator=gen) * 1e-6
    changed = (draw(logits, seeds, positions)[0] != draw(nudged, seeds, positions)[0]).sum()
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
    ids, checks = draw(logits, seeds, torch.arange(5))
    assert checks.isfinite().tolist() == [False, False, False, False, True]
    assert checks[1] == -torch.inf
    assert ((ids >= 0) & (ids < vocab_size)).all()
    assert ids[4] == draw(good, seeds[4:], torch.tensor([4]))[0][0]


def random_rows(
    rng: random.Random, gen: torch.Generator, n: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, temperature, seeds, positions): a third greedy, some tokens banned."""
    logits = torch.randn(n, vocab_size, generator=gen) * 3
    logits[torch.rand(n, vocab_size, generator=gen) < 0.2] = -torch.inf
    logits[:, -1] = 1.0
    temperature = torch.tensor([rng.choice([0.0, rng.uniform(0.1, 2), 1.0]) for _ in range(n)])
    return logits, temperature, seeds_of(rng, n), torch.randint(0, 2**31 - 1, (n,), generator=gen)


def test_greedy_and_random_rows_do_not_see_each_other(rng: random.Random, gen: torch.Generator) -> None:
    columns = random_rows(rng, gen, 30, 700)
    ids, checks = gumbel_sample(*columns)
    for i in range(30):
        one_id, one_check = gumbel_sample(*(column[i : i + 1] for column in columns))
        assert one_id[0] == ids[i] and one_check[0] == checks[i]
    greedy = columns[1] == 0
    assert torch.equal(ids[greedy], columns[0][greedy].argmax(1))


def margins(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    cutoff: torch.Tensor | None = None,
) -> torch.Tensor:
    """By how much the best noisy value of each row beats the second, of blocks or inside the best one; [n]."""
    if cutoff is not None:
        logits = logits.masked_fill(logits < cutoff[:, None], -torch.inf)
    n, vocab_size = logits.shape
    padded = torch.full((n, -(-vocab_size // BLOCK) * BLOCK), -torch.inf, dtype=torch.float64)
    padded[:, :vocab_size] = logits.double() / temperature.clamp(min=1e-3)[:, None]
    blocks = padded.unflatten(1, (-1, BLOCK))
    noise = torch.from_numpy(gumbel_noise(seeds.numpy(), positions.numpy(), BLOCK + blocks.shape[1]))
    outer = blocks.logsumexp(2) + noise[:, BLOCK:]
    inner = blocks[torch.arange(n), outer.argmax(1)] + noise[:, :BLOCK]
    smallest = torch.full((n,), torch.inf, dtype=torch.float64)
    for values in (outer, inner):
        if values.shape[1] > 1:
            best = values.topk(2, dim=1).values
            smallest = torch.minimum(smallest, best[:, 0] - best[:, 1])
    return torch.where(temperature > 0, smallest, torch.inf)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [3, BLOCK - 1, BLOCK, 20 * BLOCK + 7])
@pytest.mark.parametrize("cut", [False, True])
def test_triton_against_the_reference(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, vocab_size: int, cut: bool
) -> None:
    n = 20 if triton_device.type == "cpu" else 500
    columns = random_rows(rng, gen, n, vocab_size)
    cutoff = columns[0].quantile(0.9, dim=1, interpolation="nearest") if cut else None
    if cutoff is not None:
        cutoff = torch.where(columns[1] > 0, cutoff, -torch.inf)
    # As in the runner, columns of a table of 16 words.
    words = torch.zeros(n, 16, dtype=torch.int32)
    words.view(torch.int64)[:, 0] = columns[2]
    words.view(torch.float32)[:, 2] = columns[1]
    words[:, 10] = columns[3].int()
    words = words.to(triton_device)
    there = (words.view(torch.float32)[:, 2], words.view(torch.int64)[:, 0], words[:, 10])
    ids, checks = gumbel_sample(
        columns[0].to(triton_device), *there, None if cutoff is None else cutoff.to(triton_device)
    )
    wanted, _ = draw_or_greedy(*columns, cutoff)
    assert checks.isfinite().all() and ids.dtype == torch.int64
    clear = margins(*columns, cutoff) > 1e-3
    assert torch.equal(ids.cpu()[clear], wanted[clear]) and clear.float().mean() > 0.5  # 0.998 of them are


@pytest.mark.parametrize("vocab_size", [5, BLOCK, 17 * BLOCK + 3])
def test_triton_bad_rows_and_ties(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, vocab_size: int
) -> None:
    logits = torch.randn(12, vocab_size, generator=gen)
    for greedy in (0, 6):
        logits[greedy, rng.randrange(vocab_size)] = torch.nan
        logits[greedy + 1] = -torch.inf
        logits[greedy + 2, rng.randrange(vocab_size)] = torch.inf
        logits[greedy + 3] = torch.nan
        logits[greedy + 4, :] = logits[greedy + 4].round()  # ties
    temperature = torch.tensor([0.7] * 6 + [0.0] * 6)
    columns = (logits, temperature, seeds_of(rng, 12), torch.arange(12))
    ids, checks = (column.cpu() for column in gumbel_sample(*(column.to(triton_device) for column in columns)))
    kinds = ["nan", "-inf", "inf", "nan", "finite", "finite"] * 2
    for kind, check in zip(kinds, checks.tolist()):
        assert math.isfinite(check) if kind == "finite" else str(check) == kind
    assert ((ids >= 0) & (ids < vocab_size)).all()
    assert torch.equal(ids[10:], logits[10:].argmax(1)), "of the likeliest the first"


@pytest.mark.parametrize("on", ["torch", "triton"])
@pytest.mark.parametrize("shares", [2, 4])
def test_shares_of_a_vocabulary_draw_what_the_whole_does(
    on: str, shares: int, rng: random.Random, gen: torch.Generator, triton_device: torch.device
) -> None:
    """The last share lacks tokens, one may have none; rows in any mixture, ties across borders, and bad ones."""
    vocab_size = rng.choice([5 * BLOCK + 3, 2 * BLOCK, 9 * BLOCK])
    columns = list(random_rows(rng, gen, 16, vocab_size))
    logits, temperature = columns[0], columns[1]
    temperature[:4] = 0.0
    logits[:2] = logits[:2].round()
    logits[2, -1] = 50.0  # the best is the last
    logits[12, rng.randrange(vocab_size)] = torch.nan
    logits[13] = -torch.inf
    logits[14, rng.randrange(vocab_size)] = torch.inf
    size = -(-vocab_size // (shares * BLOCK)) * BLOCK
    padded = torch.full((16, shares * size), -torch.inf)
    padded[:, :vocab_size] = logits
    device = torch.device("cpu") if on == "torch" else triton_device
    with torch_reference() if on == "torch" else nullcontext():
        moved = [column.to(device) for column in columns]
        wanted, wanted_checks = gumbel_sample(*moved)
        parts = [
            draw_share(padded[:, i * size : (i + 1) * size].to(device), *moved[1:], i * size, vocab_size)
            for i in range(shares)
        ]
        ids, checks = best_of_shares(torch.stack(parts))
        many, _ = best_of_shares(torch.stack(parts).repeat(1, 1, 5))
    assert torch.equal(many, ids.repeat(5)) and ids[2] == vocab_size - 1
    good = wanted_checks.isfinite()
    assert torch.equal(ids[good], wanted[good]) and good.sum() == 13
    # torch takes logarithms at the end of a row, where no vector is full, by other code, which may round otherwise.
    bound = 1e-6 if on == "torch" else 0.0
    torch.testing.assert_close(checks, wanted_checks, rtol=bound, atol=0.0, equal_nan=True)
    assert ids.dtype == torch.int64 and ((ids >= 0) & (ids < vocab_size)).all()


def test_triton_in_any_batch(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    columns = [column.to(triton_device) for column in random_rows(rng, gen, 6, 4 * BLOCK + 1)]
    together = gumbel_sample(*columns)[0]
    order = torch.tensor([5, 1, 3], device=triton_device)
    assert torch.equal(gumbel_sample(*(column[order] for column in columns))[0], together[order])


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [7, BLOCK + 44])
def test_triton_distribution_is_softmax(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, vocab_size: int
) -> None:
    draws = DRAWS if triton_device.type == "cuda" else 150
    logits, temperature = torch.randn(vocab_size, generator=gen) * 2, rng.uniform(0.5, 2)
    seeds, positions = seeds_of(rng, draws), torch.arange(draws)
    there = logits.to(triton_device).expand(draws, -1)
    scale = torch.full((draws,), temperature, device=triton_device)
    ids, _ = gumbel_sample(there, scale, seeds.to(triton_device), positions.to(triton_device))
    expected = torch.softmax(logits.double() / temperature, 0).numpy() * draws
    assert chi_square(torch.bincount(ids.cpu(), minlength=vocab_size).double().numpy(), expected) > P_MIN
