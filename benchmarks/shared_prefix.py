"""Decode steps of rows that begin with the same blocks: each row by itself, and with keys read together. On CUDA.

    python benchmarks/shared_prefix.py --out r.json                      # kernels and whole steps; two minutes
    python benchmarks/shared_prefix.py --only kernels --sweep            # also other tilings
    python benchmarks/shared_prefix.py --only steps --shapes qwen3-0.6b

"kernels": microseconds of the attention of a layer, in a CUDA graph over as many layers as exceed the L2 cache, medians
of replays. "apart": rows with blocks of their own; "alone": with the same blocks, each read by every row, so what it
gains over "apart" is what the L2 cache served; "together": as steps with shared prefixes run. "floor": the bytes of the
prefix once, and of each row's own keys, by the bandwidth of a copy, measured first. "own alone", "prefix alone": one of
the two launches of "together" without the other.

"steps": milliseconds of a decode step of a whole model of random weights, whose runner is in this process, in turns.
"host": microseconds of the host's look for groups, with the rows of the step before, and with others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from engine_bench import SHAPES
from gpu_attention import BLOCK, COLD_BYTES, microseconds

from aengine.config import EngineConfig
from aengine.kernels import shared_prefix
from aengine.kernels.decode_attention import DecodeWorkspace, decode_step_attention, plan_decode
from aengine.kernels.paged_attention import Scores
from aengine.kernels.rotary import Rope
from aengine.kernels.triton import decode_attention as decode_body
from aengine.kernels.triton import shared_prefix as body
from aengine.kernels.triton.launch import compiling
from aengine.runner.attention import shared_prefixes
from aengine.runner.attention.shared_prefixes import SharedPrefixes
from aengine.runner.attention.triton_attention import Heads
from aengine.runner.graphs.cuda_graphs import CudaGraphManager
from aengine.runner.weights.step_rows import StepRows

OWN = 200  # tokens of each row behind the prefix
HEADS = {"qwen3-0.6b": Heads(16, 8, 128), "llama-3.1-8b": Heads(32, 8, 128)}
DEVICE = torch.device("cuda")
TILINGS = [
    (64, 132, 256, (64, 4, 4)),
    (64, 132, 512, (64, 4, 4)),
    (64, 132, 128, (64, 4, 4)),
    (64, 66, 256, (64, 4, 4)),
    (64, 99, 256, (64, 4, 4)),
    (128, 132, 256, (64, 8, 3)),
    (128, 132, 512, (64, 8, 3)),
    (128, 132, 128, (64, 8, 3)),
    (128, 66, 256, (64, 8, 3)),
]
"""Rows of a tile, programs, fewest keys of an item, and the kernel's own."""


