"""Sessions over an engine that is real but for its worker: history, forks, tools, and what ends a turn badly."""

from __future__ import annotations

import asyncio
import gc
import random
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from aengine import (
    ChatSession,
    ContextLengthError,
    DeadlineExceededError,
    EngineClosedError,
    FinishReason,
    InternalError,
    InvalidRequestError,
    RequestListener,
    RequestStart,
    SamplingParams,
    Usage,
)
from aengine.engine.sessions.said_tokens import Said, SaidTokens, with_tokens_of
from aengine.remote import connect, serve_engine
from aengine.testing import FakeAsyncLLM, FakeLLM, FakeRequest, Reply

KINDS = ["here", "thread", "process"]
SLOW: dict[str, Any] = {"token_delay": 0.001}


@asynccontextmanager
async def engines(kind: str, folder: Path, script: Any, **settings: Any) -> AsyncIterator[tuple[Any, Any]]:
    """The engine by this handle, and the one that computes."""
    async with FakeAsyncLLM(script, own_thread=kind == "thread", **settings) as engine:
        if kind != "process":
            yield engine, engine
            return
        async with serve_engine(engine, folder / "e"), connect(folder / "e") as remote:
            yield remote, engine


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def said(session: Any) -> list[str]:
    return [message["content"] for message in session.messages]


def get_weather(city: str) -> str:
    """Weather in a city."""
    return f"sunny in {city}"


async def get_time(city: str) -> dict[str, Any]:
    """Time in a city."""
    return {"city": city, "hour": 12}


def fail() -> None:
    """Fails."""
    raise ZeroDivisionError


@pytest.mark.parametrize("kind", KINDS)
async def test_turns_and_their_usage(kind: str, tmp_path: Path) -> None:
    async with engines(kind, tmp_path, ["Paris", "Rome", "Oslo"]) as (engine, inner):
        async with engine.session("Be brief.", params=SamplingParams(max_tokens=20)) as session:
            assert session.messages == [{"role": "system", "content": "Be brief."}]
            assert (await session.chat("Of France?")).message.content == "Paris"
            stream = session.stream([{"role": "user", "content": "Of Italy?"}], SamplingParams(max_tokens=30))
            assert "".join([delta.text async for delta in stream]) == "Rome"
            assert (await session.chat({"role": "user", "content": "Of Norway?"})).message.content == "Oslo"
            assert said(session) == ["Be brief.", "Of France?", "Paris", "Of Italy?", "Rome", "Of Norway?", "Oslo"]
            assert [request.params.max_tokens for request in inner.requests] == [20, 30, 20]
            assert [request.messages for request in inner.requests][2] == session.messages[:-1]
            usage = session.usage
            assert len(usage.turns) == 3 and usage.prompt_tokens == sum(turn.prompt_tokens for turn in usage.turns)
            for before, turn in zip(usage.turns, usage.turns[1:], strict=False):
                assert turn.cached_tokens >= before.prompt_tokens // 16 * 16 > 0
            assert session.session_id in repr(session)
        assert session.is_closed


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fork_of_an_answer_under_way(kind: str, tmp_path: Path) -> None:
    script = ["x" * 1000, "forked", "y" * 10, "z"]
    async with engines(kind, tmp_path, script, **SLOW) as (engine, inner):
        async with engine.session("Be brief.") as session:
            stream = session.stream("Go")
            for _ in range(5):
                await anext(stream)
            before = said(session)[-1]
            fork = session.fork()
            assert set(before) == {"x"} and said(fork)[:2] == ["Be brief.", "Go"]
            assert len(before) <= len(said(fork)[-1]) < 1000
            assert (await fork.chat("And?")).message.content == "forked"
            assert (await stream.wait()).message.content == "x" * 1000
            assert said(session)[-1] == "x" * 1000 and said(fork)[-2:] == ["And?", "forked"]

            goes_on = fork.fork()
            await goes_on.chat(continue_final_message=True)
            assert said(goes_on)[-1] == "forked" + "y" * 10 and said(fork)[-1] == "forked"
            assert fork.session_id.startswith(session.session_id) and fork.session_id != goes_on.session_id
            await goes_on.chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}],
                               continue_final_message=True)  # fmt: skip
            assert said(goes_on)[-2:] == ["?", "az"]
        with pytest.raises(InvalidRequestError, match="closed") as caught:
            session.fork()
        assert caught.value.param == "session"


