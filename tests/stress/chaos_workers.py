"""`kills` and `hangs`: workers of SmolLM2 are killed or stopped under streams that are read token by token."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import psutil
from chaos_common import ProcessResources, Promises, division, model_for, say, seconds, settle
from conftest_api import core_of

from aengine import AEngineError, AsyncLLM, SamplingParams, StructuredOutput
from aengine.engine.executor import ProcessExecutor

PLAIN = SamplingParams(temperature=0, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
KINDS: dict[str, SamplingParams] = {
    "greedy": PLAIN,
    "seeded": PLAIN.replace(temperature=0.9, top_p=0.95),
    "regex": PLAIN.replace(
        temperature=0.9, structured_output=StructuredOutput(regex=r"[a-z]{2,9}( [a-z]{2,9}){30}"), ignore_eos=False
    ),
    "json": SamplingParams(temperature=0.9, structured_output=StructuredOutput(json_schema=SCHEMA)),
    "n=2": PLAIN.replace(temperature=0.8, n=2),
    "stop": PLAIN.replace(temperature=0.9, stop=[".", "\n", " the "]),
}
ONGOING_SHARE = 0.2
"""Of the kills, those that come while another worker is started already."""


class Job(NamedTuple):
    kind: str
    prompt: str
    params: SamplingParams


class Output(NamedTuple):
    """Of each completion: its token ids, its text, its reason to end."""

    token_ids: list[tuple[int, ...]]
    texts: list[str]
    reasons: list[str | None]


def make_jobs(rng: random.Random, count: int, tokens: int) -> list[Job]:
    jobs = []
    for i in range(count):
        kind = list(KINDS)[i % len(KINDS)]
        seed, length = rng.getrandbits(31), rng.randint(tokens // 2, tokens)
        topic = rng.choice(["the sea", "a clock", "bread", "a king", "winter", "an owl"])
        jobs.append(Job(kind, f"Story {i} of {topic}:", KINDS[kind].replace(seed=seed, max_tokens=length)))
    return jobs


class Streams:
    """So many streams at once, one after the other in each slot; each token is checked as it comes."""

    def __init__(self, engine: AsyncLLM, jobs: list[Job], seed: int) -> None:
        self.engine = engine
        self.jobs = jobs
        self.expected: list[Output] = []
        self.num_streams = self.num_tokens = self.num_doubled = self.num_missing = 0
        self.different: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.first_lost: list[str] = []
        self.first_different: list[str] = []
        self.last_token_at = 0.0
        self._seed = seed
        self._stop = False

    async def read(self, job: Job) -> Output:
        output = Output([()] * job.params.n, [""] * job.params.n, [None] * job.params.n)
        async for token in self.engine.stream(job.prompt, job.params):
            self.last_token_at = time.monotonic()
            self.num_tokens += 1
            so_far = len(output.token_ids[token.index])
            self.num_doubled += token.position < so_far
            self.num_missing += token.position > so_far
            output.token_ids[token.index] += (token.token_id,)
            output.texts[token.index] += token.text
            output.reasons[token.index] = token.finish_reason
        return output

    async def learn(self) -> None:
        """What an undisturbed engine answers."""
        self.expected = list(await asyncio.gather(*map(self.read, self.jobs)))
        self.num_tokens = 0

    async def _slot(self, slot: int) -> None:
        rng = random.Random(f"{self._seed} {slot}")
        while not self._stop:
            which = rng.randrange(len(self.jobs))
            job = self.jobs[which]
            self.num_streams += 1
            try:
                output = await self.read(job)
            except AEngineError as error:
                self.lost[job.kind] += 1
                self.first_lost = (self.first_lost + [f"{job.kind}: {error!r}"])[:3]
                say(f"lost: {job.kind}: {error!r}")
                continue
            if output != self.expected[which]:
                self.different[job.kind] += 1
                self.first_different = [*self.first_different, difference(job, self.expected[which], output)][:3]
                say(f"different: {self.first_different[-1]}")

    @asynccontextmanager
    async def flowing(self, count: int) -> AsyncIterator[None]:
        """Within: ``count`` streams at any time. At the end they are read to their ends."""
        tasks = [asyncio.create_task(self._slot(i)) for i in range(count)]
        try:
            await self.token_after(time.monotonic())
            yield
            self._stop = True
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def token_after(self, moment: float, most: float = 240.0) -> float:
        """When the first one came. Raises TimeoutError."""
        async with asyncio.timeout(most):
            while self.last_token_at <= moment:
                await asyncio.sleep(0.002)
        return self.last_token_at

    def report(self, promises: Promises) -> dict[str, Any]:
        promises.hold("no stream is lost", not self.lost, self.first_lost)
        promises.hold("no token comes twice", not self.num_doubled, self.num_doubled)
        promises.hold("no token is left out", not self.num_missing, self.num_missing)
        promises.hold("the outputs are those of an undisturbed run", not self.different, self.first_different)
        return {
            "streams": self.num_streams,
            "lost_streams": dict(self.lost),
            "tokens": self.num_tokens,
            "tokens_duplicated": self.num_doubled,
            "tokens_missing": self.num_missing,
            "different_outputs": dict(self.different),
        }


def difference(job: Job, expected: Output, output: Output) -> str:
    """Where the first differing completion leaves what was expected of it."""
    for index, (want, got) in enumerate(zip(expected.token_ids, output.token_ids, strict=True)):
        if want != got:
            same = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), len(want))
            return f"{job} choice {index} from token {same} on: {want[same : same + 4]} became {got[same : same + 4]}"
    return f"{job}: equal tokens, but {expected.texts, expected.reasons} became {output.texts, output.reasons}"


class Backoff(logging.Handler):
    """The waits before restarts, which the engine's log tells."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r"started again in ([\d.]+) s", record.getMessage()):
            self.total += float(found[1])


