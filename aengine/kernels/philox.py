"""Philox4x32-10: a stateless random function of (key, counter).

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3. SC 2011. https://doi.org/10.1145/2063384.2063405
A round turns the counter (c0 c1 c2 c3) under the key (k0 k1) into

    c0' = hi(c2 * M1) ^ c1 ^ k0      c1' = lo(c2 * M1)
    c2' = hi(c0 * M0) ^ c3 ^ k1      c3' = lo(c0 * M0)

and adds the Weyl constants to the key. ``triton.language.philox``, by which the kernels of triton/gumbel.py draw, is
the same function of the same five inputs; this one is for the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["philox4x32", "philox_rounds"]

_ROUNDS = 10
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(keys: Tensor, c0: Tensor, c1: Tensor) -> Tensor:
    """Return four random words for each row and counter; the counter's other words (c2, c3) are 0.

    Args:
        keys: int64 [n]; its low half is k0, its high half k1.
        c0: int64 [m], 0 <= c0 < 2**32; shared by all rows.
        c1: int64 [n], 0 <= c1 < 2**32; one a row.

    Returns:
        int64 [n, m, 4], each 0 <= word < 2**32.
    """
    assert keys.dtype == c0.dtype == c1.dtype == torch.int64 and keys.shape == c1.shape and c0.dim() == 1
    n, m = keys.shape[0], c0.shape[0]
    counter = torch.zeros(4, n, m, dtype=torch.int64)
    counter[0] = c0
    counter[1] = c1[:, None]
    key = torch.stack((keys & _MASK, (keys >> 32) & _MASK))
    return philox_rounds(counter, key[:, :, None]).permute(1, 2, 0)


def philox_rounds(counter: Tensor, key: Tensor) -> Tensor:
    """Compute Philox in int64 arithmetic. counter: [4, ...], key: [2, ...], words < 2**32; returns [4, ...].

    The even words (c0, c2) are multiplied together, as one tensor, and so are the odd ones: half the calls. A product
    may pass 2**63; the wrapped int64 has the right 64 bits all the same.
    """
    shape = (2, *([1] * (counter.dim() - 1)))
    multipliers = torch.tensor(_MULTIPLIERS).view(shape)
    weyl = torch.tensor(_WEYL).view(shape)
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        product = even * multipliers
        high_low = torch.stack((product >> 32, product)).bitwise_and_(_MASK).flip(1)
        even = high_low[0].bitwise_xor_(odd).bitwise_xor_(key)
        odd = high_low[1]
        key = (key + weyl).bitwise_and_(_MASK)
    return torch.stack((even, odd), dim=1).flatten(0, 1)
