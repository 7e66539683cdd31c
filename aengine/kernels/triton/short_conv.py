"""A run of channels a program: of a sequence of one token, or of a block of tokens of any sequences."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sequences import Sequences
from .launch import has_pdl, launch, launch_next, wait_for_previous

_TOKENS, _CHANNELS = 16, 128
_MOST_CHANNELS = 256  # a program of one token has no more: with few programs the kernel takes longer
# parts of one buffer: any place in it is one kernel
_WHERE = ["owners_ptr", "starts_ptr", "pages_ptr", "begins_ptr", "cut_places_ptr", "cut_pages_ptr"]


def conv_of_tokens(
    x: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor, pages: Tensor, begins: Tensor
) -> Tensor:
    n, channels = len(x), weight.shape[1]
    out = torch.empty((n, channels), dtype=x.dtype, device=x.device)
    block = min(_MOST_CHANNELS, triton.next_power_of_2(channels))
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
        GATED=x.shape[1] > channels,
        BLOCK=block,
        PDL=has_pdl(),
        num_warps=4,
    )
    return out


@triton.jit
def conv_input(row, at, channels, inside, GATED: tl.constexpr):
    """The inputs ``at`` of the token whose x begins at ``row``, float32: b * x if x is gated."""
    x = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        x *= tl.load(row + 2 * channels + at, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def conv_output(y, row, at, channels, inside, GATED: tl.constexpr):
    """The convolution ``y`` of the token whose x begins at ``row``: c * y if x is gated."""
    if GATED:
        y *= tl.load(row + channels + at, mask=inside, other=0.0).to(tl.float32)
    return y


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
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next(PDL)
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    state = memory_ptr + tl.load(pages_ptr + i) * stride_page
    goes_on = inside & (tl.load(begins_ptr + i) == 0)
    y = conv_of_state(weight_ptr, bias_ptr, state, at, channels, inside, goes_on, WIDTH)
    wait_for_previous(PDL)
    row = x_ptr + i * stride_x
    x = conv_input(row, at, channels, inside, GATED)
    y += x * tl.load(weight_ptr + (WIDTH - 1) * channels + at, mask=inside, other=0.0)
    if WIDTH > 1:
        tl.store(state + (WIDTH - 2) * channels + at, x, mask=inside)
    y = conv_output(y, row, at, channels, inside, GATED)
    tl.store(out_ptr + i * channels + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def conv_of_state(weight_ptr, bias_ptr, state, at, channels, inside, goes_on, WIDTH: tl.constexpr):
    """What the inputs in a state, and the bias, add to the next token's output. They make room for that token's input;
    no other kernel of a step reads or writes them, so this may be ahead of the wait for those before."""
    y = tl.zeros(at.shape, tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + at, mask=inside, other=0.0)
    for t in tl.static_range(WIDTH - 1):
        before = tl.load(state + t * channels + at, mask=goes_on, other=0.0)
        y += before * tl.load(weight_ptr + t * channels + at, mask=inside, other=0.0)
        if t > 0:
            tl.store(state + (t - 1) * channels + at, before, mask=inside)
    return y


def conv_of_prompts(x: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor, sequences: Sequences) -> Tensor:
    n, channels, is_gated = len(x), weight.shape[1], x.shape[1] > weight.shape[1]
    out = torch.empty((n, channels), dtype=x.dtype, device=x.device)
    where = sequences.starts, sequences.pages, sequences.begins
    sizes = x.stride(0), memory.stride(0), channels
    launch(
        _conv_of_prompts,
        (triton.cdiv(n, _TOKENS), triton.cdiv(channels, _CHANNELS)),
        x,
        weight,
        bias,
        memory,
        sequences.owners,
        *where,
        out,
        n,
        *sizes,
        WIDTH=weight.shape[0],
        GATED=is_gated,
        TOKENS=_TOKENS,
        CHANNELS=_CHANNELS,
        num_warps=4,
    )
    block = min(1024, triton.next_power_of_2(channels))
    cuts = sequences.cut_places, sequences.cut_pages
    for count, has_cuts in ((len(sequences.cut_pages), True), (len(sequences.pages), False)):
        grid = (count, triton.cdiv(channels, block))
        options = {"WIDTH": weight.shape[0], "GATED": is_gated, "CUTS": has_cuts, "BLOCK": block, "num_warps": 4}
        if count:
            launch(_keep_last, grid, x, memory, *where, *cuts, *sizes, len(sequences.cut_pages), **options)
    return out


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=_WHERE)
def _conv_of_prompts(
    x_ptr,
    weight_ptr,
    bias_ptr,
    memory_ptr,
    owners_ptr,
    starts_ptr,
    pages_ptr,
    begins_ptr,
    out_ptr,
    n,
    stride_x,
    stride_page,
    channels,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The states are those from before the step: `_keep_last` replaces them when all of this has run."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    at = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_token, is_channel = t < n, at < channels
    inside = is_token[:, None] & is_channel[None, :]
    owner = tl.load(owners_ptr + t, mask=is_token, other=0)
    start = tl.load(starts_ptr + owner)
    goes_on = tl.load(begins_ptr + owner) == 0
    state = memory_ptr + tl.load(pages_ptr + owner)[:, None] * stride_page + at[None, :]
    y = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for i in tl.static_range(WIDTH):
        source = t.to(tl.int64) - (WIDTH - 1) + i
        is_new = inside & (source >= start)[:, None]
        value = conv_input(x_ptr + source[:, None] * stride_x, at[None, :], channels, is_new, GATED)
        if i < WIDTH - 1:
            is_old = inside & ((source < start) & goes_on)[:, None]
            row = source - start + (WIDTH - 1)
            value += tl.load(state + row[:, None] * channels, mask=is_old, other=0.0)
        y += value * tl.load(weight_ptr + i * channels + at, mask=is_channel, other=0.0)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + at, mask=is_channel, other=0.0)[None, :]
    y = conv_output(y, x_ptr + t.to(tl.int64)[:, None] * stride_x, at[None, :], channels, inside, GATED)
    places = out_ptr + t.to(tl.int64)[:, None] * channels + at[None, :]
    tl.store(places, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_cuts"], do_not_specialize_on_alignment=_WHERE)
def _keep_last(
    x_ptr,
    memory_ptr,
    starts_ptr,
    pages_ptr,
    begins_ptr,
    cut_places_ptr,
    cut_pages_ptr,
    stride_x,
    stride_page,
    channels,
    num_cuts,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last WIDTH - 1 inputs of a sequence, or of what is before a cut, of which those before this step's are in the
    sequence's state."""
    i = tl.program_id(0).to(tl.int64)
    kept = i
    if CUTS:
        kept = tl.load(cut_pages_ptr + i)
        if kept < 0:
            return
        i = tl.load(cut_places_ptr + i)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < channels
    start, end = tl.load(starts_ptr + i), tl.load(starts_ptr + i + 1)
    page = tl.load(pages_ptr + i)
    if CUTS:
        end = tl.load(cut_places_ptr + num_cuts + tl.program_id(0))
    else:
        kept = page
    goes_on = inside & (tl.load(begins_ptr + i) == 0)
    state, target = memory_ptr + page * stride_page + at, memory_ptr + kept * stride_page + at
    for row in tl.static_range(WIDTH - 1):  # upwards: a row moves down, and is read before it is written
        source = end - (WIDTH - 1) + row
        new = conv_input(x_ptr + source * stride_x, at, channels, inside & (source >= start), GATED)
        old = tl.load(state + (row + end - start) * channels, mask=goes_on & (source < start), other=0.0)
        tl.store(target + row * channels, new + old, mask=inside)
