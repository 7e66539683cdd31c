"""An engine used over its Unix socket, as the same engine used directly."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

import aengine.remote
from aengine import (
    AsyncLLM,
    ContextLengthError,
    DeadlineExceededError,
    EngineClosedError,
    FinishReason,
    GrammarError,
    InvalidRequestError,
    RequestListener,
    SamplingParams,
    StructuredOutput,
    TextDelta,
    Tool,
    ToolChoice,
)
from aengine.engine.speculation import choice
from aengine.engine.speculation.budget import DraftBudget
from aengine.engine.structured.output_type import AskedType
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.outputs import Choice, Completion, Timings, Usage
from aengine.remote import connect, serve_engine
from aengine.remote.mailbox import RemoteMailbox, RemoteTokenStream
from aengine.testing import FakeAsyncLLM, Reply

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}


@asynccontextmanager
async def both(tmp_path: Path, script: Any, **settings: Any) -> AsyncIterator[tuple[FakeAsyncLLM, AsyncLLM]]:
    async with FakeAsyncLLM(script, **settings) as engine:
        async with serve_engine(engine, tmp_path / "engine"), connect(tmp_path / "engine") as remote:
            yield engine, remote


async def until_idle(engine: FakeAsyncLLM) -> None:
    while engine.statistics().num_running + engine.statistics().num_waiting:
        await asyncio.sleep(0.001)


async def until_running(engine: FakeAsyncLLM, count: int = 1) -> None:
    while engine.statistics().num_running < count:
        await asyncio.sleep(0.001)


async def test_completions_are_those_of_the_engine(tmp_path: Path) -> None:
    async with both(tmp_path, "Hello wörld") as (engine, remote):
        params = SamplingParams(logprobs=2, n=2)
        near, far = await engine.generate("x", params), await remote.generate("x", params)
        assert (far.choices, far.usage) == (near.choices, near.usage)
        assert far.timings.total is not None
        stream = remote.stream("x", params)
        tokens = [token async for token in stream]
        assert tokens == [token async for token in engine.stream("x", params)]
        assert type(tokens[-1].finish_reason) is FinishReason
        assert stream.completion.choices == near.choices and stream.usage == near.usage
        assert stream.finish_reasons == (FinishReason.STOP,) * 2 and type(stream.finish_reasons[0]) is FinishReason
        assert (await remote.stream([1, 2, 3]).wait()).text == "Hello wörld"


async def test_an_end_without_a_token_brings_all_that_is_reported() -> None:
    """Tokens that came after the last that was sent are counted, too."""
    choices = tuple(Choice(i, "ab", (1, 2), FinishReason.STOP, stop_reason="c") for i in range(2))
    whole = Completion("r", choices, Usage(3, 4, 2), timings=Timings(total=1.0))
    mailbox = RemoteMailbox("r", lambda *message: None, num_choices=2)
    stream = RemoteTokenStream("r", mailbox, asyncio.get_running_loop(), mailbox.leave)
    mailbox.put_tokens([], (3, 1, 0), None)
    mailbox.finish(whole, ([FinishReason.STOP] * 2, ["c", "c"]))
    assert stream.completion == whole
    assert stream.usage == Usage(3, 4, 2)
    assert stream.finish_reasons == (FinishReason.STOP,) * 2 and stream.stop_reasons == ("c", "c")


async def test_chats_are_those_of_the_engine(tmp_path: Path) -> None:
    reply = Reply("text", reasoning="so", tool_calls=[("add", {"a": 1})])
    async with both(tmp_path, reply, reasoning=True) as (engine, remote):
        for params in (None, SamplingParams(logprobs=1, n=2), SamplingParams(n=2)):
            near = [delta async for delta in engine.stream_chat(HELLO, params, tools=[TOOL])]
            far = [delta async for delta in remote.stream_chat(HELLO, params, tools=[TOOL])]
            ids = {delta.id for delta in near + far if hasattr(delta, "id")}
            assert [repr(delta) for delta in far] != [] and len(ids) == (2 if params is None else 4)
            assert _without_ids(far) == _without_ids(near)
            completion = await remote.chat(HELLO, params, tools=[TOOL])
            (call,) = completion.message.tool_calls
            assert call.parsed_arguments() == {"a": 1} and completion.finish_reason is FinishReason.TOOL_CALLS
            assert completion.message.reasoning == "so" and completion.message.content == "text"


def _without_ids(deltas: list[Any]) -> list[Any]:
    names = ("text", "arguments", "tokens")
    return sorted(
        (delta.choice, type(delta).__name__, [getattr(delta, name) for name in names if hasattr(delta, name)])
        for delta in deltas
    )


async def test_what_is_wrong_is_the_same_error(tmp_path: Path) -> None:
    async with both(tmp_path, "a" * 10_000, token_delay=0.001) as (engine, remote):
        with pytest.raises(GrammarError) as caught:
            await remote.generate("x", SamplingParams(structured_output=StructuredOutput(regex="(")))
        assert caught.value.kind == "invalid"
        with pytest.raises(InvalidRequestError) as wrong:
            await remote.chat([{"role": "user"}])
        assert wrong.value.param == "messages"
        with pytest.raises(DeadlineExceededError) as late:
            await remote.chat(HELLO, deadline=0.5)
        assert late.value.deadline == 0.5
        assert late.value.completion is not None and late.value.completion.text.startswith("aaa")
        assert late.value.completion.message.content == late.value.completion.text  # type: ignore[attr-defined]
        for options in ({"tools": [print]}, {"output_type": "int"}, {"no_such": 1}):
            with pytest.raises(InvalidRequestError):
                await remote.chat(HELLO, **options)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="plain data") as wrong:
            await remote.chat(HELLO, tool_choice=object())  # type: ignore[arg-type]
        assert wrong.value.param == "tool_choice"
        with pytest.raises(InvalidRequestError, match="plain data") as wrong:
            remote.stream(object())  # type: ignore[arg-type]
        assert wrong.value.param == "prompt"
        await until_idle(engine)


async def test_wrong_parameters_and_options_are_the_same_error(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    calls: list[dict[str, Any]] = [{"params": {"temperature": 0}}, {"request_id": ""}, {"request_id": []}]
    calls += [{"priority": wrong} for wrong in (2**63, -(2**63) - 1, object(), endless)]
    async with both(tmp_path, "a") as (engine, remote):
        for options in calls:
            for near, far in ((engine.generate, remote.generate), (engine.chat, remote.chat)):
                raised = []
                for call in (near, far):
                    with pytest.raises(InvalidRequestError) as caught:
                        await call(HELLO, **options)
                    raised.append((str(caught.value), caught.value.param))
                assert raised[0] == raised[1]
        assert (await remote.generate("x", priority=2**63 - 1)).text == "a"


async def test_no_inputs_have_no_scores(tmp_path: Path) -> None:
    async with both(tmp_path, "a") as (engine, remote):
        assert len(await engine.score("a", [])) == len(await remote.score("a", [])) == 0
        assert len(await engine.embed([])) == len(await remote.embed([])) == 0


class City(BaseModel):
    name: str
    people: int = Field(ge=0)

    @field_validator("name")
    @classmethod
    def begins_large(cls, name: str) -> str:
        if not name[0].isupper():
            raise ValueError("begins with a small letter")
        return name


async def test_python_types_are_the_shape_of_answers(tmp_path: Path) -> None:
    script = ['{"name": "Rome", "people": 3}', '{"name": "rome", "people": 3}', "[1, 2"] * 2
    async with both(tmp_path, script + ["[1, 20, 300]"] * 3) as (engine, remote):
        for ask in (remote.generate, remote.chat):
            prompt: Any = "x" if ask == remote.generate else HELLO
            good: Any = await ask(prompt, output_type=City)
            assert good.parsed == City(name="Rome", people=3) and good.parse_error is None
            bad: Any = await ask(prompt, output_type=City)
            assert bad.parsed is None and isinstance(bad.parse_error, ValidationError)
            cut: Any = await ask(prompt, SamplingParams(max_tokens=2), output_type=list[int])
            assert cut.parsed is None and cut.parse_error is None and cut.finish_reason is FinishReason.LENGTH
        seen: list[list[Any]] = []
        for one in (engine, remote):
            stream: Any = one.stream_chat(HELLO, output_type=list[int])
            assert stream.partial is None
            seen.append([(delta, stream.partial) async for delta in stream])
        assert seen[0] == seen[1] and seen[1][-1][1] == [1, 20, 300]
        tokens = remote.stream("x", output_type=list[int])
        assert await tokens.read()
        await tokens.wait()
        assert tokens.completion.parsed == [1, 20, 300]
        shapes = [request.params.structured_output for request in engine.requests]
        schema = json.loads(str(shapes[0].json_schema))  # type: ignore[union-attr]
        assert schema["properties"]["people"]["minimum"] == 0
        with pytest.raises(InvalidRequestError, match="not both"):
            params = SamplingParams(structured_output=StructuredOutput(regex="a"))
            await remote.chat(HELLO, params, output_type=City)


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: the first
    """
    return a + b


