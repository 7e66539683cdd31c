"""Streams whose reader is on another thread than the engine, turn by turn of the engine: against what must be seen."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from aengine.engine.streams import cross_thread_stream
from aengine.engine.streams.cross_thread_stream import BlockingStream, CrossThreadStream, run_now
from aengine.engine.streams.token_stream import Mailbox, TokenStream
from aengine.errors import EngineError, InvalidRequestError
from aengine.outputs import FinishReason, Token

LENGTH, ABORT = FinishReason.LENGTH, FinishReason.ABORT


class Turns:
    """Stands for the engine's thread: what is posted to it, and what it does at the end of a turn, when told to."""

    is_foreign = False

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.posted: list[Callable[[], object]] = []
        self.deferred: list[Callable[[], object]] = []

    def post(self, call: Callable[[], object]) -> None:
        self.posted.append(call)

    def defer(self, call: Callable[[], object]) -> None:
        self.deferred.append(call)

    def check_process(self) -> None:
        pass

    def turn(self) -> None:
        for calls in (self.posted, self.deferred):
            while calls:
                calls.pop(0)()

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.wait(work)

    def wait(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        steps = work()
        steps.send(None)
        self.turn()
        with pytest.raises(StopIteration):
            steps.send(None)


def begun(kind: type[CrossThreadStream], thread: Any, aborted: list[str]) -> tuple[Any, Mailbox]:
    """A stream whose request the engine has."""
    stream, made = kind(thread, None, "r"), list[Mailbox]()

    def submit(buffer: Any) -> Mailbox:
        made.append(Mailbox(final_only=False, num_choices=2, buffer=buffer))
        return made[0]

    def abort(request_id: str) -> None:
        aborted.append(request_id)
        made[0].abort()

    stream.begin(submit, abort)
    return stream, made[0]


async def test_a_reader_elsewhere_gets_each_turn_of_the_engine_whole(rng: random.Random) -> None:
    for _ in range(100):
        thread, aborted = Turns(), list[str]()
        stream, mailbox = begun(CrossThreadStream, thread, aborted)
        read, put, is_shown = list[Token](), list[int](), 0

        async def reading(stream: Any = stream, read: list[Token] = read) -> None:
            while tokens := await stream.read(rng.choice([None, 1, 3])):
                read += tokens

        task = asyncio.ensure_future(reading())
        await asyncio.sleep(0)  # it waits
        is_closed = rng.random() < 0.3
        for i in range(rng.randint(0, 8)):
            put.append(i)
            mailbox.choices[i % 2].put(i, None)
            with pytest.raises(InvalidRequestError, match="has not ended yet"):
                stream.completion  # noqa: B018 - it raises
            if rng.random() < 0.5:
                thread.turn()
                is_shown = len(put)
            for _ in range(rng.randint(0, 4)):
                await asyncio.sleep(0)
            assert len(read) <= is_shown
        if is_closed and not task.done():
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            thread.turn()
            assert aborted == ["r"] and stream.completion.finish_reason is ABORT
            await stream.aclose()
            assert await stream.read() == []
        else:
            for choice in mailbox.choices:
                choice.end(LENGTH)
            thread.turn()
            async with asyncio.timeout(30):
                await task
                assert await stream.wait() == stream.completion
            assert [token.token_id for token in read] == put and not aborted
        assert stream.completion.choices == mailbox.completion("r").choices


@pytest.mark.parametrize("kind", [CrossThreadStream, BlockingStream])
async def test_a_stream_elsewhere_is_ended_and_fails_as_any_other(kind: type[CrossThreadStream]) -> None:
    def now(work: Coroutine[Any, Any, Any]) -> Any:
        """Nothing here waits: what is read has come."""
        return run_now(work)

    thread, aborted = Turns(), list[str]()
    refused = kind(thread, None, "r")  # type: ignore[arg-type]
    refused.begin(lambda buffer: int("no number"), print)  # type: ignore[arg-type, return-value]
    thread.turn()
    for ask in (lambda: refused.completion, lambda: now(refused.wait()), lambda: now(refused.read())):
        with pytest.raises(ValueError, match="no number"):
            ask()
    stream, mailbox = begun(kind, thread, aborted)
    mailbox.choices[0].put(5, None)
    thread.turn()
    assert mailbox.oldest_unread() == Token("", 5, 0) and mailbox.finish_reason is None
    mailbox.fail(EngineError("the worker has died"))
    thread.turn()
    assert [token.token_id for token in now(stream.read())] == [5] and mailbox.oldest_unread() is None
    with pytest.raises(EngineError, match="has died"):
        now(stream.read())
    assert stream.completion.choices[0].token_ids == (5,) and not aborted
    stream, mailbox = begun(kind, thread, aborted)
    mailbox.choices[0].put(5, None)
    thread.turn()
    now(stream.aclose())
    now(stream.aclose())
    assert aborted == ["r"] and now(stream.read()) == [] and stream.completion.finish_reason is ABORT
    told: list[str] = []
    BlockingStream.when_ended(stream, lambda: told.append("at once"))
    del stream
    thread.turn()
    assert told == ["at once"] and aborted == ["r"], "it has ended: another request may have its id"
    dropped, _ = begun(kind, thread, aborted)
    del dropped
    gc.collect()
    thread.turn()
    assert aborted == ["r", "r"]
    in_a_fork, _ = begun(kind, thread, aborted)
    thread.is_foreign = True  # the thread is the parent's
    now(in_a_fork.aclose())
    del in_a_fork
    gc.collect()
    assert not thread.posted and aborted == ["r", "r"]


async def test_a_reader_that_went_with_its_loop_ends_the_request() -> None:
    thread, aborted = Turns(), list[str]()
    stream, mailbox = begun(CrossThreadStream, thread, aborted)
    for is_closed in (False, True):
        stream._buffer.loop = loop = asyncio.new_event_loop()  # as while it waits; a reader can't be left there else
        if is_closed:
            loop.close()
        mailbox.choices[0].put(1, None)
        thread.turn()
        thread.turn()
        assert aborted == ["r"] * is_closed
        loop.close()


async def test_a_coroutine_that_must_not_suspend_and_does_is_closed() -> None:
    ended: list[bool] = []

    async def suspends() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append(True)

    with pytest.raises(AssertionError, match="must not suspend") as caught:  # which keeps what refers to it
        run_now(suspends())
    assert ended == [True] and caught.value


async def test_a_stream_that_was_never_made_is_dropped_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its constructor may be interrupted anywhere; an error in `__del__` is a warning, and so one here."""
    thread: Any = Turns()
    for kind in (TokenStream, CrossThreadStream, BlockingStream):
        kind.__new__(kind)
    for name in ("CrossThreadBuffer", "Mailbox"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(cross_thread_stream, name, interrupt)
            CrossThreadStream(thread, None, "r")
    gc.collect()
    thread.turn()


def interrupt(*args: Any, **options: Any) -> None:
    raise KeyboardInterrupt


async def test_two_threads_can_not_wait_for_one_stream() -> None:
    waits: list[bool] = []

    class Counted(BlockingStream):
        def _register_wake(self, wake: Callable[[], object], any_token: bool) -> bool:
            waits.append(any_token)
            return super()._register_wake(wake, any_token)

    thread = Turns()
    stream, mailbox = begun(Counted, thread, [])
    read: list[Token] = []
    reader = threading.Thread(target=lambda: read.extend(run_now(anext(stream)) for _ in range(3)))
    reader.start()
    for token_id in (7, 8, 9):
        while stream._buffer.wake is None and reader.is_alive():  # it is about to sleep
            await asyncio.sleep(0)
        with pytest.raises(InvalidRequestError, match="already being read by another task"):
            run_now(anext(stream))
        mailbox.choices[0].put(token_id, None)
        thread.turn()
    await asyncio.to_thread(reader.join, 30)
    assert [token.token_id for token in read] == [7, 8, 9]
    assert waits == [True] * 3, "it sleeps until there is something"


async def test_a_reader_that_rests_is_told_of_the_end_alone() -> None:
    thread, aborted = Turns(), list[str]()
    stream, mailbox = begun(CrossThreadStream, thread, aborted)
    resting = asyncio.ensure_future(stream.rest(600))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match="already being read by another task"):
        await stream.rest(600)
    mailbox.choices[0].put(7, None)
    thread.turn()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not resting.done()
    for choice in mailbox.choices:
        choice.end(LENGTH)
    thread.turn()
    async with asyncio.timeout(30):
        await resting
        await stream.rest(600)
    resting = asyncio.ensure_future(begun(CrossThreadStream, thread, aborted)[0].rest(600))
    await asyncio.sleep(0)
    resting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resting
    thread.turn()
    assert aborted == ["r"]


async def test_a_reader_that_is_interrupted_ends_the_request() -> None:
    class Interrupted(BlockingStream):
        def _register_wake(self, wake: Callable[[], object], any_token: bool) -> bool:
            raise KeyboardInterrupt

    thread, aborted = Turns(), list[str]()
    stream, _ = begun(Interrupted, thread, aborted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_now(anext(stream))
    thread.turn()
    assert aborted == ["r"]
