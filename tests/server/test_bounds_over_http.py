"""Large bodies and answers: refused before any work on them, or worked on in threads."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from aengine import AsyncLLM, ContextLengthError, EngineOverloadedError, InvalidRequestError, SamplingParams
from aengine.engine.chat.spellings import Spellings
from aengine.engine.preparation import Preparation
from aengine.engine.threads.lanes import Lanes
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.server import create_app, http
from aengine.server.anthropic import conversation
from aengine.server.anthropic.requests import CountBody
from aengine.server.http import ClientLeftError, HTTPError, JSONAnswer, json_in_pieces, read_json
from aengine.server.in_process import streaming_transport
from aengine.server.openai import completions
from aengine.server.openai.requests import ChatBody, _names_of
from aengine.server.openai.responses import messages, store
from aengine.server.service import validated
from aengine.testing import FakeAsyncLLM, Reply


def http_client(engine: AsyncLLM, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=streaming_transport(create_app(engine, **options)), base_url="http://engine")


TEXT = "x" * 400_000
MANY = [{"role": "user", "content": "x"}] * 5000
COUNTS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"prompt": TEXT}),
    ("/tokenize", {"messages": MANY}),
    ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}),
    ("/detokenize", {"tokens": [97] * 5000}),
    ("/v1/responses/input_tokens", {"input": TEXT}),
    ("/v1/responses/input_tokens", {"input": MANY}),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": [{"role": "user", "content": TEXT}]}),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": MANY}),
]


@pytest.mark.parametrize(("path", "body"), COUNTS, ids=lambda value: str(value)[:40])
async def test_what_is_larger_than_any_prompt_is_not_encoded(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeAsyncLLM("a", max_model_len=2048) as engine, http_client(engine) as client:
        for name in ("encode", "decode", "apply_chat_template"):
            if name != "apply_chat_template" or "count_tokens" not in path:
                monkeypatch.setattr(Tokenizer, name, lambda *args, **options: pytest.fail("it was encoded"))
        answer = await client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert "max_model_len" in answer.text


async def test_what_is_larger_than_any_prompt_needs_no_place_in_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lanes, "num_queued", lambda *_, is_long: 1000)
    async with FakeAsyncLLM("a", max_model_len=2048) as engine:
        for prompt in (TEXT, MANY):
            with pytest.raises(ContextLengthError):
                await engine.async_tokenizer.count(prompt)  # type: ignore[arg-type]
        with pytest.raises(EngineOverloadedError):
            await engine.async_tokenizer.count("x")


@pytest.mark.parametrize("path", sorted({path for path, _ in COUNTS}))
async def test_who_leaves_takes_back_a_call_of_the_tokenizer(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    async def wait(*_: Any) -> None:
        calls.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            calls.append("cancelled")

    body = {"prompt": "x", "tokens": [97], "input": "x", "messages": [{"role": "user", "content": "x"}]}
    fields = {"/tokenize": ["prompt"], "/detokenize": ["tokens"], "/v1/responses/input_tokens": ["input"]}
    sent = json.dumps({name: body[name] for name in fields.get(path, ["messages"])} | {"model": "fake"}).encode()
    messages: list[Message] = [{"type": "http.disconnect"}, {"type": "http.request", "body": sent}]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "http_version": "1.1"}

    async def send(message: Message) -> None:
        pass

    async def receive() -> Message:
        while len(messages) == 1 and not calls:
            await asyncio.sleep(0)
        return messages.pop() if messages else {"type": "http.disconnect"}

    monkeypatch.setattr(Preparation, "ask_tokenizer", wait)
    async with FakeAsyncLLM("a") as engine, asyncio.timeout(60):
        headers = [(b"content-type", b"application/json"), (b"host", b"engine")]
        await create_app(engine)(scope | {"headers": headers}, receive, send)
    assert calls == ["begun", "cancelled"]


async def test_calls_of_the_tokenizer_wait_in_a_bounded_line(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, gate, encoded = Tokenizer.encode, threading.Event(), []

    def slow(self: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        encoded.append(len(text))
        assert len(text) < 1000 or gate.wait(60)
        return encode(self, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    async with FakeAsyncLLM("a") as engine, http_client(engine) as client:
        count = engine.async_tokenizer.count
        waiting = [asyncio.create_task(count("x" * 60_000))]
        while not encoded:
            await asyncio.sleep(0.001)
        waiting += [asyncio.create_task(count("x" * 60_000)) for _ in range(64)]
        await asyncio.sleep(0)
        refused = await client.post("/tokenize", json={"prompt": "x" * 60_000})
        assert refused.status_code == 429 and "retry-after" in refused.headers
        assert (await client.post("/tokenize", json={"prompt": "short"})).json()["count"] == 5
        assert (await engine.chat([{"role": "user", "content": "short"}])).text == "a"
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        gate.set()
        assert await count("x" * 60_000) == 60_000
    assert encoded.count(60_000) == 2  # what no thread had begun was taken back


async def test_large_bodies_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    check = completions.CompletionBody.model_validate

    def noted(value: Any) -> Any:
        threads.append(threading.current_thread().name)
        return check(value)

    monkeypatch.setattr(completions.CompletionBody, "model_validate", noted)
    async with FakeAsyncLLM("a", max_model_len=8192) as engine, http_client(engine) as client:
        for ids in ([97], [97] * 7000, [97] * 150_000):
            answer = await client.post("/v1/completions", json={"prompt": ids})
            assert answer.status_code == (200 if len(ids) < 8192 else 400), answer.text
        for wrong in ({"prompt": [97] * 7000 + ["a"]}, {"prompt": [1.5] * 7000}):
            answer = await client.post("/v1/completions", json=wrong)
            assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("prompt")
        cut = await client.post("/v1/completions", content=json.dumps({"prompt": [1] * 7000})[:-1], headers=JSON)
        assert cut.status_code == 400 and cut.json()["error"]["code"] == "invalid_json"
        odd = await client.post(
            "/v1/completions", content=b'{"prompt": [%s]}' % b",".join([b"NaN"] * 7000), headers=JSON
        )
        assert odd.status_code == 400 and odd.json()["error"]["code"] == "invalid_json"
        large = await client.post("/tokenize", content=b"[" * 1_100_000, headers=JSON)
        assert large.status_code == 413
    assert threads[:3] == ["MainThread", "aengine-http", "aengine-http-long"]
    assert set(threads[3:]) == {"aengine-http"}


JSON = {"content-type": "application/json"}


async def test_a_body_of_few_but_long_numbers_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, threads = http._loaded, []

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return loads(*args)

    monkeypatch.setattr(http, "_loaded", noted)
    async with FakeAsyncLLM("a") as engine, http_client(engine) as client:
        body = {"prompt": "x", "metadata": [10**4000] * 300}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert threads[0] is not threading.main_thread()


NAMED = {"model": "fake"}
SAID = {"role": "user", "content": "x"}
TEXTS = [{"type": "text", "text": "x"}] * 9000
USES = [{"type": "tool_use", "id": f"call_{i}", "name": "f", "input": {}} for i in range(17_000)]
ITEMS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/messages", NAMED | {"messages": [{"role": "user", "content": TEXTS}] * 2, "max_tokens": 1}, "messages"),
    ("/v1/messages", NAMED | {"messages": [{"role": "assistant", "content": USES}], "max_tokens": 1}, "messages"),
    ("/v1/messages/count_tokens", NAMED | {"messages": [SAID] * 17_000}, "messages"),
    ("/v1/responses", {"input": [{"role": "system", "content": "x"}] * 17_000}, "input"),
    ("/v1/responses/input_tokens", {"input": [{"role": "user", "content": TEXTS}] * 2}, "input"),
    ("/v1/responses", {"input": [{"type": "reasoning", "summary": TEXTS}] * 2}, "input"),
]


@pytest.mark.parametrize(("path", "body", "field"), ITEMS, ids=lambda value: str(value)[:40])
async def test_more_items_than_a_chat_may_have_are_not_read(
    path: str, body: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one they would take seconds of the loop."""
    for module, name in ((conversation, "_said"), (conversation, "_assistant"), (messages, "_Reader")):
        monkeypatch.setattr(module, name, lambda *args: pytest.fail("they were read"))
    async with FakeAsyncLLM("a", max_model_len=1 << 20) as engine, http_client(engine) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 400 and field in answer.text and "there may be 16384" in answer.text


