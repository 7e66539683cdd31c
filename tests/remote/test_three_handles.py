"""What an engine does the same on its user's loop, on a thread of its own, and in another process over its socket."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aengine import (
    ContextLengthError,
    DeadlineExceededError,
    EngineClosedError,
    EngineOverloadedError,
    FinishReason,
    GrammarError,
    InvalidRequestError,
    SamplingParams,
    StructuredOutput,
)
from aengine.remote import connect, serve_engine
from aengine.testing import FakeAsyncLLM, Reply

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
KINDS = ["here", "thread", "process"]
LONG: dict[str, Any] = {"script": "a" * 10_000, "token_delay": 0.001}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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


def is_idle(engine: Any) -> bool:
    return bool(engine.statistics().num_running + engine.statistics().num_waiting == 0)


async def test_tokens_and_the_whole(kind: str, tmp_path: Path) -> None:
    async with engines(kind, tmp_path, "Hello wörld") as (engine, _):
        params = SamplingParams(logprobs=2, n=2)
        stream = engine.stream("x", params, request_id="mine")
        first = await anext(stream)
        assert (first.text, first.position, first.finish_reason) == ("H", 0, None)
        assert first.logprob is not None and len(first.top_logprobs) == 2
        tokens = [first] + [token async for token in stream]
        assert await stream.read() == []
        completion = stream.completion
        for i, choice in enumerate(completion.choices):
            own = [token for token in tokens if token.index == i]
            assert choice.text == "".join(token.text for token in own) == "Hello wörld"
            assert choice.token_ids == tuple(token.token_id for token in own)
            assert [(row[0].token_id, row[0].logprob, list(row[1:])) for row in choice.logprobs] == [
                (token.token_id, token.logprob, list(token.top_logprobs)) for token in own
            ]
        assert completion.usage == stream.usage and completion.usage.completion_tokens == len(tokens)
        assert completion.timings.total > 0
        assert stream.finish_reasons == (FinishReason.STOP,) * 2 and stream.stop_reasons == (None, None)
        assert completion.request_id == stream.request_id == "mine"
        assert (await engine.generate("x", params)).choices == completion.choices
        assert (await engine.stream("x", params).wait()).choices == completion.choices


async def test_chats(kind: str, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    reply = Reply("text", reasoning="so", tool_calls=[("add", {"a": 1}), ("add", {"a": 20})])
    async with engines(kind, tmp_path, reply, reasoning=True) as (engine, _):
        stream = engine.stream_chat(HELLO, SamplingParams(n=2), tools=[tool])
        assert stream.message == stream.messages[1] and stream.message.content is None
        seen = []
        async for delta in stream:
            seen.append(stream.messages[delta.choice])
            assert stream.finish_reasons[delta.choice] in (None, FinishReason.TOOL_CALLS)
        assert [message for message in seen if message.content == "te"]
        assert [message for message in seen if message.tool_calls and message.tool_calls[-1].arguments == '{"a": 2']
        completion = stream.completion
        assert [choice.message for choice in completion.choices] == list(stream.messages)
        assert completion.usage.reasoning_tokens > 0
        whole = engine.stream_chat(HELLO, tools=[tool])
        assert (await whole.wait()).message == whole.message
        for message in (*stream.messages, whole.message):
            assert (message.content, message.reasoning) == ("text", "so")
            assert [call.parsed_arguments() for call in message.tool_calls] == [{"a": 1}, {"a": 20}]


async def test_what_a_json_answer_says_so_far(kind: str, tmp_path: Path) -> None:
    async with engines(kind, tmp_path, "[1, 20, 300]") as (engine, _):
        for stream in (engine.stream("x", output_type=list[int]), engine.stream_chat(HELLO, output_type=list[int])):
            assert stream.partial is None
            await anext(stream)
            assert stream.partial in ([], [1], [1, 20], [1, 20, 300])
            assert (await stream.wait()).parsed == [1, 20, 300] == stream.partial


@pytest.mark.parametrize("phase", ["queued", "begun"])
@pytest.mark.parametrize("call", ["read", "wait", "rest", "generate", "chat"])
async def test_cancelling_ends_the_request(kind: str, tmp_path: Path, call: str, phase: str) -> None:
    async with engines(kind, tmp_path, **LONG, max_num_seqs=1) as (engine, near):
        if phase == "queued":
            other = engine.stream("first")
            await anext(other)
        begin = {"generate": engine.generate, "chat": lambda prompt: engine.chat(HELLO)}.get(call)
        stream = None if begin else engine.stream("x")
        if stream is not None and phase == "begun":
            await anext(stream)

        async def read() -> None:
            while await stream.read():
                pass

        calls = {"read": read, "wait": lambda: stream.wait(), "rest": lambda: stream.rest(1000)}
        task = asyncio.create_task(begin("x") if begin else calls[call]())
        await asyncio.sleep(0)  # it runs as far as to where it waits
        await until(lambda: near.statistics().num_requests == (2 if phase == "queued" else 1))
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: near.statistics().num_aborted == 1)
        if phase == "queued":
            assert await anext(other)
            await other.aclose()
        await until(lambda: is_idle(near))


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("how", ["close", "drop", "abort", "abort_all"])
async def test_leaving_and_aborting(kind: str, tmp_path: Path, how: str, is_chat: bool) -> None:
    async with engines(kind, tmp_path, **LONG) as (engine, near):
        stream = engine.stream_chat(HELLO, request_id="a") if is_chat else engine.stream("x", request_id="a")
        text = (await anext(stream)).text
        if how == "drop":
            del stream
        elif how == "close":
            with pytest.raises(InvalidRequestError, match="has not ended|to its end"):
                _ = stream.completion
            await stream.aclose()
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        else:
            assert not any(map(engine.abort, ("another", 3, None, ["a"])))
            assert engine.abort("a") if how == "abort" else engine.abort_all() == 1
            text += "".join([item.text async for item in stream])
        if how != "drop":
            completion = stream.completion
            assert completion.finish_reason is FinishReason.ABORT and stream.finish_reasons == (FinishReason.ABORT,)
            said = completion.message.content if is_chat else completion.text
            assert said.startswith("a") and (how == "close" or said == text)
        await until(lambda: is_idle(near) and near.statistics().num_aborted == 1)
        assert not engine.abort("a") and engine.abort_all() == 0


async def test_a_stream_that_was_waited_for_is_read_all_the_same(kind: str, tmp_path: Path) -> None:
    async with engines(kind, tmp_path, "a" * 200, token_delay=0.0005) as (engine, _):
        stream = engine.stream("x", SamplingParams(logprobs=1))
        first = await anext(stream)
        whole = await stream.wait()
        assert "".join(token.text for token in [first, *await stream.read()]) == whole.text == "a" * 200
        assert await stream.read() == [] and stream.completion.choices == whole.choices


@pytest.mark.parametrize("is_chat", [False, True])
async def test_deadlines(kind: str, tmp_path: Path, is_chat: bool) -> None:
    async with engines(kind, tmp_path, **LONG, max_num_seqs=1) as (engine, near):
        ask = engine.stream_chat if is_chat else engine.stream
        stream = ask(HELLO, deadline=0.5)
        with pytest.raises(DeadlineExceededError) as late:
            await stream.wait()
        assert late.value.deadline == 0.5 and late.value.completion.text.startswith("a")
        assert stream.finish_reasons == (FinishReason.ERROR,)
        if is_chat:
            assert late.value.completion.message.content.startswith("a")
        other = engine.stream("x")
        await anext(other)
        with pytest.raises(DeadlineExceededError, match="first_token_deadline") as late:
            await ask(HELLO, first_token_deadline=0.01).wait()
        assert late.value.completion is None
        await other.aclose()
        await until(lambda: is_idle(near))


async def test_overload(kind: str, tmp_path: Path) -> None:
    async with engines(kind, tmp_path, **LONG, max_num_seqs=1, max_num_queued_requests=1) as (engine, near):
        first = engine.stream("x")
        await anext(first)
        second = engine.stream("x")
        await until(lambda: near.statistics().num_waiting == 1)
        for ask in (engine.generate, lambda prompt: engine.stream(prompt).wait(), lambda prompt: engine.chat(HELLO)):
            with pytest.raises(EngineOverloadedError) as caught:
                await ask("x")
            assert caught.value.retry_after is None or caught.value.retry_after > 0
        assert near.statistics().num_rejected == 3
        await first.aclose()
        assert await anext(second)


WRONG: list[tuple[dict[str, Any], type[Exception], str | None]] = [
    ({"params": {"temperature": 0}}, InvalidRequestError, "params"),
    ({"request_id": ""}, InvalidRequestError, "request_id"),
    ({"priority": "high"}, InvalidRequestError, "priority"),
    ({"deadline": -1}, InvalidRequestError, "deadline"),
    ({"no_such": 1}, InvalidRequestError, "no_such"),
    ({"temperature": 1}, InvalidRequestError, "temperature"),
    ({"output_type": "int"}, InvalidRequestError, "output_type"),
    ({"on_unsupported": "never"}, InvalidRequestError, "on_unsupported"),
    ({"params": SamplingParams(detokenize=False), "output_type": int}, InvalidRequestError, None),
    ({"params": SamplingParams(stop_token_ids=[10**6])}, InvalidRequestError, "stop_token_ids"),
    ({"params": SamplingParams(structured_output=StructuredOutput(regex="("))}, GrammarError, None),
    ({"params": SamplingParams(structured_output=StructuredOutput(choice=["a"])), "output_type": int}, Exception, None),
]


@pytest.mark.parametrize("is_chat", [False, True])
async def test_what_is_wrong_is_named(kind: str, tmp_path: Path, is_chat: bool) -> None:
    async with engines(kind, tmp_path, "a") as (engine, near):
        for options, error, param in WRONG:
            given = dict(options)
            params = given.pop("params", None)
            with pytest.raises(error) as caught:
                await (engine.chat if is_chat else engine.generate)(HELLO, params, **given)
            assert isinstance(caught.value, InvalidRequestError | GrammarError), options
            if param is not None:
                assert getattr(caught.value, "param", None) == param, options
        for prompt in ([{"role": "user"}], 3, [10**6], b"x"):
            with pytest.raises(InvalidRequestError) as caught:
                await (engine.chat if is_chat else engine.generate)(prompt)
            assert caught.value.param == ("messages" if is_chat or isinstance(prompt, list) else "prompt") or (
                prompt == [10**6]
            )
        running = engine.stream("x", request_id="twice")
        if kind == "here":
            with pytest.raises(InvalidRequestError, match="in use"):
                engine.stream("x", request_id="twice")
        await running.wait()
        await until(lambda: is_idle(near))


async def test_the_end_of_the_engine(kind: str, tmp_path: Path) -> None:
    async with engines(kind, tmp_path, **LONG) as (engine, near):
        stream, chat, waiting = engine.stream("x"), engine.stream_chat(HELLO), engine.stream("x")
        task = asyncio.create_task(waiting.wait())
        await anext(stream)
        await anext(chat)
        await until(lambda: near.statistics().num_running == 3)
        await engine.aclose()
        for one in (stream, chat):
            with pytest.raises(EngineClosedError) as caught:
                while True:
                    await anext(one)
            assert caught.value.completion is not None and caught.value.completion.text.startswith("a")
        with pytest.raises(EngineClosedError):
            await task
        assert engine.state == "closed"
        for call in (engine.stream, engine.statistics, engine.describe, engine.abort_all):
            with pytest.raises(EngineClosedError):
                call(*(["x"] if call == engine.stream else []))
        for method in (engine.check_health, engine.generate, engine.drain):
            with pytest.raises(EngineClosedError):
                await method(*(["x"] if method == engine.generate else []))
        await engine.aclose()
        if kind == "process":
            assert near.state == "running", "only the connection has ended"
            await until(lambda: is_idle(near))
        await engine.start()
        assert (await engine.generate("x", SamplingParams(max_tokens=2))).text == "aa"


async def test_draining(kind: str, tmp_path: Path) -> None:
    async with engines(kind, tmp_path, **LONG) as (engine, near):
        stream = engine.stream("x")
        await anext(stream)
        assert not await engine.drain(0.01)
        assert engine.state == "draining"
        for ask in (engine.stream, engine.stream_chat, engine.generate, engine.embed):
            with pytest.raises(EngineClosedError, match="drain"):
                answer = ask(HELLO if ask == engine.stream_chat else "x")
                await (answer.wait() if ask in (engine.stream, engine.stream_chat) else answer)
        drained = asyncio.create_task(engine.drain())
        assert await anext(stream) and not drained.done()
        await stream.aclose()
        assert await drained
        if kind == "process":
            assert near.state == "running", "another process may go on"


async def test_health_and_numbers(kind: str, tmp_path: Path) -> None:
    async with engines(kind, tmp_path, "yes") as (engine, near):
        assert engine.state == "running" and engine.config.model == "fake"
        assert await engine.check_health() >= 0 and await engine.reset_prefix_cache() == 0
        for wrong in (0, "1", True):
            with pytest.raises(InvalidRequestError) as caught:
                await engine.check_health(wrong)
            assert caught.value.param == "timeout"
        assert engine.describe() == near.describe()
        await engine.generate("x")
        await until(lambda: engine.statistics().num_finished == 1)
        assert engine.statistics().generated_tokens == near.statistics().generated_tokens
        assert await engine.async_tokenizer.count("hello") == 5
        assert await asyncio.to_thread(engine.tokenizer.encode, "hi") == near.tokenizer.encode("hi")


async def test_log_probabilities_of_prompts_and_completions(kind: str, tmp_path: Path) -> None:
    async with engines(kind, tmp_path, "a", max_num_batched_tokens=16) as (engine, _):
        prompt = list(range(40, 90))
        params = SamplingParams(prompt_logprobs=2)
        for asked in (params, params.replace(n=2), params.replace(max_tokens=0)):
            completion = await engine.generate(prompt, asked)
            found = completion.prompt_logprobs
            assert found[0] is None and len(found) == 50 and len(found[3:5]) == 2
            assert [(entry[0].token_id, entry[0].logprob) for entry in found[1:]] == [(i, 0.0) for i in prompt[1:]]
            assert [one.token_id for one in found[7]] == [47, 47, 0] and found[-1] == list(found)[-1]
            assert copy.copy(found) == found == pickle.loads(pickle.dumps(found)) and "more" in repr(found)
            stream = engine.stream(prompt, asked)
            assert len([token async for token in stream]) == sum(len(one.token_ids) for one in completion.choices)
            assert stream.completion.prompt_logprobs == found
        assert completion.token_ids == () and completion.finish_reason is FinishReason.LENGTH
        assert (await engine.generate(prompt, SamplingParams())).prompt_logprobs is None
        chat = await engine.chat(HELLO, params)
        assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
        assert (await engine.generate([7], params)).prompt_logprobs == [None]
        scored = await engine.score_completions("one two", [" three", " four five"])
        assert [bytes(one.token_ids.tolist()) for one in scored] == [b" three", b" four five"]
        assert all(one.is_greedy and one.logprob == 0 == one.logprobs.sum() for one in scored)
        assert [one.token_ids.tolist() for one in await engine.score_completions([1], [[2, 3], [4]])] == [[2, 3], [4]]
        assert await engine.score_completions("one", []) == []
        whole = await engine.generate(list(range(100)) * 327 + [1] * 68, params.replace(max_tokens=0))
        assert len(whole.prompt_logprobs) == 32_768  # a prompt that fills the context, as no token follows


async def test_log_probabilities_that_can_not_be(kind: str, tmp_path: Path) -> None:
    async with engines(kind, tmp_path, "a") as (engine, _):
        for asked in ({"max_tokens": 0}, {"max_tokens": 0, "prompt_logprobs": 1, "n": 2}, {"prompt_logprobs": 65}):
            with pytest.raises(InvalidRequestError):
                await engine.generate("x", SamplingParams(**asked))
        many = SamplingParams(prompt_logprobs=64)
        for prompt in ("x" * 32_700, [1] * 32_700):
            with pytest.raises(InvalidRequestError, match="65 for each of the prompt's 32700") as caught:
                await engine.generate(prompt, many)
            assert caught.value.param == "prompt_logprobs"
        wrong: list[tuple[Any, Any]] = [("x", "yz"), ("x", [""]), ("", ["x"]), ("x", [[1]]), (None, ["x"]), ("x", [5])]
        for prompt, completions in [*wrong, ([1], [[-1]])]:
            with pytest.raises(InvalidRequestError):
                await engine.score_completions(prompt, completions)
        with pytest.raises(InvalidRequestError, match="there are 16385 completions"):
            await engine.score_completions([1], [[2]] * 16_385)
        with pytest.raises(ContextLengthError, match="32769"):
            await engine.score_completions([1] * 32_768, [[1]])
        for length, asked in ((32_768, SamplingParams()), (32_769, SamplingParams(max_tokens=0, prompt_logprobs=0))):
            with pytest.raises(ContextLengthError, match=str(length)):
                await engine.generate([1] * length, asked)
        await until(lambda: is_idle(engine))


async def administered(near: FakeAsyncLLM, stack: AsyncExitStack, kind: str, folder: Path) -> Any:
    """A handle that may do all with it; in another process, beside one of those at ``no``, who may not."""
    if kind != "process":
        return near
    for name, admin in (("no", False), ("yes", True)):
        await stack.enter_async_context(serve_engine(near, folder / name, admin=admin))
    return await stack.enter_async_context(connect(folder / "yes"))


async def test_a_pause_and_its_end(kind: str, tmp_path: Path) -> None:
    """In another process only where the engine's allows it."""
    async with FakeAsyncLLM(**LONG, own_thread=kind == "thread") as near:
        async with AsyncExitStack() as stack:
            engine = await administered(near, stack, kind, tmp_path)
            if kind == "process":
                guest = await stack.enter_async_context(connect(tmp_path / "no"))
                with pytest.raises(InvalidRequestError, match=r"pause\(\) is refused"):
                    await guest.pause("keep")
            stream = engine.stream("x")
            assert await anext(stream)
            assert await engine.pause("keep") is True
            assert engine.state == near.state == "paused"
            await engine.resume()
            assert engine.state == near.state == "running"
            assert await anext(stream) and await engine.pause() is True
            assert (await stream.wait()).finish_reason is FinishReason.ABORT


