"""`cancels` and `requests`: very many requests that leave nothing behind, with a fake worker."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil
from chaos_common import MIB, FakeWorkerLLM, ProcessResources, Promises, say, settle
from conftest_api import user_requests

from aengine import AsyncLLM, DeadlineExceededError, SamplingParams
from aengine.engine.scheduler.request import Request
from aengine.engine.streams.token_stream import ChoiceOutput, Mailbox, TokenStream
from aengine.engine.user_request import UserRequest

WATCHED = (UserRequest, Request, ChoiceOutput, Mailbox, TokenStream)
WORDS = "one two three four five six seven eight nine ten"


def objects() -> dict[str, int]:
    """How many of the engine's own things are alive."""
    gc.collect()
    counts = Counter(type(thing) for thing in gc.get_objects())
    return {kind.__name__: counts[kind] for kind in WATCHED if counts[kind]}


class Canceller:
    """Begins requests and ends each in one of these ways; a few are left alone, and their tokens are checked."""

    WAYS = ("break", "aclose", "task", "task_early", "timeout", "deadline", "gc", "abort", "generate", "unread")

    def __init__(self, engine: AsyncLLM, rng: random.Random, ways: Sequence[str], most_tokens: int) -> None:
        self.engine = engine
        self.rng = rng
        self._chosen = ways
        self._most_tokens = most_tokens
        self.phases: Counter[str] = Counter()  # in which the explicit cancels met their requests
        self.ways: Counter[str] = Counter()
        self.num_begun = self.num_whole = self.num_wrong = 0

    def _prompt(self) -> str | list[int]:
        """Mostly short, at times of several steps, at times a text that is tokenised in a thread."""
        rng = self.rng
        draw = rng.random()
        if draw < 0.15:
            return WORDS * rng.randint(1, 40)
        length = rng.randint(1, 40) if draw < 0.85 else rng.randint(200, 4000)
        return [rng.randrange(100, 40_000)] * length

    def _params(self) -> SamplingParams:
        rng = self.rng
        n = 3 if rng.random() < 0.05 else 1
        return SamplingParams(
            max_tokens=rng.randint(1, self._most_tokens), n=n, ignore_eos=True, detokenize=rng.random() < 0.3
        )

    def _note(self, request_id: str) -> None:
        """In which phase the request is that is about to be cancelled."""
        request = user_requests(self.engine).get(request_id)
        if request is None:
            phase = "ended"
        elif not request.requests:
            phase = "before_the_queue"
        else:
            phase = request.requests[0].status.name.lower()
        self.phases[phase] += 1

    async def _a_while(self) -> None:
        """Some turns of the loop, which end anywhere between two deliveries, or some milliseconds."""
        if self.rng.random() < 0.5:
            for _ in range(self.rng.randrange(12)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(self.rng.expovariate(1 / 0.02))

    async def _read(self, stream: TokenStream, most: int) -> None:
        count = 0
        async for _ in stream:
            count += 1
            if count >= most:
                break

    async def one(self) -> None:
        self.num_begun += 1
        if self.rng.random() < 0.02:
            await self._left_alone()
            return
        way = self.rng.choice(self._chosen)
        self.ways[way] += 1
        await getattr(self, f"_{way}")()

    async def _left_alone(self) -> None:
        """The fake runner's ids depend on the position alone."""
        length, tokens = self.rng.randint(1, 300), self.rng.randint(1, 60)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        got = (await self.engine.generate([self.rng.randrange(100, 40_000)] * length, params)).token_ids
        self.num_whole += 1
        self.num_wrong += got != tuple(260 + (length + i) % 997 for i in range(tokens))

    def _stream(self, **options: Any) -> TokenStream:
        return self.engine.stream(self._prompt(), self._params(), priority=self.rng.randrange(3), **options)

    async def _break(self) -> None:
        stream = self._stream()
        await self._read(stream, self.rng.randint(1, 10))
        self._note(stream.request_id)  # dropped at the return

    async def _aclose(self) -> None:
        async with self._stream() as stream:
            if self.rng.random() < 0.5:
                await self._a_while()
            else:
                await self._read(stream, self.rng.randint(1, 10))
            self._note(stream.request_id)

    async def _abort(self) -> None:
        stream = self._stream()
        await self._a_while()
        self._note(stream.request_id)
        self.engine.abort(stream.request_id)
        async for _ in stream:
            pass

    async def _task(self, early: bool = False) -> None:
        stream = self._stream()
        task = asyncio.create_task(self._read(stream, 1000))
        if not early:
            await self._a_while()
        self._note(stream.request_id)
        task.cancel()
        await asyncio.wait([task])

    async def _task_early(self) -> None:
        await self._task(early=True)

    async def _generate(self) -> None:
        task = asyncio.create_task(self.engine.generate(self._prompt(), self._params()))
        await self._a_while()
        task.cancel()
        await asyncio.wait([task])

    async def _timeout(self) -> None:
        try:
            async with asyncio.timeout(self.rng.expovariate(1 / 0.02)):
                await self._read(self._stream(), 1000)
        except TimeoutError:
            pass

    async def _deadline(self) -> None:
        try:
            await self._read(self._stream(deadline=1e-4 + self.rng.expovariate(1 / 0.02)), 1000)
        except DeadlineExceededError:
            pass

    async def _gc(self) -> None:
        """In a cycle, so that only the collector drops it, in whatever frame it happens to run."""
        stream = self._stream()
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        self._note(stream.request_id)
        await self._a_while()

    async def _unread(self) -> None:
        self._stream()  # dropped at once


async def in_slots(slots: int, count: int, one: Any) -> None:
    """``one()`` so often, in so many slots at once."""
    left = iter(range(count))

    async def slot() -> None:
        for _ in left:
            await one()

    await asyncio.gather(*(slot() for _ in range(slots)))


async def cancels(args: argparse.Namespace, promises: Promises) -> dict[str, Any]:
    os.environ |= {"FAKE_STEP_US": "200", "CHAOS_BLOCKS": str(args.blocks)}
    engine = await FakeWorkerLLM("smollm2-135m", max_num_seqs=64, preload_grammars=False).start()
    tasks = asyncio.all_tasks()
    canceller = Canceller(engine, random.Random(args.seed), args.ways or Canceller.WAYS, args.tokens)
    warm_up = max(args.cancels // 20, min(args.cancels, 2000))
    await in_slots(args.slots, warm_up, canceller.one)
    await settle(engine, promises)
    resources, begun, before = ProcessResources(), time.monotonic(), canceller.num_begun
    for part in range(10):
        await in_slots(args.slots, args.cancels // 10, canceller.one)
        say(f"{(part + 1) * 10} %: RSS {resources.growth()['rss_growth_mib']:+.1f} MiB")
    took, done = time.monotonic() - begun, canceller.num_begun - before
    gc.collect()
    await settle(engine, promises)
    growth, left, statistics = resources.growth(), objects(), engine.statistics()
    others = [task.get_name() for task in asyncio.all_tasks() - tasks]
    promises.hold("no object of a request is left", not left, left)
    promises.hold("no task but the engine's own is left", not others, others)
    promises.hold("no descriptor is kept", growth["fds_growth"] <= 0, growth)
    promises.hold("memory does not grow by 200 bytes a cancel, or 8 MiB", _bounded(growth, done, 200), growth)
    promises.hold("who is left alone gets the right tokens", not canceller.num_wrong, canceller.num_wrong)
    promises.hold("no request failed but by its deadline", statistics.num_failed <= canceller.ways["deadline"])
    promises.hold("the engine runs", engine.state == "running", engine.state)
    promises.hold("no step makes a worker fail", not statistics.num_restarts, f"{statistics.num_restarts} restarts")
    await engine.aclose()
    return {
        "cancels": done,
        "per_s": round(done / took),
        "ways": dict(canceller.ways),
        "met_in_phase": dict(canceller.phases),
        "aborted": statistics.num_aborted,
        "preemptions": statistics.num_preemptions,
        "left_alone_and_right": canceller.num_whole - canceller.num_wrong,
        "objects_left": left,
        **growth,
    }


def _bounded(growth: dict[str, float], count: int, each: float) -> bool:
    return growth["rss_growth_mib"] * MIB <= max(8 * MIB, each * count)


async def requests(args: argparse.Namespace, promises: Promises) -> dict[str, Any]:
    os.environ |= {"FAKE_STEP_US": "0", "CHAOS_BLOCKS": "40000"}
    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    wrong = 0
    async with FakeWorkerLLM("smollm2-135m", skip_tokenizer=True) as engine:

        async def one() -> None:
            nonlocal wrong
            wrong += (await engine.generate([5, 6, 7], params)).token_ids != (263, 264)

        worker = psutil.Process(engine.describe()["pid"])
        await in_slots(args.slots, max(args.count // 20, 1), one)
        await settle(engine, promises)  # The check's own sets of 40,000 blocks are 7 MiB, which the allocator keeps.
        resources, worker_before, begun = ProcessResources(), worker.memory_info().rss, time.monotonic()
        for part in range(10):
            await in_slots(args.slots, args.count // 10, one)
            say(f"{(part + 1) * 10} %: RSS {resources.growth()['rss_growth_mib']:+.2f} MiB")
        took, done = time.monotonic() - begun, args.count // 10 * 10
        await settle(engine, promises)
        growth, left, worker_growth = resources.growth(), objects(), worker.memory_info().rss - worker_before
    promises.hold("no object of a request is left", not left, left)
    promises.hold("no descriptor is kept", growth["fds_growth"] <= 0, growth)
    promises.hold("memory does not grow by 20 bytes a request, or 8 MiB", _bounded(growth, done, 20), growth)
    promises.hold("the worker's memory neither", worker_growth <= max(8 * MIB, 20 * done), worker_growth)
    promises.hold("all get the right tokens", not wrong, wrong)
    return {
        "requests": done,
        "per_s": round(done / took),
        "rss_growth_bytes_a_request": round(growth["rss_growth_mib"] * MIB / done, 2),
        "worker_rss_growth_mib": round(worker_growth / MIB, 2),
        **growth,
    }
