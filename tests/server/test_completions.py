"""Completions, tokens, health and what is not there, by OpenAI's own client over an engine of the same process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from conftest_api import leaves

from aengine import AsyncLLM, Logprob
from aengine.server import create_app
from aengine.server.in_process import openai_client, streaming_transport
from aengine.server.openai import completions
from aengine.testing import FakeAsyncLLM, FakeRequest, Reply


def http_client(engine: AsyncLLM, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=streaming_transport(create_app(engine, **options)), base_url="http://engine")


def upper(request: FakeRequest) -> str:
    return f"{request.text.upper()}{request.choice}"


PROMPTS: list[tuple[Any, list[str]]] = [
    ("ab", ["AB0", "AB1"]),
    ([97, 98], ["AB0", "AB1"]),
    (["ab", "cd"], ["AB0", "AB1", "CD0", "CD1"]),
    ([[97, 98], [99]], ["AB0", "AB1", "C0", "C1"]),
]


@pytest.mark.parametrize(("prompt", "texts"), PROMPTS, ids=lambda value: str(value))
@pytest.mark.parametrize("own_thread", [False, True])
async def test_prompts_of_each_form(prompt: Any, texts: list[str], own_thread: bool) -> None:
    async with FakeAsyncLLM(upper, own_thread=own_thread) as engine, openai_client(engine) as client:
        answer = await client.completions.create(model="fake", prompt=prompt, n=2)
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        num_prompt_tokens = len("".join(texts).translate(dict.fromkeys(b"01"))) // 2
        assert answer.usage is not None and answer.usage.prompt_tokens == num_prompt_tokens
        assert answer.usage.completion_tokens == len("".join(texts)) + len(texts)
        streamed, usage, reasons = [""] * len(texts), None, {}
        async for chunk in await client.completions.create(
            model="fake", prompt=prompt, n=2, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage
            for choice in chunk.choices:
                assert usage is None and choice.index not in reasons
                streamed[choice.index] += choice.text
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert streamed == texts and usage == answer.usage
        assert reasons == dict.fromkeys(range(len(texts)), "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_repeats_the_prompt(stream: bool) -> None:
    async with FakeAsyncLLM(["!", "?"]) as engine, openai_client(engine) as client:
        answer: Any = await client.completions.create(model="fake", prompt=["ab", "c"], echo=True, stream=stream)  # type: ignore[call-overload]
        texts = {0: "", 1: ""}
        for chunk in [chunk async for chunk in answer] if stream else [answer]:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == {0: "ab!", 1: "c?"}


async def test_log_probabilities_of_prompts() -> None:
    """As lm-eval asks for them, and as vLLM's clients."""
    async with FakeAsyncLLM("!") as engine, openai_client(engine) as client:
        for prompt in ("na\u00efve", list("na\u00efve".encode())):
            ask: dict[str, Any] = {"model": "fake", "prompt": prompt, "echo": True, "logprobs": 1}
            for num_tokens in (0, 2):
                answer = await client.completions.create(**ask, max_tokens=num_tokens)
                (choice,) = answer.choices
                logprobs: Any = choice.logprobs
                assert choice.text == "na\u00efve" + "!" * (num_tokens > 0) and answer.usage is not None
                assert answer.usage.completion_tokens == num_tokens
                assert logprobs.tokens[:4] == ["n", "a", "bytes:\\xc3", "bytes:\\xaf"] and logprobs.tokens[4:6] == [
                    "v",
                    "e",
                ]
                assert logprobs.token_logprobs == [None] + [0.0] * (5 + num_tokens)
                assert logprobs.text_offset[:6] == [0, 1, 2, 2, 3, 4]
                assert logprobs.top_logprobs[:2] == [None, {"a": 0.0}]
                assert choice.finish_reason == ("stop" if num_tokens else "length")
            answer = await client.completions.create(**ask, n=2, max_tokens=1, extra_body={"prompt_logprobs": 2})
            for choice in answer.choices:
                (first, second, *others), shown = choice.model_extra["prompt_logprobs"], choice.logprobs
                assert first is None and len(others) == 4 and shown is not None and len(shown.tokens) == 7
                assert list(second) == ["97", "0"] and shown.top_logprobs[1] == {"a": 0.0}
                assert second["97"] == {"logprob": 0.0, "rank": 1, "decoded_token": "a"}
        chat = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}], extra_body={"prompt_logprobs": 0}
        )
        assert chat.usage is not None and chat.model_extra is not None
        assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens
        answer = await client.completions.create(model="fake", prompt="ab", echo=True, max_tokens=0)
        assert answer.choices[0].text == "ab" and answer.choices[0].logprobs is None and answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 0)
        with pytest.raises(openai.BadRequestError, match="or 0 with echo, n=1"):
            await client.completions.create(model="fake", prompt="ab", logprobs=1, max_tokens=0)
        for none in (False, None):
            answer = await client.completions.create(model="fake", prompt="x", extra_body={"prompt_logprobs": none})
            assert not answer.choices[0].model_extra or "prompt_logprobs" not in answer.choices[0].model_extra


