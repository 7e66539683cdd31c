"""Messages, by Anthropic's own client over an engine of the same process."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from conftest_api import leaves
from pydantic import BaseModel, TypeAdapter

from aengine import AsyncLLM, EngineOverloadedError, WorkerDiedError
from aengine.server import create_app
from aengine.server.in_process import anthropic_client, streaming_transport
from aengine.testing import FakeAsyncLLM, FakeRequest, Reply

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ADD: dict[str, Any] = {
    "name": "add",
    "description": "Add numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
    "cache_control": {"type": "ephemeral"},
}
ASK: dict[str, Any] = {"model": "fake", "max_tokens": 1000, "messages": HELLO}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def new_client(engine: AsyncLLM) -> anthropic.AsyncAnthropic:
    return anthropic_client(engine, max_retries=0)


def http_client(engine: AsyncLLM, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=streaming_transport(create_app(engine, **options)), base_url="http://engine")


def num_prompt_tokens(usage: dict[str, Any]) -> int:
    """All tokens of a prompt: those that were neither read from a cache nor written to it, and those that were."""
    names = "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"
    return sum(usage[name] for name in names)


async def raw_events(engine: AsyncLLM, **ask: Any) -> list[dict[str, Any]]:
    """Stream a message, and validate each event strictly. Pings are left out."""
    events = []
    async with http_client(engine) as http:
        async with http.stream("POST", "/v1/messages", json=ASK | ask | {"stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["request-id"].startswith("req_")
            text = (await answer.aread()).decode()
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "error":
            ErrorResponse.model_validate(event, strict=True)
        elif event["type"] != "ping":
            EVENT.validate_json(data.removeprefix("data: "), strict=True)
        events.append(event)
    return [event for event in events if event["type"] != "ping"]


async def whole(engine: AsyncLLM, **ask: Any) -> dict[str, Any]:
    """Ask for a whole message, and validate it strictly."""
    async with http_client(engine) as http:
        answer = await http.post("/v1/messages", json=ASK | ask)
        assert answer.status_code == 200, answer.text
        Message.model_validate_json(answer.text, strict=True)
        return dict(answer.json())


def contents_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the blocks together, and check the order of the events."""
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(blocks)
                is_open, texts = True, []
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                assert is_open and event["index"] == len(blocks) - 1
                kind, delta = event["delta"]["type"], event["delta"]
                if kind == "signature_delta":
                    blocks[-1]["signature"] = delta["signature"]
                else:
                    texts.append(next(value for key, value in delta.items() if key != "type"))
            case "content_block_stop":
                assert is_open and event["index"] == len(blocks) - 1
                is_open = False
                block = blocks[-1]
                match block["type"]:
                    case "tool_use":
                        block["input"] = json.loads("".join(texts))
                    case kind:
                        block[{"text": "text", "thinking": "thinking"}[kind]] = "".join(texts)
            case other:
                raise AssertionError(other)
    assert not is_open
    return blocks


CALLS = [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})]
SIGNED = {"type": "thinking", "signature": "aengine"}
ANSWERS: list[tuple[Any, dict[str, Any], list[dict[str, Any]], str]] = [
    ("Hello 👋 there", {}, [{"type": "text", "text": "Hello 👋 there", "citations": None}], "end_turn"),
    ("", {}, [], "end_turn"),
    (" \n", {}, [], "end_turn"),
    (
        Reply("Adding. ", tool_calls=CALLS),
        {"tools": [ADD]},
        [
            {"type": "text", "text": "Adding. ", "citations": None},
            *[{"type": "tool_use", "name": "add", "input": arguments} for _, arguments in CALLS],
        ],
        "tool_use",
    ),
    (
        Reply("Hi", reasoning="hm"),
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        [SIGNED | {"thinking": "hm"}, {"type": "text", "text": "Hi", "citations": None}],
        "end_turn",
    ),
    (
        Reply("Hi", reasoning="hm"),
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        [SIGNED | {"thinking": ""}, {"type": "text", "text": "Hi", "citations": None}],
        "end_turn",
    ),
    ("a" * 50, {"max_tokens": 5}, [{"type": "text", "text": "aaaaa", "citations": None}], "max_tokens"),
]


