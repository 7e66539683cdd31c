"""The pairs of `make test`: none is missing, and no combination is lost to `make test-all`."""

from __future__ import annotations

import itertools

import pairs
import pytest
from pairs import pairwise


def test_each_two_values_meet_and_no_combination_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "WITH_EXTENDED", True)
    factors = ["abcdefg", (1, 2, 3), (None, True), "xy"]
    params = pairwise(*factors)
    assert [param.values for param in params] == list(itertools.product(*factors))
    plain = [param.values for param in params if not param.marks]
    assert len(plain) < 30 < len(params)
    monkeypatch.setattr(pairs, "WITH_EXTENDED", False)
    assert [param.values for param in pairwise(*factors)] == plain
    for a, b in itertools.combinations(range(4), 2):
        assert {(row[a], row[b]) for row in plain} == set(itertools.product(factors[a], factors[b]))