def workers_of(engine: AsyncLLM) -> ProcessExecutor:
    """The newest ones, which may be in their start, or yet to be made."""
    return whole(core_of(engine).replicas[0].worker.executor)


def whole(executor: Any) -> ProcessExecutor:
    """That of all ranks, if replicas share them."""
    executor = getattr(executor, "_joint", executor)
    assert isinstance(executor, ProcessExecutor)
    return executor


def victim_of(workers: ProcessExecutor, rng: random.Random) -> int:
    """The process of a rank."""
    return rng.choice([worker.pid for worker in workers.workers if worker.pid])


def kill(pid: int) -> None:
    assert pid > 1, "to the kernel, other numbers mean everybody"
    os.kill(pid, signal.SIGKILL)


async def other_workers(engine: AsyncLLM, old: ProcessExecutor, *, ready: bool) -> ProcessExecutor:
    """Wait for others than ``old`` of which one is there at least; until they have been given the requests if
    ``ready``. Raises TimeoutError."""
    async with asyncio.timeout(240):
        while True:
            core = core_of(engine)
            assert core is not None
            new = workers_of(engine)
            is_there = any(worker.pid for worker in new.workers)
            if new is not old and is_there and (not ready or whole(core.replicas[0].steps._executor) is new):
                return new
            if core.state != "running":
                raise TimeoutError(f"the engine has {core.state}: {core.failure!r}")
            await asyncio.sleep(0.002)


class Kill(NamedTuple):
    at: float
    recovered: float  # when a token came
    backoff: float
    deaths: int  # of a series, without a token in between


async def killer(streams: Streams, rng: random.Random, count: int, mean: float, backoff: Backoff) -> list[Kill]:
    """Kills a worker ``count`` times; one entry a series of deaths without a token in between, from the first on."""
    engine, workers, done, kills = streams.engine, workers_of(streams.engine), 0, []
    while done < count:
        await asyncio.sleep(rng.expovariate(1 / mean))
        at, before, deaths = time.monotonic(), backoff.total, 1
        kill(victim_of(workers, rng))
        while done + deaths < count and rng.random() < ONGOING_SHARE:
            workers = await other_workers(engine, workers, ready=False)
            await asyncio.sleep(rng.uniform(0, 4))
            kill(victim_of(workers, rng))
            deaths += 1
        workers = await other_workers(engine, workers, ready=True)
        done += deaths
        if rng.random() < 0.2 and done < count:  # a kill before anything has been computed again
            await asyncio.sleep(rng.uniform(0, 0.3))
            kill(victim_of(workers, rng))
            done, deaths = done + 1, deaths + 1
            workers = await other_workers(engine, workers, ready=True)
        recovered = await streams.token_after(time.monotonic() if deaths > 1 else at + 0.05)
        kills.append(Kill(at, recovered, backoff.total - before, deaths))
        say(f"{done} of {count} kills: {deaths} in a row, a token after {recovered - at:.1f} s, "
            f"of which {kills[-1].backoff:g} s were waited")  # fmt: skip
    return kills


