"""Causal convolution of each channel over the last few tokens.

    y[t] = bias + sum over i < width of weight[i] * x[t - width + 1 + i]

What a sequence keeps for its next token are the last width - 1 inputs. torch bodies alone: the sums of a few tokens are
little beside the products of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["conv_of_prompt", "conv_of_tokens"]


def conv_of_tokens(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token each of n sequences. Returns y [n, channels] in x's dtype, and the states after it.

    Args:
        x: [n, channels]
        state: float32 [n, width - 1, channels], the inputs before
        weight: float32 [width, channels]
        bias: float32 [channels]
    """
    inputs = torch.cat((state, x[:, None].float()), 1)
    y = (inputs * weight).sum(1)
    if bias is not None:
        y += bias
    return y.to(x.dtype), inputs[:, 1:]


def conv_of_prompt(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The next tokens of one sequence, x [num_tokens, channels]; ``state`` [width - 1, channels] is updated in place.
    See `conv_of_tokens`."""
    inputs, num_tokens = torch.cat((state, x.float())), len(x)
    y = inputs[:num_tokens] * weight[0]
    for i in range(1, len(weight)):
        y.addcmul_(inputs[i : i + num_tokens], weight[i])
    if bias is not None:
        y += bias
    state.copy_(inputs[num_tokens:])
    return y.to(x.dtype)
