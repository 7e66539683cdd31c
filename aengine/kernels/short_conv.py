"""Causal convolution of each channel over the last few tokens.

    y[t] = bias + sum over i < width of weight[i] * x[t - width + 1 + i]

What a sequence keeps for its next token are the last width - 1 inputs. With gates b and c it is c * convolution of
b * x, of which b, c and x are given side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import uses_triton
from .sequences import Sequences


class TokenConv(NamedTuple):
    """A convolution of one token of each of n sequences: what `conv_of_tokens` takes beside x."""

    weight: Tensor
    bias: Tensor | None
    memory: Tensor
    pages: Tensor
    begins: Tensor


def conv_of_tokens(
    x: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor, pages: Tensor, begins: Tensor
) -> Tensor:
    """Compute one token of each of n sequences, whose states are updated in place. Returns y [n, channels] in x's
    dtype.

    Args:
        x: [n, channels], or [n, 3 * channels]: b, c and x; any stride from token to token
        weight: float32 [width, channels]
        bias: float32 [channels]
        memory: float32 [num_pages, width - 1, channels], the inputs before; any stride from page to page
        pages: int64 [n]
        begins: bool [n]: the sequence has no state yet, whatever its page holds
    """
    assert memory.dtype == torch.float32 and pages.dtype == torch.int64 and begins.dtype == torch.bool
    if uses_triton(x):
        from .triton import short_conv as triton_op

        return triton_op.conv_of_tokens(x, weight, bias, memory, pages, begins)
    state = memory.index_select(0, pages).masked_fill_(begins[:, None, None], 0)
    own, gate = ungated(x, weight)
    inputs = torch.cat((state, own[:, None]), 1)
    y = (inputs * weight).sum(1)
    if bias is not None:
        y += bias
    memory.index_copy_(0, pages, inputs[:, 1:])
    return (y * gate).to(x.dtype)


def conv_of_prompts(x: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor, sequences: Sequences) -> Tensor:
    """Compute the next tokens of several sequences, whose states are updated in place, and kept at cuts: n counts the
    tokens of all. See `conv_of_tokens`."""
    assert memory.dtype == torch.float32 and len(x) == len(sequences.owners)
    if uses_triton(x):
        from .triton import short_conv as triton_op

        return triton_op.conv_of_prompts(x, weight, bias, memory, sequences)
    own, gate = ungated(x, weight)
    n = len(sequences.singles)
    out, begin = torch.empty_like(own), n
    if n:
        where = memory, sequences.singles, sequences.begins[:n] > 0
        out[:n] = conv_of_tokens(own[:n], weight, bias, *where)
    for i, length in enumerate(sequences.lens[n:], n):
        state = memory[sequences.pages[i]]
        before = torch.zeros_like(state) if sequences.begins[i] else state
        inputs = torch.cat((before, own[begin : begin + length]))
        y = inputs[:length] * weight[0]
        for tap in range(1, len(weight)):
            y.addcmul_(inputs[tap : tap + length], weight[tap])
        if bias is not None:
            y += bias
        out[begin : begin + length] = y
        for cut in sequences.cuts:
            if cut.sequence == i:
                memory[cut.page] = inputs[cut.num_tokens : cut.num_tokens + len(state)]
        state.copy_(inputs[length:])
        begin += length
    return (out * gate).to(x.dtype)


def ungated(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | float]:
    """Return float32 [n, channels] that is convolved of x, and the gate of what comes of it."""
    if x.shape[1] == weight.shape[1]:
        return x.float(), 1.0
    b, c, inputs = x.float().chunk(3, 1)
    return b * inputs, c