@pytest.mark.parametrize("kind", KINDS)
async def test_what_becomes_of_a_turn_that_does_not_end_by_itself(kind: str, tmp_path: Path) -> None:
    replies = {"left": "x" * 1000, "cancelled": "y" * 1000, "too slow": "z" * 1000, "fails": InternalError("bug")}

    def script(request: FakeRequest) -> Any:
        return replies.get(request.text, request.text)

    async with engines(kind, tmp_path, script, **SLOW) as (engine, inner):
        session = engine.session()
        await session.chat("1")
        async for _ in session.stream("left"):
            if session.usage.turns[-1].completion_tokens >= 5:
                break
        gc.collect()
        history = said(session)
        assert history[:3] == ["1", "1", "left"] and set(history[3]) == {"x"} and len(history[3]) < 1000
        await until(lambda: not inner.statistics().num_running)

        task = asyncio.create_task(session.chat("cancelled"))
        await until(lambda: len(inner.requests) == 3 and inner.statistics().num_running)
        task.cancel()
        await asyncio.wait([task])
        assert said(session) == history

        with pytest.raises(DeadlineExceededError):
            await session.chat("too slow", deadline=0.05)
        assert said(session) == history
        with pytest.raises(InternalError, match="bug"):
            await session.chat("fails")
        assert said(session) == history and len(session.usage.turns) == 5
        await session.chat("2")
        assert said(session) == [*history, "2", "2"]


@pytest.mark.parametrize("kind", KINDS)
async def test_one_turn_at_a_time(kind: str, tmp_path: Path) -> None:
    async with engines(kind, tmp_path, ["x" * 500, "done", "y" * 500], **SLOW) as (engine, _):
        session = engine.session()
        stream = session.stream("1")
        for again in (session.stream, session.chat):
            with pytest.raises(InvalidRequestError, match="under way") as caught:
                result = again("2")
                await result
            assert caught.value.param == "message"
        await anext(stream)
        await stream.aclose()
        assert (await session.chat("2")).message.content == "done"
        assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2

        ends = session.stream("3")
        await session.aclose()  # with a turn under way
        assert (await asyncio.wait_for(_end_of(ends), 30)) is FinishReason.ABORT
        with pytest.raises(InvalidRequestError, match="closed"):
            await session.chat("4")
        assert said(session)[:4] == ["1", said(session)[1], "2", "done"]
        await session.aclose()


async def _end_of(stream: Any) -> Any:
    return (await stream.wait()).finish_reason


async def test_a_turn_that_was_left_before_its_first_token_is_undone() -> None:
    async with FakeAsyncLLM([Reply("late", delay=30.0), "x"]) as engine:
        session = engine.session()
        stream = session.stream("1")
        await asyncio.sleep(0)
        await stream.aclose()
        assert session.messages == []
        assert (await session.chat("2")).message.content == "x" and said(session) == ["2", "x"]


@pytest.mark.parametrize("kind", KINDS)
async def test_tools(kind: str, tmp_path: Path) -> None:
    calls = [("get_weather", {"city": "Oslo"}), ("get_time", {"city": "Oslo"})]
    script = [Reply(tool_calls=calls), "It is noon.", Reply(tool_calls=[("get_weather", {"city": "Rome"})]), "Sunny."]
    async with engines(kind, tmp_path, script) as (engine, inner):
        async with engine.session(tools=[get_weather, get_time]) as session:
            assert await session.call_tools() == 0  # nothing was said
            await session.chat("?")
            with pytest.raises(InvalidRequestError, match="no call 'other'"):
                session.add_tool_result("other", "x")
            assert await session.call_tools() == 2 and await session.call_tools() == 0
            assert said(session)[-2:] == ["sunny in Oslo", '{"city":"Oslo","hour":12}']
            assert (await session.chat()).message.content == "It is noon."
            assert [message["role"] for message in inner.requests[1].messages] == ["user", "assistant", "tool", "tool"]

            answer = await session.chat("And Rome?")
            await session.keep(300)
            (call,) = answer.message.tool_calls
            session.add_tool_result(call, {"weather": "sunny"})
            with pytest.raises(InvalidRequestError, match="has none"):
                session.add_tool_result(call, "again")
            await session.chat()
            assert said(session)[-2:] == ['{"weather":"sunny"}', "Sunny."]


async def test_a_fork_within_a_call_has_nothing_of_it() -> None:
    async with FakeAsyncLLM([Reply(tool_calls=[("get_weather", {"city": "Oslo" * 50})]), "x"], **SLOW) as engine:
        session = engine.session(tools=[get_weather])
        stream = session.stream("?")
        for _ in range(3):
            await anext(stream)
        fork = session.fork()
        assert stream.message.tool_calls and fork.messages == [{"role": "user", "content": "?"}]
        assert (await fork.chat()).message.content == "x"


