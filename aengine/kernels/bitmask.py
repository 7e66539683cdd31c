"""Ban the tokens that a grammar does not allow."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .dispatch import uses_triton


def apply_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in place. NaN and +inf there may stay NaN, or go.

    Args:
        logits: float32 [n, vocab_size]
        rows: int64 [g], distinct: the row of logits that bitmask[i] belongs to; -1: to none
        bitmask: uint8 [g, 4 * ceil(vocab_size / 32)]: bit (t % 8) of byte t / 8 is token t's, as in little-endian
            int32 words with the least significant bit first; or on the host, in memory that the device sees
    """
    vocab_size = logits.shape[1]
    assert bitmask.dtype == torch.uint8 and bitmask.shape == (rows.shape[0], 4 * ((vocab_size + 31) // 32))
    if uses_triton(logits):
        from .triton import bitmask as triton_op

        return triton_op.apply_bitmask(logits, rows, bitmask)
    if not (is_real := rows >= 0).all():
        bitmask, rows = bitmask[is_real], rows[is_real]
    # A byte is eight numbers to add: one look-up instead of eight shifts.
    addends = _addend_of_byte().index_select(0, bitmask.flatten().int())
    addend = addends.view(len(rows), 8 * bitmask.shape[1])[:, :vocab_size]
    if rows.shape[0] == len(logits):
        logits.index_add_(0, rows, addend)
    else:
        logits[rows] = logits.index_select(0, rows) + addend
    return None


@functools.cache
def _addend_of_byte() -> Tensor:
    """Return float32 [256, 8]: 0 where the bit is set, -inf where it is not."""
    return torch.where((torch.arange(256)[:, None] >> torch.arange(8)) % 2 == 1, 0.0, -torch.inf)
