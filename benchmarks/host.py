"""What the engine costs its host: CPU a token, loop lag, idle CPU. JSON to stdout.

    python benchmarks/host.py [--streams 256] [--tokens 400] [--own-thread]

A real worker process with a runner that answers at once (fake_worker.py), so that nothing but our own work is measured.
The host's CPU time includes the consumers' ``async for`` and the text of every token. Loop lag is how late a 1 ms
ticker runs, with the worker paced to 50,000 tokens/s; beside it the same ticker on the same loop with no engine at
work, which is the machine's own noise.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import time
from pathlib import Path

import psutil
import uvloop

from aengine import AsyncLLM, EngineConfig, SamplingParams
from aengine.engine.executor import ProcessExecutor

PACED_TOKENS_PER_SECOND = 50_000


class FakeWorkerLLM(AsyncLLM):
    def _make_executor(self, config: EngineConfig) -> ProcessExecutor:
        return ProcessExecutor(config.replace(worker="fake_worker:load_model"))


async def burst(engine: AsyncLLM, streams: int, tokens: int) -> int:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)

    async def one(i: int) -> int:
        return len([token.text async for token in engine.stream([5, 6, 7 + i], params)])

    return sum(await asyncio.gather(*map(one, range(streams))))


async def cpu_per_token(engine: AsyncLLM, streams: int, tokens: int) -> dict[str, float]:
    begun, cpu = time.perf_counter(), time.process_time()
    count = await burst(engine, streams, tokens)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - begun
    return {"host_cpu_us_per_token": cpu / count * 1e6, "tokens_per_s": count / wall}


async def lag_while(work: asyncio.Task | None, seconds: float) -> list[float]:
    """Lateness of a 1 ms ticker, in milliseconds, while ``work`` runs, or for ``seconds``."""
    lags: list[float] = []
    end = time.perf_counter() + seconds
    while (not work.done()) if work is not None else time.perf_counter() < end:
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        lags.append((time.perf_counter() - due) * 1e3)
    return lags


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


async def idle_cpu(engine: AsyncLLM, seconds: float = 3.0) -> dict[str, float]:
    """CPU seconds a second of host and worker while no request runs."""
    worker = psutil.Process(engine.describe()["pid"])
    before, host = worker.cpu_times(), time.process_time()
    await asyncio.sleep(seconds)
    after = worker.cpu_times()
    used = after.user + after.system - before.user - before.system
    return {"idle_host_cpu": (time.process_time() - host) / seconds, "idle_worker_cpu": used / seconds}


async def unpaced(args: argparse.Namespace) -> dict[str, float]:
    result: dict[str, float] = {}
    async with FakeWorkerLLM("smollm2-135m", max_num_seqs=1024, own_thread=args.own_thread) as engine:
        await burst(engine, 4, 20)
        gc.collect()
        gc.freeze()
        for streams in args.streams:
            runs = [await cpu_per_token(engine, streams, args.tokens) for _ in range(args.repeats)]
            for name in runs[0]:
                result[f"{name}_{streams}"] = round(statistics.median(run[name] for run in runs), 3)
        result |= {name: round(value, 5) for name, value in (await idle_cpu(engine)).items()}
    return result


async def paced(args: argparse.Namespace) -> dict[str, float]:
    streams = 256
    async with FakeWorkerLLM("smollm2-135m", max_num_seqs=streams, own_thread=args.own_thread) as engine:
        await burst(engine, 4, 20)
        gc.collect()
        gc.freeze()
        without = await lag_while(None, 3.0)
        begun = time.perf_counter()
        work = asyncio.create_task(burst(engine, streams, 1000))
        await asyncio.sleep(0.2)  # the burst of arrivals is another thing
        during = await lag_while(work, 0)
        rate = await work / (time.perf_counter() - begun)
    return {
        "paced_tokens_per_s": round(rate),
        "loop_lag_ms_p99": round(p99(during), 3),
        "loop_lag_ms_p50": round(statistics.median(during), 3),
        "loop_lag_ms_p99_without_engine": round(p99(without), 3),
        "loop_lag_ms_p50_without_engine": round(statistics.median(without), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256, 512])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--own-thread", action="store_true", help="the engine's loop in a thread of its own")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # this is our own process: the worker finds fake_worker.py
    result = uvloop.run(unpaced(args))
    os.environ["FAKE_STEP_US"] = str(256 / PACED_TOKENS_PER_SECOND * 1e6)
    result |= uvloop.run(paced(args))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
