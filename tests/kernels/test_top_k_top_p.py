"""Cutoffs against a naive float64 loop over sorted lists."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from aengine.kernels.dispatch import torch_reference
from aengine.kernels.top_k_top_p import find_cutoff


def naive_cutoff(logits: list[float], top_k: int, top_p: float) -> float:
    ordered = sorted(logits, reverse=True)
    k = min(top_k, len(ordered)) if top_k > 0 else len(ordered)
    weights = np.exp(np.array(ordered[:k], dtype=np.float64) - ordered[0])
    if top_p >= 1:
        return ordered[k - 1]
    total, sum_ = weights.sum(), 0.0
    for value, weight in zip(ordered, weights):
        sum_ += weight
        if sum_ >= top_p * total:
            return value
    return ordered[k - 1]


def cutoff_of(
    logits: torch.Tensor, top_k: list[int], top_p: list[float], temperature: float | list[float] = 1.0
) -> torch.Tensor:
    """[n]; no min-p."""
    n = len(logits)
    temperatures = torch.tensor(temperature).expand(n)
    return find_cutoff(logits, temperatures, torch.tensor(top_k).int(), torch.tensor(top_p), torch.zeros(n))


@pytest.mark.parametrize("vocab_size", [1, 9, 127, 128, 129, 3000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_against_naive(rng: random.Random, gen: torch.Generator, vocab_size: int, spread: float) -> None:
    n = 12
    logits = torch.randn(n, vocab_size, generator=gen) * spread
    top_k = [rng.choice([0, 1, 2, 50, vocab_size, 2 * vocab_size]) for _ in range(n)]
    top_p = [rng.choice([1.0, rng.uniform(0.01, 1.0), 0.999]) for _ in range(n)]
    temperature = [rng.choice([1.0, rng.uniform(0.3, 3)]) for _ in range(n)]
    cutoff = cutoff_of(logits, top_k, top_p, temperature)
    assert cutoff.shape == (n,) and cutoff.dtype == torch.float32
    for i in range(n):
        check_row(logits[i], top_k[i], float(torch.tensor(top_p)[i]), temperature[i], cutoff[i])


def check_row(logits: torch.Tensor, top_k: int, top_p: float, temperature: float, cutoff: torch.Tensor) -> None:
    # The total over a whole vocabulary is a float32 sum, so a nucleus may end where a slightly other top_p's does.
    slack = 3e-6 if top_p < 1 else 0.0
    scaled = logits.double() / float(torch.tensor(temperature))
    limits = (naive_cutoff(scaled.tolist(), top_k, min(top_p * (1 + nudge), 1.0)) for nudge in (-slack, slack))
    fewest, most = (int((scaled >= limit).sum()) for limit in limits)
    assert fewest <= (logits >= cutoff).sum() <= most, (top_k, top_p)


def test_ties_with_the_last_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    assert cutoff_of(logits, [2], [1.0]).item() == 1.0
    assert cutoff_of(torch.zeros(1, 4), [0], [0.5]).item() == 0.0


def test_top_p_is_of_what_top_k_left() -> None:
    """Of 0.4 0.3 0.2 0.1, the two of top_k=2 are 0.57 and 0.43: top_p=0.5 keeps one; without top_k it keeps two."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    alone, both = cutoff_of(logits, [0], [0.5]), cutoff_of(logits, [2], [0.5])
    assert (logits >= alone).sum() == 2 and (logits >= both).sum() == 1


def test_rows_do_not_see_each_other(gen: torch.Generator) -> None:
    """A row with a wide nucleus makes the search go on; that changes no other row."""
    logits = torch.cat((torch.randn(3, 5000, generator=gen) * 6, torch.randn(1, 5000, generator=gen) * 0.1))
    top_k, top_p = [0, 40, 0, 0], [0.9, 0.8, 0.3, 0.99]
    together = cutoff_of(logits, top_k, top_p)
    for i in range(4):
        assert torch.equal(cutoff_of(logits[i : i + 1], top_k[i : i + 1], top_p[i : i + 1])[0], together[i])
    assert (logits[3] >= together[3]).sum() > 2048


def test_min_p_and_greedy_rows(gen: torch.Generator) -> None:
    logits = torch.randn(5, 300, generator=gen)
    min_p = torch.tensor([0.0, 0.1, 0.5, 1.0, 0.5])
    temperature = torch.tensor([1.0, 2.0, 0.3, 1.0, 0.0])
    probs = torch.softmax(logits.double() / temperature[:, None], 1)
    limit = min_p[:, None].double() * probs.amax(1, keepdim=True)
    limit[4] = 0
    cutoff = find_cutoff(logits, temperature, torch.zeros(5, dtype=torch.int32), torch.ones(5), min_p)
    kept = logits >= cutoff[:, None]
    assert kept[probs >= limit * (1 + 1e-6)].all() and not kept[probs < limit * (1 - 1e-6)].any()
    assert kept[torch.arange(5), logits.argmax(1)].all()