class Layer:
    """Rows of one layer, whose first ``prefix`` tokens are the same blocks."""

    def __init__(self, heads: Heads, rows: int, prefix: int, copies: int, *, is_apart: bool) -> None:
        self.heads, self.n = heads, rows
        length = prefix + OWN
        width, shared = -(-length // BLOCK), prefix // BLOCK
        count = rows * width if is_apart else shared + rows * (width - shared)
        order = torch.randperm(count, dtype=torch.int32)
        table = torch.empty(rows, width, dtype=torch.int32)
        if is_apart:
            table[:] = order.view(rows, width)
        else:
            table[:, :shared], table[:, shared:] = order[:shared], order[shared:].view(rows, -1)
        self.table = table
        shape = (count, 2, heads.num_kv_heads, BLOCK, heads.head_dim)
        made = [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(copies)]
        self.caches = [cache.permute(0, 3, 1, 2, 4) for cache in made]
        self.lens = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
        self.rows = torch.arange(rows, device=DEVICE)
        self.qkv = torch.randn(rows, sum(heads[:2], heads[1]) * heads.head_dim, dtype=torch.bfloat16, device=DEVICE)
        self.rope = Rope(torch.randn(length, heads.head_dim, device=DEVICE))
        self.on_device = table.to(DEVICE)
        self.workspace = DecodeWorkspace(rows, *heads[:3], DEVICE)

    def prefixes(self) -> SharedPrefixes:
        requests = SimpleNamespace(
            in_use=np.zeros(self.n),
            token_ids=self.rows,
            num_computed_tokens=self.lens.cpu().numpy().astype(np.int64) - 1,
        )
        group = SimpleNamespace(block_size=BLOCK)
        tables = SimpleNamespace(groups=[group], on_host=self.table.numpy()[None], num_replaced=0)
        found = SharedPrefixes.of([self.heads[:3]], torch.bfloat16, [0], requests, tables, StepRows())  # type: ignore[arg-type]
        assert found is not None
        return found

    def calls(self, *, together: bool) -> list[Callable[[], Any]]:
        shared = None
        if together:
            prefixes = self.prefixes()
            prefixes.choose(np.arange(self.n))
            prefixes.shares = True
            self.workspace.reserve(prefixes.sizes.num_parts)
            shared = prefixes.of_step(self.rows, self.lens, None)
        plan = plan_decode(self.rows, self.lens, self.workspace, None, shared)
        torch.cuda.synchronize()
        how = self.rope, None, self.heads.num_heads, Scores(self.heads.head_dim**-0.5), plan, self.workspace
        return [
            lambda cache=cache: decode_step_attention(self.qkv, cache, self.on_device, *how, shared=shared)
            for cache in self.caches
        ]


def bandwidth() -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2e6 * len(source) / microseconds([lambda: target.copy_(source)], at_least=4)


def time_kernels(name: str, rows: int, prefix: int, rate: float, is_swept: bool) -> dict[str, Any]:
    heads = HEADS[name]
    token = 4 * heads.num_kv_heads * heads.head_dim
    copies = max(2, -(-COLD_BYTES // ((prefix + rows * OWN) * token)))
    layer = Layer(heads, rows, prefix, copies, is_apart=False)
    found = {"alone": microseconds(layer.calls(together=False)), "together": microseconds(layer.calls(together=True))}
    for part, module, name_of_part in (("own", decode_body, "attend_to_shared"), ("prefix", decode_body, "launch")):
        kept = getattr(module, name_of_part)  # the other launch is left out
        setattr(module, name_of_part, lambda *args, **options: None)
        found[f"{part} alone"] = microseconds(layer.calls(together=True))
        setattr(module, name_of_part, kept)
    found["floor"] = (prefix + rows * OWN) * token / rate * 1e6
    out, expected = layer.calls(together=True)[0](), layer.calls(together=False)[0]()
    found["difference"] = float((out.double() - expected.double()).norm() / expected.double().norm())
    result: dict[str, Any] = {"shape": name, "rows": rows, "prefix": prefix, "us": found}
    if is_swept:
        result["tilings"] = sweep(layer)
    del layer, out, expected
    apart = Layer(heads, rows, prefix, 1, is_apart=True)
    found["apart"] = microseconds(apart.calls(together=False), at_least=2)
    found["floor apart"] = rows * (prefix + OWN) * token / rate * 1e6
    return result


def sweep(layer: Layer) -> dict[str, float]:
    before = shared_prefix._TILE_ROWS, shared_prefix._PROGRAMS, shared_prefixes.LEAST_CHUNK, body._tiling
    found = {}

    def choose(rows: int, programs: int, least: int, tiling: tuple[int, int, int]) -> None:
        shared_prefix._TILE_ROWS, shared_prefix._PROGRAMS, shared_prefixes.LEAST_CHUNK = rows, programs, least
        body._tiling = lambda *args: body._Tiling(*tiling)

    with compiling(os.cpu_count() or 1):
        for choice in TILINGS:
            choose(*choice)
            layer.calls(together=True)[0]()
    for choice in TILINGS:
        choose(*choice)
        try:
            found[str(choice)] = microseconds(layer.calls(together=True))
        except Exception as error:  # more shared memory than there is
            found[str(choice)] = str(type(error).__name__)  # type: ignore[assignment]
    shared_prefix._TILE_ROWS, shared_prefix._PROGRAMS, shared_prefixes.LEAST_CHUNK, body._tiling = before
    return found


class Steps:
    """A whole model's decode steps, by its runner in this process."""

    def __init__(self, name: str, longest: int, num_bytes: int) -> None:
        from aengine.checkpoint.source import resolve_model
        from aengine.runner.startup.load import load_model
        from aengine.workers.rank import ranks_of

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
            settings = {"load_format": "dummy", "skip_tokenizer": True, "max_num_seqs": 64, "max_model_len": longest}
            settings |= {"kv_cache_memory_bytes": num_bytes, "device": "cuda", "block_size": BLOCK}
            config = EngineConfig.create(folder, settings)
            self.capture_seconds = 0.0
            capture_all = CudaGraphManager.capture_all

            def timed(manager: CudaGraphManager, *args: Any) -> None:
                begin = time.monotonic()
                capture_all(manager, *args)
                self.capture_seconds += time.monotonic() - begin

            CudaGraphManager.capture_all = timed  # type: ignore[method-assign]
            begin = time.monotonic()
            model = load_model(config, resolve_model(config).to_wire(), ranks_of(config)[0], lambda *report: None)
            self.runner = model.allocate(model.offer, None)[0]
            self.start_seconds = time.monotonic() - begin
            CudaGraphManager.capture_all = capture_all  # type: ignore[method-assign]
        self.num_blocks = self.runner.tables._num_blocks
        for slab in self.runner.kv_memory.pages.slabs:
            for part in slab.split(4096):
                part.normal_()
        self._step_id = 0

    def begin(self, rows: int, prefix: int, own: int, *, is_apart: bool) -> bool:
        """Give rows their blocks, with keys as if computed. Returns False if there are too few blocks."""
        from aengine.ipc.messages import NewRequest, SchedulerOutput, int32

        width, shared = -(-(prefix + own + 300) // BLOCK), 0 if is_apart else prefix // BLOCK
        if shared + rows * (width - shared) > self.num_blocks:
            return False
        ids = np.random.permutation(self.num_blocks)
        new = []
        for row in range(rows):
            rest = ids[shared + row * (width - shared) :][: width - shared]
            blocks, length = [*ids[:shared], *rest], prefix + own
            tokens = int32([100 + row] * length)
            new.append(NewRequest(row, tokens, length, length - 1, int32(blocks), temperature=0.0))
        out = SchedulerOutput(0, new_requests=new, req_idx=int32(range(rows)), num_scheduled_tokens=int32([1] * rows))
        self._run(out).get()
        return True

    def end(self, rows: int) -> None:
        from aengine.ipc.messages import SchedulerOutput, int32

        self._run(
            SchedulerOutput(0, removed=int32(range(rows)), req_idx=int32([]), num_scheduled_tokens=int32([]))
        ).get()

    def _run(self, out: Any) -> Any:
        self._step_id += 1
        out.step_id = self._step_id
        self.runner.execute_model(out)
        return self.runner.sample_tokens(None)

    def milliseconds(self, rows: int, count: int = 24) -> float:
        """Of a step while the next one is queued already; each row gets ``count`` tokens."""
        from aengine.ipc.messages import SchedulerOutput, int32

        times, before = [], None
        for _ in range(count):
            out = SchedulerOutput(0, req_idx=int32(range(rows)), num_scheduled_tokens=int32([1] * rows))
            answer = self._run(out)
            if before is not None:
                before.get()
            before = answer
            times.append(time.perf_counter())
        before.get()
        return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(times[4:]))

    def host(self, rows: int) -> dict[str, float]:
        kinds = self.runner.decode_kinds
        own, times = np.arange(rows), []
        for forget in (False, True):
            kinds.choose(own)
            begin = time.perf_counter()
            for _ in range(50):
                if forget:
                    kinds._seen = None
                kinds.choose(own)
            times.append(1e6 * (time.perf_counter() - begin) / 50)
        return dict(zip(("same rows", "other rows"), times, strict=True))


def time_steps(name: str, cases: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    steps = Steps(name, 8192 + 1024, 20 << 30)
    for rows, prefix in cases:
        found: dict[str, Any] = {"shape": name, "rows": rows, "prefix": prefix, "start_s": steps.start_seconds}
        found["captures_s"] = steps.capture_seconds
        ms: dict[str, list[float]] = {}
        steps.begin(rows, prefix, OWN, is_apart=False)
        kinds = steps.runner.decode_kinds
        for _ in range(2):
            with kinds.only(0):
                ms.setdefault("alone", []).append(steps.milliseconds(rows))
            ms.setdefault("together", []).append(steps.milliseconds(rows))
        found["shares"] = bool(kinds.shares)
        found["host_us"] = steps.host(rows)
        steps.end(rows)
        if steps.begin(rows, prefix, OWN, is_apart=True):
            for _ in range(2):
                with kinds.only(0):
                    ms.setdefault("apart, not looked at", []).append(steps.milliseconds(rows))
                ms.setdefault("apart", []).append(steps.milliseconds(rows))
            found["host_us apart"] = steps.host(rows)
            steps.end(rows)
        found["ms"] = {way: min(values) for way, values in ms.items()}
        yield found
    del steps
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=("kernels", "steps"))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--shapes", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 16])
    parser.add_argument("--prefixes", nargs="+", type=int, default=[8000, 2000])
    args = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, list[Any]] = {"kernels": [], "steps": []}
    rate = bandwidth()
    print(json.dumps({"device": torch.cuda.get_device_name(), "copy_tb_s": rate / 1e12}), flush=True)
    cases = list(itertools.product(args.rows, args.prefixes))
    for name in args.shapes:
        for rows, prefix in cases if args.only != "steps" else ():
            results["kernels"].append(time_kernels(name, rows, prefix, rate, args.sweep and rows == max(args.rows)))
            print(json.dumps(results["kernels"][-1]), flush=True)
            torch.cuda.empty_cache()
        for found in time_steps(name, cases) if args.only != "kernels" else ():
            results["steps"].append(found)
            print(json.dumps(found), flush=True)
        if args.out:
            args.out.write_text(json.dumps(results | {"copy_tb_s": rate / 1e12}, indent=1))


if __name__ == "__main__":
    main()