async def test_a_listener_begins_no_turn_within_another() -> None:
    async with FakeAsyncLLM("x") as engine:
        session = engine.session()

        class Meddler(RequestListener):
            def on_accepted(self, request: RequestStart) -> None:
                with pytest.raises(InvalidRequestError, match="under way"):
                    session.stream("me too")
                heard.append(session.messages)

        heard: list[Any] = []
        engine.add_listener(Meddler())
        await session.chat("1")
        assert said(session) == ["1", "x"] and heard == [[]]


async def test_tools_that_fail() -> None:
    calls = [("get_weather", {"city": "Oslo"}), ("fail", {})]
    async with FakeAsyncLLM([Reply(tool_calls=calls), Reply(tool_calls=[("other", {})])]) as engine:
        session = engine.session(tools=[get_weather, fail, {"name": "other"}])
        await session.chat("?")
        with pytest.raises(ZeroDivisionError):
            await session.call_tools()
        assert said(session)[-1] == "sunny in Oslo"  # which need not be called again
        with pytest.raises(ZeroDivisionError):
            await session.call_tools()
        history = session.messages
        with pytest.raises(InvalidRequestError, match="JSON"):
            session.add_tool_result(history[1]["tool_calls"][1]["id"], object())
        session.add_tool_result(history[1]["tool_calls"][1]["id"], "it failed")
        await session.chat()
        with pytest.raises(InvalidRequestError, match="no function of the session's tools"):
            await session.call_tools()

    function = {"name": "get_weather", "arguments": '{"town": 1}'}  # as of a model without a grammar
    before = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}]
    session = FakeAsyncLLM().session(messages=before, tools=[get_weather])
    assert await session.call_tools() == 1
    assert said(session)[-1].startswith("Error: wrong arguments for 'get_weather'")


class Answer(BaseModel):
    city: str


async def test_types_adapters_and_salts() -> None:
    async with FakeAsyncLLM([Answer(city="Rome"), "x", "y"]) as engine:
        session = engine.session(cache_salt="mine")
        assert (await session.chat("?", output_type=Answer)).parsed == Answer(city="Rome")
        assert said(session) == ["?", '{"city": "Rome"}']
        with pytest.raises(InvalidRequestError, match="adapters"):
            await session.chat("?", lora="none")
        assert len(session.messages) == 2
        await session.chat("2")
        assert session.usage.turns[1].cached_tokens > 0
        await session.chat("3", cache_salt="other")  # whose prefixes are others
        assert session.usage.turns[2].cached_tokens == 0


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"system": 3}, "system"),
        ({"messages": "x"}, "messages"),
        ({"messages": 3}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"params": {}}, "params"),
        ({"keep": -1}, "keep"),
        ({"keep": float("nan")}, "keep"),
        ({"keep": 1e6}, "keep"),
        ({"session_id": ""}, "session_id"),
        ({"bogus": 1}, "bogus"),
        ({"temperature": 1}, "temperature"),
        ({"deadline": -1}, "deadline"),
        ({"tools": [3]}, "tools"),
        ({"tools": get_weather}, "tools"),
        ({"tools": [get_weather, get_weather]}, "tools"),
    ],
)
async def test_wrong_sessions(wrong: dict[str, Any], param: str) -> None:
    async with FakeAsyncLLM("x") as engine:
        with pytest.raises(InvalidRequestError) as caught:
            engine.session(**wrong)
        assert caught.value.param == param


async def test_wrong_turns() -> None:
    async with FakeAsyncLLM("x", max_model_len=256) as engine:
        session = engine.session("Be brief.")
        for message in (3, b"x", [], [3], {"role": "user"}, [{"content": "x"}]):
            with pytest.raises(InvalidRequestError):
                await session.chat(message)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="session_id"):
            await session.chat("x", session_id="another")
        with pytest.raises(InvalidRequestError):
            await session.keep(-1)
        with pytest.raises(ContextLengthError):
            await session.chat("long " * 300)
        assert said(session) == ["Be brief."]
        assert (await session.chat("short")).message.content == "x"