def test_nan_stays_to_be_found() -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0], [0.0, 2.0, 1.0]])
    cutoff = cutoff_of(logits, [1, 1], [1.0, 1.0])
    assert not logits[0, 1] < cutoff[0] and cutoff[1] == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [1, 9, 257, 6000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_triton_against_naive(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, vocab_size: int, spread: float
) -> None:
    n = 10 if triton_device.type == "cpu" else 100
    logits = torch.randn(n, vocab_size, generator=gen) * spread
    logits[1::3] = logits[1::3].half().float()  # ties
    banned = torch.rand(n, vocab_size, generator=gen) < 0.9
    banned[:, 0] = False
    logits[2::3] = logits[2::3].masked_fill(banned[2::3], -torch.inf)
    top_k = [rng.choice([0, 1, 2, 50, vocab_size - 1, vocab_size, 2 * vocab_size]) for _ in range(n)]
    top_p = [rng.choice([1.0, rng.uniform(0.01, 1.0), 0.999]) for _ in range(n)]
    temperature = [rng.choice([1.0, rng.uniform(0.3, 3)]) for _ in range(n)]
    columns = torch.tensor(temperature), torch.tensor(top_k).int(), torch.tensor(top_p), torch.zeros(n)
    cutoff = find_cutoff(logits.to(triton_device), *(column.to(triton_device) for column in columns)).cpu()
    for i in range(n):
        check_row(logits[i], top_k[i], float(columns[2][i]), temperature[i], cutoff[i])


def test_triton_where_the_list_is_too_short(
    gen: torch.Generator, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the row itself is searched: of many logits that tie, with a large k, or with a wide nucleus."""
    from aengine.kernels.triton import nucleus

    monkeypatch.setattr(nucleus, "LIST_SIZE", 16)
    logits = torch.randn(7, 700, generator=gen) * 0.1
    logits[::2] = logits[::2].half().float()
    logits[5, ::3] = logits[5].max()
    top_k, top_p = [300, 200, 0, 0, 699, 0, 300], [1.0, 0.5, 0.9, 0.6, 0.99, 0.3, 1.0]  # no list follows the last
    columns = torch.ones(7), torch.tensor(top_k).int(), torch.tensor(top_p), torch.zeros(7)
    cutoff = find_cutoff(logits.to(triton_device), *(column.to(triton_device) for column in columns)).cpu()
    for i in range(7):
        check_row(logits[i], top_k[i], float(columns[2][i]), 1.0, cutoff[i])


def test_triton_against_the_reference(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    """Without top-p there is no sum to round: the same cutoffs, min-p's within rounding; and odd rows."""
    n, vocab_size = 12, 2000
    logits = torch.randn(n, vocab_size, generator=gen) * 3
    logits[8] = -torch.inf
    logits[9] = 2.0
    logits[10, 5], logits[11, 5] = torch.nan, torch.inf
    temperature = torch.tensor([0.0, *(rng.uniform(0.2, 2) for _ in range(n - 1))])
    top_k = torch.tensor([rng.choice([0, 1, 5, 300]) for _ in range(n)], dtype=torch.int32)
    min_p = torch.tensor([rng.choice([0.0, 0.05, 1.0]) for _ in range(n)])
    columns = temperature, top_k, torch.ones(n), min_p
    got = find_cutoff(logits.to(triton_device), *(column.to(triton_device) for column in columns)).cpu()
    with torch_reference():
        wanted = find_cutoff(logits, *columns)
    torch.testing.assert_close(got[:10], wanted[:10], rtol=1e-6, atol=1e-6)
    assert not (logits[10, 5] < got[10] or logits[11, 5] < got[11])


def bracket_after(
    sums: torch.Tensor, pivots: torch.Tensor, bases: torch.Tensor, top_p: float
) -> tuple[float, float, int, int]:
    """(low, high, mass at or above high, mass that is wanted) after a pass over a row"""
    *masses, total = sums.tolist()
    wanted = bases[1].item() if bases[1] >= 0 else int(top_p * float(total))
    first = next(i for i, mass in enumerate(masses) if mass >= wanted)
    if first == 0:
        return pivots[0].item(), pivots[-1].item(), bases[0].item(), wanted
    return pivots[first].item(), pivots[first - 1].item(), masses[first - 1], wanted


def test_triton_lists_the_logits_of_a_narrow_bracket(gen: torch.Generator, triton_device: torch.device) -> None:
    """Masses at or above each pivot, of the whole row at first and then of a fifteenth of it; and what lies between."""
    from aengine.kernels.triton.nucleus import COLUMNS, find_candidates, make_candidates
    from aengine.kernels.triton.top_k_top_p import BLOCK, _extremes

    top_p = [0.05, 0.5, 0.9, 0.97, 0.999]
    n, vocab_size = len(top_p), 3000
    logits = torch.randn(n, vocab_size, generator=gen) * torch.tensor([[1.0], [3.0], [1.0], [6.0], [0.1]])
    logits[1, ::3] = -torch.inf
    logits[2, 7] = torch.nan
    temperature, p = torch.tensor([1.0, 0.6, 1.7, 1.0, 0.9]), torch.tensor(top_p)
    given = [t.to(triton_device) for t in (logits, temperature, torch.zeros(n, dtype=torch.int32), p)]
    found = make_candidates(n, triton_device)
    find_candidates(*given, _extremes(given[0], found), found, BLOCK)
    sums, counts, pivots, bases, values = (t.cpu() for t in found)
    num_listed = 0
    for i in range(n):
        x = logits[i].double()
        x[x.isnan()] = -torch.inf
        peak, t = x.max(), temperature[i].double()
        mass = ((x - peak) / t).exp() * 2.0**36
        low, high, base, wanted = float(x[x.isfinite()].min()), float(peak), 0, -1
        low = max(low, high - float(t) * (np.log(vocab_size) + 20))
        upper = float("inf")
        for number in range(2):
            own = pivots[number, i].double()
            assert bases[number, i].tolist() == [base, wanted] and own[-1] == upper
            shares = torch.arange(COLUMNS - 1) / 14 if number == 0 else torch.arange(1, COLUMNS) / 15
            torch.testing.assert_close(own[:-1], high + (low - high) * shares.double(), rtol=1e-5, atol=1e-5)
            exact = torch.stack([mass[x >= pivot].sum() for pivot in own[:-1]])
            torch.testing.assert_close(sums[number, i, :-1].double(), exact, rtol=1e-5, atol=99.0)
            if number == 0:
                torch.testing.assert_close(sums[0, i, -1].double(), mass.sum(), rtol=1e-5, atol=99.0)
            low, upper, base, wanted = bracket_after(sums[number, i], pivots[number, i], bases[number, i], float(p[i]))
            high = low if upper == float("inf") else upper
        if upper == float("inf"):  # the cutoff is the highest logit
            assert low == peak and counts[i] == 0
            continue
        num_listed += 1
        between = logits[i][(logits[i] >= low) & (logits[i] < upper)]
        assert counts[i] == len(between) < vocab_size / 2
        assert torch.equal(values[i, : len(between)].sort().values, between.sort().values)
    assert num_listed >= 3


def test_of_tokens_that_tie_with_the_last_only_as_many_count(triton_device: torch.device) -> None:
    """Of 20.1, 2.7, 2.7 and 2.7, two are 22.8, of which 0.87 is less than the first alone."""
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    columns = torch.ones(1), torch.tensor([2]).int(), torch.tensor([0.87]), torch.zeros(1)
    assert find_cutoff(logits.to(triton_device), *(column.to(triton_device) for column in columns)).item() == 3.0
    with torch_reference():
        assert find_cutoff(logits, *columns).item() == 3.0


@pytest.mark.timeout(100)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_triton_ends_whatever_the_logits_span(triton_device: torch.device) -> None:
    """The distance of two logits, or a temperature's multiple, may be more than a float32 can hold."""
    most, least = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
    rows = [
        [most, -most, 0.0, 1.0, -1.0],
        [most, most / 2, -most / 2, -most, 0.0],
        [-most, -most, -most, -most, most],
        [most, -most, -torch.inf, -torch.inf, -most],
        [least, -least, least / 2, 1e-45, 0.0],
        [2e-45, 1e-45, 0.0, -1e-45, -2e-45],
    ]
    logits = torch.tensor(rows)
    for top_k, top_p, temperature in ((2, 1.0, 1.0), (0, 0.999, 1e4)):
        n = len(rows)
        columns = torch.full((n,), temperature), torch.full((n,), top_k).int(), torch.full((n,), top_p), torch.zeros(n)
        got = find_cutoff(logits.to(triton_device), *(column.to(triton_device) for column in columns)).cpu()
        with torch_reference():
            assert torch.equal(got, find_cutoff(logits, *columns)), (top_k, top_p, temperature)