@pytest.mark.parametrize("choice", [None, "add", ToolChoice("required", ("add",)), ToolChoice("named", ("add",))])
async def test_functions_are_tools(tmp_path: Path, choice: Any) -> None:
    reply = Reply(tool_calls=[("add", {"a": 1})])
    async with both(tmp_path, [reply, reply]) as (engine, remote):
        options: Any = {"tools": [add, Tool("other", strict=False), TOOL | {"function": {"name": "third"}}]}
        near = await engine.chat(HELLO, tool_choice=choice, **options)
        far = await remote.chat(HELLO, tool_choice=choice, **options)
        assert far.message.tool_calls[0].arguments == near.message.tool_calls[0].arguments
        first, second = engine.requests
        shown = [[(tool.for_template(), tool.strict) for tool in request.tools] for request in (first, second)]
        assert shown[0] == shown[1] and len(shown[1]) == (3 if choice is None else len(shown[0]))


async def test_values_that_msgpack_does_not_know_travel(tmp_path: Path) -> None:
    schema = {"type": "integer", "maximum": 10**30}
    async with both(tmp_path, "12") as (engine, remote):
        shape = StructuredOutput(json_schema=schema)
        completion = await remote.generate(
            "x", SamplingParams(structured_output=shape, logit_bias={5: 1.0}, seed=-(2**63))
        )
        assert completion.text == "12"
        assert engine.requests[0].params.structured_output == shape
        assert engine.requests[0].params.logit_bias == {5: 1.0}
        asked = SamplingParams(allowed_token_ids=[1, 7], bad_words=["no"])
        await remote.generate("x", asked)
        assert engine.requests[1].params == asked
        with pytest.raises(GrammarError, match="lone surrogate"):  # the engine's own
            shape = StructuredOutput(json_schema={"description": "\ud800"})
            await remote.generate("x", SamplingParams(structured_output=shape))


