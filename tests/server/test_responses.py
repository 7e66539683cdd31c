"""Responses, by OpenAI's own client over an engine of the same process."""

from __future__ import annotations

import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from conftest_api import leaves
from openai.types import responses as types
from openai.types.responses.response_stream_event import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from aengine import WorkerDiedError
from aengine.server import create_app
from aengine.server.http import dumps
from aengine.server.in_process import openai_client, streaming_transport
from aengine.server.openai.responses.messages import messages_of
from aengine.server.openai.responses.store import ResponseStore
from aengine.testing import FakeAsyncLLM, FakeRequest, Reply

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
CALLS = [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})]


class Report(BaseModel):
    city: str
    sunny: bool


async def test_a_response_is_answered_whole() -> None:
    async with FakeAsyncLLM("Hello there") as engine, openai_client(engine) as client:
        answer = await client.responses.create(
            model="fake",
            input="hello",
            instructions="Be short.",
            metadata={"a": "b"},
            max_output_tokens=50,
            top_logprobs=1,
            include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        )
        types.Response.model_validate(answer.model_dump(warnings=False))
        assert (answer.output_text, answer.status, answer.metadata) == ("Hello there", "completed", {"a": "b"})
        assert answer.usage is not None and answer.usage.output_tokens == len("Hello there") + 1
        (message,) = answer.output
        assert message.type == "message" and message.content[0].type == "output_text"
        logprobs = message.content[0].logprobs
        assert logprobs is not None and "".join(one.token for one in logprobs).startswith("Hello there")
        assert engine.requests[0].messages == [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "hello"},
        ]


@pytest.mark.parametrize("own_thread", [False, True])
async def test_all_events_come_in_their_order(own_thread: bool) -> None:
    """Reasoning, a message, and two calls; each item's deltas add up to what the whole response has."""
    reply = Reply("Let me see.", reasoning="Two sums", tool_calls=CALLS)
    async with (
        FakeAsyncLLM([reply, reply], reasoning=True, token_delay=0.001, own_thread=own_thread) as engine,
        openai_client(engine) as client,
    ):
        ask: dict[str, Any] = {"model": "fake", "input": "sums", "tools": [ADD]}
        events = [event async for event in await client.responses.create(**ask, stream=True)]
        adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
        for event in events:
            adapter.validate_python(event.model_dump(by_alias=True, warnings=False))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
        reasoning = [*message[:2], "reasoning_text.delta", "reasoning_text.done"]
        call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
        part_end, item_end = "content_part.done", "output_item.done"
        assert [kind for i, kind in enumerate(kinds) if kinds[i - 1] != kind] == [
            *("created", "in_progress"),
            *(*reasoning, part_end, item_end),
            *(*message, part_end, item_end),
            *(*call, item_end) * 2,
            "completed",
        ]
        response = events[-1].response  # type: ignore[union-attr]
        texts = ["", "", "", ""]
        for event in events:
            if event.type.endswith(".delta"):
                texts[event.output_index] += event.delta  # type: ignore[union-attr]
        whole = await client.responses.create(**ask)
        for one in (response, whole):
            thought, said, *calls = one.output
            assert thought.content[0].text.strip() == "Two sums" and thought.content[0].text == texts[0]
            assert said.content[0].text == texts[1] and said.content[0].text.strip() == "Let me see."
            assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
            assert [call.arguments for call in calls] == texts[2:]
            assert len({call.call_id for call in calls}) == 2
            assert one.usage.output_tokens_details.reasoning_tokens == len(texts[0])
            assert {item.status for item in one.output} == {"completed"}


async def test_the_stream_helper_and_parse() -> None:
    async with FakeAsyncLLM(Report(city="Paris", sunny=True)) as engine, openai_client(engine) as client:
        parsed = await client.responses.parse(model="fake", input="weather", text_format=Report)
        assert parsed.output_parsed == Report(city="Paris", sunny=True)
        async with client.responses.stream(model="fake", input="weather", text_format=Report) as stream:
            snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert final.output_parsed == Report(city="Paris", sunny=True)
        assert json.loads(snapshots[-1]) == {"city": "Paris", "sunny": True}


