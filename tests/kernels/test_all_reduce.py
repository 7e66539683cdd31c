"""Sums and gathers over ranks, in Triton's interpreter: one process plays all of them, first sending, then taking."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from aengine.kernels.all_reduce import EACH_WAY, all_gathered, all_reduced, sum_of
from aengine.kernels.exchange_buffers import MAX_PROGRAMS, ExchangeBuffers

pytest.importorskip("triton")

from aengine.kernels.triton.exchange_bulk import BulkTiling, gather_in_bulk, sum_in_bulk, sum_in_two_shots
from aengine.kernels.triton.exchange_parts import Phase
from aengine.kernels.triton.exchange_words import gather_in_words, sum_in_words

WORDS, BULK = 4096, 32768
SUMS = (sum_in_words, sum_in_bulk, sum_in_two_shots)


@pytest.fixture(autouse=True)
def interpreted(triton_device: torch.device) -> None:
    if triton_device.type != "cpu":
        pytest.skip("on GPUs each rank is a process: tests/gpu/test_gpu_ranks.py")


class Ranks:
    """Mailboxes in one process' memory."""

    def __init__(self, size: int) -> None:
        num_bytes = ExchangeBuffers.bytes_needed(size, WORDS, BULK)
        self._memory = torch.zeros(size, num_bytes // 16 + 1, 2, dtype=torch.int64)
        addresses = torch.tensor([(memory.data_ptr() + 15) // 16 * 16 for memory in self._memory])
        self.mailboxes = [
            ExchangeBuffers(rank, size, WORDS, BULK, addresses, torch.zeros(MAX_PROGRAMS, dtype=torch.int32))
            for rank in range(size)
        ]

    def call(
        self, op: Callable[..., None], outs: list[torch.Tensor], xs: list[torch.Tensor], **options: bool | BulkTiling
    ) -> None:
        phases = (Phase.SEND, Phase.ADD, Phase.TAKE) if op is sum_in_two_shots else (Phase.SEND, Phase.TAKE)
        for phase in phases:
            for buffers, out, x in zip(self.mailboxes, outs, xs):
                op(out, x, buffers, phases=phase, **options)


def test_against_the_reference(rng: random.Random, gen: torch.Generator) -> None:
    """Calls of all kinds, of different sizes and numbers of programs, one after the other over the same memory."""
    for size in (2, 3, 4):
        ranks = Ranks(size)
        for _ in range(8):
            dtype = rng.choice((torch.float16, torch.float32))  # the interpreter cuts bfloat16 off instead of rounding
            n, hidden = rng.randint(1, 4), rng.choice((8, 576, 2048))
            parts = [torch.randn(n, hidden, generator=gen).to(dtype) for _ in range(size)]
            residual = torch.randn(n, hidden, generator=gen).to(dtype)
            op, add = rng.choice(SUMS), rng.random() < 0.5
            if parts[0].nbytes > 4 * WORDS:
                op = rng.choice(SUMS[1:])
            outs = [residual.clone() for _ in range(size)]
            blocks = {} if op is sum_in_words else {"tiling": BulkTiling(rng.randint(1, 4), 1024, 4)}
            ranks.call(op, outs, parts, add=add, **blocks)
            expected = (residual + sum_of(parts) if add else sum_of(parts)).to(dtype)
            assert all(torch.equal(out, expected) for out in outs), f"{op.__name__} of {size} x {dtype} {n} x {hidden}"


def test_bfloat16_is_added_in_float32(gen: torch.Generator) -> None:
    """Sums that need no rounding at the end, but would if they were made in bfloat16."""
    parts = [torch.full((1, 16), 256.0), torch.ones(1, 16), torch.full((1, 16), -256.0)]
    for op in SUMS:
        outs = [torch.ones(1, 16, dtype=torch.bfloat16) for _ in parts]
        Ranks(3).call(op, outs, [part.bfloat16() for part in parts], add=True)
        assert all(out.eq(2.0).all() for out in outs)


def test_each_way_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded before graphs are captured is all that a sum may launch."""
    from aengine.kernels.triton import all_reduce as op

    called: list[str] = []
    for module, name in ((op.exchange_words, "sum_in_words"), *((op.exchange_bulk, one.__name__) for one in SUMS[1:])):
        monkeypatch.setattr(module, name, lambda *args, name=name, **how: called.append(name))
    buffers = ExchangeBuffers(0, 2, 2**16, 2**25, torch.zeros(2), torch.zeros(1))
    for num_bytes in EACH_WAY:
        all_reduced(torch.zeros(-(-num_bytes // 8192), 4096, dtype=torch.float16), buffers)
    assert called == [one.__name__ for one in SUMS]


def test_sums_larger_than_the_memory_are_cut(monkeypatch: pytest.MonkeyPatch, gen: torch.Generator) -> None:
    """By rows, with exchanges that give the rank's own part as the sum."""
    from aengine.kernels.triton import all_reduce as op

    rows: list[int] = []

    def exchange(out: torch.Tensor, part: torch.Tensor, buffers: ExchangeBuffers, *, add: bool) -> None:
        assert part.nbytes <= BULK
        rows.append(len(part))
        out.copy_(part)

    monkeypatch.setattr(op.exchange_bulk, "sum_in_two_shots", exchange)
    for n, expected in ((3, [3]), (4, [4]), (9, [4, 4, 1])):
        part = torch.randn(n, 2048, generator=gen)
        assert torch.equal(all_reduced(part, Ranks(3).mailboxes[0]), part)
        assert rows == expected
        rows.clear()


def test_gathers(gen: torch.Generator) -> None:
    ranks = Ranks(3)
    for op, n in ((gather_in_words, 1), (gather_in_words, 777), (gather_in_bulk, 4), (gather_in_bulk, 4196)):
        xs = [torch.randint(-(2**31), 2**31, (n,), generator=gen, dtype=torch.int32) for _ in range(3)]
        outs = [torch.empty(3, n, dtype=torch.int32) for _ in range(3)]
        ranks.call(op, outs, xs)
        assert all(torch.equal(out, torch.stack(xs)) for out in outs)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("op", [sum_in_words, sum_in_bulk, gather_in_words, gather_in_bulk])
def test_a_rank_may_be_a_call_ahead(op: Callable[..., None]) -> None:
    """In one shot a rank's call ends when all have sent: its next one may signal before another looks for this one's.
    Numbers of calls wrap around between the two."""
    ranks, is_sum = Ranks(2), op in SUMS
    for buffers in ranks.mailboxes:
        buffers.calls.fill_(2**31 - 2)
    how = {"add": False} if is_sum else {}
    shape, dtype = ((1, 64), torch.float32) if is_sum else ((64,), torch.int32)
    xs = [[torch.full(shape, 1 + 10 * rank + call, dtype=dtype) for call in range(2)] for rank in range(2)]
    outs = [[torch.zeros_like(xs[0][0]) if is_sum else torch.zeros(2, 64, dtype=dtype) for _ in range(2)] for _ in xs]

    def do(rank: int, call: int, phase: int) -> None:
        op(outs[rank][call], xs[rank][call], ranks.mailboxes[rank], phases=phase, **how)

    order = [(0, 0, Phase.SEND), (1, 0, Phase.SEND), (0, 0, Phase.TAKE), (0, 1, Phase.SEND)]
    order += [(1, 0, Phase.TAKE), (1, 1, Phase.SEND), (0, 1, Phase.TAKE), (1, 1, Phase.TAKE)]
    for rank, call, phase in order:
        do(rank, call, phase)
    for call in range(2):
        parts = [xs[rank][call] for rank in range(2)]
        wanted = sum_of(parts) if is_sum else torch.stack(parts)
        assert all(torch.equal(outs[rank][call], wanted) for rank in range(2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_gathers_of_any_shape(gen: torch.Generator, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """How tensors are cut into calls and padded, with exchanges that give every rank's part as this one's."""
    from aengine.kernels.triton import all_reduce as op

    def exchange(out: torch.Tensor, x: torch.Tensor, buffers: ExchangeBuffers) -> None:
        assert x.dtype == torch.int32 and (is_small or (x.nbytes % 16 == 0 and x.nbytes <= BULK))
        out.copy_(x.expand_as(out))

    monkeypatch.setattr(op.exchange_words, "gather_in_words", exchange)
    monkeypatch.setattr(op.exchange_bulk, "gather_in_bulk", exchange)
    for shape in ((1,), (3,), (5, 7), (3, 12345), (70_001,)):
        x = torch.randint(0, 100, shape, generator=gen).to(dtype)
        is_small = x.nbytes <= 4 * WORDS
        gathered = all_gathered(x, Ranks(2).mailboxes[0])
        assert torch.equal(gathered, torch.stack([x, x]))