async def test_the_prompts_of_one_request_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.server.openai.completions.MAX_PROMPT_LOGPROBS", 11)
    async with FakeAsyncLLM("!") as engine, openai_client(engine) as client:
        ask: dict[str, Any] = {"model": "fake", "max_tokens": 0, "extra_body": {"prompt_logprobs": 1}}
        assert len((await client.completions.create(prompt=["ab", "cd"], **ask)).choices) == 2
        with pytest.raises(openai.BadRequestError, match="more than 11"):
            await client.completions.create(prompt=["ab", "cd", "ef"], **ask)


async def test_logprobs_say_where_each_token_is() -> None:
    text = "na\u00efve 👋"
    async with FakeAsyncLLM(text) as engine, openai_client(engine) as client:
        ask: dict[str, Any] = {"model": "fake", "prompt": "x", "logprobs": 2, "max_tokens": 50}
        whole = (await client.completions.create(**ask)).choices[0].logprobs
        assert whole is not None and whole.text_offset and whole.top_logprobs and whole.tokens
        assert len(whole.tokens) == len(text.encode()) + 1
        assert whole.text_offset[:2] == [0, 1] and whole.text_offset[-1] == len(text)
        assert all(token in likeliest for token, likeliest in zip(whole.tokens, whole.top_logprobs))
        parts: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        async for chunk in await client.completions.create(**ask, stream=True):
            for name, values in parts.items():
                values += getattr(chunk.choices[0].logprobs, name)
        assert parts == whole.model_dump()


async def test_tokens_that_are_no_text_by_themselves_keep_their_entries() -> None:
    """Bytes of one character, which all are the same replacement character when each is decoded by itself."""
    async with FakeAsyncLLM("👋") as engine, openai_client(engine) as client:
        answer = await client.completions.create(model="fake", prompt="x", logprobs=5)
        logprobs: Any = answer.choices[0].logprobs
        assert logprobs.tokens[:4] == [f"bytes:\\x{byte:02x}" for byte in "👋".encode()]
        for token, logprob, likeliest in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
            assert len(likeliest) in (5, 6) and likeliest[token] == logprob


@pytest.mark.parametrize("chosen", [1, 2, 3, 4])
def test_tokens_of_one_text_have_keys_of_their_own(chosen: int) -> None:
    class Tokenizer:
        special_tokens: dict[str, int] = {}

        def token_bytes(self, token_id: int) -> bytes:
            return {1: b"a", 2: b"a", 3: b"\xf0", 4: b"b"}[token_id]

    others = [Logprob(1, -0.5), Logprob(2, -1.0), Logprob(3, -2.0)]
    logprob = {**dict(others), 4: -5.0}[chosen]
    tokenizer: Any = Tokenizer()
    texts = completions._TokenTexts(tokenizer, skips_special=False)
    written = json.loads(completions._Logprobs(texts, 0).take_written([(chosen, logprob, others)]))
    (likeliest,), (token,) = written["top_logprobs"], written["tokens"]
    assert len(likeliest) == len({1, 2, 3, chosen})
    assert likeliest[token] == written["token_logprobs"][0]
    assert ("token_id:1" if chosen == 2 else "token_id:2") in likeliest and "bytes:\\xf0" in likeliest


async def test_what_stopped_a_choice_is_told() -> None:
    async with FakeAsyncLLM("one two three") as engine, openai_client(engine) as client:
        ask: dict[str, Any] = {"model": "fake", "prompt": "x", "stop": [" three", "two"]}
        whole: Any = (await client.completions.create(**ask)).choices[0]
        assert (whole.text, whole.finish_reason, whole.stop_reason) == ("one ", "stop", "two")
        chunks = [chunk.choices[0] async for chunk in await client.completions.create(**ask, stream=True)]
        assert "".join(chunk.text for chunk in chunks) == "one " and chunks[-1].stop_reason == "two"  # type: ignore[attr-defined]


async def test_sixteen_tokens_unless_asked_for_more() -> None:
    async with FakeAsyncLLM("a" * 50) as engine, openai_client(engine) as client:
        choice = (await client.completions.create(model="fake", prompt="x")).choices[0]
        assert (choice.text, choice.finish_reason) == ("a" * 16, "length")