async def test_keys_that_are_no_strings_concern_their_request_alone(tmp_path: Path) -> None:
    async with both(tmp_path, "a" * 10_000, token_delay=0.001) as (engine, remote):
        other = remote.stream("x")
        await other.read()
        for options in ({"chat_template_kwargs": {((1, 2), 3): 4}}, {"tool_choice": {"a": {(1,): 2}}, "tools": [TOOL]}):
            raised = []
            for one in (engine, remote):
                with pytest.raises(InvalidRequestError) as caught:
                    await one.chat(HELLO, **options)  # type: ignore[arg-type]
                raised.append((str(caught.value), caught.value.param))
            assert raised[0] == raised[1]
        assert await other.read()
        await other.aclose()


@pytest.mark.parametrize("leave", ["close", "cancel", "drop", "cancel generate"])
async def test_who_leaves_ends_the_request(tmp_path: Path, leave: str) -> None:
    async with both(tmp_path, "a" * 10_000, token_delay=0.001) as (engine, remote):
        stream = remote.stream("other")
        if leave == "cancel generate":
            task = asyncio.create_task(remote.generate("x"))
            await until_running(engine, 2)
            task.cancel()
        else:
            leaving = remote.stream_chat(HELLO)
            await leaving.read()
            if leave == "close":
                await leaving.aclose()
            elif leave == "cancel":
                task = asyncio.create_task(_read_all(leaving))
                await asyncio.sleep(0.01)  # it reads in the midst of the stream
                task.cancel()
            del leaving
        while engine.statistics().num_aborted < 1:
            await asyncio.sleep(0.001)
        await stream.read()
        assert engine.statistics().num_running == 1, "the other goes on"
        await stream.aclose()
        await until_idle(engine)


