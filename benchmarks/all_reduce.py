"""Sums over the ranks of a machine's GPUs: ours, torch's over symmetric memory, NCCL's. On two GPUs or more; a minute.

    python benchmarks/all_reduce.py                 # JSON lines: checks, then microseconds by bytes
    python benchmarks/all_reduce.py --kb 8,64       # of these sizes
    python benchmarks/all_reduce.py --tune          # ours with other numbers of programs, too
    python benchmarks/all_reduce.py --layers        # a layer's products with and without the sums

Time: a CUDA graph of 64 calls, median of replays, on rank 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import FileStore, PrefixStore

from aengine.kernels.all_reduce import add_all_reduced, all_gathered, sum_of
from aengine.kernels.exchange_buffers import MAX_PROGRAMS
from aengine.kernels.linear import add_linear, norm_gated_linear, norm_linear, plain_linear
from aengine.kernels.triton.exchange_bulk import BulkTiling, sum_in_bulk, sum_in_two_shots
from aengine.kernels.triton.exchange_words import sum_in_words
from aengine.runner.distributed.cuda_group import CudaGroup

HIDDEN = 4096
CALLS = 64
KB = (8, 16, 64, 128, 256, 512, 1024, 4096, 8192, 65536)
LAYERS = 8


class Rank:
    """One process of the benchmark."""

    def __init__(self, rank: int, size: int, path: str) -> None:
        torch.cuda.set_device(rank)
        self.device = torch.device("cuda", rank)
        self.store = FileStore(path, size)
        self.group = CudaGroup(PrefixStore("group", self.store), rank, size, self.device, timedelta(seconds=30))
        nccl: Any = torch.distributed.ProcessGroupNCCL
        self.nccl = nccl(PrefixStore("nccl", self.store), rank, size, nccl.Options())
        self.rank, self.size = rank, size
        self.num_meetings = 0

    def say(self, **fields: Any) -> None:
        if self.rank == 0:
            print(json.dumps(fields), flush=True)

    def meet(self) -> None:
        torch.cuda.synchronize()
        self.num_meetings += 1
        self.store.set(f"meeting {self.num_meetings} {self.rank}", "")
        self.store.wait([f"meeting {self.num_meetings} {rank}" for rank in range(self.size)])

    def microseconds(self, call: Callable[[], object], calls: int = CALLS) -> float:
        call()
        self.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()
        self.meet()
        times = []
        for _ in range(15):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()  # the ranks begin together behind it
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / calls)
        self.meet()
        return round(statistics.median(times), 2)


def rows_of(kb: int) -> tuple[int, int]:
    return kb * 1024 // 2 // HIDDEN, HIDDEN


# -- checks


def check_sums(rank: Rank, op: Callable[..., None], name: str) -> None:
    """Random sums have the reference's bits, and so the same on every rank."""
    wrong = 0
    rng = random.Random(os.environ.get("SEED", "1"))
    for _ in range(40):
        dtype = rng.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
        hidden, seed = rng.choice((576, 1024, 4096)), rng.getrandbits(40)
        n = rng.randint(1, max(1, 262144 // hidden // dtype.itemsize))
        generator = torch.Generator(device=rank.device).manual_seed(seed)
        made = [torch.randn(n, hidden, generator=generator, device=rank.device).to(dtype) for _ in range(rank.size + 1)]
        expected, residual = made[-1].clone(), made[-1]
        expected.add_(sum_of(made[:-1]))
        op(residual, made[rank.rank], rank.group.buffers, add=True)
        wrong += not torch.equal(residual, expected)
    rank.say(check="sums", op=name, wrong=wrong, of=40)


def check_gathers(rank: Rank) -> None:
    wrong = 0
    for n in (1, 7, 4096, 100_000, 9_000_000):
        xs = [torch.arange(n, device=rank.device, dtype=torch.int32) * (r + 3) for r in range(rank.size)]
        wrong += not torch.equal(all_gathered(xs[rank.rank], rank.group.buffers), torch.stack(xs))
    rank.say(check="gathers", wrong=wrong, of=5)


def check_replays(rank: Rank, replays: int = 1000) -> None:
    """Graphs whose inputs change, replayed with random delays on each rank: every sum is that of its own replay."""
    device = rank.device
    counter, wrong = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
    shapes = [(1, 4096), (3, 4096), (1, 576), (16, 4096), (2, 1024)]
    ops = [sum_in_words, sum_in_words, sum_in_two_shots, sum_in_bulk, sum_in_bulk]
    bases = [torch.arange(n * h, device=device).view(n, h) % 61 for n, h in shapes]

    def step() -> None:
        counter.add_(1)
        for i, (base, op) in enumerate(zip(bases, ops)):
            parts = [((base + counter * (r + 1 + i)) % 127).to(torch.float16) for r in range(rank.size)]
            residual = torch.zeros_like(parts[0])
            op(residual, parts[rank.rank], rank.group.buffers, add=True)
            wrong.add_((residual != sum(parts[1:], parts[0])).sum())

    step()
    rank.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    delays = random.Random(rank.rank)
    for _ in range(replays):
        if delays.random() < 0.3:
            torch.cuda._sleep(delays.randint(1, 200_000))
        graph.replay()
    rank.meet()
    print(json.dumps({"check": "replays", "rank": rank.rank, "wrong": int(wrong), "of": replays}), flush=True)


# -- times


def ours(rank: Rank, kb: int, op: Callable[..., None]) -> float:
    residual = torch.zeros(rows_of(kb), dtype=torch.bfloat16, device=rank.device)
    part = torch.zeros_like(residual)
    options = {} if op is add_all_reduced else {"add": True}
    return rank.microseconds(lambda: op(residual, part, rank.group.buffers, **options))


def torchs(rank: Rank, kb: int, name: str) -> float:
    from torch._C._distributed_c10d import _SymmetricMemory

    shape = rows_of(kb)
    group = "aengine-0"  # the first that this process made
    part = _SymmetricMemory.empty_strided_p2p(shape, (HIDDEN, 1), torch.bfloat16, rank.device)
    part.zero_()
    _SymmetricMemory.rendezvous(part, group)
    op = getattr(torch.ops.symm_mem, name)
    return rank.microseconds(lambda: op(part, "sum", group))


def nccls(rank: Rank, kb: int) -> float:
    part = torch.zeros(rows_of(kb), dtype=torch.bfloat16, device=rank.device)
    return rank.microseconds(lambda: rank.nccl.allreduce([part]).wait())


def gathers(rank: Rank, kb: int) -> float:
    part = torch.zeros(rows_of(kb), dtype=torch.bfloat16, device=rank.device)
    gathered = part.new_empty(rank.size, *part.shape)
    return rank.microseconds(lambda: rank.nccl._allgather_base(gathered, part).wait())


def our_gathers(rank: Rank, kb: int) -> float:
    part = torch.zeros(rows_of(kb), dtype=torch.bfloat16, device=rank.device)
    return rank.microseconds(lambda: all_gathered(part, rank.group.buffers))


def attempt(rank: Rank, what: str, kb: int, measure: Callable[[], float]) -> None:
    try:
        rank.say(us=measure(), kb=kb, op=what)
    except Exception as error:
        rank.say(kb=kb, op=what, error=f"{type(error).__name__}: {error}"[:300])


def times(rank: Rank, sizes: Sequence[int]) -> None:
    for kb in sizes:
        if kb <= 256:
            attempt(rank, "words", kb, partial(ours, rank, kb, sum_in_words))
        attempt(rank, "our gather", kb, partial(our_gathers, rank, kb))
        attempt(rank, "ours", kb, partial(ours, rank, kb, add_all_reduced))
        if 64 <= kb <= 8192:
            attempt(rank, "bulk", kb, partial(ours, rank, kb, sum_in_bulk))
            attempt(rank, "two shots", kb, partial(ours, rank, kb, sum_in_two_shots))
        attempt(rank, "nccl", kb, partial(nccls, rank, kb))
        attempt(rank, "nccl's gather", kb, partial(gathers, rank, kb))
        if kb <= 8192:
            attempt(rank, "torch one-shot", kb, partial(torchs, rank, kb, "one_shot_all_reduce"))
            attempt(rank, "torch two-shot", kb, partial(torchs, rank, kb, "two_shot_all_reduce_"))


def tune(rank: Rank, sizes: Sequence[int]) -> None:
    for kb in sizes:
        for words, warps in ((256, 2), (256, 4), (512, 8), (1024, 8), (1024, 16), (2048, 16)):
            if kb * 1024 <= 4 * rank.group.buffers.words_per_rank and kb * 256 // words <= MAX_PROGRAMS:
                op = partial(sum_in_words, words_per_program=words, num_warps=warps)
                attempt(rank, f"words {words} {warps} warps", kb, partial(ours, rank, kb, op))
        if kb < 512 or kb * 1024 > rank.group.buffers.bulk_per_rank:
            continue
        for tiling in itertools.starmap(BulkTiling, itertools.product((64, 128, 256), (8192, 16384, 32768), (8, 16))):
            for name, op in (("bulk", sum_in_bulk), ("two shots", sum_in_two_shots)):
                what = f"{name} {tiling.num_programs} x {tiling.block_bytes}, {tiling.num_warps} warps"
                attempt(rank, what, kb, partial(ours, rank, kb, partial(op, tiling=tiling)))


def layers(rank: Rank) -> None:
    """The four products of a layer of Llama-3.1-8B split over the ranks, with the sums and without."""
    size, made = rank.size, {"dtype": torch.bfloat16, "device": rank.device}
    q, qkv, inner = 4096 // size, 6144 // size, 14336 // size
    shapes = ((qkv, HIDDEN), (HIDDEN, q), (2 * inner, HIDDEN), (HIDDEN, inner))
    torch.manual_seed(rank.rank)
    weights = [[torch.randn(*shape, **made) * 0.01 for shape in shapes] for _ in range(LAYERS)]
    norm = torch.ones(HIDDEN, **made)
    for n in (1, 2, 16, 64, 128):
        residual, attended = torch.randn(n, HIDDEN, **made), torch.randn(n, q, **made)

        def add_summed(residual: Tensor, x: Tensor, weight: Tensor) -> None:
            rank.group.add_sum(residual, plain_linear(x, weight))

        def step(add: Callable[..., None], residual: Tensor, attended: Tensor) -> None:
            residual.zero_()
            for w_qkv, w_o, w_gate_up, w_down in weights:
                norm_linear(residual, norm, 1e-6, w_qkv)
                add(residual, attended, w_o)
                add(residual, norm_gated_linear(residual, norm, 1e-6, w_gate_up), w_down)

        steps = (partial(step, add, residual, attended) for add in (add_linear, add_summed))
        alone, summed = (rank.microseconds(one, calls=4) / LAYERS for one in steps)
        figures = {"without_sums": alone, "with_sums": summed, "a_sum": (summed - alone) / 2}
        rank.say(layer_rows=n, **{name: round(us, 2) for name, us in figures.items()})


def run(index: int, size: int, path: str, args: argparse.Namespace) -> None:
    try:
        rank = Rank(index, size, path)
        check_sums(rank, sum_in_words, "words")
        check_sums(rank, sum_in_bulk, "bulk")
        check_sums(rank, sum_in_two_shots, "two shots")
        check_gathers(rank)
        check_replays(rank)
        times(rank, args.kb)
        if args.layers:
            layers(rank)
        if args.tune:
            tune(rank, args.kb)
    except Exception:
        print(f"rank {index}: {traceback.format_exc()[-1500:]}", flush=True)
    os._exit(0)  # a communicator is not to wait for ranks that failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kb", type=lambda text: [int(kb) for kb in text.split(",")], default=KB, help="sizes")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--layers", action="store_true")
    args = parser.parse_args()
    size = torch.cuda.device_count()
    if size < 2:
        sys.exit("there are fewer than two GPUs here")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (size, os.path.join(folder, "store"), args), size)


if __name__ == "__main__":
    main()
