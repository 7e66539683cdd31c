"""Blocking calls in threads of their own, and what comes back to the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest
from ipc_helpers import turns

from aengine.errors import EngineError, InternalError
from aengine.ipc.thread_calls import outcome_of, run_in_thread, settle, tell


class Panic(BaseException):
    """Like a panic of a library in Rust."""


def raising(error: BaseException) -> None:
    raise error


async def test_a_call_runs_in_a_thread_of_its_own() -> None:
    name, is_daemon, total = await run_in_thread(
        "sum", lambda *args: (threading.current_thread().name, threading.current_thread().daemon, sum(args)), 1, 2
    )
    assert (name, is_daemon, total) == ("aengine-sum", True, 3)
    with pytest.raises(LookupError, match="gone"):
        await run_in_thread("gone", raising, LookupError("gone"))
    with pytest.raises(InternalError, match=r"raised SystemExit\(3\)") as caught:
        await run_in_thread("exit", raising, SystemExit(3))
    assert isinstance(caught.value.__cause__, SystemExit)


async def test_the_result_for_a_caller_that_has_gone_is_dropped() -> None:
    begun, goes_on, has_ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        goes_on.wait(30)
        has_ended.set()

    task = asyncio.ensure_future(run_in_thread("work", work))
    while not begun.is_set():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    goes_on.set()
    await asyncio.to_thread(has_ended.wait, 30)
    await turns()  # a result that was set nevertheless would be an error in a callback


async def test_a_thread_that_can_not_be_started_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(EngineError, match="no thread can be started .*ulimit -u"):
            await run_in_thread("work", int)


def test_outcomes() -> None:
    assert outcome_of(lambda: 5) == (5, None)
    error = ValueError("v")
    assert outcome_of(lambda: raising(error)) == (None, error)
    value, raised = outcome_of(lambda: raising(Panic("rust")))
    assert value is None and type(raised) is InternalError and isinstance(raised.__cause__, Panic)


async def test_a_future_is_settled_once_and_only_on_a_loop_that_is_there() -> None:
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    settle(first, 1)
    settle(first, 2)
    settle(second, 3, KeyError("k"))
    settle(second, 4)
    settle(None, 5)
    assert await first == 1
    with pytest.raises(KeyError):
        await second
    other = asyncio.new_event_loop()
    left = other.create_future()
    other.close()
    settle(left, 1)
    assert not left.done()
    tell(other, pytest.fail, "a callback on a closed loop")
    told: list[int] = []
    await asyncio.to_thread(tell, loop, told.append, 1)
    await asyncio.sleep(0)
    assert told == [1]