async def test_reasoning_and_several_answers() -> None:
    """The first answer is history, with its reasoning, of which the chat template shows what it likes."""
    replies = ["Hello", Reply("Paris", reasoning="Hm."), "Rome"]
    async with FakeAsyncLLM(lambda request: replies[len(engine.requests) % 3], reasoning=True) as engine:
        session = engine.session()
        stream = session.stream("Of France?")
        await _end_of(stream)
        assert session.messages[-1] == {"role": "assistant", "content": "Paris", "reasoning_content": "Hm."}
        assert session.usage.reasoning_tokens == stream.completion.usage.reasoning_tokens > 0
        answer = await session.chat("Of Italy?", SamplingParams(n=2))
        assert said(session)[-1] == answer.choices[0].message.content and len(session.messages) == 4
        assert session.usage.turns[1].completion_tokens == answer.usage.completion_tokens


async def test_an_engine_that_sleeps() -> None:
    """A turn is refused or wakes it, as any request; nothing said is lost."""
    async with FakeAsyncLLM("x", when_asleep="error") as engine, engine.session() as session:
        await session.chat("1")
        await engine.sleep()
        with pytest.raises(EngineClosedError):
            await session.chat("2")
        await engine.wake_up()
        await session.chat("3")
        assert said(session) == ["1", "x", "3", "x"]


async def test_a_full_context_leaves_what_was_said() -> None:
    """The answer ends where the context does; a next turn has no room, and the session can be gone on with in part."""
    async with FakeAsyncLLM("x" * 400, max_model_len=256) as engine:
        async with engine.session("Be brief.") as session:
            answer = await session.chat("go")
            assert answer.finish_reason is FinishReason.LENGTH
            history = said(session)
            with pytest.raises(ContextLengthError):
                await session.chat("more")
            assert said(session) == history
            async with engine.session("Be brief.", messages=session.messages[1:2]) as shorter:
                await shorter.chat(params=SamplingParams(max_tokens=5))
            assert said(shorter) == ["Be brief.", "go", "xxxxx"]


async def test_an_engine_that_closes_and_starts_again() -> None:
    engine = FakeAsyncLLM(lambda request: request.text)
    session = engine.session()
    with pytest.raises(EngineClosedError):
        await session.chat("0")
    async with engine:
        await session.chat("1")
    for call in (session.chat("2"), session.keep(5)):
        with pytest.raises(EngineClosedError):
            await call
    assert said(session) == ["1", "1"]
    async with engine:
        await session.chat("3")
        assert said(session) == ["1", "1", "3", "3"] and session.usage.turns[-1].cached_tokens == 0
    await session.aclose()


async def test_a_worker_that_dies_costs_nothing_said() -> None:
    async with FakeAsyncLLM(["one", Reply("two", num_deaths=1)]) as engine, engine.session() as session:
        await session.chat("1")
        await session.chat("2")
        assert said(session) == ["1", "one", "2", "two"]


async def test_what_is_kept_ends_with_the_session() -> None:
    async with FakeAsyncLLM("answer") as engine:
        async with engine.session("long instructions " * 20, keep=1000) as session:
            await session.chat("1")
            assert await engine.keep_session(session.session_id, 5)
            assert not await engine.keep_session("another", 5)
        assert not await engine.keep_session(session.session_id, 5)
        for wrong in (("", 1), ("x", -1), ("x", "y"), (3, 1)):
            with pytest.raises(InvalidRequestError):
                await engine.keep_session(*wrong)


def test_code_that_blocks() -> None:
    script = [Reply(tool_calls=[("get_weather", {"city": "Oslo"})]), "Sunny.", "x" * 1000, "forked"]
    with FakeLLM(script, token_delay=0.001) as llm, llm.session("Be brief.", tools=[get_weather], keep=5) as session:
        session.chat("?")
        assert session.call_tools() == 1
        assert session.chat().message.content == "Sunny."
        with session.stream("long") as stream:
            next(stream)
            fork = session.fork()
        assert set(said(session)[-1]) == {"x"} and set(said(fork)[-1]) == {"x"}
        assert fork.chat("and?").message.content == "forked"
        session.keep(7)
        assert isinstance(session.usage.turns[0], Usage)
    with pytest.raises(InvalidRequestError, match="closed"):
        session.chat("x")
    with FakeLLM(Reply(tool_calls=[("get_time", {"city": "Oslo"})])) as llm:
        session = llm.session(tools=[get_time])
        session.chat("?")
        with pytest.raises(InvalidRequestError, match="async"):
            session.call_tools()


# -- tokens as they were said


SPECIAL = 0
WORDS = {
    SPECIAL: b"<|im_end|>",
    1: b"a",
    2: b"b",
    3: b"ab",
    4: b"aa",
    5: b"ba",
    6: b"\xe2",
    7: b"\x82\xac",
    8: b"\xe2\x82\xac",
    9: b"",
}


