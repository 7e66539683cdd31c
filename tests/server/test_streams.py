"""Streams of events that take their time, and requests on their way to an endpoint."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import Request

from aengine.server import create_app, http
from aengine.server.in_process import streaming_transport
from aengine.testing import FakeAsyncLLM, Reply

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/responses", {"input": "hello"}),
    ("/v1/messages", {"model": "fake", "messages": HELLO, "max_tokens": 10}),
]


def client_of(engine: FakeAsyncLLM) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=streaming_transport(create_app(engine)), base_url="http://app")


async def no_rest(seconds: float) -> None:
    """Wait for nothing."""


async def test_comments_keep_a_connection_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first event, and between events; none is sent while the next chunk is there."""
    monkeypatch.setattr(http, "PING_SECONDS", 0.001)
    turns: asyncio.Queue[None] = asyncio.Queue()
    sent: list[bytes] = []

    async def chunks() -> AsyncGenerator[bytes, None]:
        for text in (b"data: 1\n\n", b"data: 2\n\n"):
            await turns.get()
            yield text
        await turns.get()
        raise ValueError("late")

    async def receive() -> Any:
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if body := message.get("body"):
            is_new = not sent or sent[-1] != body
            sent.append(body)
            if body == http.PING and is_new:
                turns.put_nowait(None)

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    answer = await http.begin_events(request, chunks(), http.Pace(1000), no_rest, lambda error: b"", {})
    with pytest.raises(ValueError, match="late"):
        await answer(request.scope, receive, send)
    assert [body for body, _ in itertools.groupby(sent)] == [
        http.PING, b"data: 1\n\n", http.PING, b"data: 2\n\n", http.PING,
    ]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_an_error_after_the_first_comment_is_an_event(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeAsyncLLM("ab", token_delay=2.0) as engine, client_of(engine) as client:
        late = await client.post(path, json=body | {"stream": True, "deadline": 0.01})
        assert late.status_code == 504
        monkeypatch.setattr(http, "PING_SECONDS", 0.001)
        late = await client.post(path, json=body | {"stream": True, "deadline": 0.5})
        assert late.status_code == 200
        assert "deadline" in [part for part in late.text.split("\n\n") if part not in ("", "data: [DONE]")][-1]


async def test_openais_client_passes_over_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PING_SECONDS", 0.001)
    async with FakeAsyncLLM("ab", token_delay=0.2) as engine, engine.openai_client(max_retries=0) as client:
        ask: dict[str, Any] = {"model": "fake", "messages": HELLO, "stream": True}
        chunks = [chunk async for chunk in await client.chat.completions.create(**ask)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ab"
        stream = await client.responses.create(model="fake", input="hello", stream=True, extra_body={"deadline": 0.15})
        events = [event async for event in stream]
        assert [event.type for event in events] == ["error"] and "deadline" in getattr(events[0], "message")
        with pytest.raises(openai.APIError, match="deadline"):
            async for _ in await client.chat.completions.create(**ask, extra_body={"deadline": 0.15}):
                pass


async def test_a_call_of_the_function_that_is_named_stops() -> None:
    reply = Reply(tool_calls=[("a", {})])
    async with FakeAsyncLLM([reply] * 4) as engine, client_of(engine) as client:
        named: Any = {"type": "function", "function": {"name": "a"}}
        for choice, word in ((named, "stop"), ("required", "tool_calls")):
            asked = with_tool({}) | {"messages": HELLO, "tool_choice": choice}
            answer = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]
            assert answer["finish_reason"] == word and answer["message"]["tool_calls"]
            events = await client.post("/v1/chat/completions", json=asked | {"stream": True})
            assert f'"finish_reason":"{word}"' in events.text


async def test_a_compressed_body_is_refused() -> None:
    async with FakeAsyncLLM("a") as engine, client_of(engine) as client:
        for encoding in ("gzip", "Deflate", "br"):
            body = gzip.compress(json.dumps({"messages": HELLO}).encode())
            headers = {"content-type": "application/json", "content-encoding": encoding}
            for path in ("/v1/chat/completions", "/v1/messages"):
                answer = await client.post(path, content=body, headers=headers)
                assert answer.status_code == 415 and encoding.lower() in answer.json()["error"]["message"]
        headers = {"content-type": "application/json", "content-encoding": "identity"}
        answer = await client.post("/v1/chat/completions", content=json.dumps({"messages": HELLO}), headers=headers)
        assert answer.status_code == 200


async def test_a_slash_at_the_end_of_a_path_changes_nothing() -> None:
    async with FakeAsyncLLM("a" * 9) as engine, client_of(engine) as client:
        answer = await client.post("/v1/chat/completions/", json={"messages": HELLO})
        assert answer.status_code == 200 and answer.json()["object"] == "chat.completion"
        for path in ("/v1/models/", "/health/", "/"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/v1/models/")).json()["object"] == "list"
        assert (await client.get("/v1/chat/completions/")).status_code == 405
        assert (await client.get("/v1/nothing/")).status_code == 404


def shaped(schema: object, *, strict: bool = False) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}}


def with_tool(schema: object) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "a", "parameters": schema}}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "\ud800"]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"type": "nope"}}}, "structured_outputs.json.type"),
        (shaped({"type": "nope"}), "response_format.json_schema.schema.type"),
        (with_tool({"properties": {"b": {"type": "nope"}}}), "tools.properties.b.type"),
        (with_tool({"\ud800": 1}), 'tools["\\ud800"]'),
    ],
)
async def test_an_error_names_the_field(body: dict[str, Any], param: str) -> None:
    async with FakeAsyncLLM("a") as engine, client_of(engine) as client:
        text = json.dumps({"messages": HELLO} | body)  # httpx can't write halves of surrogate pairs
        headers = {"content-type": "application/json"}
        answer = await client.post("/v1/chat/completions", content=text, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body", "cure"),
    [
        ("/v1/chat/completions", {"messages": HELLO, **shaped({"uniqueItems": True}, strict=True)}, '"strict": true'),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": {"uniqueItems": True}}}, "response_format"),
    ],
)
async def test_the_cure_of_a_schema_is_a_field_of_the_body(path: str, body: dict[str, Any], cure: str) -> None:
    async with FakeAsyncLLM("a") as engine, client_of(engine) as client:
        message = (await client.post(path, json=body)).json()["error"]["message"]
        assert cure in message and "on_unsupported" not in message
