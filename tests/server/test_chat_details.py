"""Chat completions' finer points: several choices, reasoning, log-probabilities, tools beside a shape, errors."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, ValidationError

from aengine import AsyncLLM, InvalidRequestError, WorkerDiedError
from aengine.server import create_app
from aengine.server.http import Pace
from aengine.server.in_process import streaming_transport
from aengine.server.openai.requests import Body, ChatBody, CompletionBody
from aengine.server.openai.responses.body import ResponseBody
from aengine.server.openai.responses.store import ResponseStore
from aengine.server.service import Folders, Service
from aengine.testing import FakeAsyncLLM, FakeRequest, Reply

JSON = {"content-type": "application/json"}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


class Sum(BaseModel):
    value: int


@pytest.mark.parametrize("own_thread", [False, True])
async def test_each_choice_ends_with_its_own_reason(own_thread: bool) -> None:
    script = ["a" * 30, "b", Reply(tool_calls=[("add", {"a": 1})])] * 2
    async with FakeAsyncLLM(script, own_thread=own_thread) as engine, engine.openai_client() as client:
        ask: dict[str, Any] = {"model": "fake", "messages": HELLO, "n": 3, "tools": [ADD], "max_tokens": 80}
        whole = await client.chat.completions.create(**ask | {"stop": "aaaaa", "seed": 7})
        assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop", "tool_calls"]
        assert [choice.message.content or "" for choice in whole.choices][:2] == ["", "b"]
        assert engine.requests[0].params.seed == 7
        ask |= {"max_tokens": 20, "stream": True, "tools": None}
        assert [getattr(choice, "stop_reason") for choice in whole.choices] == ["aaaaa", None, None]
        reasons: dict[int, str] = {}
        texts = {0: "", 1: "", 2: ""}
        async for chunk in await client.chat.completions.create(**ask):
            for choice in chunk.choices:
                assert choice.index not in reasons, "nothing comes after the end"
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert reasons == {0: "length", 1: "stop", 2: "length"}
        assert own_thread or list(reasons)[0] == 1, "as soon as it has ended"
        assert texts[0] == "a" * 20 and texts[1] == "b"


@pytest.mark.parametrize("include_reasoning", [True, False])
async def test_streamed_logprobs_add_up(include_reasoning: bool) -> None:
    reply = Reply("Well.", reasoning="hm", tool_calls=[("add", {"a": 1}), ("add", {"a": 2})])
    async with FakeAsyncLLM([reply] * 4, reasoning=True, token_delay=0.001) as engine, engine.openai_client() as client:
        ask: dict[str, Any] = {"model": "fake", "messages": HELLO, "n": 2, "tools": [ADD], "logprobs": True}
        ask["extra_body"] = {"include_reasoning": include_reasoning}
        whole = await client.chat.completions.create(**ask)
        streamed: dict[int, list[Any]] = {0: [], 1: []}
        thoughts = ""
        async for chunk in await client.chat.completions.create(**ask, stream=True):
            for choice in chunk.choices:
                thoughts += getattr(choice.delta, "reasoning_content", None) or ""
                if choice.logprobs:
                    streamed[choice.index] += choice.logprobs.content or []
        for choice in whole.choices:
            assert choice.logprobs is not None and streamed[choice.index] == choice.logprobs.content
            assert (getattr(choice.message, "reasoning_content", None) is not None) == include_reasoning
        assert bool(thoughts) == include_reasoning
        assert whole.usage is not None and whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens > 0


def sums(request: FakeRequest) -> Any:
    messages = request.messages or ()
    return Sum(value=3) if messages[-1]["role"] == "tool" else Reply(tool_calls=[("add", {"a": 1})])


async def test_a_shape_and_tools_in_one_request() -> None:
    async with FakeAsyncLLM(sums) as engine, engine.openai_client() as client:
        messages: list[Any] = [{"role": "developer", "content": "Count."}, *HELLO]
        ask: dict[str, Any] = {"model": "fake", "tools": [ADD], "response_format": Sum}
        first = (await client.chat.completions.parse(messages=messages, **ask)).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.parsed is None
        (call,) = first.message.tool_calls or ()
        messages += [first.message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"}]
        assert (await client.chat.completions.parse(messages=messages, **ask)).choices[0].message.parsed == Sum(value=3)
        async with client.chat.completions.stream(messages=messages, **ask) as stream:
            assert (await stream.get_final_completion()).choices[0].message.parsed == Sum(value=3)
        assert [message["role"] for message in engine.requests[0].messages or ()] == ["system", "user"]


async def test_a_forced_choice_of_tools() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    async with FakeAsyncLLM() as engine, engine.openai_client() as client:
        named = {"type": "function", "function": {"name": "other"}}
        for choice, names in (("required", {"add", "other"}), (named, {"other"})):
            answer: Any = await client.chat.completions.create(
                model="fake", messages=HELLO, tools=[ADD, other], tool_choice=choice, parallel_tool_calls=False
            )
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.name in names
        none = await client.chat.completions.create(model="fake", messages=HELLO, tools=[ADD], tool_choice="none")
        assert not none.choices[0].message.tool_calls


def client_of(engine: FakeAsyncLLM, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=streaming_transport(create_app(engine, **options)), base_url="http://engine")


BODIES: list[tuple[bytes, str, int]] = [
    (b"{", "application/json", 400),
    (b"\xff\xfe", "application/json", 400),
    (b"[]", "application/json", 400),
    (b"null", "application/json", 400),
    (b'{"messages": [], "temperature": NaN}', "application/json", 400),
    (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "application/json", 400),
    (b'{"messages": ' + b"[" * 50_000, "application/json", 400),
    (
        b'{"messages": [{"role": "user", "content": "x", "y": ' + b"[" * 900 + b"]" * 900 + b"}]}",
        "application/json",
        400,
    ),
    (b"x" * 3000, "application/json", 413),
    (b"{}", "text/plain", 415),
]


@pytest.mark.parametrize(("body", "kind", "status"), BODIES, ids=lambda value: str(value)[:50])
async def test_bodies_that_are_none(body: bytes, kind: str, status: int) -> None:
    limit = 200_000 if len(body) > 50_000 else 2500
    async with FakeAsyncLLM("yes") as engine, client_of(engine, max_body_bytes=limit) as client:
        answer = await client.post("/v1/chat/completions", content=body, headers={"content-type": kind})
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]


async def test_a_body_of_millions_of_values_is_refused_before_it_is_parsed() -> None:
    async with FakeAsyncLLM("yes") as engine, client_of(engine) as client:
        body = b'{"prompt":[' + b"[1]," * 1_000_000 + b"[1]]}"
        answer = await client.post("/v1/completions", content=body, headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


LONG_LISTS: list[tuple[type[Body], dict[str, Any]]] = [
    (CompletionBody, {"prompt": [[1]] * 50_000}),
    (CompletionBody, {"prompt": ["a"] * 50_000}),
    (CompletionBody, {"prompt": [1.5] * 50_000}),
    (CompletionBody, {"prompt": "a", "stop": [1] * 50_000}),
    (ChatBody, {"messages": [1] * 50_000}),
    (ChatBody, {"messages": [], "tools": [1] * 50_000}),
    (ResponseBody, {"input": [1] * 50_000}),
]


@pytest.mark.parametrize(("kind", "body"), LONG_LISTS, ids=lambda value: str(value)[:40])
def test_the_first_wrong_item_of_a_long_list_ends_its_validation(kind: type[Body], body: dict[str, Any]) -> None:
    """Millions of errors take minutes, in which the loop would stand still."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 10