@pytest.mark.parametrize(("reply", "ask", "content", "reason"), ANSWERS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("own_thread", [False, True])
async def test_answers_whole_and_in_pieces(
    reply: Any, ask: dict[str, Any], content: list[dict[str, Any]], reason: str, own_thread: bool
) -> None:
    async with FakeAsyncLLM(reply, token_delay=0.0005, reasoning=True, own_thread=own_thread) as engine:
        message = await whole(engine, **ask)
        events = await raw_events(engine, **ask)
    for blocks in (message["content"], contents_of(events)):
        ids = [block.pop("id") for block in blocks if block["type"] == "tool_use"]
        assert len(set(ids)) == len(ids)
        for block in blocks:
            if block["type"] == "thinking":
                block["thinking"] = block["thinking"].strip()
            if block["type"] == "text":
                block["text"] = block["text"].lstrip("\n")
        assert blocks == content
    start, end = events[0]["message"], events[-2]
    assert (message["stop_reason"], end["delta"]["stop_reason"]) == (reason, reason)
    assert message["role"] == start["role"] == "assistant" and message["id"].startswith("msg_")
    assert start["model"] == "fake" and start["content"] == [] and start["stop_reason"] is None
    prompt = num_prompt_tokens(message["usage"])
    for usage in (start["usage"], end["usage"]):
        assert num_prompt_tokens(usage) == prompt > 0
    assert end["usage"]["output_tokens"] == message["usage"]["output_tokens"] > 0


async def test_the_streaming_helper_puts_a_message_together() -> None:
    replies = [Reply("Let me add.", tool_calls=CALLS[:1]), "It is 3."]
    async with FakeAsyncLLM(replies, token_delay=0.001) as engine, new_client(engine) as client:
        async with client.messages.stream(**ASK, tools=[ADD]) as stream:
            texts = [text async for text in stream.text_stream]
            message = await stream.get_final_message()
        assert len(texts) > 2, "it comes in pieces"
        (text, call) = message.content
        assert text.type == "text" and text.text.strip() == "".join(texts).strip() == "Let me add."
        assert call.type == "tool_use" and call.input == {"a": 1, "b": 2}
        assert message.stop_reason == "tool_use" and message.usage.output_tokens > 0
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
        history: Any = [
            *HELLO,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]
        answer = await client.messages.create(**ASK | {"messages": history}, tools=[ADD])
        assert answer.content[0].type == "text" and answer.content[0].text == "It is 3."
        _, called, replied = engine.requests[1].messages or ()
        assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
        assert replied == {"role": "tool", "tool_call_id": call.id, "content": "3"}


class City(BaseModel):
    name: str
    people: int


@pytest.mark.parametrize("strict_tool", [False, True])
async def test_structured_output_is_parsed(strict_tool: bool) -> None:
    tools: Any = [ADD | {"strict": True}] if strict_tool else anthropic.omit
    async with FakeAsyncLLM({"name": "Oslo", "people": 700000}) as engine, new_client(engine) as client:
        parsed = await client.messages.parse(**ASK, output_format=City, tools=tools)
        assert parsed.parsed_output == City(name="Oslo", people=700000)
        async with client.messages.stream(**ASK, output_format=City, tools=tools) as stream:
            assert (await stream.get_final_message()).parsed_output == City(name="Oslo", people=700000)
        beta = await client.beta.messages.parse(**ASK, output_format=City, betas=["structured-outputs-2025-11-13"])
        assert beta.parsed_output == City(name="Oslo", people=700000)
        schema = {"type": "object", "properties": {"name": {"type": "string"}, "people": {"type": "integer"}}}
        shape: Any = {"type": "json_schema", "schema": schema | {"required": ["name", "people"]}}
        answer = await client.messages.create(**ASK, output_config={"format": shape, "effort": "max"})
        assert answer.content[0].type == "text"
        assert json.loads(answer.content[0].text) == {"name": "Oslo", "people": 700000}


def seen(request: FakeRequest) -> str:
    return json.dumps([list(request.messages or ()), request.tool_choice, [tool.name for tool in request.tools]])


def system_prompt(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


TEXTS: Any = [{"type": "text", "text": "a", "citations": None}, {"type": "text", "text": "b"}]
THOUGHT: Any = {"type": "thinking", "thinking": "hm", "signature": "x"}
REDACTED: Any = {"type": "redacted_thinking", "data": "x"}
CALL: Any = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True}
OPENAI_CALL = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CONVERSATIONS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"system": "be kind"}, [system_prompt("be kind"), *HELLO]),
    ({"system": TEXTS}, [system_prompt("a\nb"), *HELLO]),
    ({"system": []}, HELLO),
    ({"messages": [{"role": "user", "content": TEXTS}]}, [{"role": "user", "content": "a\nb"}]),
    ({"messages": [*HELLO, system_prompt("now be brief")]}, [*HELLO, system_prompt("now be brief")]),
    (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [REDACTED, THOUGHT, TEXTS[0], CALL]},
                {"role": "user", "content": [TEXTS[0], RESULT, TEXTS[1]]},
            ],
        },
        [
            *HELLO,
            {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [OPENAI_CALL]},
            {"role": "tool", "tool_call_id": "t1", "content": "Error: no"},
            {"role": "user", "content": "a\nb"},
        ],
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": "It is"}]},
        [*HELLO, {"role": "assistant", "content": "It is"}],
    ),
]


