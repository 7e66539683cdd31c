"""Streams that somebody holds and nobody reads: a notebook's Out[], a variable after a break."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import until

from aengine import (
    AsyncLLM,
    Completion,
    DeadlineExceededError,
    FinishReason,
    InvalidRequestError,
    SamplingParams,
    Token,
    TokenStream,
)
from aengine.engine.unread import UnreadWatch

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking", "no_thread_left")
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture(params=["on this loop", "own thread"])
def make(make_engine: Make, request: pytest.FixtureRequest) -> Make:
    settings = {"own_thread": request.param == "own thread", "max_leased_steps": 0, "fake": {"delay": 0.01}}
    return lambda **config: make_engine(**(settings | config))


async def test_what_nobody_reads_ends(make: Make) -> None:
    """Never read, left off, and a chat."""
    async with make(unread_timeout=0.4) as engine:
        outs: list[Any] = [engine.stream([1], ENDLESS), engine.stream([1], ENDLESS)]
        outs.append(engine.stream_chat([{"role": "user", "content": "Hello"}], ENDLESS))
        async for token in outs[1]:
            if token.position == 5:
                break
        await until(lambda: engine.statistics().num_failed == 3)
        assert engine.statistics().generated_tokens < 3 * 900
        assert all("tokens" in repr(out) for out in outs[:2])
        for out in outs:
            seen: list[Any] = []
            with pytest.raises(DeadlineExceededError, match=r"unread_timeout=0.4 s.*Out\[\]") as caught:
                while True:  # what had come is still delivered
                    seen.append(await anext(out))
            assert seen and caught.value.deadline == 0.4
            assert caught.value.completion is not None and caught.value.completion.text


async def test_what_somebody_reads_goes_on(make: Make) -> None:
    """A token now and then, by waiting for the end, as a whole; and without a limit what nobody reads for longer."""
    params = ENDLESS.replace(max_tokens=300)  # over a second

    async def now_and_then(stream: TokenStream) -> Completion:
        async for token in stream:
            if token.position % 10 == 0:
                await asyncio.sleep(0.02)
        return await stream.wait()

    async def late(stream: TokenStream) -> Completion:
        await asyncio.sleep(1.0)  # a reader that does not read
        return await stream.wait()

    async with make(unread_timeout=0.6) as engine, make(unread_timeout=None) as patient:
        first, second, third = (one.stream([1], params) for one in (engine, engine, patient))
        calls = now_and_then(first), second.wait(), late(third), engine.generate([1], params)
        for completion in await asyncio.gather(*calls):
            assert completion.finish_reason is FinishReason.LENGTH and len(completion.token_ids) == 300


async def test_a_stream_that_has_ended_is_kept(make: Make) -> None:
    async with make(unread_timeout=0.1, fake={}) as engine:
        stream = engine.stream([1], ENDLESS.replace(max_tokens=5))
        await asyncio.sleep(0.5)  # five times the timeout, which is what is tested here
        assert len([token async for token in stream]) == 5


class Times:
    """A loop that keeps one timer."""

    timer: Any = None

    def call_later(self, seconds: float, function: Callable[[], None]) -> Any:
        assert self.timer is None
        self.timer = function
        return self

    def cancel(self) -> None:
        self.timer = None

    def look(self) -> None:
        function, self.timer = self.timer, None
        function()


class FakeRequest:
    """One whose reader has left ``oldest`` lying."""

    request_id = "r"

    def __init__(self) -> None:
        self.mailbox = self
        self.final_only = False
        self.oldest: Token | None = None
        self.failed: list[Exception] = []

    def oldest_unread(self) -> Token | None:
        return self.oldest

    def fail(self, error: Exception) -> None:
        self.failed.append(error)


def test_a_loop_that_stood_still_counts_as_one_look() -> None:
    """A debugger, a laptop that slept: however long, the reader had no turn."""
    loop, request = Times(), FakeRequest()
    requests: Any = {"r": request}
    watch = UnreadWatch(loop, 4.0, requests)  # type: ignore[arg-type]
    watch.begin()
    watch.begin()
    loop.look()
    request.oldest = Token("a", 1)
    for _ in range(4):
        loop.look()
    assert not request.failed
    request.oldest = Token("a", 1)  # an equal one, but the next
    for _ in range(4):
        loop.look()
    assert not request.failed
    loop.look()
    assert len(request.failed) == 1
    requests.clear()
    loop.look()
    assert loop.timer is None  # nothing to watch
    watch.begin()
    watch.stop()
    assert loop.timer is None


@pytest.mark.parametrize("value", [0, -1, "5", True, float("nan")])
def test_a_timeout_that_is_none(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="unread_timeout"):
        AsyncLLM("x", unread_timeout=value)