def spelt(text: bytes, rng: random.Random) -> list[int]:
    """Any tokens that say this."""
    ids: list[int] = []
    while text:
        token_id = rng.choice([i for i, word in WORDS.items() if word and text.startswith(word)])
        ids.append(token_id)
        text = text[len(WORDS[token_id]) :]
    return ids


def text_of(ids: list[int]) -> bytes:
    return b"".join(WORDS[i] for i in ids)


def test_the_same_text_gets_the_tokens_that_were_said() -> None:
    rng = random.Random(5)
    parts = (b"a", b"b", b"\xe2\x82\xac", b"<|im_end|>")
    for _ in range(2000):
        text = b"".join(rng.choices(parts, k=rng.randrange(12)))
        said_ids, more = spelt(text, rng), spelt(b"".join(rng.choices(parts, k=rng.randrange(6))), rng)
        ids = spelt(text, rng) + more
        exact = with_tokens_of(said_ids, list(ids), WORDS.__getitem__, {SPECIAL})
        assert exact[: len(said_ids)] == said_ids and exact[len(said_ids) :] == more
        # of other texts: what is said stays, special tokens included
        other = spelt(b"".join(rng.choices(parts, k=rng.randrange(12))), rng)
        mixed = with_tokens_of(other, list(ids), WORDS.__getitem__, {SPECIAL})
        assert text_of(mixed) == text_of(ids) and mixed.count(SPECIAL) == ids.count(SPECIAL)


def test_tokens_of_the_sessions_of_the_last_time_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.engine.sessions.said_tokens.MAX_SAID_TOKENS", 10)
    known = SaidTokens()

    def tokens_of(salt: bytes, name: str) -> list[int]:
        before = known.before((salt, name))
        return [*before.prompt, *before.answer]

    answer: list[int] = []
    known.note((b"", "one"), Said([1, 2, 3], answer))
    answer.append(4)
    assert tokens_of(b"", "one") == tokens_of(b"", "one/fork") == [1, 2, 3, 4]
    assert tokens_of(b"salt", "one") == tokens_of(b"", "two") == []
    known.note((b"", "one"), Said([1] * 5))
    known.note((b"", "two"), Said([2] * 6))
    assert tokens_of(b"", "one") == [] and tokens_of(b"", "two") == [2] * 6
    answer = [3] * 2
    known.note((b"", "three"), Said([3] * 2, answer))
    answer += [3] * 3
    known.end((b"", "three"), [3] * 5)  # of an earlier turn
    assert tokens_of(b"", "two") == [2] * 6
    known.end((b"", "three"), answer)
    assert tokens_of(b"", "two") == [] and tokens_of(b"", "three") == [3] * 7
    assert isinstance(known.before((b"", "three")).answer, array)
    known.forget((b"", "three"))
    known.note((b"", "four"), Said([4] * 10))
    assert tokens_of(b"", "three") == [] and tokens_of(b"", "four") == [4] * 10
    monkeypatch.setattr("aengine.engine.sessions.said_tokens.MAX_SAID_SESSIONS", 2)
    for name in ("five", "six", "seven"):
        known.note((b"", name), Said([5]))
    assert tokens_of(b"", "five") == [] and tokens_of(b"", "six") == tokens_of(b"", "seven") == [5]


def test_what_was_said_is_forgotten_when_its_kv_can_be_kept_no_more() -> None:
    now = 0.0
    known = SaidTokens(clock=lambda: now)
    for name in ("one", "two"):
        known.note((b"", name), Said([1]))
    now = 80_000.0
    known.note((b"", "two"), Said([2]))
    now = 90_000.0
    known.note((b"", "three"), Said([3]))
    assert [list(known.before((b"", name)).prompt) for name in ("one", "two", "three")] == [[], [2], [3]]


async def test_what_was_said_is_counted_and_forgotten_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SaidTokens()
    monkeypatch.setattr("aengine.engine.preparation.SaidTokens", lambda: known)
    async with FakeAsyncLLM("a long answer", max_num_seqs=4) as engine:
        async with engine.session(cache_salt="salt") as session:
            answer = await session.chat("1")
            before = known.before((b"salt", session.session_id))
            assert before.num_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert known.before((b"salt", session.session_id)) == Said()
        async with engine.session(params=SamplingParams(max_tokens=50)) as session:
            stream = session.stream("1")
            await anext(stream)
        assert known.before((b"", session.session_id)) == Said()


def test_sessions_are_the_public_class() -> None:
    assert isinstance(FakeAsyncLLM("x").session(), ChatSession)