@pytest.mark.parametrize(("ask", "messages"), CONVERSATIONS, ids=lambda value: str(value)[:40])
async def test_what_the_model_is_shown(ask: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    async with FakeAsyncLLM(seen) as engine:
        message = await whole(engine, **ask)
        assert json.loads(message["content"][0]["text"])[0] == messages
        async with new_client(engine) as client:
            counted = await client.messages.count_tokens(**{"model": "fake", "messages": HELLO, **ask})
        MessageTokensCount.model_validate(counted.model_dump(), strict=True)
        usage = message["usage"]
        assert counted.input_tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]


async def test_tools_count() -> None:
    async with FakeAsyncLLM("ok") as engine, new_client(engine) as client:
        ask: Any = {"model": "fake", "messages": HELLO, "tools": [ADD]}
        counted = await client.messages.count_tokens(**ask)
        answer = await client.messages.create(**ask, max_tokens=10)
        assert counted.input_tokens == num_prompt_tokens(answer.usage.model_dump())


CHOICES: list[tuple[dict[str, Any], int]] = [
    ({"type": "auto"}, 0),
    ({"type": "none"}, 0),
    ({"type": "any"}, 1),
    ({"type": "any", "disable_parallel_tool_use": True}, 1),
    ({"type": "tool", "name": "add"}, 1),
]


@pytest.mark.parametrize(("choice", "num_calls"), CHOICES, ids=str)
async def test_tool_choices(choice: dict[str, Any], num_calls: int) -> None:
    async with FakeAsyncLLM() as engine:
        message = await whole(engine, tools=[ADD], tool_choice=choice)
        assert [block["type"] for block in message["content"]].count("tool_use") == num_calls
        assert message["stop_reason"] == ("tool_use" if num_calls else "end_turn")


async def test_parallel_calls_can_be_forbidden() -> None:
    async with FakeAsyncLLM(Reply(tool_calls=CALLS)) as engine, http_client(engine) as http:
        ask = ASK | {"tools": [ADD]}
        assert len((await http.post("/v1/messages", json=ask)).json()["content"]) == 2
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        answer = await http.post("/v1/messages", json=ask | {"tool_choice": choice})
        assert answer.status_code == 500, "the script has a call that the grammar does not allow"


