"""A sequence's run of channels a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

__all__ = ["conv_of_tokens"]


def conv_of_tokens(
    x: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor, pages: Tensor, begins: Tensor
) -> Tensor:
    n, channels = x.shape
    out = torch.empty((n, channels), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(channels))
    launch(
        _conv,
        (n, triton.cdiv(channels, block)),
        x,
        weight,
        bias,
        memory,
        pages,
        begins.view(torch.uint8),
        out,
        x.stride(0),
        memory.stride(0),
        channels,
        WIDTH=weight.shape[0],
        BLOCK=block,
        num_warps=4,
    )
    return out


@triton.jit
def _conv(
    x_ptr,
    weight_ptr,
    bias_ptr,
    memory_ptr,
    pages_ptr,
    begins_ptr,
    out_ptr,
    stride_x,
    stride_page,
    channels,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    x = tl.load(x_ptr + i * stride_x + at, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.load(weight_ptr + (WIDTH - 1) * channels + at, mask=inside, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + at, mask=inside, other=0.0)
    state = memory_ptr + tl.load(pages_ptr + i) * stride_page + at
    goes_on = inside & (tl.load(begins_ptr + i) == 0)
    for t in tl.static_range(WIDTH - 1):
        before = tl.load(state + t * channels, mask=goes_on, other=0.0)
        y += before * tl.load(weight_ptr + t * channels + at, mask=inside, other=0.0)
        if t > 0:
            tl.store(state + (t - 1) * channels, before, mask=inside)
    if WIDTH > 1:
        tl.store(state + (WIDTH - 2) * channels, x, mask=inside)
    tl.store(out_ptr + i * channels + at, y.to(out_ptr.dtype.element_ty), mask=inside)
