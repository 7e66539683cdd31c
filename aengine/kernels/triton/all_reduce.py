"""Sums and gathers over ranks. Which way is quicker was measured on two H200s, in bytes of the tensor:

up to 256 KB   in words
up to 4 MB     in one shot, between two ranks; among more the bytes of that grow with their number
more           in two shots
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..exchange_buffers import ExchangeBuffers
from . import exchange_bulk, exchange_words

_MOST_IN_WORDS = 2**18
_MOST_IN_ONE_SHOT = 2**22


def all_reduce(out: Tensor, part: Tensor, buffers: ExchangeBuffers, *, add: bool) -> None:
    """Set out [n, size] to the sum of all ranks' parts, or add it to out."""
    if part.nbytes <= min(_MOST_IN_WORDS, 4 * buffers.words_per_rank):
        exchange_words.sum_in_words(out, part, buffers, add=add)
        return
    rows = buffers.bulk_per_rank // (part.nbytes // len(part))
    is_whole = len(part) <= rows  # to split takes the host nearly as long as a launch
    for some_out, some in [(out, part)] if is_whole else zip(out.split(rows), part.split(rows)):
        if buffers.size == 2 and some.nbytes <= _MOST_IN_ONE_SHOT:
            exchange_bulk.sum_in_bulk(some_out, some, buffers, add=add)
        else:
            exchange_bulk.sum_in_two_shots(some_out, some, buffers, add=add)


def all_gather(x: Tensor, buffers: ExchangeBuffers) -> Tensor:
    """Return all ranks' x, [size, *x.shape]."""
    is_small = x.nbytes <= min(_MOST_IN_WORDS, 4 * buffers.words_per_rank)
    words = _words_of(x, 1 if is_small else 4)
    gathered = words.new_empty(buffers.size, len(words))
    if is_small:
        exchange_words.gather_in_words(gathered, words, buffers)
    else:
        most = buffers.bulk_per_rank // words.element_size()
        pieces = [words.new_empty(buffers.size, len(some)) for some in words.split(most)]
        for piece, some in zip(pieces, words.split(most)):
            exchange_bulk.gather_in_bulk(piece, some, buffers)
        gathered = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
    if words.nbytes > x.nbytes:
        gathered = gathered.view(torch.uint8)[:, : x.nbytes].contiguous()
    return gathered.view(x.dtype).view(buffers.size, *x.shape)


def _words_of(x: Tensor, multiple: int) -> Tensor:
    """Return x as a row of int32, with zeros behind up to a multiple of words."""
    row = x.reshape(-1)
    if x.nbytes % (4 * multiple):
        row = torch.nn.functional.pad(row.view(torch.uint8), (0, -x.nbytes % (4 * multiple)))
    return row.view(torch.int32)