async def test_what_a_response_repeats_is_small() -> None:
    """A field without effect would fill the memory of stored responses, and be written with each."""
    async with FakeAsyncLLM("a") as engine, http_client(engine) as client:
        for field, value in {
            "metadata": {f"key {i}": "x" for i in range(17)},
            "metadata ": {"key": "x" * 1025},
            "user": "x" * 1025,
        }.items():
            answer = await client.post("/v1/responses", json={"input": "x", field.strip(): value})
            assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(field.strip())
        right = {"metadata": {f"key {i}": "x" * 512 for i in range(16)}, "user": "somebody"}
        answer = (await client.post("/v1/responses", json={"input": "x"} | right)).json()
        assert {name: answer[name] for name in right} == right


SEALED = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x" * 50_000, "status": None}
PART = {"type": "input_text", "text": "a", "extra": ["x"] * 1000}
CALLING = {
    "type": "function_call",
    "call_id": "c",
    "name": "f",
    "arguments": "{}",
    "id": "x" * 5000,
    "extra": "x" * 999,
}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [PART], "status": "x" * 999, "name": "x" * 999}


async def test_of_what_a_response_is_given_no_more_is_stored_than_was_read() -> None:
    """Else fields that the context does not bound would fill the memory, and be written on the loop."""
    namespace = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}], "extra": "x" * 999}
    search = {"type": "web_search", "filters": ["x"] * 1000}
    tools = [{"type": "function", "name": "f"}, namespace, search]
    async with FakeAsyncLLM("a") as engine, http_client(engine) as client:
        given = [SEALED, {"role": "user", "content": [PART]}, CALLING, OUTPUT, {"role": "user", "content": "b"}]
        answer = (await client.post("/v1/responses", json={"input": given, "tools": tools})).json()
        assert [tool.get("name") for tool in answer["tools"]] == ["f", "n"] and "xxx" not in str(answer)
        listed = (await client.get(f"/v1/responses/{answer['id']}/input_items?order=asc")).json()["data"]
        assert "xxx" not in str(listed)
        text = {"type": "input_text", "text": "a"}
        sealed, user, call, output, last = listed
        assert sealed == {"type": "reasoning", "id": "rs_1", "summary": []}
        assert user["content"] == output["output"] == [text] and last["content"] == [text | {"text": "b"}]
        assert (call["name"], call["arguments"], output["call_id"], output["status"]) == ("f", "{}", "c", "completed")
        inner = [{"type": "function", "name": "g"}] * 1024
        many = {"input": "x", "tools": [tools[0], namespace | {"tools": inner}]}
        refused = await client.post("/v1/responses", json=many)
        assert refused.status_code == 400 and "there may be 1024 functions" in refused.text