async def _read_all(stream: Any) -> None:
    while await stream.read():
        pass


async def test_abort_ends_a_stream_properly(tmp_path: Path) -> None:
    async with both(tmp_path, "a" * 10_000, token_delay=0.001) as (engine, remote):
        first, second = remote.stream("x", request_id="mine"), remote.stream_chat(HELLO)
        other = engine.stream("x")
        assert remote.abort("mine") and not remote.abort("nobody's")
        assert (await first.wait()).finish_reason is FinishReason.ABORT
        assert isinstance((await second.read())[0], TextDelta)
        assert remote.abort_all() == 1
        await _read_all(second)
        assert second.completion.finish_reason is FinishReason.ABORT
        await other.read()
        assert engine.statistics().num_running == 1, "that of another process"


async def test_a_reader_that_is_slow_holds_up_the_engines_stream(tmp_path: Path) -> None:
    async with both(tmp_path, "a" * 3000) as (engine, remote):
        stream = remote.stream_chat(HELLO)
        text = "".join(delta.text for delta in await stream.read())  # type: ignore[union-attr]
        await until_idle(engine)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert len(stream._stream._mailbox.pending) < 3000, "what was not asked for stays in the engine"
        while deltas := await stream.read():
            text += "".join(delta.text for delta in deltas)  # type: ignore[union-attr]
        assert text == "a" * 3000


async def test_draining_is_of_one_process(tmp_path: Path) -> None:
    async with both(tmp_path, "a" * 10_000, token_delay=0.001) as (engine, remote):
        stream = remote.stream("x")
        await stream.read()
        assert not await remote.drain(0.01)
        assert remote.state == "draining" and engine.state == "running"
        with pytest.raises(EngineClosedError):
            remote.stream("x")
        drained = asyncio.create_task(remote.drain())
        await asyncio.sleep(0)
        await stream.aclose()
        assert await drained
        await remote.aclose()
        assert remote.state == "closed"


async def test_drafts_are_told_by_proposer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "CostBudget", lambda most_positions, growth: DraftBudget(most_positions))
    async with both(tmp_path, "to be or not " * 9, speculation="suffix") as (engine, remote):
        await remote.generate("x")
        while remote.statistics().num_finished < 1:
            await asyncio.sleep(0.01)
        (drafts,) = remote.statistics().drafts
        assert drafts == engine.statistics().drafts[0] and drafts.proposer == "suffix"
        assert 20 < drafts.accepted_tokens == sum(drafts.accepted_by_position)


