"""Sequences that begin with the same blocks and read them together: the same as each by itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aengine.kernels.decode_attention import DecodeWorkspace, decode_step_attention, plan_decode
from aengine.kernels.kv_codes import kept_kv
from aengine.kernels.paged_attention import Scores
from aengine.kernels.rotary import HeadNorms, Rope
from aengine.runner.attention import shared_prefixes
from aengine.runner.attention.shared_prefixes import SharedPrefixes, find_groups
from aengine.runner.attention.triton_attention import Heads
from aengine.runner.weights.step_rows import ROWS_UNSEEN, StepRows

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def tables_of(
    rng: random.Random, shapes: list[tuple[int, int]], size: int, longest: int
) -> tuple[np.ndarray, list[int]]:
    """Block tables of groups of (rows, blocks in common), in random order, and the length of each row."""
    rows = [(num, common) for num, common in shapes for _ in range(num)]
    ids = iter(rng.sample(range(10**6), 10**5))
    common = {shape: [next(ids) for _ in range(shape[1])] for shape in shapes}
    lens = [common * size + rng.randint(1, longest) for _, common in rows]
    table = np.zeros((len(rows), max(lens) // size + 2), dtype=np.int32)
    for i, (shape, length) in enumerate(zip(rows, lens, strict=True)):
        blocks = [*common[shape], *(next(ids) for _ in range(-(-length // size) - shape[1]))]
        table[i, : len(blocks)] = blocks
    return table, lens


def test_groups_are_found(rng: random.Random) -> None:
    for _ in range(20):
        shapes = [(rng.randint(4, 9), least) for least in rng.sample(range(4, 70), rng.randint(1, 3))]
        shapes += [(1, rng.randint(1, 50)) for _ in range(rng.randint(0, 3))] + [(3, 40)]
        table, lens = tables_of(rng, shapes, 4, 60)
        rows = np.array(rng.sample(range(len(lens)), len(lens)))
        num_blocks = (np.array(lens) - 1)[rows] // 4
        found = find_groups(table, rows, num_blocks, 4)
        assert sorted((len(group.members), group.num_blocks) for group in found) == sorted(shapes[: len(found)])
        assert len(found) == sum(num >= 4 for num, _ in shapes)
        for group in found:
            own = table[rows[group.members], : group.num_blocks]
            assert (own == own[0]).all()


def test_the_larger_saving_is_chosen() -> None:
    """Of 16 rows with one instruction 8 have more in common; what saves more is read together."""
    table = np.arange(16 * 300, dtype=np.int32).reshape(16, 300)
    for outer, inner, wanted in ((16, 250, {(8, 250), (8, 16)}), (200, 210, {(16, 200)})):
        table[:, :outer] = range(outer)
        table[:8, outer:inner] = range(5000, 5000 + inner - outer)
        found = find_groups(table, np.arange(16), np.full(16, 299), 4)
        assert {(len(group.members), group.num_blocks) for group in found} == wanted
        table = np.arange(16 * 300, dtype=np.int32).reshape(16, 300)


class Step:
    """A decode step of rows that share prefixes, over scattered blocks; what nobody has written is NaN."""

    def __init__(self, rng: random.Random, gen: torch.Generator, dtype: torch.dtype, **extras: Any) -> None:
        self.dtype, self.gen = dtype, gen
        self.heads = Heads(*extras.get("heads", (4, 2, 64)))
        self.size = rng.choice([4, 16])
        shapes = [(rng.randint(4, 11), rng.randint(8, 300 // self.size)) for _ in range(rng.randint(1, 2))]
        shapes += [(1, 0)] * rng.randint(0, 2)
        table, lens = tables_of(rng, shapes, self.size, 100)
        num_heads, num_kv, dim, _ = self.heads
        blocks, places = np.unique(table, return_inverse=True)
        self.rows = torch.tensor(rng.sample(range(len(lens)), len(lens)))
        self.table = torch.from_numpy(places.reshape(table.shape)).int()
        self.lens = [lens[row] for row in self.rows]
        kv = torch.full((len(blocks), self.size, 2, num_kv, dim), torch.nan)
        for row, length in enumerate(lens):
            t = torch.arange(length - 1)
            at = self.table[row, t // self.size].long(), t % self.size
            new = torch.randn(length - 1, 2, num_kv, dim, generator=gen)
            kv[at] = torch.where(kv[at].isnan(), new, kv[at])
        self.scales = None
        if extras.get("fp8"):
            self.scales = torch.rand(2, num_kv, generator=gen) + 0.5
        kept = kept_kv(kv.flatten(0, 1), torch.uint8 if self.scales is not None else dtype, self.scales).view(kv.shape)
        self.cache = kept.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)
        self.qkv = torch.randn(len(lens), (num_heads + 2 * num_kv) * dim, generator=gen).to(dtype)
        rotary = extras.get("rotary", dim)
        angles = torch.arange(max(lens) + 9)[:, None] * 10000.0 ** -(torch.arange(0, rotary, 2) / max(1, rotary))
        shifts = torch.randint(0, 9, (len(lens),), generator=gen, dtype=torch.int32) if extras.get("shifts") else None
        scale = torch.rand(max(lens) + 9, generator=gen) + 0.5 if extras.get("query_scale") else None
        turn = torch.cat((angles.cos(), angles.sin()), 1)
        self.rope = Rope(turn, bool(extras.get("interleaved")), scale, shifts) if rotary else None
        norm = (torch.rand(dim, generator=gen) + 0.5).to(dtype)
        self.norms = HeadNorms(norm, norm.flip(0), 1e-5) if extras.get("norm") else None
        sinks = torch.randn(num_heads, generator=gen).to(dtype) if extras.get("sinks") else None
        self.how = Scores(dim**-0.5, None, extras.get("softcap", 0.0), sinks)

    def prefixes(self, device: torch.device, padding: int, step_rows: StepRows = ROWS_UNSEEN) -> SharedPrefixes:
        requests = SimpleNamespace(
            in_use=np.zeros(len(self.table) + padding),
            token_ids=torch.zeros(1, device=device),
            num_computed_tokens=np.zeros(len(self.table), dtype=np.int64),
        )
        requests.num_computed_tokens[self.rows] = np.array(self.lens) - 1
        group = SimpleNamespace(block_size=self.size)
        tables = SimpleNamespace(groups=[group], on_host=self.table.numpy()[None], num_replaced=0)
        found = SharedPrefixes.of([self.heads[:3]], self.dtype, [0], requests, tables, step_rows)  # type: ignore[arg-type]
        assert found is not None
        return found

    def run(self, device: torch.device, *, shares: bool, is_raw: bool, padding: int = 2) -> tuple[Tensor, Tensor]:
        """Return the output and the cache."""
        n = len(self.lens)
        rows = torch.cat((self.rows, torch.full((padding,), -1))).to(device)
        lens = torch.tensor(self.lens + [0] * padding, dtype=torch.int32, device=device)
        prefixes = self.prefixes(device, padding)
        shared = None
        if shares:
            prefixes.choose(self.rows.numpy())
            assert prefixes.kind == 1
            shared = prefixes.of_step(rows, lens, None)
        workspace = DecodeWorkspace(len(rows), *self.heads[:3], device)
        workspace.reserve(prefixes.sizes.num_parts)
        plan = plan_decode(rows, lens, workspace, None, shared)
        qkv = torch.cat((self.qkv, torch.full((padding, self.qkv.shape[1]), torch.nan, dtype=self.dtype))).to(device)
        cache = self.cache.permute(0, 2, 3, 1, 4).clone().to(device).permute(0, 3, 1, 2, 4)
        rope = self.rope and Rope(*(x.to(device) if isinstance(x, Tensor) else x for x in self.rope))
        norms = self.norms and HeadNorms(self.norms.q.to(device), self.norms.k.to(device), self.norms.eps)
        how = self.how._replace(sinks=None if self.how.sinks is None else self.how.sinks.to(device))
        where = cache, self.table.to(device), rope, norms, self.heads.num_heads, how, plan, workspace
        scales = None if self.scales is None else self.scales.to(device)
        out = decode_step_attention(qkv, *where, is_raw=is_raw, kv_scales=scales, shared=shared)
        assert workspace.counters.sum() == 0, "a counter was not put back"
        assert (out[n:] == 0).all()
        return out[:n].cpu().double(), cache.cpu()


EXTRAS: list[dict[str, Any]] = [
    {},
    {"norm": True, "heads": (6, 2, 80)},
    {"interleaved": True, "rotary": 40, "query_scale": True, "shifts": True, "heads": (2, 2, 64)},
    {"softcap": 1.5, "sinks": True, "rotary": 0, "norm": True},
    {"fp8": True, "norm": True, "heads": (16, 2, 64)},
]


@pytest.fixture(autouse=True)
def _always_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 16)
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 1)
    monkeypatch.setattr(shared_prefixes, "LEAST_CHUNK", 64)


@pytest.mark.parametrize("extras", EXTRAS, ids=str)
def test_sharing_rows_attend_as_each_alone(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, extras: dict[str, Any]
) -> None:
    for dtype in (torch.float32, torch.bfloat16 if triton_device.type == "cuda" else torch.float16):
        if dtype == torch.float32 and extras.get("fp8"):
            continue
        step = Step(rng, gen, dtype, **extras)
        alone, written = step.run(triton_device, shares=False, is_raw=True)
        together, written_too = step.run(triton_device, shares=True, is_raw=True)
        assert float((together - alone).norm() / alone.norm()) < TOLERANCE[dtype]
        torch.testing.assert_close(written, written_too, rtol=0, atol=0, equal_nan=written.is_floating_point())
        step.cache = written
        width = (step.heads.num_heads + step.heads.num_kv_heads) * step.heads.head_dim
        turned = step.qkv.clone()
        turned[:, :width] = torch.randn(turned[:, :width].shape, generator=gen).to(dtype)
        step.qkv = turned
        alone, _ = step.run(triton_device, shares=False, is_raw=False)
        together, _ = step.run(triton_device, shares=True, is_raw=False)
        assert float((together - alone).norm() / alone.norm()) < TOLERANCE[dtype]


class Kinds(StepRows):
    """Of two kinds, as adapters' are."""

    kinds = (0, 1)

    @contextmanager
    def only(self, kind: int) -> Iterator[None]:
        self.kind, before = kind, self.kind
        yield
        self.kind = before


def test_steps_have_the_kinds_of_others_too(rng: random.Random, gen: torch.Generator) -> None:
    step, others = Step(rng, gen, torch.float32), Kinds()
    prefixes = step.prefixes(torch.device("cpu"), 0, others)
    assert prefixes.kinds == (0, 1, 2, 3)
    for others.kind in (0, 1):
        prefixes.choose(step.rows.numpy())
        assert prefixes.kind == 2 * others.kind + 1
        with prefixes.only(2 * (1 - others.kind)):
            prefixes.choose(step.rows.numpy())
            assert prefixes.kind == 2 * others.kind and not prefixes.shares
        assert prefixes.kind == 2 * others.kind + 1
        prefixes.choose(step.rows.numpy()[:3])
        assert prefixes.kind == 2 * others.kind, "too few rows"
