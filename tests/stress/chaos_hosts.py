"""`hosts`: processes with an engine are killed while they start and while they stream; what do they leave behind?"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
from chaos_common import FakeWorkerLLM, Promises, division, model_for, say, seconds

from aengine import AsyncLLM, SamplingParams

PROMISED_SECONDS = 2.0
_PR_SET_CHILD_SUBREAPER = 36
START_SECONDS = {"fake": 1.0, "real": 5.0}
"""From the host's first line to streams: kills in this time are kills while it starts and loads."""


async def host(model: str, path: str, ranks: int, by: str) -> None:
    """Says how far it is, then streams for ever."""
    os.environ["CHAOS_BLOCKS"] = "2000"
    os.write(1, b"begin\n")
    settings: dict[str, Any] = {"device": "cpu", **division(ranks, by)}
    if model == "real":
        engine = AsyncLLM(path, max_model_len=512, kv_cache_memory_bytes=64 << 20, num_threads=1, **settings)
    else:
        engine = FakeWorkerLLM("smollm2-135m", skip_tokenizer=True, **settings)
    params = SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False)
    async with engine:

        async def slot(i: int) -> None:
            while True:
                async for _ in engine.stream([5, 6, 7 + i], params):
                    if told:
                        told.clear()
                        os.write(1, b"streaming\n")

        told = [True]
        await asyncio.gather(*map(slot, range(8)))


def left_of(pid: int) -> tuple[list[psutil.Process], list[str]]:
    """Its orphans, which are ours as we are the subreaper, and its names in /dev/shm. The dead are buried."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
            else:
                alive.append(process)
        except (psutil.NoSuchProcess, ChildProcessError):
            pass
    return alive, [name for name in os.listdir("/dev/shm") if f"aengine-{pid}-" in name]


def stop_a_rank(pid: int, rng: random.Random) -> None:
    """Have the other ranks of a host wait for one that does not come, as in a collective."""
    workers = psutil.Process(pid).children()
    if len(workers) > 1:
        rng.choice(workers).suspend()
        time.sleep(0.3)  # the others wait for it by then


def kill_one(model: str, phase: str, ranks: int, by: str, rng: random.Random, promises: Promises) -> float:
    """Seconds until nothing was left of it."""
    command = [sys.executable, __file__, model, model_for(ranks, by), str(ranks), by]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            until = b"begin\n" if phase == "start" else b"streaming\n"
            while (line := process.stdout.readline()) != until:
                if not line:
                    raise RuntimeError(f"a {model} host ended by itself before it said {until!r}")
            time.sleep(rng.uniform(0, START_SECONDS[model] if phase == "start" else 0.5))
            if phase == "stuck":
                stop_a_rank(process.pid, rng)
        finally:
            process.send_signal(signal.SIGKILL)
        process.wait()
        begun = time.monotonic()
        while any(left := left_of(process.pid)) and time.monotonic() < begun + 10:
            time.sleep(0.005)
        took = time.monotonic() - begun
    promises.hold("nothing of a host is left after 2 s", took <= PROMISED_SECONDS, (model, phase, round(took, 2), left))
    for orphan in left[0]:  # not to be found again in the next round
        orphan.kill()
    return took


def hosts(args: argparse.Namespace, promises: Promises) -> dict[str, Any]:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    rng = random.Random(args.seed)
    times: dict[str, list[float]] = {}
    for i in range(args.hosts):
        model = args.model if args.model != "both" else ("fake", "real")[i // 2 % 2]
        phase = ("start", "stream")[i % 2]
        if args.ranks > 1 and phase == "stream" and rng.random() < 0.5:
            phase = "stuck"
        times.setdefault(f"{model}, {phase}", []).append(kill_one(model, phase, args.ranks, args.by, rng, promises))
        say(f"{i + 1} of {args.hosts}: {model}, {phase}: gone after {times[f'{model}, {phase}'][-1]:.3f} s")
    everything = [t for some in times.values() for t in some]
    return {
        "ranks": args.ranks,
        "by": args.by,
        "hosts": len(everything),
        "gone_s": {name: seconds(some) for name, some in times.items()},
        "worst_gone_s": round(max(everything), 3),
    }


if __name__ == "__main__":
    asyncio.run(host(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