async def test_thinking_is_the_templates_variable() -> None:
    from aengine.server.anthropic.requests import MessagesBody

    for thinking, variables in (
        (None, {}),
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
    ):
        assert MessagesBody.model_validate(ASK | {"thinking": thinking}).template_variables() == variables


async def test_calls_that_are_cut_off() -> None:
    """Behind the name and within the arguments: what has come, whole and as a stream."""
    async with FakeAsyncLLM(Reply("x", tool_calls=CALLS)) as engine:
        for max_tokens, arguments in ((30, {}), (55, {"a": 1})):
            message = await whole(engine, tools=[ADD], max_tokens=max_tokens)
            assert message["stop_reason"] == "max_tokens"
            text, call = message["content"]
            assert (text["text"], call["type"], call["name"], call["input"]) == ("x", "tool_use", "add", arguments)
            events = await raw_events(engine, tools=[ADD], max_tokens=max_tokens)
            assert events[-2]["delta"]["stop_reason"] == "max_tokens"
            blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
            assert [block["type"] for block in blocks] == ["text", "tool_use"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_loop_over_tools(stream: bool) -> None:
    """It begins with a thread of messages kept by the server, and goes on without."""

    @anthropic.beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add numbers."""
        return str(a + b)

    def script(request: FakeRequest) -> Any:
        last = (request.messages or ())[-1]
        return f"It is {last['content']}." if last["role"] == "tool" else Reply("Hm.", tool_calls=CALLS)

    async with FakeAsyncLLM(script) as engine, new_client(engine) as client:
        runner: Any = client.beta.messages.tool_runner(**ASK, tools=[add], stream=stream)
        message = await runner.until_done()
        assert message.content[0].text == "It is 7."
        roles = [message["role"] for message in engine.requests[-1].messages or ()]
        assert roles == ["user", "assistant", "tool", "tool"]


async def test_text_behind_a_call_stays_there() -> None:
    async with FakeAsyncLLM(Reply("x", tool_calls=CALLS)) as engine:
        ask: dict[str, Any] = {"tools": [ADD], "max_tokens": 90}  # before the second call's name
        message = await whole(engine, **ask)
        blocks = [block["type"] for block in message["content"]]
        assert blocks == ["text", "tool_use", "text"] and message["content"][2]["text"].startswith("\n<tool_call>")
        assert blocks == [block["type"] for block in contents_of(await raw_events(engine, **ask))]


@pytest.mark.parametrize("stop", ["ST", "P"])
async def test_the_stop_sequence_is_told(stop: str) -> None:
    async with FakeAsyncLLM("abSTOP") as engine:
        message = await whole(engine, stop_sequences=["XYZ", stop])
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
        events = await raw_events(engine, stop_sequences=["XYZ", stop])
        assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}
        assert contents_of(events)[0]["text"] == message["content"][0]["text"] == "abSTOP".partition(stop)[0]


async def test_the_end_of_the_context_is_told() -> None:
    async with FakeAsyncLLM("a" * 1000, max_model_len=200) as engine:
        assert (await whole(engine, max_tokens=100_000))["stop_reason"] == "model_context_window_exceeded"


def conversation(*contents: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


WRONG: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "other"}, 404, "not_found_error", "'other' is not served"),
    ({"model": None}, 400, "invalid_request_error", "model"),
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    ({"max_tokens": "many"}, 400, "invalid_request_error", "max_tokens"),
    (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        400,
        "invalid_request_error",
        "parallel_tool_use",
    ),
    ({"messages": []}, 400, "invalid_request_error", "messages"),
    ({"messages": "hello"}, 400, "invalid_request_error", "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request_error", r"messages\[0\].role"),
    (
        conversation([{"type": "image", "source": {}}]),
        400,
        "invalid_request_error",
        r"content\[0\].*'image'.*text only",
    ),
    (conversation([{"type": "document", "source": {}}]), 400, "invalid_request_error", "'document'"),
    (conversation([{"type": 1}]), 400, "invalid_request_error", "must be a block"),
    (conversation(["text"]), 400, "invalid_request_error", "must be a block"),
    (conversation([{"type": "text"}]), 400, "invalid_request_error", r"content\[0\].text"),
    (conversation([CALL]), 400, "invalid_request_error", "an assistant's"),
    (conversation("x", [RESULT]), 400, "invalid_request_error", "a user's"),
    (conversation("x", [CALL]), 400, "invalid_request_error", "no tool_result for 't1'"),
    (conversation("x", [CALL], "y"), 400, "invalid_request_error", "no tool_result for 't1'"),
    (conversation("x", [CALL, CALL], [RESULT]), 400, "invalid_request_error", "two tool_use"),
    (conversation("x", [CALL], [RESULT, RESULT]), 400, "invalid_request_error", "each gets one result"),
    (conversation("x", "y", [RESULT]), 400, "invalid_request_error", "must have the tool_use"),
    (
        conversation("x", [CALL], [RESULT | {"content": [{"type": "image"}]}]),
        400,
        "invalid_request_error",
        "'image'",
    ),
    ({"system": [{"type": "image"}]}, 400, "invalid_request_error", "'image'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "invalid_request_error", "web_search"),
    ({"tools": [{"name": "x"}]}, 400, "invalid_request_error", "input_schema"),
    ({"tools": [ADD, ADD]}, 400, "invalid_request_error", "two tools"),
    ({"tools": [ADD | {"input_schema": {"type": 3}}]}, 400, "invalid_request_error", "add"),
    ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "at least one tool"),
    ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "name"),
    ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [ADD]}, 400, "invalid_request_error", "'add'"),
    ({"tool_choice": {"type": "some"}}, 400, "invalid_request_error", "tool_choice"),
    ({"thinking": {"type": "between_tools"}}, 400, "invalid_request_error", "thinking"),
    ({"temperature": -1}, 400, "invalid_request_error", "temperature"),
    ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop"),
    ({"stop_sequences": "x"}, 400, "invalid_request_error", "stop_sequences"),
    ({"output_config": {"format": {"type": "xml"}}}, 400, "invalid_request_error", "output_config"),
    ({"output_format": {"type": "json_schema", "schema": {"type": 1}}}, 400, "invalid_request_error", "type"),
    ({"mcp_servers": [{"type": "url"}]}, 400, "invalid_request_error", "mcp_servers"),
    ({"colour": 1}, 400, "invalid_request_error", "colour is not supported"),
    (conversation("a" * 200_000), 400, "invalid_request_error", "prompt is too long"),
]


@pytest.mark.parametrize(("change", "status", "kind", "message"), WRONG, ids=lambda value: str(value)[:40])
async def test_what_is_wrong_is_named(change: dict[str, Any], status: int, kind: str, message: str) -> None:
    async with FakeAsyncLLM("yes") as engine, new_client(engine) as client:
        for stream in (False, True):
            with pytest.raises(anthropic.APIStatusError, match=message) as caught:
                await client.post("/v1/messages", body=ASK | change | {"stream": stream}, cast_to=object)
            assert (caught.value.status_code, caught.value.type) == (status, kind), caught.value
            assert caught.value.request_id is not None
            ErrorResponse.model_validate(caught.value.body, strict=True)
        assert engine.statistics().num_running == 0
        assert (await client.messages.create(**ASK)).stop_reason == "end_turn"


HALF = "\ud800"
NOT_UNICODE: list[dict[str, Any]] = [
    conversation(HALF),
    {"system": HALF},
    {"stop_sequences": [HALF]},
    {"tools": [ADD | {"description": HALF}]},
    {"tools": [ADD | {"name": HALF}]},
    {"model": HALF},
    conversation("x", [THOUGHT | {"thinking": HALF}, CALL], [RESULT]),
    conversation("x", [CALL | {"input": {"a": HALF}}], [RESULT]),
    conversation("x", [CALL], [RESULT | {"content": HALF}]),
    conversation("x", [CALL], [RESULT | {"tool_use_id": HALF}]),
]


@pytest.mark.parametrize("change", NOT_UNICODE, ids=lambda value: ascii(value)[:60])
async def test_half_a_character_harms_nobody(change: dict[str, Any]) -> None:
    async with FakeAsyncLLM("yes", reasoning=True) as engine, http_client(engine) as http:
        headers = {"content-type": "application/json"}
        answer = await http.post("/v1/messages", content=json.dumps(ASK | change), headers=headers)
        expected = (200,) if "thinking" in str(change) else (400, 404)  # the template does not show it
        assert answer.status_code in expected, answer.text
        assert engine.statistics().num_running == 0
        assert (await http.post("/v1/messages", json=ASK)).status_code == 200


async def test_errors_of_http_have_the_shape_too() -> None:
    async with FakeAsyncLLM("yes") as engine, http_client(engine, api_keys="secret", max_body_bytes=500) as http:
        key = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
        for path, options, status in (
            ("/v1/messages", {"json": ASK}, 401),
            ("/v1/messages", {"json": ASK, "headers": {"x-api-key": "wrong"}}, 401),
            ("/v1/messages", {"content": b"{", "headers": key | {"content-type": "application/json"}}, 400),
            ("/v1/messages", {"content": b"[]", "headers": key | {"content-type": "application/json"}}, 400),
            ("/v1/messages", {"content": b"{}", "headers": key}, 415),
            ("/v1/messages", {"content": b"a=b", "headers": key | {"content-type": "text/plain"}}, 415),
            ("/v1/messages", {"json": ASK | conversation("a" * 1000), "headers": key}, 413),
            ("/v1/messages/batches", {"json": {}, "headers": key}, 404),
            ("/v1/messages/count_tokens", {"json": {"model": "fake"}, "headers": key}, 400),
        ):
            answer = await http.post(path, **options)
            assert answer.status_code == status, (path, answer.text)
            error = ErrorResponse.model_validate_json(answer.text, strict=True)
            assert error.request_id == answer.headers["request-id"]
        assert (await http.get("/v1/messages", headers=key)).json()["type"] == "error"
        assert (await http.post("/v1/messages", json=ASK, headers=key)).status_code == 200
        bearer = {"authorization": "Bearer secret"}
        assert (await http.post("/v1/messages?beta=true", json=ASK, headers=bearer)).status_code == 200


async def test_failures_of_the_engine() -> None:
    replies = [EngineOverloadedError("full", retry_after=2.5), WorkerDiedError("gone")]
    async with FakeAsyncLLM(replies) as engine, new_client(engine) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.create(**ASK)
        assert (caught.value.status_code, caught.value.type) == (529, "overloaded_error")
        assert caught.value.response.headers["retry-after"] == "3"
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.create(**ASK)
        assert (caught.value.status_code, caught.value.type) == (503, "api_error")
    async with FakeAsyncLLM(Reply("abc", error=WorkerDiedError("gone"))) as engine, new_client(engine) as client:
        with pytest.raises(anthropic.APIStatusError, match="worker process"):
            async for _ in await client.messages.create(**ASK, stream=True):
                pass
        events = await raw_events(engine)
        assert [events[0]["type"], events[-1]["type"]] == ["message_start", "error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_ends_the_request(stream: bool) -> None:
    async with FakeAsyncLLM("a" * 1000, token_delay=0.01) as engine, new_client(engine) as client:
        await leaves(engine, client.messages.create(**ASK, stream=stream), stream)