async def test_what_there_is_to_know(tmp_path: Path) -> None:
    async with both(tmp_path, "yes") as (engine, remote):
        assert remote.state == "running" and remote.config.model == "fake"
        assert remote.describe() == engine.describe()
        assert await remote.check_health() >= 0 and await remote.reset_prefix_cache() == 0
        await remote.generate("x")
        seen = remote.statistics()  # at once: nothing runs any more
        assert (seen.num_finished, seen.num_running) == (1, 0) and seen.histograms == engine.statistics().histograms
        near, far = engine.tokenizer, remote.tokenizer
        assert (far.vocab_size, far.special_tokens) == (near.vocab_size, near.special_tokens)
        assert (far.bos_token_id, far.eos_token_ids) == (near.bos_token_id, near.eos_token_ids)
        assert [far.token_bytes(i) for i in range(near.vocab_size)] == [
            near.token_bytes(i) for i in range(near.vocab_size)
        ]
        ids = await asyncio.to_thread(far.encode, "hé")
        assert ids == near.encode("hé") and await asyncio.to_thread(far.decode, ids) == "hé"
        assert await asyncio.to_thread(far.render_ids, HELLO) == near.render_ids(HELLO)
        assert await asyncio.to_thread(far.count, HELLO, [TOOL]) == near.count(HELLO, [TOOL])
        with pytest.raises(InvalidRequestError):
            await asyncio.to_thread(far.decode, [-1])
        with pytest.raises(InvalidRequestError):
            far.token_bytes(-1)


async def test_the_end_of_the_engines_process_is_an_error(tmp_path: Path) -> None:
    async with FakeAsyncLLM("a" * 10_000, token_delay=0.001) as engine:
        async with serve_engine(engine, tmp_path / "engine"):
            remote = await connect(tmp_path / "engine").start()
            stream = remote.stream("x")
            await stream.read()
        with pytest.raises(EngineClosedError):
            await _read_all(stream)
        assert remote.state == "failed"
        with pytest.raises(EngineClosedError):
            remote.stream("x")
        await remote.aclose()
        assert remote.state == "closed"
        await until_idle(engine)
    with pytest.raises(EngineClosedError, match="no engine is served"):
        await connect(tmp_path / "engine", timeout=0).start()


async def test_a_stream_read_on_another_loop_is_refused_and_goes_on(tmp_path: Path) -> None:
    async with both(tmp_path, "a" * 100, token_delay=0.001) as (_, remote):
        stream = remote.stream("x")
        for read in (stream.read, stream.wait):
            with pytest.raises(InvalidRequestError, match="belongs to the event loop of its engine"):
                await asyncio.to_thread(asyncio.run, read())
        assert "".join([token.text async for token in stream]) == "a" * 100


async def test_a_connection_that_brings_rubbish_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with both(tmp_path, "yes") as (engine, remote):
        for rubbish in (b"\x05\0\0\0hello", b"\x03\0\0\0\x91\x91\xc0", b"\xff\xff\xff\xff"):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "engine")
            writer.write(rubbish)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
        assert (await remote.generate("x")).text == "yes"
    told = [record for record in caplog.records if "what no client of this version sends" in record.message]
    assert len(told) == 2 and not any(record.exc_info for record in told)


async def test_a_path_that_no_program_can_serve_is_tried_once(tmp_path: Path) -> None:
    with pytest.raises(EngineClosedError, match="too long"):
        await asyncio.wait_for(connect(tmp_path / ("x" * 200)).start(), 20)


@pytest.mark.parametrize("path", ["", "a\0b", "\ud800", None, 3, ["x"]])
async def test_what_is_no_path_is_refused_at_once(path: Any) -> None:
    async with FakeAsyncLLM("yes") as engine:
        for call in (lambda: connect(path).start(), lambda: serve_engine(engine, path).__aenter__()):
            with pytest.raises(InvalidRequestError, match="the path of a Unix socket") as caught:
                await call()
            assert caught.value.param == "path"


@pytest.mark.parametrize("timeout", [float("nan"), -1, "1", None, True])
def test_a_timeout_is_a_number_of_seconds(tmp_path: Path, timeout: Any) -> None:
    with pytest.raises(InvalidRequestError, match="a number of seconds"):
        connect(tmp_path / "engine", timeout=timeout)