async def test_items_of_a_conversation_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, threads = store._joined, []

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return loads(*args)

    monkeypatch.setattr(store, "_joined", noted)
    async with FakeAsyncLLM("a") as engine, http_client(engine) as client:
        answer = await client.post("/v1/responses", json={"input": "x"})
        items = await client.get(f"/v1/responses/{answer.json()['id']}/input_items")
        assert items.status_code == 200 and len(items.json()["data"]) == 1
    assert threads and threading.main_thread() not in threads


async def test_of_many_wrong_fields_one_is_told() -> None:
    body = {f"field {i}": None for i in range(50_000)}
    with pytest.raises(HTTPError, match="field 0 is not supported"):
        validated(ChatBody, body | {"messages": [SAID]})
    assert len(ChatBody.leave_out_nulls(body)) == 1


@pytest.mark.parametrize("chunk", [b"[1," * 10_000, b"[1," * 1_000_000])
async def test_the_rest_of_a_body_of_too_many_values_is_not_read(chunk: bytes) -> None:
    num_read = 0

    async def receive() -> Message:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": chunk, "more_body": True}

    request = Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)
    lanes = Lanes("unused")
    with pytest.raises(HTTPError, match="more than 300000 values") as caught:
        await read_json(request, 1 << 25, lanes, lambda value: value)
    assert caught.value.status == 413 and num_read == (7 if len(chunk) < 100_000 else 1)


async def test_others_have_the_loop_while_a_body_is_counted() -> None:
    num_turns, is_read = 0, False

    async def receive() -> Message:
        return {"type": "http.request", "body": b'"%s"' % (b"x" * (10 << 20))}

    async def take_turns() -> None:
        nonlocal num_turns
        while not is_read:
            num_turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(take_turns())
    read, num_values = await http.read_body(Request({"type": "http", "headers": []}, receive), 1 << 25)
    is_read = True
    await others
    assert len(read) > 10 << 20 and num_values == 0 and num_turns >= 10


