"""Sums over the bytes of tensors, by which ranks find that they have got the same."""

from __future__ import annotations

import ctypes
import zlib

import torch
from torch import Tensor

_WORDS = 1 << 22  # 4-byte words that are summed at a time: what is made of them takes a few times as much memory
_MASK = (1 << 64) - 1


def sum_of(tensor: Tensor) -> int:
    """Return a number that differs, but for chance, where a byte or the order of bytes does; another one on a GPU than
    on a CPU. On the tensor's device, with one wait for it."""
    own = tensor.detach().contiguous()
    if own.device.type == "cpu":
        size = own.numel() * own.element_size()
        return zlib.crc32((ctypes.c_char * size).from_address(own.data_ptr())) if size else 0
    words = _words(own.reshape(-1).view(torch.uint8))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, len(words), _WORDS):
        part = words[begin : begin + _WORDS].long()
        place = torch.arange(begin, begin + len(part), device=part.device)
        total += ((part + place * 0x9E3779B1) * (2 * place + 1)).sum()  # wraps
    return (int(total) ^ tensor.numel() * tensor.element_size()) & _MASK


def is_finite(tensor: Tensor) -> bool:
    """Return whether no number is NaN or infinite."""
    # The sum is one pass; each number is looked at only if it says no more than that it was too large itself.
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def _words(data: Tensor) -> Tensor:
    whole = len(data) // 4 * 4
    head = data[:whole].view(torch.int32) if data.storage_offset() % 4 == 0 else data[:whole].clone().view(torch.int32)
    return torch.cat([head, data[whole:].int()]) if whole < len(data) else head
