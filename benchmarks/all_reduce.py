"""Sums over the ranks of a machine's GPUs: ours, torch's over symmetric memory, NCCL's. Two GPUs or more; two minutes.

    python benchmarks/all_reduce.py                          # JSON lines: checks, then microseconds by bytes
    python benchmarks/all_reduce.py --kb 8,64                # of these sizes
    python benchmarks/all_reduce.py --dtypes float16         # of this dtype alone
    python benchmarks/all_reduce.py --modes eager            # launched one by one; graph: in a CUDA graph
    python benchmarks/all_reduce.py --tune                   # ours with other numbers of programs, too
    python benchmarks/all_reduce.py --layers                 # a layer's products with and without the sums

Time of a call, on rank 0: the median of 15 runs of 64 calls, fewer of large tensors. What a layer needs is named so:
"..., added": its product lies where the product has left it, and the sum is added to the residual. torch's ops alone
find their input in symmetric memory, and leave the sum beside the residual.
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
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import FileStore, PrefixStore

from aengine.kernels.activation import computed
from aengine.kernels.all_reduce import add_all_reduced, all_gathered, sum_of
from aengine.kernels.exchange_buffers import MAX_PROGRAMS
from aengine.kernels.expert_types import InputNorm
from aengine.kernels.linear import add_linear, norm_gated_linear, norm_linear, plain_linear
from aengine.kernels.matrix import Matrix
from aengine.kernels.triton.exchange_bulk import BulkTiling, sum_in_bulk, sum_in_two_shots
from aengine.kernels.triton.exchange_words import sum_in_words
from aengine.runner.distributed.cuda_group import CudaGroup

HIDDEN = 4096
CALLS = 64
KB = (8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
LAYERS = 8
GROUP = "aengine-0"
"""torch's name of the first group that a process has made (runner/distributed/symmetric_memory.py)."""


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
        self._symmetric = _SymmetricMemory.empty_strided_p2p((max(KB) * 1024,), (1,), torch.uint8, self.device)
        self._handle = _SymmetricMemory.rendezvous(self._symmetric, GROUP)

    def say(self, **fields: Any) -> None:
        if self.rank == 0:
            print(json.dumps(fields), flush=True)

    def meet(self) -> None:
        torch.cuda.synchronize()
        self.num_meetings += 1
        self.store.set(f"meeting {self.num_meetings} {self.rank}", "")
        self.store.wait([f"meeting {self.num_meetings} {rank}" for rank in range(self.size)])

    def microseconds(self, call: Callable[[], object], calls: int = CALLS, mode: str = "graph") -> float:
        def run() -> None:
            for _ in range(calls):
                call()

        call()
        self.meet()
        if mode == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run()
            self.meet()
        times = []
        for _ in range(15):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            replay = graph.replay if mode == "graph" else run
            replay()  # the ranks begin together behind it
            begin.record()
            replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / calls)
        self.meet()
        return round(statistics.median(times), 2)

    def shared(self, like: Tensor) -> Tensor:
        """Return symmetric memory of that shape and dtype: the input of torch's ops."""
        return self._symmetric[: like.nbytes].view(like.dtype).view(like.shape)


