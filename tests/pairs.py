"""Products of parameters, of which `make test` runs so many cases that each two values meet in one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

WITH_EXTENDED = True
"""Whether cases that are marked ``extended`` are made at all: they are more than the others, and a millisecond each."""


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
        if WITH_EXTENDED or row in chosen
    ]


def some(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """All cases, for ``pytest.mark.parametrize``: those not ``kept`` are marked ``extended``. A tuple is a case of
    several parameters."""
    cases = list(cases)
    assert all(case in cases for case in kept), f"of {kept} some are no cases"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.extended
        )
        for case in cases
        if WITH_EXTENDED or case in kept
    ]


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
