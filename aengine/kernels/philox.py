"""Philox4x32-10: a stateless random function of (key, counter).

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011. https://doi.org/10.1145/2063384.2063405
A round turns the counter (c0 c1 c2 c3) under the key (k0 k1) into

    c0' = hi(c2 * M1) ^ c1 ^ k0      c1' = lo(c2 * M1)
    c2' = hi(c0 * M0) ^ c3 ^ k1      c3' = lo(c0 * M0)

and adds the Weyl constants to the key. ``triton.language.philox``, by which the kernels of triton/gumbel.py draw, is
the same function of the same five inputs; this one is for the CPU, by numpy: of few numbers its ops take less time than
torch's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)


def philox4x32(keys: NDArray[np.int64], c0: NDArray[np.int64], c1: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return four random words for each row and counter; the counter's other words (c2, c3) are 0.

    Args:
        keys: [n]; its low half is k0, its high half k1.
        c0: [m], 0 <= c0 < 2**32; shared by all rows.
        c1: [n], 0 <= c1 < 2**32; one a row.

    Returns:
        [n, m, 4], each 0 <= word < 2**32.
    """
    assert keys.shape == c1.shape and c0.ndim == 1
    counter = np.zeros((4, len(keys), len(c0)), np.uint64)
    counter[0] = c0
    counter[1] = c1[:, None]
    words = keys.astype(np.uint64)
    key = np.stack((words & _MASK, words >> _HALF))
    return philox_rounds(counter, key[:, :, None]).transpose(1, 2, 0)


def philox_rounds(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Compute Philox in 64-bit arithmetic. counter: [4, ...], key: [2, ...], words < 2**32; returns [4, ...].

    The even words (c0, c2) are multiplied together, as one array, and so are the odd ones: half the calls.
    """
    shape = 2, *[1] * (counter.ndim - 1)
    multipliers, weyl = _MULTIPLIERS.reshape(shape), _WEYL.reshape(shape)
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        product = (even * multipliers)[::-1]
        even = (product >> _HALF) ^ odd ^ key
        odd = product & _MASK
        key = (key + weyl) & _MASK
    return np.stack((even, odd), 1).reshape(counter.shape)
