"""Calls for a loop from other threads: each is made exactly once, whatever interrupts who posts it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from aengine.engine.threads.call_queue import CallQueue


class Interrupted:
    """A loop at whose ``call_soon_threadsafe`` a Ctrl-C strikes, before it has done anything or after."""

    def __init__(self, loop: asyncio.AbstractEventLoop, when: str) -> None:
        self._loop, self._when = loop, when

    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def call_soon_threadsafe(self, *args: Any, **options: Any) -> None:
        when, self._when = self._when, ""
        if when == "before":
            raise KeyboardInterrupt
        self._loop.call_soon_threadsafe(*args, **options)
        if when == "after":
            raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_interrupted_post_is_made(when: str) -> None:
    loop: Any = Interrupted(asyncio.get_running_loop(), when)
    queue = CallQueue(loop)
    calls: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        queue.post(calls.append, 1)
    for _ in range(3):
        await asyncio.sleep(0)
    assert calls == [1]
    queue.post(calls.append, 2)
    for _ in range(3):
        await asyncio.sleep(0)
    assert calls == [1, 2]


async def test_each_of_many_threads_calls_comes_once_and_in_its_order() -> None:
    queue = CallQueue(asyncio.get_running_loop())
    calls: list[tuple[int, int]] = []
    done = asyncio.Event()

    def note(i: int, j: int) -> None:
        calls.append((i, j))
        if len(calls) == 4000:
            done.set()

    threads = [
        threading.Thread(target=lambda i=i: [queue.post(note, i, j) for j in range(1000)])  # type: ignore[misc]
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(60):
        await done.wait()
    for i in range(4):
        assert [j for k, j in calls if k == i] == list(range(1000))


def test_after_the_end_of_the_loop_it_is_called_at_once() -> None:
    loop = asyncio.new_event_loop()
    queue = CallQueue(loop)
    calls: list[int] = []
    queue.post(calls.append, 1)
    loop.close()
    queue.post(calls.append, 2)
    assert calls == [1, 2]