async def test_a_tool_is_called_and_its_result_is_read() -> None:
    script = [Reply(reasoning="hm", tool_calls=CALLS), "It is 3 and 7."]
    async with FakeAsyncLLM(script, reasoning=True) as engine, openai_client(engine) as client:
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "sums"}]}]
        first = await client.responses.create(model="fake", input=items, tools=[ADD], tool_choice="required")
        items += [item.model_dump(exclude_none=True) for item in first.output]
        for item in first.output:
            if item.type == "function_call":
                numbers = json.loads(item.arguments)
                output = [{"type": "input_text", "text": str(sum(numbers.values()))}]
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
        second = await client.responses.create(model="fake", input=items, tools=[ADD])
        assert second.output_text == "It is 3 and 7."
        user, answer, *results = engine.requests[1].messages or ()
        assert user["role"] == "user" and answer["reasoning_content"].strip() == "hm"
        assert [call["function"]["name"] for call in answer["tool_calls"]] == ["add", "add"]
        assert [result["content"] for result in results] == ["3", "7"]
        assert [result["tool_call_id"] for result in results] == [call["id"] for call in answer["tool_calls"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_a_namespace_are_called(stream: bool) -> None:
    """As Codex has them: beside a tool that OpenAI would run, which no model need call."""
    namespace = {"type": "namespace", "name": "sums", "description": "Sums.", "tools": [ADD]}
    ask: dict[str, Any] = {"model": "fake", "tools": [ADD, namespace, {"type": "web_search"}]}
    calls = [("sums__add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})]
    extra = {"client_metadata": {"session_id": "1"}}
    async with FakeAsyncLLM([Reply(tool_calls=calls), "Done."]) as engine, openai_client(engine) as client:
        if stream:
            events = [event async for event in await client.responses.create(input="?", stream=True, **ask)]
            (first,) = [event.response for event in events if event.type == "response.completed"]
        else:
            first = await client.responses.create(input="?", extra_body=extra, **ask)
        types.Response.model_validate(first.model_dump(warnings=False))
        output: list[Any] = first.output
        assert [(call.name, call.namespace) for call in output] == [("add", "sums"), ("add", None)]
        assert first.model_extra is not None and "web_search" in str(first.model_extra["warnings"])
        items = [{"role": "user", "content": "?"}, *(call.model_dump(exclude_none=True) for call in output)]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in output]
        second = await client.responses.create(input=items, **ask)
        assert second.output_text == "Done."
        answer = (engine.requests[1].messages or ())[1]
        assert [call["function"]["name"] for call in answer["tool_calls"]] == ["sums__add", "add"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "web_search"}], "tools"),
        ([{"type": "namespace", "tools": [ADD]}], "tools[0].name"),
        ([ADD, {"type": "namespace", "name": "n", "tools": {}}], "tools[1].tools"),
        ([{"type": "namespace", "name": "n", "tools": [1]}], "tools[0].tools[0].name"),
    ],
)
async def test_tools_that_cant_be_used_are_refused(tools: list[Any], param: str) -> None:
    async with FakeAsyncLLM("Hello") as engine, openai_client(engine, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="fake", input="?", tools=tools)
        assert caught.value.param == param


async def test_a_conversation_goes_on_from_the_response_before() -> None:
    async with FakeAsyncLLM(["one", Reply(tool_calls=CALLS[:1]), "three", "four"]) as engine:
        async with openai_client(engine) as client:
            first = await client.responses.create(model="fake", input="1", instructions="Count.")
            second = await client.responses.create(
                model="fake", input="2", previous_response_id=first.id, tools=[ADD], stream=True
            )
            (done,) = [event.response async for event in second if event.type == "response.completed"]
            call: Any = done.output[0]
            output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
            third = await client.responses.create(model="fake", input=output, previous_response_id=done.id)
            roles = [message["role"] for message in engine.requests[2].messages or ()]
            assert roles == ["user", "assistant", "user", "assistant", "tool"], "without the first's instructions"
            assert (await client.responses.retrieve(third.id)).output_text == third.output_text == "three"
            await client.responses.delete(third.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(third.id)
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="fake", input="4", previous_response_id=third.id)
            assert caught.value.param == "previous_response_id"
            unstored = await client.responses.create(model="fake", input="5", store=False)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(unstored.id)
            count = await client.responses.input_tokens.count(model="fake", input="5")
            assert unstored.usage is not None and count.input_tokens == unstored.usage.input_tokens


