"""The gated convolution that is compiled for a CPU, against torch's: prompts, chunks of prompts and decodes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("llvmlite")

from aengine.kernels.cpu.ops import gated_conv

SPANS = [(1, 5), (1, 0), (7, 0), (4, 9), (1, 40)]
"""New tokens of each request, and those before."""
KEPT = {2: 3, 3: 1}
"""Behind how many of its tokens a request's state is kept, in the page of 12 + the request's place."""


def wanted(gates: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor, pages: list[int]) -> Tensor:
    b, c, x = gates.chunk(3, 1)
    out, begin = torch.empty_like(c), 0
    for i, ((new, old), page) in enumerate(zip(SPANS, pages, strict=True)):
        own = slice(begin, begin + new)
        state = memory[page] if old else torch.zeros_like(memory[page])
        inputs = torch.cat((state, (b * x)[own]))
        y = sum(inputs[tap : tap + new] * one for tap, one in enumerate(weight))
        out[own] = c[own] * (y if bias is None else y + bias)
        memory[page] = inputs[new:]
        if i in KEPT:
            memory[12 + i] = inputs[KEPT[i] :][: len(weight) - 1]
        begin += new
    return out


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_gated_conv(width: int, has_bias: bool, rng: random.Random, gen: torch.Generator) -> None:
    channels = rng.choice((5, 16, 64, 65, 200))
    pages, rows = rng.sample(range(1, 12), len(SPANS)), rng.sample(range(9), len(SPANS))
    weight, bias = torch.randn(width, channels, generator=gen), torch.randn(channels, generator=gen)
    own_bias = bias if has_bias else None
    memory = torch.full((16, (width - 1) * channels + 3), torch.nan)[:, 3:].view(16, width - 1, channels)
    for (_, old), page in zip(SPANS, pages, strict=True):
        if old:  # others hold what another request has left
            memory[page] = torch.randn(width - 1, channels, generator=gen)
    table = torch.zeros(9, 3, dtype=torch.int32)
    table[rows, 0] = torch.tensor(pages, dtype=torch.int32)
    positions = torch.cat([torch.arange(old, old + new) for new, old in SPANS])
    lens = torch.tensor([new for new, _ in SPANS])
    table_rows = torch.tensor(rows).repeat_interleave(lens)
    gates = torch.randn(len(positions), 3 * channels, generator=gen)
    alone, expected_memory = memory.clone(), memory.clone()
    expected = wanted(gates, weight, own_bias, expected_memory, pages)
    kept_pages = torch.zeros(len(gates), dtype=torch.int64)
    for i, count in KEPT.items():
        kept_pages[int(lens[:i].sum()) + count - 1] = 1 + 12 + i
    out = gated_conv(gates, weight, own_bias, memory, positions, table_rows, table, kept_pages)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(memory, expected_memory, equal_nan=True)
    for i in range(len(gates)):  # token by token: the same bits
        one = [x[i : i + 1] for x in (gates, positions, table_rows, kept_pages)]
        assert torch.equal(gated_conv(one[0], weight, own_bias, alone, *one[1:3], table, one[3]), out[i : i + 1])
    torch.testing.assert_close(alone, memory, rtol=0, atol=0, equal_nan=True)


def test_a_ring_forgets_what_is_rejected(rng: random.Random, gen: torch.Generator) -> None:
    """Steps of one request, of whose tokens some are computed anew, with other inputs."""
    channels, width, most = rng.choice((5, 64, 200)), rng.choice((2, 4)), 4
    weight = torch.randn(width, channels, generator=gen)
    ring = torch.full((3, width - 1 + most, channels), torch.nan)
    table, at, right = torch.full((2, 1), 1, dtype=torch.int32), 0, torch.zeros(width - 1, channels)
    for _ in range(20):
        new = rng.choice((1, 2, 3, 4, 4, 9))
        gates = torch.randn(new, 3 * channels, generator=gen)
        positions, rows = torch.arange(at, at + new), torch.ones(new, dtype=torch.int64)
        kept = rng.randint(1, new)  # the others go on from here
        kept_pages = torch.zeros(new, dtype=torch.int64)
        kept_pages[kept - 1] = 1 + 2
        out = gated_conv(gates, weight, None, ring, positions, rows, table, kept_pages)
        b, c, x = gates.chunk(3, 1)
        inputs = torch.cat((right, b * x))
        y = sum(inputs[i : i + new] * one for i, one in enumerate(weight))
        torch.testing.assert_close(out, c * y, rtol=1e-5, atol=1e-5)
        if kept < new:
            ahead, nothing = slice(kept, new), torch.zeros(new - kept, dtype=torch.int64)
            where = positions[ahead], nothing, torch.full((2, 1), 2, dtype=torch.int32)
            out = gated_conv(gates[ahead].contiguous(), weight, None, ring, *where, nothing)
            torch.testing.assert_close(out, (c * y)[ahead], rtol=1e-5, atol=1e-5)
        accepted = rng.randint(1, new) if new <= most else new
        at, right = at + accepted, inputs[: width - 1 + accepted][1 - width :]