async def test_usage_so_far_with_each_chunk() -> None:
    async with FakeAsyncLLM("abc", token_delay=0.001) as engine, openai_client(engine) as client:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        ask: dict[str, Any] = {"model": "fake", "stream": True, "stream_options": options}
        chunks = [chunk async for chunk in await client.completions.create(prompt="x", **ask)]
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
        assert len(counts) == len(chunks) and counts == sorted(counts) and counts[0] < counts[-1] == 4
        messages = [{"role": "user", "content": "x"}]
        chunks = [chunk async for chunk in await client.chat.completions.create(messages=messages, **ask)]
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
        assert len(counts) == len(chunks) and counts == sorted(counts) and counts[0] < counts[-1] == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]], ids=str)
async def test_who_leaves_ends_all_its_prompts(stream: bool, prompt: Any) -> None:
    async with FakeAsyncLLM("a" * 1000, token_delay=0.01) as engine, openai_client(engine) as client:
        ask = client.completions.create(model="fake", prompt=prompt, stream=stream, max_tokens=1000)  # type: ignore[call-overload]
        await leaves(engine, ask, stream, len(prompt))


async def test_one_prompt_that_fails_ends_the_others() -> None:
    script = ["a" * 1000, Reply("b", error=openai_error())]
    async with FakeAsyncLLM(script * 2, token_delay=0.001) as engine, openai_client(engine, max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model="fake", prompt=["a", "b"], max_tokens=1000)
        assert caught.value.status_code == 503
        with pytest.raises(openai.APIError, match="worker process"):
            async for _ in await client.completions.create(
                model="fake", prompt=["a", "b"], max_tokens=1000, stream=True
            ):
                pass
        while engine.statistics().num_running:
            await asyncio.sleep(0.001)


def openai_error() -> Any:
    from aengine import WorkerDiedError

    return WorkerDiedError("gone")


async def test_two_clients_may_give_the_same_id() -> None:
    async with FakeAsyncLLM("a" * 20, token_delay=0.001) as engine, openai_client(engine) as client:
        ask: dict[str, Any] = {"model": "fake", "prompt": "x", "extra_headers": {"X-Request-Id": "mine"}}
        answers = await asyncio.gather(*(client.completions.create(**ask) for _ in range(3)))
        assert {answer.id for answer in answers} == {"cmpl-mine"}
        assert {answer._request_id for answer in answers} == {"mine"}


@pytest.mark.parametrize("own_thread", [False, True])
async def test_tokens_and_back(own_thread: bool) -> None:
    async with FakeAsyncLLM("yes", own_thread=own_thread) as engine, http_client(engine) as client:
        told = (await client.post("/tokenize", json={"prompt": "aé", "return_token_strs": True})).json()
        assert told == {"count": 3, "max_model_len": 32_768, "tokens": [97, 195, 169], "token_strs": ["a", "�", "�"]}
        back = (await client.post("/detokenize", json={"model": "fake", "tokens": told["tokens"]})).json()
        assert back == {"prompt": "aé"}
        messages = [{"role": "user", "content": "hello"}]
        chat = (await client.post("/tokenize", json={"messages": messages})).json()
        assert chat["count"] == (await engine.chat(messages)).usage.prompt_tokens
        assert chat["token_strs"] is None
        about = (await client.get("/tokenizer_info")).json()
        assert about == {"bos_token": None, "eos_token": "<|im_end|>", "vocab_size": engine.tokenizer.vocab_size}
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": messages}),
            ("/tokenize", {"prompt": 1}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [10**40]}),
            ("/detokenize", {"tokens": "a"}),
        ):
            answer = await client.post(path, json=body)
            assert answer.status_code == 400 and answer.json()["error"]["message"], body


@pytest.mark.parametrize("own_thread", [False, True])
async def test_health_tells_whether_the_engine_can_answer(own_thread: bool) -> None:
    engine = FakeAsyncLLM("yes", own_thread=own_thread)
    async with http_client(engine, api_keys="secret") as client:
        assert (await client.get("/version")).status_code == 401
        assert (await client.get("/health")).json() == {"status": "unavailable", "reason": "the engine is new"}
        async with engine:
            both = await asyncio.gather(client.get("/health"), client.get("/health"))
            assert [(answer.status_code, answer.json()) for answer in both] == [(200, {"status": "ok"})] * 2
            await engine.drain()
            assert (await client.get("/health")).json()["reason"] == "the engine is draining"
        assert (await client.get("/health")).status_code == 503


async def test_what_is_not_there_says_so() -> None:
    async with FakeAsyncLLM("yes") as engine, openai_client(engine, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            await client.post("/nowhere", cast_to=object)
