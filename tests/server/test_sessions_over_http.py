"""Sessions as OpenAI's and Anthropic's clients ask for them: whose they are, for how long, and what usage says."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from aengine import InvalidRequestError
from aengine.server import create_app
from aengine.server.in_process import anthropic_client, openai_client, streaming_transport
from aengine.testing import FakeAsyncLLM

LONG = "What is the capital of France? " * 8
HELLO: list[Any] = [{"role": "user", "content": LONG}]
CHAT: dict[str, Any] = {"model": "fake", "messages": HELLO}
MESSAGE: dict[str, Any] = {"model": "fake", "messages": HELLO, "max_tokens": 50}
SHORT_CONTROL = {"cache_control": {"type": "ephemeral"}}
LONG_CONTROL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


class Recorded(FakeAsyncLLM):
    """An engine that notes what is asked of it."""

    def __init__(self, script: Any = "Paris", **settings: Any) -> None:
        super().__init__(script, **settings)
        self.asked: list[tuple[Any, Any]] = []

    def stream_chat(self, messages: Any, params: Any = None, **options: Any) -> Any:
        self.asked.append((options.get("session_id"), options.get("keep")))
        return super().stream_chat(messages, params, **options)

    async def generate(self, prompt: Any, params: Any = None, **options: Any) -> Any:
        self.asked.append((options.get("session_id"), options.get("keep")))
        return await super().generate(prompt, params, **options)


async def asked(engine: Recorded, path: str, body: dict[str, Any], key: str = "", **options: Any) -> tuple[Any, Any]:
    """What a request has asked of the engine, by an application with these options."""
    transport = streaming_transport(create_app(engine, **options))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", headers=headers) as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
    return engine.asked[-1]


@pytest.mark.parametrize(
    ("given", "keep"),
    [
        ({}, None),
        ({"prompt_cache_key": None}, None),
        ({"prompt_cache_key": "mine"}, 300),
        ({"prompt_cache_key": "mine", "prompt_cache_retention": "in_memory"}, 300),
        ({"prompt_cache_key": "mine", "prompt_cache_retention": "24h"}, 3600),
        ({"prompt_cache_retention": "24h"}, 3600),
        ({"prompt_cache_key": "mine", "prompt_cache_options": {"ttl": "30m", "mode": "implicit"}}, 1800),
        ({"prompt_cache_key": "mine", "prompt_cache_options": {"mode": "implicit"}}, 300),
    ],
)
async def test_keys_and_times(given: dict[str, Any], keep: float | None) -> None:
    async with Recorded() as engine:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/responses", {"model": "fake", "input": "x", "store": False}),
            ("/v1/completions", {"model": "fake", "prompt": "x"}),
        ):
            session, seconds = await asked(engine, path, body | given)
            assert seconds == keep and (session is not None) == bool(given.get("prompt_cache_key")), path


async def test_nobody_names_the_session_of_another() -> None:
    """Neither by the same key of a cache, nor by an API key or a salt that the two together spell."""
    async with Recorded() as engine:
        sessions = set()
        for key in ("", "one", "two", "onetwo"):
            for salt in (None, "one", "two", "onetwo"):
                for name in ("one", "two", "onetwo", "http-one"):
                    body = CHAT | {"prompt_cache_key": name, "cache_salt": salt}
                    session, _ = await asked(engine, "/v1/chat/completions", body, key)
                    assert session == (await asked(engine, "/v1/chat/completions", body, key))[0] != name
                    assert len(session) < 50
                    sessions.add(session)
        assert len(sessions) == 4 * 4 * 4


async def test_the_application_bounds_what_is_kept() -> None:
    async with Recorded() as engine:
        body = CHAT | {"prompt_cache_key": "mine", "prompt_cache_retention": "24h"}
        assert (await asked(engine, "/v1/chat/completions", body, max_keep=100_00))[1] == 10_000
        assert (await asked(engine, "/v1/chat/completions", body, max_keep=20))[1] == 20
        assert await asked(engine, "/v1/chat/completions", body, max_keep=0) == (None, None)
        assert await asked(engine, "/v1/messages", MESSAGE | LONG_CONTROL, max_keep=0) == (None, None)
        for wrong in (-1, 1e9, float("nan"), "x", None):
            with pytest.raises(InvalidRequestError) as caught:
                create_app(engine, max_keep=wrong)  # type: ignore[arg-type]
            assert caught.value.param == "max_keep"


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("/v1/chat/completions", CHAT | {"prompt_cache_key": "x" * 1025}, "prompt_cache_key"),
        ("/v1/chat/completions", CHAT | {"prompt_cache_key": 5}, "prompt_cache_key"),
        ("/v1/chat/completions", CHAT | {"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ("/v1/chat/completions", CHAT | {"prompt_cache_options": {"ttl": "1 year"}}, "prompt_cache_options.ttl"),
        ("/v1/messages", MESSAGE | {"cache_control": {"type": "ephemeral", "ttl": "1d"}}, None),
        ("/v1/messages", MESSAGE | {"cache_control": {"type": "for ever"}}, None),
        ("/v1/messages", MESSAGE | {"cache_control": "5m"}, None),
    ],
)
async def test_wrong_fields(path: str, given: dict[str, Any], param: str | None) -> None:
    async with Recorded() as engine:
        transport = streaming_transport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
            answer = await http.post(path, json=given)
        assert answer.status_code == 400 and not engine.asked
        if param is not None:
            assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("given", "keep"),
    [
        ({}, None),
        (SHORT_CONTROL, 300),
        ({"system": [{"type": "text", "text": "Be brief.", **LONG_CONTROL}]}, 3600),
        ({"tools": [{"name": "add", "input_schema": {"type": "object"}, **SHORT_CONTROL}]}, 300),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hello", **LONG_CONTROL}]}]}, 3600),
        ({"system": [{"type": "text", "text": "Be brief.", **LONG_CONTROL}], **SHORT_CONTROL}, 3600),
    ],
)
async def test_cache_control(given: dict[str, Any], keep: float | None) -> None:
    async with Recorded() as engine:
        assert await asked(engine, "/v1/messages", MESSAGE | given) == (None, keep)


async def test_usage_of_openai() -> None:
    async with Recorded() as engine, openai_client(engine) as client:
        first = await client.chat.completions.create(**CHAT, prompt_cache_key="mine", prompt_cache_retention="24h")
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        again = [*HELLO, {"role": "assistant", "content": "Paris"}, {"role": "user", "content": "Of Italy?"}]
        second = await client.chat.completions.create(
            model="fake", messages=again, prompt_cache_key="mine", stream=True, stream_options={"include_usage": True}
        )
        usage = [chunk.usage async for chunk in second][-1]
        assert usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 16 * 16 > 0
        assert len({session for session, _ in engine.asked}) == 1


async def test_usage_of_anthropic() -> None:
    async with Recorded() as engine, anthropic_client(engine) as client:
        first = (await client.messages.create(**MESSAGE)).usage
        assert (first.cache_creation_input_tokens, first.cache_read_input_tokens) == (0, 0)
        again = [*HELLO, {"role": "assistant", "content": "Paris"}]
        block: Any = {"type": "text", "text": "Of Italy, with more words than before?", **LONG_CONTROL}
        again.append({"role": "user", "content": [block]})
        async with client.messages.stream(**MESSAGE | {"messages": again}) as stream:
            second = (await stream.get_final_message()).usage
        assert second.input_tokens == 0 and second.cache_read_input_tokens >= first.input_tokens // 16 * 16
        assert second.cache_creation_input_tokens > 0
        assert second.cache_creation.ephemeral_1h_input_tokens == second.cache_creation_input_tokens
        assert second.cache_creation.ephemeral_5m_input_tokens == 0


async def test_responses_that_go_on_are_a_session() -> None:
    async with Recorded() as engine, openai_client(engine) as client:

        async def respond(text: str, before: openai.types.responses.Response | None = None, **more: Any) -> Any:
            previous = {} if before is None else {"previous_response_id": before.id}
            return await client.responses.create(model="fake", input=text, **previous, **more)

        first = await respond(LONG)
        assert engine.asked == [(None, None)]
        second = await respond("Of Italy?", first)
        third = await respond("Of Spain?", second, stream=True)
        usage = [event async for event in third][-1].response.usage
        found = usage.input_tokens_details
        assert found.cached_tokens >= second.usage.input_tokens // 16 * 16 > 0
        assert found.cache_write_tokens == usage.input_tokens - found.cached_tokens > 0
        assert first.usage.input_tokens_details.cache_write_tokens == 0
        await respond("Of Norway?", first)
        (session,) = {session for session, _ in engine.asked[1:]}
        assert session is not None and {keep for _, keep in engine.asked[1:]} == {300}
        await respond("Of Peru?", first, prompt_cache_key="mine", prompt_cache_retention="24h")
        assert engine.asked[-1][0] != session and engine.asked[-1][1] == 3600
        other = await respond("Another")
        await respond("more", other)
        assert engine.asked[-1][0] not in (None, session)


async def test_a_session_keeps_what_its_turn_has_computed() -> None:
    """A turn's KV is kept in the engine, for a key of the client's."""
    async with Recorded() as engine:
        body = CHAT | {"prompt_cache_key": "mine"}
        session, _ = await asked(engine, "/v1/chat/completions", body)
        assert await engine.keep_session(session, 0)
        assert not await engine.keep_session(session, 0)
