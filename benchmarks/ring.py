"""The bridge's speed, against multiprocessing.Queue in the same run; one JSON object on stdout.

    python benchmarks/ring.py [--rounds N] [--repeats K]

Everything is measured in turn over N round trips, K times. Printed is the turn that other work on the machine disturbed
least (the best median of "sync"), whole, so that what is compared was measured within the same seconds; of the
throughputs the best. Times are microseconds for there and back, throughput is GB/s (1e9).

  sync        two processes that spin on their rings, as the worker does all the time
  asyncio,    the host's end as the engine uses it: publish, then the loop wakes the reader, which drains and
  uvloop      completes a future
  queue       the same through a pair of multiprocessing.Queue
  down, up    4 MiB messages host -> worker and worker -> host, one after the other, received whole
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import uvloop

from aengine.ipc.channel import Frame, HostChannel, WorkerChannel

PAYLOAD = os.urandom(200)
LARGE = os.urandom(4 * 1024 * 1024)
ECHO, SINK, SOURCE, STOP = 1, 2, 3, 4


def worker_main(description: str) -> None:
    """The child: echoes, swallows and acknowledges, or sends as many large messages as it is told."""
    channel = WorkerChannel.attach(description, spin_us=100)
    swallowed = 0
    while (frame := channel.consume(None)) is not None and frame.kind != STOP:
        if frame.kind == ECHO:
            channel.publish(ECHO, frame.step_id, frame.payload)
        elif frame.kind == SINK:
            swallowed += len(frame.payload)
            if frame.step_id == 0:
                channel.publish(SINK, swallowed, b"")
        else:
            for _ in range(frame.step_id):
                channel.publish(SOURCE, 0, LARGE)
    channel.close()


def start_worker() -> tuple[HostChannel, subprocess.Popen[bytes]]:
    host = HostChannel.create(4 * 1024 * 1024)
    command = [sys.executable, __file__, "--worker", host.description]
    child = subprocess.Popen(command, pass_fds=host.inherit_fds)
    host.offer()
    return host, child


def stop_worker(host: HostChannel, child: subprocess.Popen[bytes]) -> None:
    assert host.try_publish(STOP, 0, b"")
    child.wait()
    host.close()


def quantiles(seconds: list[float]) -> dict[str, float]:
    seconds.sort()
    return {
        "p50_us": round(seconds[len(seconds) // 2] * 1e6, 2),
        "p99_us": round(seconds[len(seconds) * 99 // 100] * 1e6, 2),
    }


def sync_round_trips(rounds: int) -> dict[str, float]:
    host, child = start_worker()
    consumer = host._consumer  # to spin on, as the host never does
    assert host.try_publish(ECHO, 0, b"warm")
    consumer.spin(10.0)
    host.unlink()
    host.drain()
    seconds = []
    for step_id in range(rounds):
        start = time.perf_counter()
        host.try_publish(ECHO, step_id, PAYLOAD)
        consumer.spin(1.0)
        (frame,) = host.drain()
        seconds.append(time.perf_counter() - start)
        assert frame.step_id == step_id and frame.payload == PAYLOAD
    stop_worker(host, child)
    return quantiles(seconds)


class Inbox:
    """What the engine's executor does with frames, and no more."""

    def __init__(self, host: HostChannel) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[Frame] | None = None
        self.num_frames = 0
        host.open(self._loop, self._on_readable)

    def expect(self) -> asyncio.Future[Frame]:
        self._waiter = self._loop.create_future()
        return self._waiter

    def _on_readable(self) -> None:
        for frame in self._host.drain():
            self.num_frames += 1
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(frame)


async def loop_round_trips(rounds: int) -> dict[str, float]:
    host, child = start_worker()
    inbox = Inbox(host)
    seconds = []
    for step_id in range(rounds):
        start = time.perf_counter()
        answer = inbox.expect()
        await host.publish(ECHO, step_id, PAYLOAD)
        frame = await answer
        seconds.append(time.perf_counter() - start)
        assert frame.step_id == step_id and frame.payload == PAYLOAD
    del seconds[0]  # the worker's start
    stop_worker(host, child)
    return quantiles(seconds)


async def throughput(messages: int) -> dict[str, float]:
    host, child = start_worker()
    inbox = Inbox(host)
    answer = inbox.expect()
    await host.publish(ECHO, 0, LARGE)
    await answer
    start, answer = time.perf_counter(), inbox.expect()
    for left in reversed(range(messages)):
        await host.publish(SINK, left, LARGE)
    assert (await answer).step_id == messages * len(LARGE)
    down = time.perf_counter() - start
    start, before = time.perf_counter(), inbox.num_frames
    await host.publish(SOURCE, messages, b"")
    while inbox.num_frames < before + messages:
        assert len((await inbox.expect()).payload) == len(LARGE)
    up = time.perf_counter() - start
    stop_worker(host, child)
    size = messages * len(LARGE) / 1e9
    return {"down_gb_s": round(size / down, 2), "up_gb_s": round(size / up, 2)}


def queue_main(requests: Any, answers: Any) -> None:
    while (item := requests.get()) is not None:
        answers.put(item)


def queue_round_trips(rounds: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    requests, answers = context.Queue(), context.Queue()
    child = context.Process(target=queue_main, args=(requests, answers))
    child.start()
    requests.put(PAYLOAD)
    answers.get()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        requests.put(PAYLOAD)
        answers.get()
        seconds.append(time.perf_counter() - start)
    requests.put(None)
    child.join()
    return quantiles(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker_main(options.worker)
        return
    n = options.rounds
    trips: dict[str, Callable[[], dict[str, float]]] = {
        "sync": lambda: sync_round_trips(n),
        "asyncio": lambda: asyncio.run(loop_round_trips(n)),
        "uvloop": lambda: uvloop.run(loop_round_trips(n)),
        "queue": lambda: queue_round_trips(n // 4),
    }
    runs = [{name: measure() for name, measure in trips.items()} for _ in range(options.repeats)]
    best: dict[str, Any] = min(runs, key=lambda run: run["sync"]["p50_us"])
    large = [uvloop.run(throughput(100)) for _ in range(options.repeats)]
    best["large_4MiB"] = {way: max(run[way] for run in large) for way in large[0]}
    best["queue_over_sync"] = round(best["queue"]["p50_us"] / best["sync"]["p50_us"], 1)
    best["queue_over_uvloop"] = round(best["queue"]["p50_us"] / best["uvloop"]["p50_us"], 1)
    machine = {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()}
    print(json.dumps({"benchmark": "ring", "frame_bytes": len(PAYLOAD), **best, "machine": machine}))


if __name__ == "__main__":
    main()
