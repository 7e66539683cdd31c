#!/usr/bin/env python3
"""Steps of requests with LoRA adapters beside steps without, on the worker alone; JSON out.

    python benchmarks/adapters.py --shape llama-3.1-8b --streams 1,64 --adapters 16 --rank 16 --out r.json
    python benchmarks/adapters.py --shape qwen3-30b-a3b --adapters 4 --expert-rank 16 --kv-gib 3 --out r.json

Random weights, and one random adapter of all linear layers, which is loaded into every slot; stream i has slot i modulo
their number. Decodes from 256 tokens on, two steps in flight, in turns without and with adapters on the same runner;
with --adapters 0 the engine is one without the setting. Then an adapter is loaded beside the largest number of streams.

    python benchmarks/adapters.py --first-tokens 8 --streams 64 --adapters 16 --rank 16 --out r.json

The whole engine instead: the first token of requests whose adapter must be loaded first, and of others whose adapter is
there, alone and beside the streams, and the gaps between two deltas of one of these.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from itertools import islice, pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from engine_bench import SHAPES

PROMPT, ROOM = 256, 1024  # tokens


def write_adapter(folder: Path, shape: dict, rank: int, expert_rank: int = 0) -> Path:
    import torch
    from safetensors.torch import save_file

    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    q, kv = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    matrices = {f"self_attn.{name}_proj": (size, hidden) for name, size in (("q", q), ("k", kv), ("v", kv))}
    matrices |= {"self_attn.o_proj": (hidden, q), "mlp.down_proj": (hidden, inner)}
    matrices |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    experts = shape.get("num_experts", 0)
    if experts:  # by parameter, those of all experts behind each other
        matrices = {name: size for name, size in matrices.items() if name.startswith("self_attn")}
        inner = shape["moe_intermediate_size"]
        matrices |= (
            {"mlp.experts.base_layer": (2 * inner, hidden), "mlp.experts": (hidden, inner)} if expert_rank else {}
        )
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (out, columns) in matrices.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            count = experts * expert_rank if ".experts" in name else rank
            tensors[f"{key}.lora_A.weight"] = torch.randn(count, columns).mul_(columns**-0.5).bfloat16()
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, count).mul_(0.01).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    config |= {"rank_pattern": {"mlp.experts.gate_up_proj": expert_rank, "mlp.experts.down_proj": expert_rank}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def make_runner(args: argparse.Namespace, shape: dict):
    from aengine.checkpoint.source import resolve_model
    from aengine.config import EngineConfig
    from aengine.runner.startup.load import load_model
    from aengine.workers.rank import Rank

    folder = Path(tempfile.gettempdir()) / "bench-models" / args.shape
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    most = max(args.streams)
    settings = {"load_format": "dummy", "skip_tokenizer": True, "max_num_seqs": most, "max_model_len": 2 * ROOM}
    settings |= {"kv_cache_memory_bytes": args.kv_gib << 30, "max_num_batched_tokens": 2048}
    if args.adapters:
        settings |= {"max_loras": args.adapters, "max_lora_rank": args.rank, "max_lora_expert_rank": args.expert_rank}
    config = EngineConfig.create(str(folder), settings)
    model = load_model(config, resolve_model(config).to_wire(), Rank(), lambda *report: None)
    runner, facts = model.allocate(model.offer)
    return model, runner, facts, folder


class Streams:
    def __init__(self, runner, vocab_size: int) -> None:
        self.runner, self.vocab_size, self.step_id = runner, vocab_size, 0

    def begin(self, count: int, slots: int) -> None:
        import random

        from aengine.ipc.messages import NewRequest, SchedulerOutput, int32

        blocks, self.rows = ROOM // 16, int32(range(count))
        for row in range(count):
            extras = {"lora": [int32([row % slots]).tobytes()]} if slots else {}
            ids = int32(random.randrange(self.vocab_size) for _ in range(PROMPT))
            where = int32(range(row * blocks, (row + 1) * blocks))
            new = NewRequest(row, ids, PROMPT, 0, where, temperature=1.0, seed=row, extras=extras)
            self.run(SchedulerOutput(0, new_requests=[new], req_idx=int32([row]), num_scheduled_tokens=int32([PROMPT])))

    def run(self, out) -> None:
        self.start(out)
        answer = self.answer.get()
        assert not answer.errors, answer.errors

    def start(self, out) -> None:
        self.step_id += 1
        out.step_id = self.step_id
        self.runner.execute_model(out)
        self.answer = self.runner.sample_tokens(None)

    def decode(self, seconds: float, count: int = 10**9) -> list[float]:
        """Seconds between the answers of steps."""
        from aengine.ipc.messages import SchedulerOutput, int32

        flying, times, ones, end = deque(), [], int32([1] * len(self.rows)), time.perf_counter() + seconds
        while len(times) < count and time.perf_counter() < end:
            self.start(SchedulerOutput(0, req_idx=self.rows, num_scheduled_tokens=ones))
            flying.append(self.answer)
            if len(flying) == 2:
                flying.popleft().get()
                times.append(time.perf_counter())
        while flying:
            flying.popleft().get()
        return [after - before for before, after in pairwise(times)]

    def end(self) -> None:
        from aengine.ipc.messages import SchedulerOutput

        self.run(SchedulerOutput(0, removed=self.rows))


async def first_tokens(args: argparse.Namespace, shape: dict) -> dict[str, object]:
    """Of each number of streams, also of none, what `Watch` says of requests whose adapter must be loaded and of others
    whose adapter is there."""
    import random
    import shutil

    from aengine import AsyncLLM, SamplingParams

    folder, counts = Path(tempfile.gettempdir()) / "bench-models" / args.shape, [0, *sorted(args.streams)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    own = [write_adapter(folder / f"adapter-{args.rank}", shape, args.rank)]
    for index in range(1, len(counts) * args.first_tokens + 1):
        own.append(Path(shutil.copytree(own[0], folder / f"adapter-{args.rank}-{index}", dirs_exist_ok=True)))
    settings = {"load_format": "dummy", "skip_tokenizer": True, "max_num_seqs": counts[-1] + 8}
    settings |= {"kv_cache_memory_bytes": args.kv_gib << 30, "max_model_len": 8 * ROOM, "max_lora_rank": args.rank}
    watch = Watch()

    async def stream(engine: AsyncLLM) -> None:
        params, last = SamplingParams(max_tokens=7 * ROOM, ignore_eos=True, detokenize=False), 0.0
        prompt = [random.randrange(shape["vocab_size"]) for _ in range(PROMPT)]
        async for _ in engine.stream(prompt, params, lora="0"):
            now = time.perf_counter()
            if last:
                watch.gaps.append((last, now))
            last = now

    async def first(engine: AsyncLLM, name: str) -> dict[str, object]:
        prompt = [random.randrange(shape["vocab_size"]) for _ in range(PROMPT)]
        watch.begin()
        await engine.generate(prompt, SamplingParams(max_tokens=1, detokenize=False), lora=name)
        return watch.end()

    found, names = {}, iter(range(1, len(own)))
    async with AsyncLLM(str(folder), **settings, max_loras=args.adapters, loras={"0": str(own[0])}) as engine:
        running: list[asyncio.Task[None]] = []
        for count in counts:
            running += [asyncio.create_task(stream(engine)) for _ in range(count - len(running))]
            watch.gaps.clear()
            while len(watch.gaps) < 50 * len(running):
                await asyncio.sleep(0.01)
            quiet = [(end - begin) * 1e3 for begin, end in watch.gaps[25 * len(running) :]]
            watch.gaps.clear()
            loading, there = [], []
            for name in islice(names, args.first_tokens):
                await engine.add_lora(str(name), str(own[name]))
                loading.append(await first(engine, str(name)))
                there.append(await first(engine, str(name)))
            worst = max(((end - begin) * 1e3 for begin, end in watch.gaps), default=0.0)
            found[f"beside_{count}"] = {"worst_gap_ms": worst, "worst_gap_before_ms": max(quiet, default=0.0)}
            found[f"beside_{count}"] |= {"loading": loading, "loaded": there}
        for task in running:
            task.cancel()
        await asyncio.wait(running)
    return found


class Watch:
    """When the load of a request's adapter began and ended, its first token came, and streams had gaps of more than 20
    ms: in milliseconds after the call."""

    def __init__(self) -> None:
        from aengine.engine.adapters import registry

        self.gaps: list[tuple[float, float]] = []  # when each began and ended
        self.loads: list[float] = []
        load_into = registry.load_into

        async def timed(*args: object) -> None:
            self.loads.append(time.perf_counter())
            await load_into(*args)
            self.loads.append(time.perf_counter())

        registry.load_into = timed

    def begin(self) -> None:
        self.called, self.num_gaps = time.perf_counter(), len(self.gaps)
        self.loads.clear()

    def end(self) -> dict[str, object]:
        def since(*times: float) -> list[float]:
            return [round((one - self.called) * 1e3, 1) for one in times]

        long: dict[int, list[float]] = {}  # that of one of the streams which ended at the same time
        for begin, end in self.gaps[self.num_gaps :]:
            if end - begin > 0.02:
                long.setdefault(round(end * 200), since(begin, end))
        token = since(time.perf_counter())[0]
        return {"first_token_ms": token, "load_ms": since(*self.loads), "gaps_ms": list(long.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--streams", type=lambda text: [int(one) for one in text.split(",")], default=[1, 64])
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--expert-rank", type=int, default=0, help="of matrices of experts; 0: they are not changed")
    parser.add_argument("--kv-gib", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-tokens", type=int, default=0, metavar="N", help="adapters that are loaded one by one")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    shape, found = SHAPES[args.shape], {"argv": sys.argv[1:]}

    def note(**values: object) -> None:
        print(values, flush=True)
        found.update(values)
        Path(args.out).write_text(json.dumps(found))

    if args.first_tokens:
        note(**asyncio.run(first_tokens(args, shape)))
        return
    began = time.perf_counter()
    model, runner, facts, folder = make_runner(args, shape)
    note(start_s=time.perf_counter() - began, device=facts["device"], name=model.offer.get("device_name"))
    adapter, load = folder / f"adapter-{args.rank}", getattr(model, "calls", {}).get("load_lora")
    if args.adapters:
        write_adapter(adapter, shape, args.rank, args.expert_rank)
        began = time.perf_counter()
        for slot in range(args.adapters):
            while (state := load(slot, str(adapter)).get()) == "loading":
                time.sleep(0.001)
            assert state == "ready", state
        note(load_s=(time.perf_counter() - began) / args.adapters)
    streams = Streams(runner, shape["vocab_size"])
    for count in args.streams:
        times: dict[int, list[float]] = {}
        for _ in range(args.rounds):
            for slots in sorted({0, args.adapters}):
                streams.begin(count, slots)
                streams.decode(9.0, 10)
                times.setdefault(slots, []).append(statistics.median(streams.decode(9.0, args.steps)) * 1e3)
                streams.end()
        note(**{f"ms_{count}_{'with' if slots else 'none'}": values for slots, values in times.items()})
        if args.adapters:
            note(**{f"ratio_{count}": min(times[0]) / min(times[args.adapters])})
    if args.adapters > 1:
        streams.begin(count, args.adapters - 1)
        streams.decode(9.0, 20)
        quiet = max(streams.decode(9.0, 60))
        load(args.adapters - 1, str(folder / "none"))
        began, gaps = time.perf_counter(), []
        while load(args.adapters - 1, str(adapter)).get() != "ready" and time.perf_counter() - began < 9:
            gaps += streams.decode(9.0, 4)
        note(load_beside_s=time.perf_counter() - began, worst_ms=max(gaps) * 1e3, worst_without_ms=quiet * 1e3)


if __name__ == "__main__":
    main()