@pytest.mark.parametrize("engine", [None, "smollm2-135m"])
async def test_what_is_no_engine_is_not_served(tmp_path: Path, engine: Any) -> None:
    with pytest.raises(InvalidRequestError, match="an AsyncLLM"):
        await serve_engine(engine, tmp_path / "engine").__aenter__()
    assert not list(tmp_path.iterdir())


async def test_the_socket_is_this_users_alone(tmp_path: Path) -> None:
    async with both(tmp_path, "yes"):
        assert (tmp_path / "engine").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("method", ["generate", "stream", "chat"])
async def test_an_abort_ends_requests_of_its_own_process_only(tmp_path: Path, method: str) -> None:
    """Another process may have a request of the same id: the second is refused, and to abort it leaves the first."""

    def begin(engine: AsyncLLM) -> Any:
        if method == "generate":
            return asyncio.ensure_future(engine.generate("x", request_id="job-1"))
        prompt: Any = HELLO if method == "chat" else "x"
        stream = (engine.stream_chat if method == "chat" else engine.stream)(prompt, request_id="job-1")
        return asyncio.ensure_future(stream.wait())

    async with both(tmp_path, "word " * 40, token_delay=0.005) as (engine, one), connect(tmp_path / "engine") as other:
        first = begin(one)
        await until_running(engine)
        second = begin(other)
        await asyncio.sleep(0)  # it is under way to the engine
        assert other.abort("job-1")
        with pytest.raises(InvalidRequestError, match="in use"):
            await second
        assert (await first).finish_reason is FinishReason.STOP
        third = begin(other)
        await until_running(engine)
        assert not one.abort("job-1") and other.abort("job-1")
        assert (await third).finish_reason is FinishReason.ABORT