def check_own_processes(ranks: int, promises: Promises) -> None:
    workers = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    zombies = len(psutil.Process().children()) - len(workers)
    promises.hold("one worker a rank, no zombie", len(workers) == ranks and not zombies, (len(workers), zombies))
    names = [name for name in os.listdir("/dev/shm") if f"aengine-{os.getpid()}-" in name]
    promises.hold("nothing is left in /dev/shm", len(names) <= 2 * ranks, names)


def make_engine(args: argparse.Namespace, **more: Any) -> AsyncLLM:
    """So short a window that hardly any time is spent in waiting for the next start: that is tested elsewhere."""
    size = {"max_model_len": 512, "kv_cache_memory_bytes": (512 << 20) // args.ranks}
    settings = {"dtype": "float32", "device": "cpu", **size, "max_restarts": 10**6, "restart_window": 5.0}
    return AsyncLLM(model_for(args.ranks, args.by), **division(args.ranks, args.by), **settings, **more)


async def kills(args: argparse.Namespace, promises: Promises) -> dict[str, Any]:
    rng, backoff = random.Random(args.seed), Backoff()
    logging.getLogger("aengine").addHandler(backoff)
    jobs = make_jobs(rng, args.streams, args.tokens)
    async with make_engine(args) as engine:
        streams = Streams(engine, jobs, args.seed)
        await streams.learn()
        say("the undisturbed run is done")
        resources = ProcessResources()
        begun = time.monotonic()
        async with streams.flowing(args.streams):
            series = await killer(streams, rng, args.kills, args.mean, backoff)
        took = time.monotonic() - begun
        await settle(engine, promises)
        check_own_processes(args.ranks, promises)
        result = {
            "ranks": args.ranks,
            "by": args.by,
            "kills": args.kills,
            "restarts": engine.statistics().num_restarts,
            **streams.report(promises),
        }
        promises.hold("one restart a kill", result["restarts"] == args.kills, result["restarts"])
        growth = resources.growth()
    single = [k for k in series if k.deaths == 1]
    several = [k for k in series if k.deaths > 1]
    promises.hold("no descriptor is kept", growth["fds_growth"] <= 4, growth)
    return result | {
        "recovery_s": seconds([k.recovered - k.at for k in single]),
        "recovery_s_less_backoff": seconds([k.recovered - k.at - k.backoff for k in single]),
        "recovery_s_of_several_deaths_in_a_row": seconds([k.recovered - k.at for k in several]),
        **growth,
        "took_s": round(took),
    }


async def hangs(args: argparse.Namespace, promises: Promises) -> dict[str, Any]:
    rng, backoff = random.Random(args.seed), Backoff()
    logging.getLogger("aengine").addHandler(backoff)
    detected, recovered = [], []
    async with make_engine(args) as engine:
        streams = Streams(engine, make_jobs(rng, args.streams, args.tokens), args.seed)
        await streams.learn()
        async with streams.flowing(args.streams):
            for i in range(args.hangs):
                await asyncio.sleep(rng.uniform(0.2, 1.5))
                workers, before, waited = workers_of(engine), engine.statistics().num_restarts, backoff.total
                pid = victim_of(workers, rng)
                assert pid > 1
                os.kill(pid, signal.SIGSTOP)
                at = time.monotonic()
                while engine.statistics().num_restarts == before:
                    await asyncio.sleep(0.005)
                    if time.monotonic() > at + 60:
                        break
                detected.append(time.monotonic() - at)
                await other_workers(engine, workers, ready=True)
                recovered.append(await streams.token_after(time.monotonic()) - at - (backoff.total - waited))
                say(f"hang {i + 1}: detected after {detected[-1]:.2f} s, a token after {recovered[-1]:.2f} s")
        await settle(engine, promises)
        check_own_processes(args.ranks, promises)
        result = {
            "ranks": args.ranks,
            "by": args.by,
            "hangs": args.hangs,
            "restarts": engine.statistics().num_restarts,
            **streams.report(promises),
        }
        limit = engine.config.hang_timeout
    promises.hold("one restart a hang", result["restarts"] == args.hangs, result["restarts"])
    promises.hold("a stopped worker is detected within hang_timeout + 1.5 s", max(detected) < limit + 1.5, detected)
    return result | {
        "hang_timeout": limit, "detected_s": seconds(detected), "recovery_s_less_backoff": seconds(recovered)
    }  # fmt: skip
