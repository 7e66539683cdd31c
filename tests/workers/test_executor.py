"""Real worker processes with a fake runner: start, answer, fail, die, close; and what is left afterwards."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import fake_runner
import psutil
import pytest
from worker_helpers import (
    HERE,
    decode,
    descriptors,
    gone,
    leftovers,
    make,
    running,
    stage,
    start,
    start_until,
    step,
)

from aengine.errors import EngineClosedError, EngineError, InternalError, ModelLoadError, WorkerDiedError
from aengine.ipc.messages import Kind
from aengine.outputs import StartupProgress


@pytest.mark.parametrize("ranks", [1, 2])
async def test_steps_are_answered(ranks: int) -> None:
    async with running(tensor_parallel_size=ranks) as executor:
        first = await (await executor.execute_model(step(0, [5, 6, 7])))
        assert list(first.token_ids) == [260 + 3]
        futures = [await executor.execute_model(decode(i, [0])) for i in range(1, 200)]
        assert [(await f).token_ids[0] for f in futures] == [260 + 3 + i for i in range(1, 200)]
        assert (await executor.call("ping", timeout=5))[0]["rank"] == 0
        assert not leftovers()


@pytest.mark.parametrize("ranks", [1, 2])
async def test_memory_of_the_workers(ranks: int, no_blocking: None) -> None:
    executor = make(tensor_parallel_size=ranks)
    assert executor.memory() == (None, None)
    await start(executor)
    resident, on_devices = executor.memory()
    real = sum(psutil.Process(worker.pid).memory_info().rss for worker in executor.workers)
    assert on_devices is None and resident is not None and 0.5 * real < resident < 2 * real
    assert real > ranks * 2**20
    await executor.aclose(5)
    assert executor.memory() == (None, None)


async def test_start_reports_progress() -> None:
    seen: list[StartupProgress] = []
    executor = make()
    ready = await start(executor, report=seen.append)
    assert ready["num_blocks"] == fake_runner.READY["num_blocks"]
    assert ready["pid"] == executor.workers[0].pid
    assert seen[0].stage == "import"
    assert (seen[-1].stage, seen[-1].done, seen[-1].total) == ("weights", 400, 400)
    await executor.aclose(5)


async def test_a_message_larger_than_the_ring() -> None:
    async with running(ring_bytes=64 * 1024) as executor:
        tokens = list(range(200, 200_000))
        answer = await (await executor.execute_model(step(0, tokens)))
        assert answer.token_ids[0] == 260 + len(tokens) % 997


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("load", ModelLoadError, "no such weights: get some"),
        ("bug", InternalError, "KeyError"),
        ("exit", WorkerDiedError, "exit code 7"),
    ],
)
async def test_failures_of_loading(how: str, error: type[Exception], text: str) -> None:
    executor = make()
    with pytest.raises(error, match=text):
        await start(executor, {"fail": how})
    await gone(executor.workers[0].pid)
    assert not leftovers()


async def test_a_start_that_hangs_names_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make()
    with pytest.raises(ModelLoadError, match=r"startup_timeout=600 s.*profile"):
        await start_until("profile", executor, {"fail": "hang"}, monkeypatch)
    await gone(executor.workers[0].pid)


async def test_cancelling_the_start_kills_the_worker() -> None:
    executor = make()
    task = asyncio.create_task(start(executor, {"fail": "hang"}))
    while stage(executor) != "profile":
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(executor.workers[0].pid)


@pytest.mark.parametrize(
    ("token_id", "error", "text"),
    [
        (fake_runner.RAISE, InternalError, "ZeroDivisionError: a bug in a step"),
        (fake_runner.SEGFAULT, WorkerDiedError, "SIGSEGV"),
        (fake_runner.WRITE_AND_KILL, WorkerDiedError, "(?s)SIGKILL.*last words"),
    ],
)
async def test_a_death_reaches_every_waiter_with_its_cause(token_id: int, error: type, text: str) -> None:
    executor = make()
    failures: list[EngineError | None] = []
    await start(executor, failures=failures)
    futures = [await executor.execute_model(step(0, [5])), await executor.execute_model(step(1, [token_id], 1))]
    futures.append(await executor.execute_model(decode(2, [0])))
    await futures[0]
    for future in futures[1:]:
        with pytest.raises(error, match=text):
            await future
    assert len(failures) == 1 and isinstance(failures[0], error)
    with pytest.raises(error):
        await executor.execute_model(decode(3, [0]))
    with pytest.raises(error):
        await executor.call("ping", timeout=1)
    pid = executor.workers[0].pid
    await executor.aclose(5)
    await gone(pid)
    if error is InternalError:
        assert "ZeroDivisionError" in failures[0].worker_traceback  # type: ignore[attr-defined]


async def test_killed_from_outside() -> None:
    executor = make()
    failures: list[EngineError | None] = []
    await start(executor, failures=failures)
    future = await executor.execute_model(step(0, [fake_runner.HANG]))
    os.kill(executor.workers[0].pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError) as caught:
        await future
    assert caught.value.exit_code == -9 and caught.value.rank == 0
    assert failures == [caught.value]
    await executor.aclose(5)


async def test_close_of_a_hanging_worker_is_bounded() -> None:
    executor = make()
    await start(executor)
    future = await executor.execute_model(step(0, [fake_runner.HANG]))
    pid = executor.workers[0].pid
    await executor.aclose(0.3)
    with pytest.raises(EngineClosedError):
        await future
    await gone(pid)
    await executor.aclose(0.3)
    with pytest.raises(EngineClosedError):
        await executor.execute_model(decode(1, [0]))


async def test_nonsense_from_the_worker_is_a_failure_and_no_hang() -> None:
    executor = make()
    failures: list[EngineError | None] = []
    await start(executor, failures=failures)
    worker = executor.workers[0]
    future = await executor.execute_model(step(0, [fake_runner.SLOW]))
    for payload in (b"\xc1", b"\x90"):  # no msgpack; an empty list
        from aengine.ipc.channel import Frame

        worker.channel.drain = lambda payload=payload: [Frame(Kind.OUTPUT, 0, payload)]  # type: ignore[method-assign]
        executor._on_frames(worker)
    with pytest.raises(InternalError, match="nonsense"):
        await future
    assert len(failures) == 1
    await executor.aclose(5)


async def test_two_executors_side_by_side() -> None:
    async with running() as one, running() as two:
        a, b = await one.execute_model(step(0, [1, 2])), await two.execute_model(step(0, [1, 2, 3]))
        assert (await a).token_ids[0] + 1 == (await b).token_ids[0]


async def test_nothing_is_left_behind() -> None:
    async with running():  # whatever the first one imports and opens for good
        pass
    gc.collect()
    process = psutil.Process()
    before = (descriptors(), threading.active_count(), process.children())
    for _ in range(3):
        async with running() as executor:
            await (await executor.execute_model(step(0, [5])))
    for _ in range(100):
        after = (descriptors(), threading.active_count(), process.children())
        if after == before:
            break
        await asyncio.sleep(0.01)
    assert after == before
    assert not leftovers()


async def test_an_idle_worker_costs_nothing() -> None:
    async with running() as executor:
        await (await executor.execute_model(step(0, [5])))
        process = psutil.Process(executor.workers[0].pid)
        await asyncio.sleep(0.3)  # the worker is parked by then
        before = process.cpu_times()
        await asyncio.sleep(1.0)  # the time whose CPU is counted
        after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    assert used <= 0.03


def test_a_starting_thread_that_ends_takes_no_worker_along(any_loop: asyncio.AbstractEventLoop) -> None:
    """PR_SET_PDEATHSIG fires at the death of the forking thread: that must not be the caller's."""
    executor = make()

    async def answer() -> int:
        return (await (await executor.execute_model(step(0, [5])))).token_ids[0]

    def start_here() -> None:
        any_loop.run_until_complete(start(executor))

    thread = threading.Thread(target=start_here)
    thread.start()
    thread.join()
    time.sleep(0.1)  # for the signal to come
    assert any_loop.run_until_complete(answer()) == 261
    any_loop.run_until_complete(executor.aclose(5))


