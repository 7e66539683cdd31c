"""Attention to latents, by torch and by the Triton kernels, against its definition in float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from aengine.kernels.decode_attention import plan_decode
from aengine.kernels.decode_plan import DecodeWorkspace, lanes_of
from aengine.kernels.dispatch import torch_reference
from aengine.kernels.latent_attention import (
    attend_to_decodes,
    attend_to_prompts,
    plan_prompts,
    write_latents,
)
from aengine.kernels.rotary import Rope

pytestmark = pytest.mark.slow
BLOCK = 16
DTYPES = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


class Sequences:
    """Sequences over scattered blocks; what none has written is NaN."""

    def __init__(self, lens: list[tuple[int, int]], heads: int, turns: int, value: int, gen: torch.Generator) -> None:
        """``lens``: of each sequence, and how many of its tokens are new."""
        self.lens, self.heads, self.value, size = lens, heads, value, turns + value
        counts = [-(-length // BLOCK) for length, _ in lens]
        order = torch.randperm(sum(counts) + 2, generator=gen).int()
        self.table = torch.zeros(len(lens) + 1, max(counts) + 1, dtype=torch.int32)
        self.rows = torch.randperm(len(lens) + 1, generator=gen)[: len(lens)]
        for row, own in zip(self.rows, order[: sum(counts)].split(counts), strict=True):
            self.table[row, : len(own)] = own
        self.cache = torch.full((len(order), 1, 1, BLOCK, size), torch.nan).permute(0, 3, 1, 2, 4)
        positions = [torch.arange(length) for length, _ in lens]
        slots = [
            self.table[row][at // BLOCK].long() * BLOCK + at % BLOCK
            for row, at in zip(self.rows, positions, strict=True)
        ]
        latents = [torch.randn(length, size, generator=gen) for length, _ in lens]
        angles = torch.arange(max(length for length, _ in lens))[:, None] * 100.0 ** -torch.arange(0, 1, 2 / turns)
        self.rope = Rope(1.1 * torch.cat((angles.cos(), angles.sin()), 1), interleaved=bool(heads % 4))
        new = [slice(length - count, length) for length, count in lens]
        for i, own in enumerate(new):
            written = self._turned(latents[i].double()[:, None], positions[i])[:, 0].float()
            at = slots[i][: own.start]
            self.cache[at // BLOCK, at % BLOCK, 0, 0] = written[: own.start]
        self.context = latents
        self.positions = torch.cat([p[own] for p, own in zip(positions, new, strict=True)])
        self.slots = torch.cat([s[own] for s, own in zip(slots, new, strict=True)])
        self.latents = torch.cat([c[own] for c, own in zip(latents, new, strict=True)])
        self.q = torch.randn(len(self.slots), heads, size, generator=gen)

    def _turned(self, x: Tensor, at: Tensor) -> Tensor:
        cos, sin = self.rope.table.double()[at][:, None].chunk(2, -1)
        x, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
        a, b = (x[..., ::2], x[..., 1::2]) if self.rope.interleaved else x.chunk(2, -1)
        both = a * cos - b * sin, b * cos + a * sin
        return torch.cat(
            (torch.stack(both, -1).flatten(-2) if self.rope.interleaved else torch.cat(both, -1), rest), -1
        )

    def expected(self, scale: float) -> Tensor:
        q, begin, outs = self._turned(self.q.double(), self.positions), 0, []
        for (length, count), context in zip(self.lens, self.context, strict=True):
            keys = self._turned(context.double()[:, None], torch.arange(length))[:, 0]
            scores = torch.einsum("qhd,td->hqt", q[begin : begin + count], keys) * scale
            seen = torch.arange(length) <= torch.arange(length - count, length)[:, None]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hqt,td->qhd", weights, keys[:, -self.value :]).flatten(1))
            begin += count
        return torch.cat(outs)

    def attend(self, scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Of sequences with one new token, and of those with several; zeros of others."""
        cache = self.cache.permute(0, 2, 3, 1, 4).to(dtype).to(device).permute(0, 3, 1, 2, 4).expand(-1, -1, 2, -1, -1)
        q, latents = (x.to(dtype).to(device) for x in (self.q.clone(), self.latents))
        rope, table, rows = self.rope._replace(table=self.rope.table.to(device)), self.table.to(device), self.rows
        write_latents(q, latents, self.positions.to(device), self.slots.to(device), rope, cache[:, :, :1])
        counts = torch.tensor([0] + [count for _, count in self.lens])
        starts, lens = counts.cumsum(0).int(), torch.tensor([length for length, _ in self.lens], dtype=torch.int32)
        where = rows.to(device), starts.to(device), lens.to(device), len(q)
        plan = plan_prompts(*where, self.heads, dtype)
        out = attend_to_prompts(q, cache, table, plan, scale, self.value).clone()
        alone = counts[1:] == 1
        if alone.any():
            workspace = DecodeWorkspace(8, self.heads, lanes_of(self.heads), self.value, device)
            own = torch.cat((rows[alone], torch.tensor([-1]))).to(device)  # one that pads
            plan = plan_decode(own, torch.cat((lens[alone], lens[:1] * 0)).to(device), workspace)
            first = starts[:-1][alone].long().to(device)
            found = attend_to_decodes(torch.cat((q[first], q[:1])), cache, table, scale, self.value, plan, workspace)
            assert (found[-1] == 0).all() and workspace.counters.sum() == 0
            out[first] = found[:-1]
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("few_idle_programs")
def test_prompts_and_decodes(
    dtype: torch.dtype, rng: random.Random, gen: torch.Generator, triton_device: torch.device
) -> None:
    for heads, turns, value in ((4, 16, 32), (6, 8, 20), (20, 16, 64), (32, 16, 48)):
        lens = [(rng.randint(1, 300), 1), (1, 1), (rng.randint(30, 90), 29), (17, 17), (300, 1)]
        rng.shuffle(lens)
        case = Sequences(lens, heads, turns, value, gen)
        wanted = case.expected(0.2)
        for is_reference in (False, True):
            if is_reference and dtype == torch.float16:
                continue
            if is_reference:
                case.cache.nan_to_num_(0.0)  # torch reads places past a sequence's end, under a mask
                with torch_reference():
                    out = case.attend(0.2, dtype, torch.device("cpu"))
            else:
                out = case.attend(0.2, dtype, triton_device)
            error = (out.cpu().double() - wanted).norm() / wanted.norm()
            assert error < DTYPES[dtype], (heads, turns, value, is_reference, float(error))