def rows_of(kb: int, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
    return kb * 1024 // dtype.itemsize // HIDDEN, HIDDEN


# -- ways to sum: each returns the tensor with the sum, or to which it was added


def summed_by(op: Callable[..., None], rank: Rank, residual: Tensor, part: Tensor) -> Tensor:
    op(residual, part, rank.group.buffers, add=True)
    return residual


def ours(rank: Rank, residual: Tensor, part: Tensor) -> Tensor:
    add_all_reduced(residual, part, rank.group.buffers)
    return residual


def torch_one_shot(rank: Rank, residual: Tensor, part: Tensor) -> Tensor:
    return torch.ops.symm_mem.one_shot_all_reduce(rank.shared(part), "sum", GROUP)


def torch_two_shot(rank: Rank, residual: Tensor, part: Tensor) -> Tensor:
    return torch.ops.symm_mem.two_shot_all_reduce_(rank.shared(part), "sum", GROUP)


def torch_two_shot_out(rank: Rank, residual: Tensor, part: Tensor) -> Tensor:
    return torch.ops.symm_mem.two_shot_all_reduce_out(rank.shared(part), "sum", GROUP, torch.empty_like(part))


def torch_reduce_scatter(rank: Rank, residual: Tensor, part: Tensor) -> Tensor:
    """Half of a sum: this rank's slice of it."""
    out = part.new_empty(part.numel() // rank.size)
    return torch.ops.symm_mem.reduce_scatter_out(rank.shared(part).view(-1), GROUP, False, out)


def torch_one_shot_added(rank: Rank, residual: Tensor, part: Tensor) -> Tensor:
    return residual.add_(torch.ops.symm_mem.one_shot_all_reduce_copy(rank.shared(part), part, "sum", GROUP))


def torch_two_shot_added(rank: Rank, residual: Tensor, part: Tensor) -> Tensor:
    rank.shared(part).copy_(part)
    return residual.add_(torch_two_shot_out(rank, residual, part))


def nccl(rank: Rank, residual: Tensor, part: Tensor) -> Tensor:
    rank.nccl.allreduce([part]).wait()
    return part


def nccl_added(rank: Rank, residual: Tensor, part: Tensor) -> Tensor:
    return residual.add_(nccl(rank, residual, part))


Way = Callable[[Rank, Tensor, Tensor], Tensor]

WAYS: dict[str, tuple[int, int, Way]] = {  # from and to how many KB it is measured
    "words, added": (8, 256, partial(summed_by, sum_in_words)),
    "bulk, added": (64, 8192, partial(summed_by, sum_in_bulk)),
    "two shots, added": (64, 8192, partial(summed_by, sum_in_two_shots)),
    "ours, added": (8, 65536, ours),
    "torch one-shot": (8, 8192, torch_one_shot),
    "torch one-shot, added": (8, 8192, torch_one_shot_added),
    "torch two-shot": (8, 65536, torch_two_shot),
    "torch two-shot out": (8, 65536, torch_two_shot_out),
    "torch two-shot, added": (8, 65536, torch_two_shot_added),
    "torch reduce-scatter": (8, 65536, torch_reduce_scatter),
    "nccl": (8, 65536, nccl),
    "nccl, added": (8, 65536, nccl_added),
}


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


def check_ways(rank: Rank, kbs: Sequence[int], dtype: torch.dtype) -> None:
    """Whether a way gives all ranks the same bits, and which share of them are those of float32, rounded once."""
    for kb, name in itertools.product(kbs, WAYS):
        first, last, way = WAYS[name]
        if not first <= kb <= last or way is torch_reduce_scatter:
            continue
        generator = torch.Generator(device=rank.device).manual_seed(kb)
        made = [torch.randn(rows_of(kb, dtype), generator=generator, device=rank.device) for _ in range(rank.size + 1)]
        *parts, residual = (one.to(dtype) for one in made)
        wanted = sum_of(parts).to(dtype)
        if name.endswith("added"):
            wanted = residual.clone().add_(sum_of(parts))
        rank.shared(residual).copy_(parts[rank.rank])
        rank.meet()
        try:
            found = way(rank, residual, parts[rank.rank])
        except Exception as error:
            rank.say(check="bits", kb=kb, dtype=str(dtype), op=name, error=f"{type(error).__name__}: {error}"[:200])
            continue
        bits = found.view(torch.int16)
        of_all = bits.new_empty(rank.size, *bits.shape).view(torch.uint8)
        rank.nccl._allgather_base(of_all, bits.view(torch.uint8)).wait()
        same = bool((of_all.view(torch.int16) == bits).all())
        right = round(float((bits == wanted.view(torch.int16)).double().mean()), 5)
        rank.say(check="bits", kb=kb, dtype=str(dtype), op=name, same_on_all_ranks=same, as_in_float32=right)


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


def microseconds_of(rank: Rank, way: Way, kb: int, dtype: torch.dtype = torch.bfloat16, mode: str = "graph") -> float:
    residual, part = (torch.randn(rows_of(kb, dtype), device=rank.device).to(dtype) for _ in range(2))
    rank.shared(part).copy_(part)
    return rank.microseconds(lambda: way(rank, residual, part), min(CALLS, max(4, 65536 // kb)), mode)


def gathers(rank: Rank, kb: int) -> float:
    part = torch.zeros(rows_of(kb), dtype=torch.bfloat16, device=rank.device)
    gathered = part.new_empty(rank.size, *part.shape)
    return rank.microseconds(lambda: rank.nccl._allgather_base(gathered, part).wait())


def our_gathers(rank: Rank, kb: int) -> float:
    part = torch.zeros(rows_of(kb), dtype=torch.bfloat16, device=rank.device)
    return rank.microseconds(lambda: all_gathered(part, rank.group.buffers))


def attempt(rank: Rank, measure: Callable[[], float], **what: Any) -> None:
    try:
        rank.say(us=measure(), **what)
    except Exception as error:
        rank.say(**what, error=f"{type(error).__name__}: {error}"[:200])


def times(rank: Rank, sizes: Sequence[int], dtypes: Sequence[torch.dtype], modes: Sequence[str]) -> None:
    for dtype, kb, mode, name in itertools.product(dtypes, sizes, modes, WAYS):
        first, last, way = WAYS[name]
        if first <= kb <= last:
            measure = partial(microseconds_of, rank, way, kb, dtype, mode)
            attempt(rank, measure, kb=kb, dtype=str(dtype), mode=mode, op=name)
    for kb in sizes:
        attempt(rank, partial(our_gathers, rank, kb), kb=kb, op="our gather")
        attempt(rank, partial(gathers, rank, kb), kb=kb, op="nccl's gather")


def tune(rank: Rank, sizes: Sequence[int]) -> None:
    for kb in sizes:
        for words, warps in ((256, 2), (256, 4), (512, 8), (1024, 8), (1024, 16), (2048, 16)):
            if kb * 1024 <= 4 * rank.group.buffers.words_per_rank and kb * 256 // words <= MAX_PROGRAMS:
                way = partial(summed_by, partial(sum_in_words, words_per_program=words, num_warps=warps))
                attempt(rank, partial(microseconds_of, rank, way, kb), kb=kb, op=f"words {words} {warps} warps")
        if kb < 512 or kb * 1024 > rank.group.buffers.bulk_per_rank:
            continue
        for tiling in itertools.starmap(BulkTiling, itertools.product((64, 128, 256), (8192, 16384, 32768), (8, 16))):
            for name, op in (("bulk", sum_in_bulk), ("two shots", sum_in_two_shots)):
                what = f"{name} {tiling.num_programs} x {tiling.block_bytes}, {tiling.num_warps} warps"
                way = partial(summed_by, partial(op, tiling=tiling))
                attempt(rank, partial(microseconds_of, rank, way, kb), kb=kb, op=what)


def layers(rank: Rank) -> None:
    """The four products of a layer of Llama-3.1-8B split over the ranks, with the sums and without."""
    size, made = rank.size, {"dtype": torch.bfloat16, "device": rank.device}
    q, qkv, inner = 4096 // size, 6144 // size, 14336 // size
    shapes = ((qkv, HIDDEN), (HIDDEN, q), (2 * inner, HIDDEN), (HIDDEN, inner))
    torch.manual_seed(rank.rank)
    weights = [[Matrix(torch.randn(*shape, **made) * 0.01) for shape in shapes] for _ in range(LAYERS)]
    norm = InputNorm(torch.ones(HIDDEN, **made), 1e-6)
    for n in (1, 2, 16, 64, 128):
        residual, attended = torch.randn(n, HIDDEN, **made), torch.randn(n, q, **made)

        def add_summed(residual: Tensor, x: Tensor, weight: Matrix) -> None:
            rank.group.add_sum(residual, plain_linear(x, weight))

        def step(add: Callable[..., None], residual: Tensor, attended: Tensor) -> None:
            residual.zero_()
            for w_qkv, w_o, w_gate_up, w_down in weights:
                norm_linear(residual, norm, w_qkv)
                add(residual, attended, w_o)
                add(residual, computed(norm_gated_linear(residual, norm, w_gate_up)), w_down)

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
        for dtype in args.dtypes:
            check_ways(rank, args.kb, dtype)
        times(rank, args.kb, args.dtypes, args.modes)
        if args.layers:
            layers(rank)
        if args.tune:
            tune(rank, args.kb)
    except Exception:
        print(f"rank {index}: {traceback.format_exc()[-1500:]}", flush=True)
    os._exit(0)  # a communicator is not to wait for ranks that failed


def dtypes_of(names: str) -> list[torch.dtype]:
    return [{"bfloat16": torch.bfloat16, "float16": torch.float16}[name] for name in names.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kb", type=lambda text: [int(kb) for kb in text.split(",")], default=KB, help="sizes")
    parser.add_argument("--dtypes", type=dtypes_of, default=dtypes_of("bfloat16,float16"))
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["graph", "eager"])
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