async def test_what_is_stored_is_bounded() -> None:
    from aengine.server.openai.responses.store import ResponseStore

    async with FakeAsyncLLM("yes") as engine:
        app = create_app(engine, max_stored_responses=2)
        async with openai_client(engine) as plain:
            http_client: Any = openai.DefaultAsyncHttpxClient(transport=streaming_transport(app, library_of(plain)))
            client = plain.with_options(http_client=http_client)
            answers = [await client.responses.create(model="fake", input="x") for _ in range(3)]
            assert (await client.responses.retrieve(answers[1].id)).id == answers[1].id
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(answers[0].id)
            await http_client.aclose()
    store = ResponseStore(100, max_bytes=5000)
    for i in range(20):
        store.put(str(i), b"x", [{"id": f"msg_{i}"}], None, [{"role": "user", "content": "x" * 1000}], [])
    assert len(store._responses) == len(store._places) == 4 and store.num_bytes <= 5000
    for response_id in list(store._responses):
        store.delete(response_id)
    assert store.num_bytes == 0 and not store._places


@pytest.mark.timeout(20)
def test_many_items_of_reasoning_are_one_text_at_once() -> None:
    """Joined one by one, 10 MB in pieces of 1 KB would be copied 10,000 times."""
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 1000}]}
    (answer,) = messages_of([item] * 10_000, [])
    assert len(answer["reasoning_content"]) == 10_000_000


async def test_items_of_stored_answers_are_referred_to() -> None:
    """As the AI SDK does: of what the server stores it sends the ids alone."""
    script = [Reply("I add.", reasoning="hm", tool_calls=CALLS[:1]), "It is 3.", "no"]
    async with FakeAsyncLLM(script, reasoning=True) as engine, openai_client(engine, max_retries=0) as client:
        ask: dict[str, Any] = {"model": "fake", "tools": [ADD]}
        question = {"role": "user", "content": "sum"}
        first = await client.responses.create(input=[question], **ask)
        references = [{"type": "item_reference", "id": item.id} for item in first.output[:2]] + [
            {"id": first.output[2].id}
        ]
        result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "3"}  # type: ignore[union-attr]
        second = await client.responses.create(input=[question, *references, result], **ask)
        assert second.output_text == "It is 3."
        answer = (engine.requests[1].messages or ())[1]
        assert (answer["content"], answer["reasoning_content"].strip()) == ("I add.", "hm")
        assert [call["function"]["name"] for call in answer["tool_calls"]] == ["add"]
        shown = await client.responses.input_items.list(second.id, order="asc")
        assert [item.type for item in shown.data] == [
            *("message", "reasoning", "message", "function_call", "function_call_output")
        ]
        wrong = {
            "input[1].id": [question, {"type": "item_reference", "id": "msg_x"}],
            "input[2].id": [question, references[0], references[0]],
            "input[0].id": [{"type": "item_reference"}],
        }
        for param, items in wrong.items():
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(input=items, **ask)
            assert caught.value.param == param
        unstored = await client.responses.create(input="x", store=False, **ask)
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(input=[{"type": "item_reference", "id": unstored.output[0].id}], **ask)


def library_of(client: openai.AsyncOpenAI) -> str:
    roots = [kind.__module__.partition(".")[0] for kind in openai.DefaultAsyncHttpxClient.__mro__]
    return next(root for root in roots if root.startswith("httpx"))