async def test_versions_of_weights(kind: str, tmp_path: Path) -> None:
    async with FakeAsyncLLM(**LONG, own_thread=kind == "thread") as near, AsyncExitStack() as stack:
        engine = await administered(near, stack, kind, tmp_path)
        stream = engine.stream("x", SamplingParams(max_tokens=200))
        assert await anext(stream)
        await engine.start_weight_update()
        assert engine.state == "paused"
        chat = asyncio.create_task(engine.chat(HELLO, SamplingParams(max_tokens=5)))
        with pytest.raises(InvalidRequestError, match="weight update is under way"):
            await engine.resume()
        await engine.update_weights(str(tmp_path))
        assert await engine.finish_weight_update("second") == "second"
        assert (await stream.wait()).weight_versions == ("0", "second")
        assert (await chat).weight_versions == ("second",)
        assert await engine.weights_checksum() == {"version": "second", "checksum": ""}
        await engine.start_weight_update("abort")
        await engine.abort_weight_update()
        assert engine.state == "running"
        assert (await engine.generate("x", SamplingParams(max_tokens=5))).weight_versions == ("second",)


async def test_a_sleep_and_its_end(kind: str, tmp_path: Path) -> None:
    """In another process only where the engine's allows it; a request wakes it from anywhere."""
    async with FakeAsyncLLM(**LONG, own_thread=kind == "thread") as near:
        async with AsyncExitStack() as stack:
            engine = await administered(near, stack, kind, tmp_path)
            if kind == "process":
                guest = await stack.enter_async_context(connect(tmp_path / "no"))
                with pytest.raises(InvalidRequestError, match=r"sleep\(\) is refused"):
                    await guest.sleep()
            stream = engine.stream("x")
            assert await anext(stream)
            await engine.sleep(2)
            assert engine.is_sleeping and near.is_sleeping and engine.state == "asleep"
            await engine.wake_up(["weights"])
            assert engine.is_sleeping
            await engine.wake_up()
            assert not engine.is_sleeping and engine.state == near.state == "running"
            assert await anext(stream)
            await engine.sleep()
            other = engine.stream("y")
            assert await anext(other) and near.state == "running"
            for one in (stream, other):
                await one.aclose()