async def test_a_key_is_asked_for() -> None:
    with pytest.raises(InvalidRequestError, match="API key"):
        create_app(FakeAsyncLLM(), api_keys="")
    async with FakeAsyncLLM("yes") as engine, client_of(engine, api_keys=["one", "two"]) as client:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer three"}, 401),
            ({"authorization": "Bearer two"}, 200),
            ({"x-api-key": "one"}, 200),
        ):
            answer = await client.get("/v1/models", headers=headers)
            assert answer.status_code == status
        wrong = await client.put("/v1/models", headers={"x-api-key": "one"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_an_error_in_mid_stream_ends_one_answer() -> None:
    async with FakeAsyncLLM([Reply("He", error=WorkerDiedError("gone")), "yes"]) as engine:
        async with engine.openai_client(max_retries=0) as client:
            texts = []
            with pytest.raises(openai.APIError, match="worker process"):
                async for chunk in await client.chat.completions.create(model="fake", messages=HELLO, stream=True):
                    texts += [chunk.choices[0].delta.content]
            assert "".join(texts) == "He"
            again = await client.chat.completions.create(model="fake", messages=HELLO)
            assert again.choices[0].message.content == "yes"


async def test_a_stream_whose_client_is_closed_is_no_whole_answer() -> None:
    async with FakeAsyncLLM("a" * 1000, token_delay=0.001) as engine, engine.openai_client() as client:
        chats: Any = await client.chat.completions.create(model="fake", messages=HELLO, stream=True)
        responses: Any = await client.responses.create(model="fake", input="hello", stream=True)
        await anext(chats), await anext(responses)
        await client.close()
        for stream in (chats, responses):
            with pytest.raises(openai.APIConnectionError):
                _ = [event async for event in stream]


async def test_a_body_that_was_read_before_has_its_events() -> None:
    async with FakeAsyncLLM("hello there") as engine, engine.openai_client() as client:
        create = client.chat.completions.with_streaming_response.create
        async with create(model="fake", messages=HELLO, stream=True) as response:
            await response.read()
            chunks = [chunk async for chunk in await response.parse()]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello there"


async def test_a_call_on_another_loop_says_so() -> None:
    async with FakeAsyncLLM("hello") as engine, engine.openai_client() as client:

        def ask() -> Any:
            return asyncio.run(client.chat.completions.create(model="fake", messages=HELLO))  # type: ignore[arg-type]

        with pytest.raises(
            openai.InternalServerError, match="belongs to another event loop.* own_thread=True"
        ) as raised:
            await asyncio.to_thread(ask)
        assert repr(engine) not in str(raised.value) and "AsyncLLM" not in str(raised.value)


async def test_a_full_queue_is_429_with_a_time() -> None:
    async with FakeAsyncLLM("a" * 1000, token_delay=0.01, max_num_queued_requests=1, max_num_seqs=1) as engine:
        async with engine.openai_client(max_retries=0) as client:
            running = [engine.stream("x")]
            while not engine.statistics().num_running:
                await asyncio.sleep(0.001)
            running.append(engine.stream("x"))
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(model="fake", messages=HELLO)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            del running


async def test_the_clients_timeout_ends_the_request() -> None:
    async with FakeAsyncLLM("a" * 1000, token_delay=100.0) as engine:
        async with engine.openai_client(max_retries=0, timeout=0.05) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="fake", messages=HELLO)
            while engine.statistics().num_running:
                await asyncio.sleep(0.001)


async def test_an_application_waits_for_a_client_that_does_not_read() -> None:
    num_sent = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for num_sent in range(1, 1001):
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with httpx.AsyncClient(transport=streaming_transport(app)) as client:
        async with client.stream("GET", "http://app/") as answer:
            for _ in range(20):
                await asyncio.sleep(0)
            assert num_sent < 4
            assert len(await answer.aread()) == 1_000_000
        async with client.stream("GET", "http://app/"):
            pass  # left without being read: the application ends all the same


async def test_an_application_is_not_collected_while_it_waits_for_its_reader() -> None:
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(2):
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            ended.set()

    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
    answer: Any = await streaming_transport(app).handle_async_request(httpx.Request("GET", "http://app/"))
    await asyncio.sleep(0.01)  # the application waits for its reader by then
    assert not ended.is_set()
    answer.extensions["itself"] = answer  # only the collector of cycles frees it
    del answer
    gc.collect()
    assert not ended.is_set()
    await ended.wait()
    assert faults == []


@pytest.mark.parametrize("how", ["dropped", "client closed"])
async def test_an_answer_that_is_not_closed_ends_all_the_same(how: str) -> None:
    async with FakeAsyncLLM("a" * 20_000, token_delay=0.005) as engine, engine.openai_client() as client:
        stream: Any = await client.chat.completions.create(model="fake", messages=HELLO, stream=True)
        while not engine.statistics().num_running:
            await asyncio.sleep(0.001)
        if how == "dropped":
            del stream
        else:
            await client.close()
        while engine.statistics().num_running:
            gc.collect()
            await asyncio.sleep(0.001)
        assert engine.statistics().num_aborted == 1


def test_the_models_name_is_that_of_the_hub_or_the_end_of_a_path(tmp_path: Path) -> None:
    for model, name in (
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("owner/repo:Q4_K_M", "owner/repo:Q4_K_M"),
        (str(tmp_path), tmp_path.name),
        ("/models/tiny.gguf", "tiny.gguf"),
        ("smollm2-135m", "smollm2-135m"),
    ):
        limits = {"max_body_bytes": 1, "responses": ResponseStore(0), "folders": Folders(), "pace": Pace(1)}
        limits |= {"max_keep": 60.0}
        service = Service(AsyncLLM(model), model_names=None, **limits)
        assert service.model_names == (name,)


async def test_what_comes_while_the_client_is_busy_is_one_event() -> None:
    """Each event costs OpenAI's client the same, whatever it brings."""
    async with FakeAsyncLLM("a" * 500) as engine, engine.openai_client() as client:
        messages: Any = [{"role": "user", "content": "hello"}]
        stream = await client.chat.completions.create(model="fake", messages=messages, stream=True)
        texts = [(await anext(stream)).choices[0].delta.content or ""]
        while engine.statistics().num_running:
            await asyncio.sleep(0.001)
        texts += [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == "a" * 500
        assert len(texts) < 10


async def test_the_end_of_an_answer_is_not_held_back() -> None:
    """Of many streams each piece waits for the next one's turn, but not the last."""
    async with FakeAsyncLLM("abc " * 20) as engine:
        app = create_app(engine, pieces_per_second=1e-6)
        async with httpx.AsyncClient(transport=streaming_transport(app), base_url="http://app") as client:
            body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
            answers = await asyncio.gather(*[client.post("/v1/chat/completions", json=body) for _ in range(8)])
            assert all(answer.text.count('"finish_reason":"stop"') == 1 for answer in answers)
            texts = {"prompt": "hello", "stream": True, "max_tokens": 1000}
            answers = await asyncio.gather(*[client.post("/v1/completions", json=texts) for _ in range(8)])
            assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers)
