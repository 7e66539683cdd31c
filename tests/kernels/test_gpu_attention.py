"""The attention of the GPU runner, on its Triton kernels, against its definition in float64."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pairs import some
from torch import Tensor

from aengine.kernels.decode_attention import DecodeWorkspace, decode_step_attention, plan_decode
from aengine.kernels.decode_plan import GRAIN, BatchSize
from aengine.kernels.dispatch import torch_reference
from aengine.kernels.paged_attention import PromptLayers, Scores
from aengine.kernels.rotary import HeadNorms, Rope
from aengine.kernels.varlen_attention import plan_prompts, varlen_attention
from aengine.kernels.write_qkv import apply_rope_and_write_kv

pytestmark = pytest.mark.slow
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
EPS = 1e-5


@dataclass
class Case:
    """Sequences over scattered blocks; what no sequence owns, or has not written yet, is NaN."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    seq_lens: list[int]
    query_lens: list[int]
    dtype: torch.dtype
    gen: torch.Generator
    with_norm: bool
    rotary_dim: int | None = None  # None: all of the head; 0: nothing is turned
    interleaved: bool = False
    with_query_scale: bool = False
    with_shifts: bool = False
    softcap: float = 0.0
    with_sinks: bool = False

    def __post_init__(self) -> None:
        gen, d, bs = self.gen, self.head_dim, self.block_size
        n = len(self.seq_lens)
        counts = [-(-s // bs) for s in self.seq_lens]
        num_blocks = sum(counts) + 3
        order = torch.randperm(num_blocks, generator=gen).int()
        self.table = torch.zeros(n + 2, max(counts) + 2, dtype=torch.int32)
        self.rows = torch.randperm(n + 2, generator=gen)[:n]
        shape = (num_blocks, 2, self.num_kv_heads, bs, d)
        self.cache = torch.full(shape, torch.nan).to(self.dtype).permute(0, 3, 1, 2, 4)
        self.context = []  # of each sequence: [seq_len, 2, kv heads, d], the old tokens' keys turned already
        begin = 0
        for i, (seq_len, count) in enumerate(zip(self.seq_lens, counts)):
            blocks = order[begin : begin + count]
            self.table[self.rows[i], :count] = blocks
            begin += count
            kv = torch.randn(seq_len, 2, self.num_kv_heads, d, generator=gen).to(self.dtype)
            old = seq_len - self.query_lens[i]
            # What is before the first query's window is another's by now: the table's entries are stale.
            gone = max(0, old - self.window + 1) // bs if self.window else 0
            self.table[self.rows[i], :gone] = torch.randint(0, num_blocks, (gone,), generator=gen).int()
            t = torch.arange(gone * bs, old)
            self.cache[blocks[t // bs].long(), t % bs] = kv[t]
            self.context.append(kv)
        width = (self.num_heads + 2 * self.num_kv_heads) * d
        self.qkv = torch.randn(sum(self.query_lens), width, generator=gen).to(self.dtype)
        self.make_rope(gen)
        self.sinks = torch.randn(self.num_heads, generator=gen).to(self.dtype) if self.with_sinks else None
        self.q_norm = self.k_norm = None
        if self.with_norm:
            self.q_norm, self.k_norm = ((torch.rand(d, generator=gen) + 0.5).to(self.dtype) for _ in range(2))
        starts = [0]
        for count in self.query_lens:
            starts.append(starts[-1] + count)
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32)
        ranges = [torch.arange(s - q, s) for s, q in zip(self.seq_lens, self.query_lens)]
        self.positions = torch.cat(ranges)
        owner = torch.repeat_interleave(torch.arange(n), torch.tensor(self.query_lens))
        blocks = self.table[self.rows[owner], self.positions // bs].long()
        self.slots = blocks * bs + self.positions % bs

    def make_rope(self, gen: torch.Generator) -> None:
        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        exponent = torch.arange(0, rotary_dim, 2) / max(1, rotary_dim)
        places, n = max(self.seq_lens) + 9, len(self.seq_lens)
        angles = torch.arange(places)[:, None] * 10000.0**-exponent
        table = 1.1 * torch.cat((angles.cos(), angles.sin()), 1)
        scale = torch.rand(places, generator=gen) + 0.5 if self.with_query_scale else None
        shifts = torch.randint(0, 9, (n + 2,), generator=gen, dtype=torch.int32) if self.with_shifts else None
        self.rope = Rope(table, self.interleaved, scale, shifts) if rotary_dim else None

    def rope_on(self, device: torch.device) -> Rope | None:
        if self.rope is None:
            return None
        return Rope(*(x.to(device) if isinstance(x, Tensor) else x for x in self.rope))

    @property
    def places(self) -> Tensor:
        """Where the new tokens' positions are in the table."""
        if self.rope is None or self.rope.shifts is None:
            return self.positions
        return self.positions + self.rope.shifts[self.rows].repeat_interleave(torch.tensor(self.query_lens))

    def turned(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of the new tokens, float64, heads split."""
        heads = self.qkv.double().view(len(self.qkv), -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
        rope = self.rope

        def turn(x: Tensor, weight: Tensor | None) -> Tensor:
            if weight is not None:
                x = x * weight.double() / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
            if rope is None:
                return x
            cos, sin = rope.table.double()[self.places][:, None].chunk(2, -1)
            x, rest = x[..., : rope.table.shape[1]], x[..., rope.table.shape[1] :]
            a, b = (x[..., ::2], x[..., 1::2]) if rope.interleaved else x.chunk(2, -1)
            both = a * cos - b * sin, b * cos + a * sin
            return torch.cat((torch.stack(both, -1).flatten(-2) if rope.interleaved else torch.cat(both, -1), rest), -1)

        q, k = turn(q, self.q_norm), turn(k, self.k_norm)
        if rope is not None and rope.query_scale is not None:
            q = q * rope.query_scale.double()[self.places][:, None, None]
        return q, k, v

    def expected(self) -> Tensor:
        q, k, v = self.turned()
        outs = []
        groups = self.num_heads // self.num_kv_heads
        for i, kv in enumerate(self.context):
            new = slice(int(self.query_start_loc[i]), int(self.query_start_loc[i + 1]))
            keys, values = kv.double().unbind(1)
            old = self.seq_lens[i] - self.query_lens[i]
            keys = torch.cat((keys[:old], k[new])).repeat_interleave(groups, 1)
            values = torch.cat((values[:old], v[new])).repeat_interleave(groups, 1)
            scores = torch.einsum("qhd,thd->hqt", q[new], keys) * self.head_dim**-0.5
            at, seen = torch.arange(old, self.seq_lens[i])[:, None], torch.arange(self.seq_lens[i])
            mask = seen <= at
            if self.window is not None:
                mask &= seen > at - self.window
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            scores = scores.masked_fill(~mask, -torch.inf)
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(*scores.shape[:2], 1)), -1)
            weights = scores.softmax(-1)[..., : len(keys)]
            outs.append(torch.einsum("hqt,thd->qhd", weights, values).flatten(1))
        return torch.cat(outs)

    def on(self, device: torch.device, name: str) -> Tensor:
        return getattr(self, name).to(device)

    def norms(self, device: torch.device) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.to(device), self.k_norm.to(device), EPS)

    def scores(self, device: torch.device) -> Scores:
        sinks = None if self.sinks is None else self.sinks.to(device)
        return Scores(self.head_dim**-0.5, self.window, self.softcap, sinks)

    def layers(self) -> PromptLayers:
        return PromptLayers(self.num_heads, self.num_kv_heads, self.head_dim, self.dtype, self.window)

    def write(self, device: torch.device, cache: Tensor) -> Tensor:
        """`apply_rope_and_write_kv` of all new tokens; returns qkv afterwards."""
        qkv = self.qkv.clone().to(device)
        args = self.places.to(device), self.slots.to(device), self.rope_on(device)
        apply_rope_and_write_kv(qkv, *args, self.norms(device), self.num_heads, cache)
        return qkv

    def decode(self, device: torch.device, qkv: Tensor, cache: Tensor, *, is_raw: bool, padding: int = 0) -> Tensor:
        rows = torch.cat((self.rows, torch.full((padding,), -1)))
        seq_lens = torch.tensor(self.seq_lens + [0] * padding, dtype=torch.int32)
        qkv = torch.cat((qkv, torch.full((padding, qkv.shape[1]), torch.nan, dtype=qkv.dtype, device=device)))
        workspace = DecodeWorkspace(len(rows), self.num_heads, self.num_kv_heads, self.head_dim, device)
        table, rope = self.on(device, "table"), self.rope_on(device)
        plan = plan_decode(rows.to(device), seq_lens.to(device), workspace, self.window)
        out = decode_step_attention(
            qkv,
            cache,
            table,
            rope,
            self.norms(device),
            self.num_heads,
            self.scores(device),
            plan,
            workspace,
            is_raw=is_raw,
        )
        assert workspace.counters.sum() == 0, "a counter was not put back"
        return out


def features(rng: random.Random, head_dim: int) -> dict[str, Any]:
    """What a layer may have beside the usual, each half of the time."""
    return {
        "rotary_dim": rng.choice([None, None, 0, head_dim // 2, head_dim // 4 * 2 - 2]),
        "interleaved": rng.random() < 0.5,
        "with_query_scale": rng.random() < 0.5,
        "with_shifts": rng.random() < 0.5,
        "softcap": rng.choice([0.0, 1.5]),
        "with_sinks": rng.random() < 0.5,
    }


def draw(
    rng: random.Random, gen: torch.Generator, *, decode: bool, dtype: torch.dtype, longest: int, plain: bool = True
) -> Case:
    """``plain``: without `features`."""
    head_dim = rng.choice([16, 64, 80, 128])
    num_kv_heads = rng.choice([1, 2, 3])
    seq_lens = [rng.choice([1, 2, 15, 16, 17, 32, rng.randint(1, longest)]) for _ in range(rng.randint(1, 4))]
    query_lens = [1 if decode else rng.randint(1, s) for s in seq_lens]
    return Case(
        num_heads=num_kv_heads * rng.choice([1, 2, 3, 17 if decode else 8]),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=rng.choice([4, 16, 32]),
        window=rng.choice([None, None, 1, 7, 40]),
        seq_lens=seq_lens,
        query_lens=query_lens,
        dtype=dtype,
        gen=gen,
        with_norm=rng.random() < 0.5,
        **({} if plain else features(rng, head_dim)),
    )


def close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    out = out.cpu().double()
    return bool(((out - expected).norm() / expected.norm()) < TOLERANCE[dtype])


def moved_cache(case: Case, device: torch.device) -> Tensor:
    """The cache on the device in the same order of memory, its own copy."""
    return case.cache.permute(0, 2, 3, 1, 4).clone().to(device).permute(0, 3, 1, 2, 4)


TILINGS: list[Any] = ["NARROW", *BatchSize]
PACKS = (None, 1, 2, 4)
ALL_DTYPES = torch.cuda.is_available()  # elsewhere each tiling has one of them in `make test`


@pytest.fixture
def tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel and the plan as for a batch of that size, or a small one of wide or narrow layers, whatever it is."""
    size = BatchSize.SMALL if request.param == "NARROW" else request.param
    monkeypatch.setattr(DecodeWorkspace, "batch_size", lambda self, num_seqs: size)
    is_narrow = property(lambda self: request.param == "NARROW", lambda self, value: None)
    monkeypatch.setattr(DecodeWorkspace, "is_narrow", is_narrow, raising=False)


@pytest.mark.parametrize(
    ("tiling", "dtype"),
    some(
        itertools.product(TILINGS, DTYPES),
        *(case for i, case in enumerate(itertools.product(TILINGS, DTYPES)) if ALL_DTYPES or i % 4 in (0, 3)),
    ),
    indirect=["tiling"],
    ids=str,
)
@pytest.mark.usefixtures("tiling", "few_idle_programs")
def test_decode(rng: random.Random, gen: torch.Generator, triton_device: torch.device, dtype: torch.dtype) -> None:
    for i in range(8 if triton_device.type == "cuda" else 4):
        case = draw(rng, gen, decode=True, dtype=dtype, longest=300, plain=i < 2)
        padding = rng.randint(0, 2)
        cache = moved_cache(case, triton_device)
        out = case.decode(triton_device, case.qkv.to(triton_device), cache, is_raw=True, padding=padding)
        n = len(case.seq_lens)
        assert close(out[:n], case.expected(), dtype), case
        assert (out[n:] == 0).all()
        written = moved_cache(case, triton_device)
        case.write(triton_device, written)
        assert torch.equal(cache.cpu().isnan(), written.cpu().isnan()), "other places were written"
        torch.testing.assert_close(cache.cpu(), written.cpu(), rtol=1e-2, atol=1e-2, equal_nan=True)
        turned = case.write(triton_device, written)
        assert close(case.decode(triton_device, turned, written, is_raw=False), case.expected(), dtype)


@pytest.mark.parametrize("tiling", TILINGS, indirect=True, ids=str)
@pytest.mark.usefixtures("tiling", "few_idle_programs")
def test_decode_of_long_sequences_in_many_splits(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device
) -> None:
    for window, extras in ((None, {}), (500, {}), (300, {"with_sinks": True, "softcap": 2.0})):
        lens = [rng.randint(700, 1500), 1, 129, 128]
        case = Case(4, 2, 64, 16, window, lens, [1] * 4, torch.float32, gen, True, **extras)
        cache = moved_cache(case, triton_device)
        out = case.decode(triton_device, case.qkv.to(triton_device), cache, is_raw=True)
        assert close(out, case.expected(), torch.float32)
        again = case.decode(triton_device, case.qkv.to(triton_device), cache, is_raw=True)
        assert torch.equal(out, again)


@pytest.mark.parametrize(
    ("pack", "dtype"),
    some(
        itertools.product(PACKS, DTYPES),
        *(case for i, case in enumerate(itertools.product(PACKS, DTYPES)) if ALL_DTYPES or i % 4 in (0, 3)),
    ),
    ids=str,
)
def test_prompts(
    rng: random.Random,
    gen: torch.Generator,
    triton_device: torch.device,
    dtype: torch.dtype,
    pack: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``pack``: with tiles of that many heads, if the group allows it; None: as the tiling is."""
    pytest.importorskip("triton")
    from aengine.kernels.triton import varlen_attention as kernel

    if pack is not None:
        monkeypatch.setattr(kernel, "_tiling", lambda *_: kernel._Tiling(32, 16, 4, 2, pack, 1))
        num_multiprocessors = rng.choice([1, 5, 40])
        monkeypatch.setattr(kernel, "num_multiprocessors", lambda: num_multiprocessors)
    for i in range(5):
        case = draw(rng, gen, decode=False, dtype=dtype, longest=150, plain=i < 2)
        cache = moved_cache(case, triton_device)
        qkv = case.write(triton_device, cache)
        q = qkv.view(len(qkv), -1, case.head_dim)[:, : case.num_heads]
        padded = torch.cat((case.query_start_loc, case.query_start_loc[-1:]))  # a sequence without tokens
        rows = torch.cat((case.rows, torch.tensor([-1])))
        seq_lens = torch.tensor([*case.seq_lens, 0], dtype=torch.int32)
        table, *on = (t.to(triton_device) for t in (case.table, rows, padded, seq_lens))
        plan = plan_prompts(*on, len(q), case.layers(), skip_single=False)
        q = q.clone()  # a kernel between the two, as the plan's docstring demands
        where = (cache, table, plan, len(rows), case.scores(triton_device), None)
        heads = qkv.view(len(qkv), -1, case.head_dim)[:, case.num_heads :]
        for new in (None, (heads[:, : case.num_kv_heads], heads[:, case.num_kv_heads :])):
            assert close(varlen_attention(q, *where, new), case.expected(), dtype), case


@pytest.mark.parametrize("dtype", some(DTYPES, *(DTYPES if ALL_DTYPES else [torch.float16])), ids=str)
@pytest.mark.usefixtures("few_idle_programs")
def test_tiles_of_gpus_with_little_shared_memory(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, dtype: torch.dtype, monkeypatch: Any
) -> None:
    """Of both kernels; less than any GPU has, so that all tiles are cut."""
    from aengine.kernels.triton import decode_attention as decodes
    from aengine.kernels.triton import varlen_attention as prompts

    for kernel in (decodes, prompts):
        monkeypatch.setattr(kernel, "max_shared_memory", lambda: 30_000)
    for head_dim, longest in ((128, 150), (256, 60)):
        lens = [rng.randint(1, longest) for _ in range(3)]
        case = Case(4, 2, head_dim, 16, None, lens, [1] * 3, dtype, gen, True)
        cache = moved_cache(case, triton_device)
        assert close(case.decode(triton_device, case.qkv.to(triton_device), cache, is_raw=True), case.expected(), dtype)
        case = Case(4, 2, head_dim, 16, None, lens, lens, dtype, gen, True)
        cache = moved_cache(case, triton_device)
        qkv = case.write(triton_device, cache)
        q = qkv.view(len(qkv), -1, head_dim)[:, :4]
        on = (t.to(triton_device) for t in (case.rows, case.query_start_loc, torch.tensor(lens, dtype=torch.int32)))
        plan = plan_prompts(*on, len(q), case.layers(), skip_single=False)
        out = varlen_attention(q, cache, case.table.to(triton_device), plan, 3, case.scores(triton_device))
        assert close(out, case.expected(), dtype), case


@pytest.mark.parametrize("least", [1, 4])
def test_few_queries_behind_long_contexts(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile's keys are divided among programs, and its parts put together; ``least``: blocks of a part."""
    pytest.importorskip("triton")
    from aengine.kernels.triton import varlen_attention as kernel

    monkeypatch.setattr(kernel, "_tiling", lambda *_: kernel._Tiling(32, 16, 4, 2, 2, 1))
    monkeypatch.setattr(kernel, "LEAST_BLOCKS", least)
    for window, extras in ((None, {}), (200, {}), (150, {"with_sinks": True, "softcap": 2.0})):
        num_programs = rng.choice([2, 12, 50])
        monkeypatch.setattr(kernel, "num_multiprocessors", lambda num_programs=num_programs: num_programs)
        lens = [rng.randint(300, 600), 40, rng.randint(100, 500)]
        case = Case(4, 2, 64, 16, window, lens, [rng.randint(2, 40), 1, 20], torch.float32, gen, True, **extras)
        cache = moved_cache(case, triton_device)
        qkv = case.write(triton_device, cache)
        q = qkv.view(len(qkv), -1, case.head_dim)[:, : case.num_heads]
        on = (case.rows, case.query_start_loc, torch.tensor(case.seq_lens, dtype=torch.int32))
        plan = plan_prompts(*(t.to(triton_device) for t in on), len(q), case.layers(), skip_single=False)
        planned = plan.clone()
        where = (cache, case.table.to(triton_device), plan, len(lens), case.scores(triton_device))
        out = varlen_attention(q, *where)
        assert close(out, case.expected(), torch.float32), case
        assert torch.equal(plan, planned), "a counter was not put back"
        assert torch.equal(varlen_attention(q, *where), out), "the order of the parts differs"


def test_a_slot_of_minus_one_is_not_written(gen: torch.Generator, triton_device: torch.device) -> None:
    case = Case(2, 1, 16, 4, None, [9, 5], [3, 2], torch.float32, gen, True)
    case.slots[2] = -1
    cache = moved_cache(case, triton_device)
    case.write(triton_device, cache)
    with torch_reference():
        expected = case.cache.clone()
        case.write(torch.device("cpu"), expected)
    torch.testing.assert_close(cache.cpu(), expected, equal_nan=True)


def test_the_torch_reference(rng: random.Random, gen: torch.Generator) -> None:
    for i in range(16):
        case = draw(rng, gen, decode=rng.random() < 0.5, dtype=torch.float32, longest=100, plain=i < 4)
        cache = case.cache.nan_to_num()  # the CPU's runner clears the blocks that change hands
        expected = case.expected()
        if max(case.query_lens) == 1:
            out = case.decode(torch.device("cpu"), case.qkv, cache, is_raw=True, padding=1)[:-1]
        else:
            qkv = case.write(torch.device("cpu"), cache)
            q = qkv.view(len(qkv), -1, case.head_dim)[:, : case.num_heads]
            lens = torch.tensor(case.seq_lens, dtype=torch.int32)
            plan = plan_prompts(case.rows, case.query_start_loc, lens, len(q), case.layers(), skip_single=False)
            out = varlen_attention(q, cache, case.table, plan, len(lens), case.scores(torch.device("cpu")))
        assert close(out, expected, torch.float32), case


def test_plans(rng: random.Random, triton_device: torch.device) -> None:
    for _ in range(20):
        n = rng.randint(1, 40)
        lens = [rng.choice([0, 1, 128, rng.randint(1, 200), rng.randint(1, 30_000)]) for _ in range(n)]
        workspace = DecodeWorkspace(n, 4, rng.choice([1, 2, 8]), 64, triton_device)
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        rows = torch.randperm(n)
        plan = plan_decode(rows.to(triton_device), seq_lens.to(triton_device), workspace).cpu()
        with torch_reference():
            expected = plan_decode(rows, seq_lens, workspace)
        assert torch.equal(plan[:, 0], expected[:, 0])
        real = expected[:, 0] >= 0
        assert torch.equal(plan[real, :7], expected[real, :7])
        most = workspace.sharing(n).max_extra
        assert len(expected) == n + most
        items = expected[real].tolist()
        for i, length in enumerate(lens):
            mine = [item for item in items if item[0] == i]
            assert [item[1:3] for item in mine] == [[int(rows[i]), length]] * len(mine)
            assert mine[0][3] == 0 and mine[-1][4] == length and mine[0][5] == items.index(mine[0])
            assert all(a[4] == b[3] and a[4] % GRAIN == 0 for a, b in zip(mine, mine[1:]))
            sizes = [item[4] - item[3] for item in mine]
            assert len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0], "parts are not equal"
            assert {item[6] for item in mine} == {len(mine)} and {item[5] for item in mine} == {mine[0][5]}