async def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    script = ["a" * 50, "a" * 50, Reply(tool_calls=CALLS), Reply(tool_calls=CALLS)]
    async with FakeAsyncLLM(script) as engine, openai_client(engine) as client:
        whole = await client.responses.create(model="fake", input="x", max_output_tokens=20)
        assert whole.status == "incomplete" and whole.incomplete_details is not None
        assert whole.incomplete_details.reason == "max_output_tokens" and whole.output_text == "a" * 20
        stream = await client.responses.create(model="fake", input="x", max_output_tokens=20, stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.incomplete" and last.response.output_text == "a" * 20
        for max_output_tokens in (30, 70):  # behind the name, and within the second call
            cut = await client.responses.create(
                model="fake", input="x", max_output_tokens=max_output_tokens, tools=[ADD]
            )
            assert (cut.status, cut.output[-1].type) == ("incomplete", "function_call")
            assert cut.output[-1].status == "incomplete"  # type: ignore[union-attr]


async def test_an_error_in_mid_stream_is_an_event() -> None:
    async with FakeAsyncLLM(Reply("Hello", error=WorkerDiedError("gone"))) as engine:
        async with openai_client(engine, max_retries=0) as client:
            events = [event async for event in await client.responses.create(model="fake", input="x", stream=True)]
            last = events[-1]
            assert last.type == "response.failed" and last.response.error is not None
            assert last.response.error.code == "server_error" and "worker process" in last.response.error.message
            assert last.response.output_text == "Hello"
            with pytest.raises(openai.APIStatusError):
                await client.responses.create(model="fake", input="x")


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_ends_the_request(stream: bool) -> None:
    async with FakeAsyncLLM("a" * 1000, token_delay=0.01) as engine, openai_client(engine) as client:
        call = client.responses.create(model="fake", input="x", stream=stream)  # type: ignore[call-overload]
        await leaves(engine, call, stream)


def agent(request: FakeRequest) -> Any:
    messages = request.messages or ()
    if messages[-1]["role"] == "tool":
        return Report(city=messages[-1]["content"], sunny=True)
    return Reply(tool_calls=[("where", {})])


async def test_an_agent_of_openais_sdk() -> None:
    agents = pytest.importorskip("agents")
    untraced = agents.RunConfig(tracing_disabled=True)

    @agents.function_tool
    def where() -> str:
        """Where am I?"""
        return "Paris"

    async with FakeAsyncLLM(agent) as engine, openai_client(engine) as client:
        model = agents.OpenAIResponsesModel("fake", client)
        asked = agents.Agent("weather", instructions="Help.", model=model, tools=[where], output_type=Report)
        assert (await agents.Runner.run(asked, "weather?", run_config=untraced)).final_output == Report(
            city="Paris", sunny=True
        )
        run = agents.Runner.run_streamed(asked, "weather?", run_config=untraced)
        names = [event.name async for event in run.stream_events() if event.type == "run_item_stream_event"]
        assert run.final_output == Report(city="Paris", sunny=True)
        assert names == ["tool_called", "tool_output", "message_output_created"]


def test_items_become_messages_of_the_assistant() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    def said(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}]}

    call = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1", "output": "3"}
    sealed = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "..."}
    user = {"role": "user", "content": "x"}
    told = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    cases: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
        (
            [thought("a"), thought("b"), said("c"), call, output, sealed, said("d")],
            [
                {"role": "assistant", "content": "c", "reasoning_content": "ab", "tool_calls": [told]},
                {"role": "tool", "tool_call_id": "1", "content": "3"},
                {"role": "assistant", "content": "d"},
            ],
        ),
        ([thought("a"), user], [{"role": "assistant", "content": "", "reasoning_content": "a"}, user]),
        ([said("a"), said("b")], [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]),
        (
            [call, call | {"call_id": "2"}, said("a"), thought("b")],
            [
                {"role": "assistant", "content": None, "tool_calls": [told, told | {"id": "2"}]},
                {"role": "assistant", "content": "a"},
                {"role": "assistant", "content": "", "reasoning_content": "b"},
            ],
        ),
    ]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    cases.append(([{"role": "user", "content": parts}], [{"role": "user", "content": "a\nb"}]))
    for items, messages in cases:
        assert messages_of(items, ()) == messages


async def test_the_input_of_a_response_is_shown() -> None:
    async with FakeAsyncLLM(["one", Reply(tool_calls=CALLS[:1]), "two"]) as engine:
        async with openai_client(engine) as client:
            first = await client.responses.create(model="fake", input="1")
            listed = await client.responses.input_items.list(first.id)
            assert [(item.type, item.role, item.content[0].text) for item in listed.data] == [("message", "user", "1")]  # type: ignore[union-attr]
            second = await client.responses.create(
                model="fake", input="2", tools=[ADD], tool_choice="required", previous_response_id=first.id
            )
            call = second.output[0]
            assert call.type == "function_call"
            output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
            third = await client.responses.create(model="fake", input=[output], previous_response_id=second.id)
            kinds = ["message", "message", "message", "function_call", "function_call_output"]
            items = [item async for item in client.responses.input_items.list(third.id, order="asc", limit=2)]
            assert [item.type for item in items] == kinds, "over three pages"
            assert len({item.id for item in items}) == 5
            newest = await client.responses.input_items.list(third.id)
            assert [item.id for item in newest.data] == [item.id for item in items[::-1]] and not newest.has_more
            for wrong in ({"limit": 0}, {"limit": 101}, {"after": "nobody"}, {"order": "up"}):
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.responses.input_items.list(third.id, **wrong)  # type: ignore[arg-type]
                assert caught.value.param == next(iter(wrong))
            with pytest.raises(openai.NotFoundError):
                await client.responses.input_items.list("resp_none")
            with pytest.raises(openai.BadRequestError, match="background") as refused:
                await client.responses.cancel(third.id)
            assert refused.value.code == "background_not_supported"
            with pytest.raises(openai.NotFoundError):
                await client.responses.cancel("resp_none")