NONE: list[None] = [None] * 2049
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [SAID]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": NAMED | {"messages": [SAID], "max_tokens": 1},
    "/v1/messages/count_tokens": NAMED | {"messages": [SAID]},
    "/v1/rerank": {"query": "x"},
    "/v1/score": {"text_1": "x"},
}
MANY_OF: list[tuple[str, str, Any]] = [
    ("/v1/completions", "prompt", NONE),
    ("/v1/embeddings", "input", NONE),
    ("/v1/rerank", "documents", NONE),
    ("/v1/score", "text_1", NONE),
    ("/v1/score", "text_2", NONE),
    ("/v1/chat/completions", "tools", NONE),
    ("/v1/responses", "tools", NONE),
    ("/v1/messages", "tools", NONE),
    ("/tokenize", "tools", NONE),
    *[
        (path, "chat_template_kwargs", dict.fromkeys(map(str, range(1025))))
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages/count_tokens", "/tokenize")
    ],
]


@pytest.mark.parametrize(("path", "field", "value"), MANY_OF, ids=lambda value: str(value)[:40])
async def test_too_many_are_refused_before_one_is_looked_at(path: str, field: str, value: Any) -> None:
    async with FakeAsyncLLM("a") as engine, http_client(engine) as client:
        refused = await client.post(path, json=NEEDED.get(path, {}) | {field: value})
        assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(f"{field} is wrong")
        assert "it may have at most" in refused.text, "else it would be told that None is none"


async def test_as_many_texts_as_openai_takes_are_taken() -> None:
    async with FakeAsyncLLM("a") as engine, http_client(engine) as client:
        texts = ["x"] * 2048
        assert len((await client.post("/v1/embeddings", json={"input": texts})).json()["data"]) == 2048
        assert len((await client.post("/v1/completions", json={"prompt": texts})).json()["choices"]) == 2048
        ids = {"prompt": [97] * 3000, "max_tokens": 1}
        assert len((await client.post("/v1/completions", json=ids)).json()["choices"]) == 1, "is one prompt"
        refused = await client.post("/v1/completions", json={"prompt": texts[1024:], "n": 3})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
        with pytest.raises(InvalidRequestError, match="1025 variables"):
            await engine.chat([SAID], chat_template_kwargs={f"v{i}": 1 for i in range(1025)})


async def test_a_bracket_counts_as_several_values() -> None:
    """A body of 150,000 lists is a burden for Python's collector, which halts everything."""
    async with FakeAsyncLLM("a") as engine, http_client(engine) as client:
        for num_lists, status in ((20_000, 400), (70_000, 413)):
            assert (await client.post("/tokenize", json={"prompt": [[]] * num_lists})).status_code == status


def test_the_names_of_fields_are_found_once() -> None:
    blocks = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 200}], "model": "m"}
    validated(CountBody, blocks)
    misses = _names_of.cache_info().misses
    validated(CountBody, blocks)
    assert _names_of.cache_info().misses == misses


async def test_a_body_whose_client_has_left_is_not_read() -> None:
    messages: list[Message] = [{"type": "http.request", "body": b"[%s]" % b",".join([b"1"] * 10_000)}]

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    request = Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)
    lanes, gate = Lanes("busy"), threading.Event()
    before = lanes.run(gate.wait, 60, is_long=False)
    with pytest.raises(ClientLeftError):
        await read_json(request, 1 << 25, lanes, lambda value: pytest.fail("it was read"))
    async with asyncio.timeout(60):
        while lanes.num_queued(is_long=False):  # it is taken back
            await asyncio.sleep(0.001)
    gate.set()
    assert await before
    lanes.close()


async def test_what_a_template_is_given_is_checked_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noted(*args: Any, **options: Any) -> str:
        threads.append(threading.current_thread().name)
        return json.dumps(*args, **options)

    monkeypatch.setattr("aengine.engine.chat.prompt.json", SimpleNamespace(dumps=noted))
    async with FakeAsyncLLM("a") as engine:
        hello = [{"role": "user", "content": "hi"}]
        await engine.chat(hello, chat_template_kwargs={"documents": ["x"]})
        with pytest.raises(InvalidRequestError, match=r"chat_template_kwargs\['documents'\] can't be written"):
            await engine.chat(hello, chat_template_kwargs={"documents": {1j}})
    assert len(threads) == 2 and set(threads) == {"aengine-prompt"}


