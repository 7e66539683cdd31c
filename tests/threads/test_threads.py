"""Threads for blocking work."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from aengine.errors import EngineClosedError, EngineError, EngineOverloadedError
from aengine.threads.pools import Lane, run_in_thread


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"aengine-{name}"]


async def test_in_its_order_in_one_thread() -> None:
    lane = Lane("one")
    seen: list[int] = []
    await asyncio.gather(*(lane.run(seen.append, i) for i in range(50)))
    assert seen == list(range(50)) and len(threads("one")) == 1
    with pytest.raises(ZeroDivisionError):
        await lane.run(lambda: 1 // 0)
    assert await lane.run(max, 3, 4) == 4
    await lane.aclose()
    assert not threads("one")
    await lane.aclose()


async def test_several_threads_when_there_is_work_for_them() -> None:
    lane, both = Lane("two", 2), threading.Barrier(2)
    for _ in range(3):
        await lane.run(time.sleep, 0)
    assert len(threads("two")) == 1
    await asyncio.gather(lane.run(both.wait, 30), lane.run(both.wait, 30))
    assert len(threads("two")) == 2
    await lane.aclose()
    assert not threads("two")


async def test_cancelled_before_its_turn() -> None:
    lane, gate = Lane("gated"), threading.Event()
    done: list[int] = []
    first = lane.run(gate.wait, 30)
    second, third = lane.run(done.append, 2), lane.run(done.append, 3)
    second.cancel()
    gate.set()
    await third
    assert await first and done == [3]
    await lane.aclose()


async def test_closed_with_work_left() -> None:
    lane, gate, begun = Lane("closed"), threading.Event(), threading.Event()
    first = lane.run(lambda: (begun.set(), gate.wait(30)))
    second = lane.run(time.sleep, 0)
    await asyncio.to_thread(begun.wait, 30)
    lane.close()
    with pytest.raises(EngineClosedError, match="is closed"):
        lane.run(time.sleep, 0)
    gate.set()
    assert await first
    with pytest.raises(asyncio.CancelledError):
        await second
    await lane.aclose()
    assert not threads("closed")


async def test_dropped_without_being_closed() -> None:
    lane = Lane("dropped")
    await lane.run(time.sleep, 0)
    (thread,) = threads("dropped")
    del lane
    gc.collect()
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()


def refuse(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane("refused", 2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for attempt in (lane.begin, lambda: lane.run(time.sleep, 0)):
            with pytest.raises(EngineOverloadedError, match=r"can't start new thread.*ulimit -u.*pids limit"):
                attempt()
        with pytest.raises(EngineError, match=r"can't start new thread.*ulimit -u"):
            await run_in_thread("refused", time.sleep, 0)
    lane.begin()
    gate = threading.Event()
    first = lane.run(gate.wait, 30)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        second = lane.run(int, "7")  # a second thread can't be started: the first one does it
    gate.set()
    assert (await first, await second) == (True, 7)
    await lane.aclose()
