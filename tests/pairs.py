"""Products of parameters, of which `make test` runs so many cases that each two values meet in one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairwise(*factors: Sequence[Any]) -> list[Any]:
    """All combinations of the factors' values, for ``pytest.mark.parametrize``.

    A few of them cover each pair of values of two factors; the others are marked ``extended``, for `make test-all`.
    """
    sizes = [range(len(factor)) for factor in factors]
    chosen = set(_covering(sizes))
    return [
        pytest.param(
            *(factor[i] for factor, i in zip(factors, row, strict=True)),
            marks=() if row in chosen else pytest.mark.extended,
        )
        for row in itertools.product(*sizes)
    ]


def some(values: Sequence[Any], *kept: Any) -> list[Any]:
    """The values, for ``pytest.mark.parametrize``: those not ``kept`` are marked ``extended``."""
    assert set(kept) <= set(values), f"{set(kept) - set(values)} are no values"
    return [value if value in kept else pytest.param(value, marks=pytest.mark.extended) for value in values]


def _covering(sizes: Sequence[range]) -> list[tuple[int, ...]]:
    """Rows of indices that hold each pair of values: each row is begun with a pair that none holds yet, and its other
    values are those that add the most such pairs."""
    places = list(itertools.combinations(range(len(sizes)), 2))
    missing = dict.fromkeys((a, i, b, j) for a, b in places for i in sizes[a] for j in sizes[b])
    rows = []
    while missing:
        a, i, b, j = next(iter(missing))
        row = {a: i, b: j}
        for place in range(len(sizes)):
            if place not in row:
                row[place] = max(sizes[place], key=lambda value: _new_pairs(row, place, value, missing))
        rows.append(tuple(row[place] for place in range(len(sizes))))
        for first, second in places:
            missing.pop((first, row[first], second, row[second]), None)
    return rows or list(itertools.product(*sizes))


def _new_pairs(row: dict[int, int], place: int, value: int, missing: dict[tuple[int, int, int, int], None]) -> int:
    known = ((*min((place, value), other), *max((place, value), other)) for other in row.items())
    return sum(pair in missing for pair in known)
