"""The threads of a tape under random schedules: each gives the same bits, and reads what is there, not what was.

The team's code is compiled anew with a random wait at each of its atomic operations, and so are the kernels' own. What
an op has read is poisoned by the op after it: a chunk that ran too late, or began before all was written, shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pairs import some
from torch import Tensor

pytest.importorskip("llvmlite")

from test_cpu_attention import Batch, Shape

from aengine.kernels.cpu import codes, ops, tape
from aengine.kernels.cpu.compiler.code_cache import CodeCache
from aengine.kernels.cpu.compiler.emit import F32, I32, I64, Function, Value
from aengine.kernels.cpu.compiler.target import Target, host
from aengine.kernels.cpu.library import Library
from aengine.kernels.cpu.rows import KERNELS
from aengine.kernels.paged_attention import Scores

WIDTH = 32
SCHED_YIELD = 24, 124  # the system calls of x86-64 and arm64
ATOMIC = ("fetch_add", "exchange", "atomic_load", "atomic_store")


def delay(f: Function) -> None:
    """Mostly nothing; sometimes some thousand cycles; seldom the processor is given to another thread."""
    draw = f.call("llvm.readcyclecounter", I64) * 0x2545F4914F6CDD1D >> 40
    with f.when((draw & 7).equals(0)):
        until = f.call("llvm.readcyclecounter", I64) + (draw >> 3 & 4095)
        with f.repeat() as over:
            f.leave(over, f.call("llvm.readcyclecounter", I64) >= until)
    with f.when((draw >> 16 & 63).equals(0)):
        number = SCHED_YIELD["aarch64" in host().triple]
        zero = f.number(I64, 0)
        f.call("syscall", I64, f.number(I64, number), f.null(), zero, zero, f.null(), zero, zero)


def mix(f: Function, target: Target) -> None:
    """words: in, out int32 [chunks, WIDTH]. A row of out depends on all of in."""
    delay(f)
    total = f.variable(I32 * WIDTH, 0)
    with f.loop(0, f.rows) as i:
        own = f.load(I32 * WIDTH, f.address(f.words, 0) + i * (4 * WIDTH))
        total.set((total.get() ^ own) * 0x01000193 + own)
    mixed = total.get() ^ f.splat(f.narrowed(f.chunk * 0x9E3779B1, I32), WIDTH)
    f.store(mixed, f.address(f.words, 1) + f.chunk * (4 * WIDTH))
    delay(f)


def poison(f: Function, target: Target) -> None:
    """words: float32 [rows, size], size: they become NaN."""
    delay(f)
    size = f.word(f.words, 1)
    with f.loop(0, size, 16) as i:
        f.store(f.number(F32 * 16, float("nan")), f.address(f.words, 0) + (f.chunk * size + i) * 4)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "mix", mix)
    monkeypatch.setitem(KERNELS, "poison", poison)


@contextmanager
def delayed(num_threads: int, folder: Path) -> Iterator[Library]:
    """A library whose code waits at random before and after each atomic operation."""
    with pytest.MonkeyPatch.context() as context:
        for name in ATOMIC:
            plain = getattr(Function, name)

            def between(f: Function, *arguments: Any, plain: Any = plain, **named: Any) -> Value:
                delay(f)
                result = plain(f, *arguments, **named)
                delay(f)
                return result

            context.setattr(Function, name, between)
        own = Library(host(), num_threads, CodeCache(folder))
        context.setattr(tape, "library", lambda: own)
        context.setattr(ops, "library", lambda: own)
        try:
            yield own
        finally:
            own.team.close()


def mixed(x: NDArray[np.int32], num_ops: int) -> NDArray[np.int32]:
    """What `mix` makes of x, ``num_ops`` times."""
    chunks = (np.arange(len(x), dtype=np.int64) * 0x9E3779B1).astype(np.int32)[:, None]
    for _ in range(num_ops):
        total = np.zeros(WIDTH, np.int32)
        for own in x:
            total = (total ^ own) * np.int32(0x01000193) + own
        x = total ^ chunks
    return x


class Mixes:
    """A tape of `mix`; what each has read is poisoned."""

    def __init__(self, rng: random.Random) -> None:
        self.most, self.num_ops = rng.choice((1, 3, 9, 40)), rng.randint(1, 6)
        self.first = torch.zeros(self.most, WIDTH, dtype=torch.int32)
        with tape.record(self.most) as self.tape:
            places = [self.first, *(tape.empty(self.most, WIDTH, torch.int32) for _ in range(self.num_ops))]
            for before, after in pairwise(places):
                tape.launch("mix", [before, after], self.most)
                tape.launch("poison", [before, WIDTH], self.most)
        self.last = places[-1]

    def check(self, rows: int, gen: torch.Generator) -> None:
        x = torch.randint(-(2**31), 2**31, (rows, WIDTH), dtype=torch.int32, generator=gen)
        self.first[:rows], self.last[:] = x, 0
        self.tape.run(rows)
        assert np.array_equal(self.last[:rows].numpy(), mixed(x.numpy(), self.num_ops)) and not self.last[rows:].any()


class Layer:
    """A tape of what a layer is made of: a norm, products, attention whose keys are shared by chunks."""

    def __init__(self, rng: random.Random, gen: torch.Generator) -> None:
        kv_heads = rng.randint(1, 3)
        shape = Shape(kv_heads * rng.randint(1, 4), kv_heads, 32 * rng.randint(1, 2))
        batch = self.batch = Batch(rng, gen, shape)
        batch.cache.copy_(torch.where(batch.cache.isnan(), 0.5, batch.cache))
        self.rows, width = len(batch.qkv), shape.heads * shape.dim
        self.x, self.sum = (torch.empty(self.rows, 64) for _ in range(2))
        sizes = (batch.qkv.shape[1], 2), (64, width // 32)
        up, down = (torch.randint(0, 40, (*size, 34), dtype=torch.uint8, generator=gen) for size in sizes)
        packed, norm = [codes.pack("q8_0", own) for own in (up, down)], (torch.ones(64), 1e-5)
        with tape.record(self.rows) as self.tape:
            of = codes.activations(self.x, norm)
            qkv = codes.multiply(packed[0], of)
            tape.launch("poison", [self.x, 64], self.rows)
            where = batch.positions, batch.table_rows, batch.table, batch.cache
            out = ops.attend(qkv, *where, Scores(0.1))
            tape.launch("poison", [qkv, qkv.shape[1]], self.rows)
            codes.add_to(self.sum, packed[1], codes.activations(out))
            tape.launch("poison", [out, width], self.rows)

    def run(self, x: Tensor) -> Tensor:
        self.x[: len(x)], self.sum[: len(x)] = x, 1.0
        self.tape.run(len(x))
        return self.sum[: len(x)].clone()


@pytest.mark.parametrize("num_schedules", some((150, 10_000), 150))
def test_random_schedules(
    num_schedules: int, kernels: None, tmp_path: Path, rng: random.Random, gen: torch.Generator
) -> None:
    for num_threads in range(1, 5):
        with delayed(num_threads, tmp_path):
            tapes = [Mixes(rng) for _ in range(6)]
            for _ in range(num_schedules // 4):
                own = rng.choice(tapes)
                own.check(rng.randint(0, own.most), gen)


@pytest.mark.parametrize(("num_layers", "num_schedules"), some(((1, 12), (10, 100)), (1, 12)))
def test_a_layer_by_random_schedules(
    num_layers: int, num_schedules: int, kernels: None, tmp_path: Path, rng: random.Random, gen: torch.Generator
) -> None:
    for _ in range(num_layers):
        seed = rng.getrandbits(32)
        plain = Layer(random.Random(seed), gen.manual_seed(seed))
        for num_threads in range(2, 5):
            with delayed(num_threads, tmp_path):
                own = Layer(random.Random(seed), gen.manual_seed(seed))
                for _ in range(num_schedules):
                    x = torch.randn(rng.choice((1, 2, 5, own.rows)), 64, generator=gen)
                    found = own.run(x)
                    assert found.isfinite().all()
                    assert torch.equal(found, plain.run(x))