SCRIPT = """
import asyncio, sys, os, time
sys.path.insert(0, {here!r})
from worker_helpers import make, start, step
async def main():
    executor = make()
    if {when!r} == "starting":
        starting = asyncio.ensure_future(start(executor, {{"fail": "hang"}}))
        while not executor.workers or executor.workers[0].pid is None:
            await asyncio.sleep(0.01)
        print(executor.workers[0].pid, flush=True)
        await starting
    await start(executor)
    print(executor.workers[0].pid, flush=True)
    if {when!r} == "exit":
        os._exit(0)
    if {when!r} == "unclosed":
        return
    await executor.execute_model(step(0, [103]))  # hangs
    time.sleep(3600)
asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["starting", "stepping", "exit", "unclosed"])
def test_the_host_dies(when: str) -> None:
    """SIGKILL of the host, os._exit, or an end without close: the worker is gone within two seconds."""
    host = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT.format(here=str(HERE), when=when))],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert host.stdout is not None
    pid = int(host.stdout.readline())
    if when in ("starting", "stepping"):
        time.sleep(0.2)  # the host is in the midst of it by then
        assert psutil.pid_exists(pid)
        host.kill()
    host.wait()
    host.stdout.close()
    asyncio.run(gone(pid))
    assert not leftovers(host.pid)


async def test_an_interrupt_in_the_terminal_does_not_reach_the_worker() -> None:
    async with running() as executor:
        assert os.getpgid(executor.workers[0].pid) != os.getpgid(0)
        os.kill(executor.workers[0].pid, signal.SIGINT)
        assert (await (await executor.execute_model(step(0, [5])))).token_ids[0] == 261


async def test_terminated_before_anything_is_launched() -> None:
    before = descriptors()
    for _ in range(5):
        executor = make(tensor_parallel_size=2)
        starting = asyncio.create_task(start(executor))
        await asyncio.sleep(0)  # it waits for a thread
        executor.terminate()
        with pytest.raises(EngineClosedError):
            await starting
    gc.collect()
    assert descriptors() <= before
