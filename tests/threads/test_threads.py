"""Threads for blocking work."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from aengine.engine.threads.lanes import Lanes
from aengine.engine.threads.pools import ThreadPool, end_pools, run_in_thread
from aengine.errors import EngineClosedError, EngineError, EngineOverloadedError, InternalError


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"aengine-{name}"]


async def test_in_its_order_in_one_thread() -> None:
    pool = ThreadPool("one")
    seen: list[int] = []
    await asyncio.gather(*(pool.run(seen.append, i) for i in range(50)))
    assert seen == list(range(50)) and len(threads("one")) == 1
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0)
    assert await pool.run(max, 3, 4) == 4
    await pool.aclose()
    assert not threads("one")
    await pool.aclose()


async def test_several_threads_when_there_is_work_for_them() -> None:
    pool, both = ThreadPool("two", 2), threading.Barrier(2)
    for _ in range(3):
        await pool.run(time.sleep, 0)
        while not pool._work.idle:  # it answers a moment before it is free again
            await asyncio.sleep(0)
    assert len(threads("two")) == 1
    await asyncio.gather(pool.run(both.wait, 30), pool.run(both.wait, 30))
    assert len(threads("two")) == 2
    await pool.aclose()
    assert not threads("two")


async def test_cancelled_before_its_turn() -> None:
    pool, gate = ThreadPool("gated"), threading.Event()
    done: list[int] = []
    first = pool.run(gate.wait, 30)
    second, third = pool.run(done.append, 2), pool.run(done.append, 3)
    second.cancel()
    gate.set()
    await third
    assert await first and done == [3]
    await pool.aclose()


async def test_closed_with_work_left() -> None:
    pool, gate, begun = ThreadPool("closed"), threading.Event(), threading.Event()
    first = pool.run(lambda: (begun.set(), gate.wait(30)))
    second = pool.run(time.sleep, 0)
    await asyncio.to_thread(begun.wait, 30)
    pool.close()
    with pytest.raises(EngineClosedError, match="is closed"):
        pool.run(time.sleep, 0)
    gate.set()
    assert await first
    with pytest.raises(asyncio.CancelledError):
        await second
    await pool.aclose()
    assert not threads("closed")


async def test_jobs_that_are_taken_back() -> None:
    pool, gate, begun = ThreadPool("jobs"), threading.Event(), threading.Event()
    done: list[int] = []
    first = pool.submit(lambda: (begun.set(), gate.wait(30), done.append(1)))
    second, third = pool.submit(lambda: done.append(2)), pool.submit(lambda: done.append(3))
    await asyncio.to_thread(begun.wait, 30)
    assert pool.num_queued == 2 and pool.discard(second) and not pool.discard(second) and not pool.discard(first)
    assert pool.num_queued == 1
    gate.set()
    await pool.run(time.sleep, 0)
    assert done == [1, 3] and not pool.discard(third)
    begun.clear(), gate.clear()
    pool.submit(lambda: (begun.set(), gate.wait(30), done.append(4)))
    pool.submit(lambda: done.append(5))
    await asyncio.to_thread(begun.wait, 30)
    pool.close()
    gate.set()
    await pool.aclose()
    assert done == [1, 3, 4] and not threads("jobs")  # what was not begun is dropped


async def test_closed_from_another_thread_while_work_comes() -> None:
    """However they fall together: each job is done or dropped, each future ends, each thread ends."""
    for _ in range(50):
        pool, done = ThreadPool("storm", 3), []
        closing = asyncio.create_task(asyncio.to_thread(pool.close))
        futures = []
        try:
            while True:
                pool.submit(lambda: done.append(1))
                futures.append(pool.run(done.append, 2))
                await asyncio.sleep(0)
        except EngineClosedError:
            pass
        await closing
        await pool.aclose()
        await asyncio.gather(*futures, return_exceptions=True)
        kept = sum(not future.cancelled() for future in futures)
        assert kept <= done.count(2) <= kept + 1, "the last may have begun before `run` saw that the pool is closed"
        assert not threads("storm")


async def test_dropped_without_being_closed() -> None:
    pool = ThreadPool("dropped")
    await pool.run(time.sleep, 0)
    (thread,) = threads("dropped")
    del pool
    gc.collect()
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()


def refuse(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ThreadPool("refused", 2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for attempt in (pool.begin, lambda: pool.run(time.sleep, 0)):
            with pytest.raises(EngineOverloadedError, match=r"can't start new thread.*ulimit -u.*pids limit"):
                attempt()
        with pytest.raises(EngineError, match=r"can't start new thread.*ulimit -u"):
            await run_in_thread("refused", time.sleep, 0)
    pool.begin()
    gate = threading.Event()
    first = pool.run(gate.wait, 30)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        second = pool.run(int, "7")  # a second thread can't be started: the first one does it
    gate.set()
    assert (await first, await second) == (True, 7)
    await pool.aclose()


class Panic(BaseException):
    """As pyo3's PanicException, which is no `Exception`."""


@pytest.mark.parametrize("kind", [Panic, SystemExit, KeyboardInterrupt])
async def test_what_is_no_exception_does_not_reach_the_loop(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("odd")

    pool = ThreadPool("panics")
    for run in (lambda: pool.run(fail), lambda: run_in_thread("panics", fail)):
        with pytest.raises(InternalError, match="odd") as caught:
            await run()
        assert isinstance(caught.value.__cause__, kind)
    await pool.aclose()


async def test_closing_leaves_a_thread_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.engine.threads.pools._END_SECONDS", 0.01)
    lanes, gate = Lanes("endless"), threading.Event()
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> bool:
        loop.call_soon_threadsafe(begun.set)
        return gate.wait()

    running, queued = lanes.run(wait, is_long=True), lanes.run(gate.wait, is_long=True)
    await begun.wait()
    assert await lanes.run(max, 1, 2, is_long=False) == 2  # the short lane goes on
    assert lanes.num_queued(is_long=True) == 1 and not lanes.num_queued(is_long=False)
    async with asyncio.timeout(20):
        await end_pools(*lanes.close())
    (thread,) = threads("endless-long")
    assert thread.daemon and not threads("endless")
    gate.set()
    assert await running
    with pytest.raises(asyncio.CancelledError):
        await queued
    thread.join(20)
