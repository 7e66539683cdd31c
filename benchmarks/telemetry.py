"""What metrics and traces cost: tokens/s with them and without, interleaved. JSON lines to stdout.

    python benchmarks/telemetry.py [--streams 64] [--tokens 128] [--step-us 3000] [--rounds 10]

A real worker process with a runner that takes --step-us for a step (fake_worker.py), as a GPU does. Each stream makes
one request after the other. A round runs every variant once, in an order of its own; the ratios are medians over the
rounds of a variant's tokens/s, and of its host's CPU time, to those of the plain run of the same round.

    plain           nobody listens, nothing is scraped
    prometheus      /metrics of the application, scraped once a second
    opentelemetry   spans and metrics of the SDK, exported to memory every second
    both            all of that
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import uvloop
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from aengine import AsyncLLM, EngineConfig, SamplingParams
from aengine.engine.executor import ProcessExecutor
from aengine.server import create_app
from aengine.telemetry.opentelemetry import instrument

VARIANTS = ("plain", "prometheus", "opentelemetry", "both")


class FakeWorkerLLM(AsyncLLM):
    def _make_executor(self, config: EngineConfig) -> ProcessExecutor:
        return ProcessExecutor(config.replace(worker="fake_worker:load_model"))


class Discard(SpanExporter):
    """Encodes nothing: what an exporter does with spans is not ours."""

    num_spans = 0

    def export(self, spans: Any) -> SpanExportResult:
        Discard.num_spans += len(spans)
        return SpanExportResult.SUCCESS


@contextlib.asynccontextmanager
async def scraped(client: httpx.AsyncClient) -> AsyncIterator[None]:
    async def scrape() -> None:
        while True:
            answer = await client.get("/metrics")
            assert answer.status_code == 200, answer.text
            await asyncio.sleep(1.0)

    task = asyncio.create_task(scrape())
    try:
        yield
    finally:
        task.cancel()


@contextlib.asynccontextmanager
async def traced(engine: AsyncLLM) -> AsyncIterator[None]:
    tracers, meters = TracerProvider(shutdown_on_exit=False), MeterProvider([InMemoryMetricReader()])
    tracers.add_span_processor(BatchSpanProcessor(Discard(), schedule_delay_millis=1000))
    remove = instrument(engine, tracer_provider=tracers, meter_provider=meters)
    try:
        yield
    finally:
        remove()
        await asyncio.to_thread(tracers.shutdown)
        meters.shutdown()


async def load(engine: AsyncLLM, args: argparse.Namespace) -> dict[str, float]:
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)

    async def stream(i: int) -> int:
        count = 0
        for j in range(args.requests):
            async with engine.stream([5, 6, i, j], params) as tokens:
                while got := await tokens.read():
                    count += len(got)
        return count

    begun, cpu = time.perf_counter(), time.process_time()
    count = sum(await asyncio.gather(*map(stream, range(args.streams))))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - begun
    return {"tokens_per_s": count / wall, "host_cpu_us_per_request": cpu / (args.streams * args.requests) * 1e6}


async def run(args: argparse.Namespace) -> None:
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    async with FakeWorkerLLM("smollm2-135m", max_num_seqs=args.streams) as engine:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            await load(engine, args)
            gc.collect()
            gc.freeze()
            for number in range(args.rounds):
                for variant in random.Random(number).sample(VARIANTS, len(VARIANTS)):
                    async with contextlib.AsyncExitStack() as stack:
                        if variant in ("prometheus", "both"):
                            await stack.enter_async_context(scraped(client))
                        if variant in ("opentelemetry", "both"):
                            await stack.enter_async_context(traced(engine))
                        runs[variant].append(await load(engine, args))
    for variant, found in runs.items():
        line: dict[str, Any] = {"variant": variant}
        for name in found[0]:
            ratios = [one[name] / plain[name] for one, plain in zip(found, runs["plain"], strict=True)]
            line[name] = round(statistics.median(one[name] for one in found), 1)
            line[f"{name}_ratio"] = round(statistics.median(ratios), 4)
            line[f"{name}_ratio_quartiles"] = [round(q, 4) for q in statistics.quantiles(ratios, n=4)[::2]]
        print(json.dumps(line))
    num_traced = 2 * args.rounds * args.streams * args.requests
    assert num_traced == Discard.num_spans, f"{Discard.num_spans} spans of {num_traced} requests"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of a request")
    parser.add_argument("--requests", type=int, default=6, help="of a stream, one after the other")
    parser.add_argument("--step-us", type=int, default=3000, help="of the worker; 0: it answers at once")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(  # this is our own process: the worker finds fake_worker.py
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    os.environ["FAKE_STEP_US"] = str(args.step_us)
    uvloop.run(run(args))


if __name__ == "__main__":
    main()