async def test_a_large_logit_bias_is_not_looked_at() -> None:
    class Odd(dict[str, float]):
        def items(self) -> Any:
            raise AssertionError("it was looked at")

    bias = Odd(dict.fromkeys(map(str, range(2000)), 1.0))
    with pytest.raises(ValueError, match="at most 1024"):
        completions.CompletionBody.model_validate({"prompt": "a", "logit_bias": bias})


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {"a": [], "b": {}, "c": [[]], "d": None, "é": "é\ud800", "e": 1e300},
        {"data": [{"embedding": [0.5] * 1000, "index": i} for i in range(3)]},
        {"choices": [{"logprobs": {"content": [{"top": [{"bytes": [i]}] * 3} for i in range(200)]}}] * 2},
        [[1, [2, [3, [4, [5, [6, [7] * 100]]]]]]] * 70,
        list(range(129)),
    ],
)
def test_json_in_pieces_is_the_same(content: Any) -> None:
    assert json_in_pieces(content) == JSONAnswer(content).body


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_large_answers_are_written_in_a_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    pieces = json_in_pieces

    def noted(content: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return pieces(content)

    monkeypatch.setattr("aengine.server.service.json_in_pieces", noted)
    async with FakeAsyncLLM("word " * 8) as engine, http_client(engine) as client:
        asked: dict[str, Any] = {"max_tokens": 40, "n": 4, "stream": False}
        if path == "/v1/completions":
            asked |= {"prompt": "x", "logprobs": 20}
        else:
            asked |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
        large = (await client.post(path, json=asked)).json()
        assert len(large["choices"]) == 4 and threads == ["aengine-http"]
        few = {"n": 700, "max_tokens": 1, "logprobs": None} | (
            {} if path == "/v1/completions" else {"top_logprobs": None}
        )
        many = (await client.post(path, json=asked | few)).json()
        assert len(many["choices"]) == 700 and threads.pop() == "aengine-http"
        small = (await client.post(path, json=asked | {"n": 1, "max_tokens": 1})).json()
        assert len(small["choices"]) == 1 and threads[1:] == ["MainThread"]
        entries = large["choices"][3]["logprobs"]
        assert len(entries["tokens" if path == "/v1/completions" else "content"]) == 40


async def test_the_strings_of_many_tokens_are_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    token_bytes = Tokenizer.token_bytes

    def noted(self: Tokenizer, token_id: int) -> bytes:
        threads.append(threading.current_thread().name)
        return token_bytes(self, token_id)

    async with FakeAsyncLLM("a", max_model_len=16_384) as engine, http_client(engine) as client:
        monkeypatch.setattr(Tokenizer, "token_bytes", noted)
        answer = await client.post("/tokenize", json={"prompt": "x" * 6000, "return_token_strs": True})
        assert answer.json()["token_strs"] == ["x"] * 6000 and set(threads) == {"aengine-http"}


async def test_reasoning_is_counted_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by encoding its text again."""
    async with FakeAsyncLLM(Reply("answer", reasoning="so </it is"), reasoning=True) as engine:
        monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *args, **options: pytest.fail("it was encoded"))
        completion = await engine.chat([{"role": "user", "content": "x"}], SamplingParams(n=2))
        assert completion.usage.reasoning_tokens == 2 * len("so </it is")
        cut = await engine.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=len("<think>\nso </")))
        assert cut.message.reasoning == "so </", "held back as long as it might end the reasoning"
        assert cut.usage.reasoning_tokens == len("so </")


async def test_the_strings_of_tools_are_made_once_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its number of answers: in the thread that plans it."""
    threads: list[str] = []
    make = Spellings.__init__

    def noted(self: Spellings, *args: Any, **options: Any) -> None:
        threads.append(threading.current_thread().name)
        make(self, *args, **options)

    monkeypatch.setattr(Spellings, "__init__", noted)
    tools = [{"name": f"tool_{i}", "parameters": {}} for i in range(20)]
    reply = Reply(tool_calls=[("tool_7", {})])
    async with FakeAsyncLLM(reply) as engine:
        completion = await engine.chat([{"role": "user", "content": "x"}], SamplingParams(n=16), tools=tools)
        assert [choice.message.tool_calls[0].name for choice in completion.choices] == ["tool_7"] * 16
        assert len({choice.message.tool_calls[0].id for choice in completion.choices}) == 16
    assert len(threads) == 1 and threads[0].startswith("aengine-prompt")


async def test_streams_of_many_prompts_are_awaited_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not all of them anew for each token."""
    num_awaited = 0
    wait = asyncio.wait

    async def counted(tasks: Any, **options: Any) -> Any:
        nonlocal num_awaited
        num_awaited += len(list(tasks))
        return await wait(tasks, **options)

    async with FakeAsyncLLM("word" * 4) as engine, http_client(engine) as client:
        body = {"prompt": ["x"] * 64, "stream": True, "max_tokens": 16}
        monkeypatch.setattr(completions.asyncio, "wait", counted)
        answer = await client.post("/v1/completions", json=body)
        monkeypatch.undo()
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    texts = [""] * 64
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["word" * 4] * 64
    assert num_awaited < 64 * 5
