"""`replicas`: workers of several replicas are killed under streams, which go on with the others."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

from chaos_common import ProcessResources, Promises, say, settle
from chaos_workers import Streams, kill, make_engine, make_jobs
from conftest_api import core_of


async def replicas(args: argparse.Namespace, promises: Promises) -> dict[str, Any]:
    rng = random.Random(args.seed)
    jobs = make_jobs(rng, args.streams, args.tokens)
    async with make_engine(args, data_parallel_size=args.replicas) as engine:
        streams = Streams(engine, jobs, args.seed)
        await streams.learn()
        say("the undisturbed run is done")
        resources, begun = ProcessResources(), time.monotonic()
        async with streams.flowing(args.streams):
            for i in range(args.kills):
                await asyncio.sleep(rng.expovariate(1 / args.mean))
                async with asyncio.timeout(240):
                    while not (running := [one for one in core_of(engine).replicas if one.state == "running"]):
                        await asyncio.sleep(0.002)
                victim = rng.choice(running)
                at, pid = time.monotonic(), rng.choice(list(victim.worker.executor.workers)).pid
                assert pid is not None
                kill(pid)
                token = await streams.token_after(time.monotonic())
                say(f"{i + 1} of {args.kills} kills: of replica {victim.index}, a token after {token - at:.2f} s")
                async with asyncio.timeout(240):  # until it is noticed: the next one is of another worker
                    while victim.state == "running" and pid in [one.pid for one in victim.worker.executor.workers]:
                        await asyncio.sleep(0.002)
        took = time.monotonic() - begun
        async with asyncio.timeout(240):
            while any(one.state != "running" for one in core_of(engine).replicas):
                await asyncio.sleep(0.01)
        await settle(engine, promises)
        restarts = [one.num_restarts for one in engine.statistics().replicas]
        promises.hold("one restart a kill", sum(restarts) == args.kills, restarts)
        growth = resources.growth()
    promises.hold("no descriptor is kept", growth["fds_growth"] <= 4, growth)
    return {"kills": args.kills, "restarts": sum(restarts), **streams.report(promises), **growth, "took_s": round(took)}