async def test_a_slow_call_of_the_tokenizer_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, gate, begun = Tokenizer.encode, threading.Event(), threading.Event()

    def slow(self: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        if len(text) > 50_000:
            begun.set()
            assert gate.wait(60)
        return encode(self, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    async with both(tmp_path, "yes") as (engine, remote), asyncio.timeout(30):
        long = [
            asyncio.create_task(asyncio.to_thread(remote.tokenizer.count, "x" * 60_000)),
            asyncio.create_task(remote.async_tokenizer.count("x" * 60_000)),
        ]
        await asyncio.to_thread(begun.wait)
        for _ in range(2):
            assert await asyncio.to_thread(remote.tokenizer.count, "short") == 5
            assert await remote.async_tokenizer.count("short") == 5
        assert await remote.async_tokenizer.render_ids(HELLO) == engine.tokenizer.render_ids(HELLO)
        assert await remote.async_tokenizer.render(HELLO) == engine.tokenizer.render(HELLO)
        assert await remote.async_tokenizer.decode([104, 105]) == "hi"
        with pytest.raises(ContextLengthError):
            await remote.async_tokenizer.encode("x" * 4_000_000)
        assert not any(task.done() for task in long)
        gate.set()
        assert await asyncio.gather(*long) == [60_000] * 2


async def test_what_is_too_large_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes would work on it, on their loops."""
    async with both(tmp_path, "yes") as (_, remote):
        monkeypatch.setattr("aengine.remote.message_stream.pack", lambda message: pytest.fail("it was sent"))
        for messages in (HELLO * 100_000, [HELLO[0] | {"x": [[0.5]] * 400_000}]):
            wrong = ContextLengthError if len(messages) > 1 else InvalidRequestError
            for ask in (
                lambda: remote.chat(messages),  # noqa: B023
                lambda: remote.generate(messages),  # noqa: B023
                lambda: remote.async_tokenizer.count(messages),  # noqa: B023
            ):
                with pytest.raises(wrong):
                    await ask()
        for prompt in ("x" * 10_000_000, [97] * 1_000_000):
            with pytest.raises(ContextLengthError):
                await remote.generate(prompt)
        schema = StructuredOutput(json_schema={"enum": ["x" * 100] * 11_000})
        with pytest.raises(GrammarError, match="larger than 1024 KiB"):
            await remote.generate("x", SamplingParams(structured_output=schema))
        monkeypatch.undo()


class Engine(FakeAsyncLLM):
    """An engine whose worker answers every call with its arguments."""

    async def collective_rpc(self, method: str, *args: Any, timeout: float = 60.0) -> list[Any]:
        return [method, list(args), timeout]

    async def start_profile(self, folder: Any = None) -> str:
        return str(folder)

    async def stop_profile(self) -> str:
        return "trace"


@pytest.mark.parametrize("admin", [False, True])
async def test_calls_that_concern_all_processes_must_be_allowed(
    tmp_path: Path, admin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "engine"
    async with Engine("yes") as engine, serve_engine(engine, path, admin=admin), connect(path) as remote:
        calls: list[tuple[Any, Any]] = [
            (lambda: remote.collective_rpc("ping", 1, [2], timeout=3), ["ping", [1, [2]], 3]),
            (lambda: remote.start_profile(Path("here")), str(tmp_path / "here")),
            (lambda: remote.start_profile(), "None"),
            (lambda: remote.stop_profile(), "trace"),
        ]
        for call, answer in calls:
            if admin:
                assert await call() == answer
            else:
                with pytest.raises(InvalidRequestError, match=r"serve_engine\(..., admin=True\)"):
                    await call()
        with pytest.raises(InvalidRequestError, match="plain data|refused"):
            await remote.collective_rpc("ping", object())
        assert await remote.reset_prefix_cache() == 0 and (await remote.generate("x")).text == "yes"


async def test_the_old_name_is_that_of_the_engine(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="AsyncLLM"):
        from aengine.remote import RemoteEngine
    async with both(tmp_path, "yes") as (_, remote):
        assert isinstance(remote, RemoteEngine) and type(remote) is AsyncLLM
    with pytest.raises(AttributeError):
        _ = aengine.remote.RemoteEngines  # type: ignore[attr-defined]


async def test_what_only_the_engines_process_can_do(tmp_path: Path) -> None:
    async with both(tmp_path, "yes") as (_, remote):
        with pytest.raises(InvalidRequestError, match="add the listener there"):
            remote.add_listener(RequestListener())
        with pytest.raises(InvalidRequestError, match="own_thread"):
            _ = remote.sync
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(remote)
        with pytest.raises(TypeError, match="argument"):
            remote.tokenizer.encode()  # type: ignore[call-arg]

        def elsewhere() -> None:
            async def use() -> None:
                with pytest.raises(EngineClosedError, match="another event loop"):
                    remote.stream("x")
                with pytest.raises(EngineClosedError, match="another event loop"):
                    await remote.start()
                assert remote.statistics().num_running == 0

            asyncio.run(use())

        await asyncio.to_thread(elsewhere)


async def test_draining_can_be_taken_back(tmp_path: Path) -> None:
    async with both(tmp_path, "a" * 10_000, token_delay=0.001) as (_, remote):
        stream = remote.stream("x")
        await stream.read()
        draining = asyncio.create_task(remote.drain())
        while remote.state != "draining":
            await asyncio.sleep(0)
        await remote.resume()
        assert not await draining and remote.state == "running"
        assert await remote.stream("x", SamplingParams(max_tokens=1)).wait()
        await stream.aclose()


@pytest.mark.parametrize("end", ["terminate", "drop", "the other side"])
async def test_a_connection_that_has_ended_can_be_made_anew(tmp_path: Path, end: str) -> None:
    path = tmp_path / "engine"
    async with FakeAsyncLLM("a" * 10_000, token_delay=0.001) as engine:
        async with serve_engine(engine, path):
            remote = await connect(path).start()
            assert await remote.start() is remote
            stream = remote.stream("x")
            await stream.read()
            if end == "terminate":
                remote.terminate()
                assert remote.state == "closed"
            elif end == "drop":
                with pytest.warns(ResourceWarning, match="dropped without aclose"):
                    del remote
                    gc.collect()
            else:
                await asyncio.sleep(0)
        if end != "the other side":
            with pytest.raises(EngineClosedError, match="connection to the engine was closed while") as caught:
                await _read_all(stream)
            assert caught.value.completion is not None and caught.value.completion.text.startswith("a")
        await until_idle(engine)
        async with serve_engine(engine, path):
            if end == "drop":
                remote = connect(path)
            while remote.state == "running":
                await asyncio.sleep(0.001)
            await asyncio.gather(remote.start(), remote.start())
            assert (await remote.generate("x", SamplingParams(max_tokens=2))).text == "aa"
            await remote.aclose()
            await until_idle(engine)


async def test_a_start_can_be_ended(tmp_path: Path) -> None:
    remote = connect(tmp_path / "engine")
    starting = asyncio.create_task(remote.start())
    while remote.state != "starting":
        await asyncio.sleep(0)
    remote.terminate()
    async with FakeAsyncLLM("yes") as engine, serve_engine(engine, tmp_path / "engine"):
        with pytest.raises(EngineClosedError, match="closed while it started"):
            await starting
        assert remote.state == "closed"


async def test_a_type_is_described_off_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the request meanwhile is sent after it, and nothing of one that has been left."""
    gate, described = threading.Event(), AskedType.described

    def slow(self: AskedType) -> Any:
        assert gate.wait(60)
        return described(self)

    monkeypatch.setattr(AskedType, "described", slow)
    async with both(tmp_path, '{"name": "Rome", "people": 3}') as (engine, remote):

        class Town(City):
            pass

        streams = [remote.stream("x", output_type=Town) for _ in range(4)]
        tasks = [asyncio.create_task(streams[0].wait()), asyncio.create_task(streams[1].read())]
        chat = asyncio.create_task(remote.chat(HELLO, output_type=Town))
        await asyncio.sleep(0)
        await streams[2].aclose()
        assert remote.abort(streams[3].request_id)
        assert engine.statistics().num_requests == 0
        gate.set()
        whole, tokens, answer = await asyncio.gather(*tasks, chat)
        assert whole.parsed == answer.parsed == Town(name="Rome", people=3) and tokens[0].text == "{"
        assert (await streams[3].wait()).finish_reason is FinishReason.ABORT
        await streams[1].aclose()
        await until_idle(engine)
        assert engine.statistics().num_requests == 4


async def test_who_holds_an_engine_awake_and_goes_holds_it_no_more(tmp_path: Path) -> None:
    async with FakeAsyncLLM("yes", sleep_after=0.005) as engine, serve_engine(engine, tmp_path / "engine"):
        async with connect(tmp_path / "engine") as remote:
            async with remote.stays_awake():
                await engine.generate("x")
                await asyncio.sleep(0.03)  # it would have fallen asleep by now
                assert engine.state == "running"
            while not engine.is_sleeping:
                await asyncio.sleep(0.001)
            held = remote.stays_awake()
            await held.__aenter__()
            await engine.generate("x")
            await asyncio.sleep(0.03)  # likewise
            assert engine.state == "running"
        while not engine.is_sleeping:  # the connection has gone
            await asyncio.sleep(0.001)


async def test_a_client_that_goes_with_an_update_open_ends_it(tmp_path: Path) -> None:
    async with FakeAsyncLLM("yes") as engine, serve_engine(engine, tmp_path / "engine", admin=True):
        async with connect(tmp_path / "engine") as remote:
            await remote.start_weight_update()
            assert engine.state == "paused"
        while engine.state == "paused":
            await asyncio.sleep(0.001)
        assert engine.state == "running"
        async with connect(tmp_path / "engine") as remote:
            await remote.start_weight_update()
            await remote.abort_weight_update()
            await engine.start_weight_update()
        await asyncio.sleep(0.01)  # another's update is none of its
        assert engine.state == "paused"
        await engine.abort_weight_update()
