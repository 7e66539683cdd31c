"""Compiled attention on a CPU against torch's, for batches of decodes and prompts in a cache that is NaN elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("llvmlite")

import llvmlite.binding as llvm

from aengine.kernels import write_qkv as reference
from aengine.kernels.cpu import ops, tape
from aengine.kernels.cpu.compiler.code_cache import CodeCache, code_cache
from aengine.kernels.cpu.compiler.compiled import compile_module
from aengine.kernels.cpu.compiler.emit import Module
from aengine.kernels.cpu.compiler.target import Target, host
from aengine.kernels.cpu.library import Library, write_kernels
from aengine.kernels.cpu.ops import attend, attend_both_sides, write_qkv
from aengine.kernels.kv_codes import kept_kv, kv_numbers
from aengine.kernels.paged_attention import Scores, prefill_attention
from aengine.kernels.rotary import HeadNorms, Rope, apply_rotary, rotary_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    dim: int

    @classmethod
    def random(cls, rng: random.Random, most: int = 16) -> Shape:
        kv_heads = rng.randint(1, 3)
        return cls(kv_heads * rng.randint(1, most), kv_heads, 16 * rng.randint(1, 6))


class Batch:
    """Tokens of several requests, and a cache in which what they may look at lies in scattered blocks."""

    def __init__(
        self, rng: random.Random, gen: torch.Generator, shape: Shape, dtype: torch.dtype = torch.float32
    ) -> None:
        self.shape, self.size = shape, rng.choice((1, 3, 16, 24, 32))
        olds = 0, rng.randint(1, 60), rng.randint(200, 700)
        self.lens = [(rng.choice((1, rng.randint(2, 40))), rng.choice(olds)) for _ in range(3)]
        self.lens += [(1, olds[1] + i) for i in range(2)]  # at consecutive positions, as tokens of one request are
        heads, kv_heads, dim = shape
        blocks = [-(-(new + old) // self.size) for new, old in self.lens]
        width = max(blocks) + 2
        pages = torch.full((sum(blocks) + 4, self.size * 2 * kv_heads * dim + 32), torch.nan, dtype=dtype)
        self.cache = pages[:, 16:-16].unflatten(1, (self.size, 2, kv_heads, dim))
        free = list(range(1, len(pages)))
        rng.shuffle(free)
        self.table = torch.zeros(9, width, dtype=torch.int32)
        self.rows = rng.sample(range(9), 5)
        positions, table_rows = [], []
        for row, count, (new, old) in zip(self.rows, blocks, self.lens, strict=True):
            self.table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
            for place in range(old):
                block = int(self.table[row, place // self.size])
                self.cache[block, place % self.size] = torch.randn(2, kv_heads, dim, generator=gen)
            positions += range(old, old + new)
            table_rows += [row] * new
        self.positions, self.table_rows = torch.tensor(positions), torch.tensor(table_rows)
        blocks_of = self.table[self.table_rows, self.positions // self.size].long()
        self.slots = blocks_of * self.size + self.positions % self.size
        self.qkv = torch.randn(len(positions), (heads + 2 * kv_heads) * dim, generator=gen)

    def forget(self, window: int) -> None:
        """Blocks that the window has passed have other owners."""
        for row, (_, old) in zip(self.rows, self.lens, strict=True):
            self.table[row, : max(0, old - window + 1) // self.size] = 0

    def wanted(self, how: Scores) -> Tensor:
        """What torch's ops attend to."""
        heads, kv_heads, _ = self.shape
        parts, begin = [], 0
        for row, (new, old) in zip(self.rows, self.lens, strict=True):
            own = self.qkv[begin : begin + new].view(new, heads + 2 * kv_heads, -1)
            q, kv = own[:, :heads], own[:, heads:].unflatten(1, (2, kv_heads))
            blocks = self.table[row, : -(-(new + old) // self.size)]
            cache = self.cache.float().nan_to_num(0.0)
            parts.append(prefill_attention(q, kv, cache, blocks, new + old, how))
            begin += new
        return torch.cat(parts)


def scores(rng: random.Random, gen: torch.Generator, heads: int) -> Scores:
    sinks = torch.randn(heads, generator=gen) * 2
    window = rng.choice((None, 1, rng.randint(2, 60)))
    return Scores(rng.uniform(0.1, 0.4), window, rng.choice((0.0, 5.0)), rng.choice((None, sinks)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend(rng: random.Random, gen: torch.Generator, dtype: torch.dtype) -> None:
    shape = Shape.random(rng)
    for _ in range(6):
        batch = Batch(rng, gen, shape, dtype)
        how = scores(rng, gen, shape.heads)
        write_qkv(batch.qkv, batch.positions, batch.slots, None, None, shape.heads, batch.cache)
        if dtype != torch.float32:  # the reference takes tokens of a request without a past as they are
            kv = batch.qkv.view(len(batch.qkv), -1, shape.dim)[:, shape.heads :]
            kv.copy_(kv.to(dtype))
        wanted = batch.wanted(how)
        if how.window is not None:
            batch.forget(how.window)
        out = attend(batch.qkv, batch.positions, batch.table_rows, batch.table, batch.cache, how)
        torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)


@pytest.fixture
def three_threads() -> Iterator[Library]:
    """Few tokens' keys are divided among several chunks."""
    own = Library(host(), 3, code_cache())
    yield own
    own.team.close()


@pytest.mark.parametrize("group", [1, 3, 16])
def test_a_token_has_the_same_bits_in_any_batch(
    rng: random.Random, gen: torch.Generator, three_threads: Library, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """Alone as a decode, or anywhere in a prompt, of which any part may be computed together, by any threads."""
    batch = Batch(rng, gen, Shape(2 * group, 2, 32))
    how = scores(rng, gen, 2 * group)
    write_qkv(batch.qkv, batch.positions, batch.slots, None, None, 2 * group, batch.cache)

    def of(begin: int, end: int) -> Tensor:
        own = (x[begin:end].contiguous() for x in (batch.qkv, batch.positions, batch.table_rows))
        return attend(*own, batch.table, batch.cache, how)

    count = len(batch.qkv)
    whole = of(0, count)
    for module in (tape, ops):
        monkeypatch.setattr(module, "library", lambda: three_threads)
    for _ in range(2):
        assert torch.equal(torch.cat([of(i, i + 1) for i in range(count)]), whole)
    for _ in range(5):
        begin, end = sorted(rng.sample(range(count + 1), 2))
        assert torch.equal(of(begin, end), whole[begin:end])
    assert torch.equal(of(0, min(16, count)), whole[:16])


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_a_query_that_is_no_number_finds_none(rng: random.Random, gen: torch.Generator, softcap: float) -> None:
    batch = Batch(rng, gen, Shape(2, 1, 16))
    write_qkv(batch.qkv, batch.positions, batch.slots, None, None, 2, batch.cache)
    batch.qkv[3, 5] = torch.nan  # of the first head
    how = Scores(0.3, None, softcap, None)
    out = attend(batch.qkv, batch.positions, batch.table_rows, batch.table, batch.cache, how)
    is_number = out.isfinite().view(-1, 2, 16)
    assert not is_number[3, 0].any() and int(is_number.sum()) == out.numel() - 16


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_no_number_is_found_by_who_sees_it_alone(
    rng: random.Random, gen: torch.Generator, value: float
) -> None:
    """Not by the tokens of its tile before it, nor by those whose window it has left."""
    for window in (None, 5):
        batch = Batch(rng, gen, Shape(6, 2, 16))
        table = batch.table[batch.table_rows]
        batch.qkv.view(-1, 10, 16)[rng.sample(range(len(batch.qkv)), 3), -1, 3] = value
        write_qkv(batch.qkv, batch.positions, batch.slots, None, None, 6, batch.cache)
        out = attend(batch.qkv, batch.positions, batch.table_rows, batch.table, batch.cache, Scores(0.3, window))
        for i, end in enumerate((batch.positions + 1).tolist()):
            places = torch.arange(0 if window is None else max(0, end - window), end)
            k, v = batch.cache[table[i, places // batch.size].long(), places % batch.size].unbind(1)
            q = batch.qkv[i].view(10, 16)[:6].view(2, 3, 16)
            weights = torch.einsum("hgd,nhd->hgn", q, k).mul(0.3).softmax(2)
            wanted = torch.einsum("hgn,nhd->hgd", weights, v).flatten()
            torch.testing.assert_close(out[i], wanted, rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("group", [1, 4])
def test_attend_both_sides(rng: random.Random, gen: torch.Generator, group: int) -> None:
    """Whole texts of a batch, whose tokens lie one after the other; each has the bits that it has alone."""
    for reach in (None, 0, rng.randint(1, 40)):
        heads, dim = rng.randint(1, 3), 16 * rng.randint(1, 5)
        lens = torch.tensor([rng.choice((1, rng.randint(2, 40), rng.randint(200, 400))) for _ in range(4)])
        begins, count = lens.cumsum(0) - lens, int(lens.sum())
        texts = torch.arange(4).repeat_interleave(lens)
        positions = torch.arange(count) - begins[texts]
        heads_of_token = torch.randn(count, (group + 2) * heads, dim, generator=gen)
        q, k, v = heads_of_token.split([group * heads, heads, heads], 1)
        out = attend_both_sides(q, k, v, positions, texts, begins.int()[:, None], lens, reach)
        for begin, n in zip(begins.tolist(), lens.tolist(), strict=True):
            own = [x[begin : begin + n] for x in (q, k, v)]
            far = (torch.arange(n)[:, None] - torch.arange(n)).abs() > (n if reach is None else reach)
            bias = torch.zeros(n, n).masked_fill_(far, -torch.inf)
            wanted = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in own), bias, enable_gqa=True)
            torch.testing.assert_close(out[begin : begin + n], wanted.transpose(0, 1).flatten(1), rtol=2e-5, atol=2e-5)
            zero = torch.zeros(n, dtype=torch.int64)
            alone = attend_both_sides(*own, torch.arange(n), zero, zero.int()[:1, None], lens.new_tensor([n]), reach)
            assert torch.equal(alone, out[begin : begin + n])


def test_layers_whose_states_have_one_size_do_not_meet(three_threads: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 heads of 16 with 3 segments, and 2 of 32 for 3 each with 2: 51,200 bytes both."""

    def of(shape: Shape, width: int) -> Tensor:
        heads, kv_heads, dim = shape
        generator = torch.Generator().manual_seed(width)
        qkv = torch.randn(16, (heads + 2 * kv_heads) * dim, generator=generator)
        cache = torch.randn(width, 16, 2, kv_heads, dim, generator=generator)
        positions, rows = torch.full((16,), width * 16 - 1), torch.arange(16)
        return attend(qkv, positions, rows, torch.arange(width).int().repeat(16, 1), cache, Scores(0.2))

    layers = (Shape(5, 5, 16), 48), (Shape(6, 2, 32), 32)
    wanted = [of(*layer) for layer in layers]
    for module in (tape, ops):
        monkeypatch.setattr(module, "library", lambda: three_threads)
    for _ in range(2):
        for layer, out in zip(layers, wanted, strict=True):
            assert torch.equal(of(*layer), out)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_qkv(rng: random.Random, gen: torch.Generator, interleaved: bool, dtype: torch.dtype) -> None:
    for _ in range(6):
        shape = Shape.random(rng, 4)
        batch = Batch(rng, gen, shape, dtype)
        batch.slots[rng.randrange(len(batch.slots))] = -1
        half = rng.randint(1, shape.dim // 2)
        table = torch.randn(750, 2 * half, generator=gen)
        query_scale = rng.choice((None, torch.rand(750, generator=gen)))
        rope = rng.choice((None, Rope(table, interleaved, query_scale)))
        weights = torch.randn(2, shape.dim, generator=gen)
        norms = rng.choice((None, HeadNorms(weights[0], weights[1], 1e-5)))
        qkv, cache = batch.qkv.clone(), batch.cache.clone()
        where = batch.positions, batch.slots, rope, norms, shape.heads
        reference.apply_rope_and_write_kv(qkv, *where, cache)
        write_qkv(batch.qkv, *where, batch.cache)
        torch.testing.assert_close(batch.qkv, qkv, rtol=2e-6, atol=2e-6)
        again = batch.qkv.clone()
        reference.apply_rope_and_write_kv(again, *where[:2], None, None, shape.heads, cache)
        assert torch.equal(batch.cache.nan_to_num(7.0), cache.nan_to_num(7.0))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_has_the_bits_of_torch(gen: torch.Generator, interleaved: bool) -> None:
    positions = torch.randint(0, 500, (7,), generator=gen)
    inv_freq = torch.rand(24, generator=gen)
    cos, sin = rotary_rows(torch.arange(500), inv_freq, 1.3)
    table = torch.cat((cos[:, 0, :24], sin[:, 0, 24:]), 1)
    qkv = torch.randn(7, 5 * 64, generator=gen)
    wanted = qkv.clone()
    rotated = rotary_rows(positions, inv_freq, 1.3, interleaved=interleaved)
    apply_rotary(wanted.view(7, 5, 64)[:, :4], *rotated, interleaved=interleaved)
    cache = torch.zeros(1, 7, 2, 1, 64)
    write_qkv(qkv, positions, torch.arange(7), Rope(table, interleaved), None, 3, cache)
    assert torch.equal(qkv, wanted)
    assert torch.equal(cache[0].flatten(1), wanted[:, 3 * 64 :])


def test_both_are_recorded(rng: random.Random, gen: torch.Generator) -> None:
    shape = Shape(3, 1, 16)
    batch = Batch(rng, gen, shape)
    qkv, how = batch.qkv.clone(), Scores(0.3)
    with tape.record(rows=len(qkv)) as recorded:
        write_qkv(qkv, batch.positions, batch.slots, None, None, shape.heads, batch.cache)
        out = attend(qkv, batch.positions, batch.table_rows, batch.table, batch.cache, how)
    recorded.run(len(qkv))
    torch.testing.assert_close(out, batch.wanted(how), rtol=2e-5, atol=2e-5)


NAMES = ["attend.48.3.float32", "attend.32.1.bfloat16", "write_qkv.halves.float32", "write_qkv.interleaved.float16"]
NAMES += ["attend.32.2.float8_e4m3fn", "write_qkv.halves.float8_e4m3fn"]
PLAIN = Target("x86_64-unknown-linux-gnu", "x86-64", "")
ARM = Target("aarch64-unknown-linux-gnu", "generic", "+neon")


@pytest.mark.parametrize(
    "target", [pytest.param(PLAIN, id="sse2", marks=pytest.mark.extended), pytest.param(ARM, id="neon")]
)
def test_they_compile_for(target: Target) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = Module("attention")
    write_kernels(module, NAMES, target)
    assert len(compile_module(module, target)) > 10_000


@pytest.mark.skipif("+avx2" not in host().features, reason="a processor with AVX2")
def test_with_avx2_alone(
    rng: random.Random, gen: torch.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    avx2 = Library(Target(host().triple, "haswell", "+avx2,+fma,+f16c"), 1, CodeCache(tmp_path))
    monkeypatch.setattr(tape, "library", lambda: avx2)
    test_write_qkv(rng, gen, interleaved=True, dtype=torch.float16)
    test_attend(rng, gen, torch.bfloat16)


def test_keys_and_values_in_fp8_are_kept_as_torch_rounds_them() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (codes[:126] + codes[1:127]) / 2
    beside = [torch.nextafter(halfway, torch.tensor(far)) for far in (1e9, -1e9)]
    odd = torch.tensor([torch.inf, -torch.inf, 1e-40, 449, 464, -1e30])
    numbers = torch.cat([codes, halfway, -halfway, *beside, odd])
    numbers = F.pad(numbers, (0, -len(numbers) % 64)).view(-1, 2, 1, 32)
    for scales in (torch.ones(2, 1), torch.tensor([[0.37], [2.9]])):
        kv = numbers * scales[:, :, None]
        slots, cache = torch.arange(len(kv)), torch.zeros(len(kv), 1, 2, 1, 32, dtype=torch.uint8)
        qkv = torch.cat([torch.zeros(len(kv), 32), kv.flatten(1)], 1)
        write_qkv(qkv, slots, slots, None, None, 1, cache, scales)
        assert torch.equal(cache.squeeze(1), kept_kv(kv, torch.uint8, scales))


def test_attend_over_fp8(rng: random.Random, gen: torch.Generator) -> None:
    """What is not written are codes of NaN."""
    shape = Shape.random(rng)
    scales = torch.rand(2, shape.kv_heads, generator=gen) / 100 + 0.005
    for _ in range(4):
        batch = Batch(rng, gen, shape)
        plain = batch.cache
        how = scores(rng, gen, shape.heads)
        batch.cache = kept_kv(plain, torch.uint8, scales)
        write_qkv(batch.qkv, batch.positions, batch.slots, None, None, shape.heads, batch.cache, scales)
        kept, batch.cache = batch.cache, kv_numbers(batch.cache, torch.float32, scales)
        kv = batch.qkv.view(len(batch.qkv), -1, shape.dim)[:, shape.heads :].unflatten(1, (2, shape.kv_heads))
        kv.copy_(kv_numbers(kept_kv(kv, torch.uint8, scales), torch.float32, scales))
        wanted = batch.wanted(how)
        out = attend(batch.qkv, batch.positions, batch.table_rows, batch.table, kept, how, scales)
        torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)