def test_the_store_takes_the_memory_that_it_counts() -> None:
    """Of many small values, which as Python's objects take many times what they take as JSON."""
    store = ResponseStore(max_responses=1000, max_bytes=3 << 20)
    tracemalloc.start()
    try:
        begun = tracemalloc.get_traced_memory()[0]
        before = None
        for i in range(60):
            values = [{"n": j, "p": [j / 3, {"k": str(j)}]} for j in range(500)]
            output = [{"type": "message", "id": f"i{i}", "content": values}]
            response_json = dumps({"id": f"r{i}", "output": output}).encode()
            store.put(f"r{i}", response_json, output, before, [{"role": "user", "content": "x" * i}], output)
            before = store.get(f"r{i}") if i % 7 else None
        del output, values, before, response_json
        taken = tracemalloc.get_traced_memory()[0] - begun
    finally:
        tracemalloc.stop()
    assert 0 < store.num_bytes <= 3 << 20 and taken < 1.2 * (3 << 20)


def test_what_is_stored_comes_back() -> None:
    store = ResponseStore(max_responses=10)
    first = [{"type": "message", "id": "o1", "text": "\ud800 ä"}]
    store.put("a", b"first", first, None, [{"role": "user", "content": "1"}], [{"id": "i1"}])
    store.put("b", b"second", [], store.get("a"), [{"role": "user", "content": "2"}], [{"id": "i2"}])
    found = store.get("b")
    assert store.get("a").response_json == b"first" and store.get("a").output == first
    assert [message["content"] for message in found.messages] == ["1", "2"]
    assert found.items == [{"id": "i1"}, *first, {"id": "i2"}]
    store.delete("a")
    store.delete("b")
    assert store.num_bytes == 0


async def test_log_probabilities_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a stream has them five times, and a stored response is shown, gone on with and referred to."""
    sizes = []

    def noted_dumps(value: Any) -> str:
        written = dumps(value)
        sizes.append(len(written))
        return written

    def noted_loads(text: bytes) -> Any:
        sizes.append(len(text))
        return json.loads(text)

    room = "aengine.server.openai.responses"
    for name in ("endpoint", "items", "store"):
        monkeypatch.setattr(f"{room}.{name}.dumps", noted_dumps, raising=False)
    monkeypatch.setattr(f"{room}.store.json", SimpleNamespace(loads=noted_loads))
    said = {"role": "user", "content": "x"}
    asked = {"input": "x", "top_logprobs": 20, "include": ["message.output_text.logprobs"]}
    async with FakeAsyncLLM("a\ud7ff \U0001f600" * 50) as engine:
        transport = streaming_transport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            whole = (await client.post("/v1/responses", json=asked)).json()
            lines = (await client.post("/v1/responses", json=asked | {"stream": True})).text.splitlines()
            stored = (await client.get(f"/v1/responses/{whole['id']}")).json()
            followed = await client.post("/v1/responses", json={"input": "y", "previous_response_id": whole["id"]})
            reference = {"type": "item_reference", "id": whole["output"][0]["id"]}
            referred = await client.post("/v1/responses", json={"input": [said, reference, said]})
            assert followed.status_code == referred.status_code == 200
            shown = (await client.get(f"/v1/responses/{followed.json()['id']}/input_items")).json()
            chat = {"messages": [said], "logprobs": True, "top_logprobs": 20}
            of_chat = (await client.post("/v1/chat/completions", json=chat)).json()
    entries = of_chat["choices"][0]["logprobs"]["content"]
    assert sum(sizes) < len(dumps(entries))

    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    text_done, part_done, item_done, completed = events[-4:]
    parts = [part_done["part"], item_done["item"]["content"][0], completed["response"]["output"][0]["content"][0]]
    parts += [whole["output"][0]["content"][0]]
    assert stored == whole and [event["sequence_number"] for event in events] == list(range(len(events)))
    for logprobs in (sum(deltas, []), text_done["logprobs"], *(part["logprobs"] for part in parts)):
        assert logprobs == entries[: len(logprobs)] and len(logprobs) >= len(entries) - 1  # the end may be no text
    assert [item["content"][0].get("logprobs") for item in shown["data"]] == [None, [], None]
