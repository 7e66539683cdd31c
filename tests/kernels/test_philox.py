"""Philox against the known answers of Random123 (kat_vectors, philox4x32 with 10 rounds) and a naive loop."""

from __future__ import annotations

import random

import numpy as np
import pytest

from aengine.kernels.philox import philox4x32, philox_rounds

KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def naive(counter: list[int], key: list[int]) -> list[int]:
    """Straight from the paper, in Python's unbounded integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 % 2**32, p0 >> 32 ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize("counter, key, answer", KNOWN)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    got = philox_rounds(np.array(words(counter), np.uint64)[:, None], np.array(words(key), np.uint64)[:, None])
    assert got.flatten().tolist() == words(answer)
    assert naive(words(counter), words(key)) == words(answer)


def test_wrapper_places_key_and_counter(rng: random.Random) -> None:
    seeds = [rng.randrange(-(2**63), 2**63) for _ in range(5)] + [0, -1, 2**63 - 1, -(2**63)]
    positions = [rng.randrange(2**31) for _ in seeds]
    counters = [0, 1, 2**32 - 1, *(rng.randrange(2**32) for _ in range(20))]
    got = philox4x32(np.array(seeds), np.array(counters), np.array(positions))
    for i, (seed, position) in enumerate(zip(seeds, positions)):
        for j, counter in enumerate(counters):
            key = [seed % 2**32, (seed >> 32) % 2**32]
            assert got[i, j].tolist() == naive([counter, position, 0, 0], key)
