"""API keys of any characters, pages of other origins, and where an application is mounted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette

from aengine import InvalidRequestError
from aengine.server import create_app
from aengine.server.in_process import streaming_transport
from aengine.testing import FakeAsyncLLM

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "stream": True}
PAGE = {"origin": "https://chat.example"}


@asynccontextmanager
async def client_of(*, keys: Sequence[str] = (), origins: str | Sequence[str] = ()) -> AsyncIterator[httpx.AsyncClient]:
    async with FakeAsyncLLM("a") as engine:
        transport = streaming_transport(create_app(engine, api_keys=keys, allow_origins=origins))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            yield client


@pytest.mark.parametrize("key", ["schlüssel", "🔑", "a key of words", "\udcff", 'a"b\\c'])
async def test_a_key_may_have_any_characters(key: str) -> None:
    as_bytes = key.encode("utf-8", "surrogateescape")
    async with client_of(keys=["another", key]) as client:
        for header in (b"Bearer " + as_bytes, b"bearer   " + as_bytes):
            assert (await client.get("/v1/models", headers={b"authorization": header})).status_code == 200
        assert (await client.get("/v1/models", headers={b"x-api-key": as_bytes})).status_code == 200
        for wrong in (b"", as_bytes[:-1], as_bytes + b"x", b"\xff\xfe"):
            answer = await client.get("/v1/models", headers={b"authorization": b"Bearer " + wrong})
            assert answer.status_code == 401, wrong


@pytest.mark.parametrize("key", ["", " key", "key\n", "two\nlines"])
async def test_a_key_that_no_client_could_show_is_refused(key: str) -> None:
    async with FakeAsyncLLM("a") as engine:
        with pytest.raises(InvalidRequestError, match="an API key"):
            create_app(engine, api_keys=key)


@pytest.mark.parametrize(
    ("field", "value"),
    [("allow_origins", value) for value in ("chat.example", "https://chat.example/path", "", "https://")]
    + [("allow_hosts", value) for value in ("http://llm.example", "llm.example/", "a b", "")],
)
async def test_what_no_browser_would_show_is_refused(field: str, value: str) -> None:
    async with FakeAsyncLLM("a") as engine:
        with pytest.raises(InvalidRequestError, match="is no (origin|host): ") as refused:
            create_app(engine, **{field: [value]})  # type: ignore[arg-type]
        assert refused.value.param == field


@pytest.mark.parametrize("origin", ["https://chat.example", "https://Chat.example/"])
async def test_pages_of_an_allowed_origin_may_call(origin: str) -> None:
    async with client_of(keys=["key"], origins=origin) as client:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        allowed = await client.options("/v1/chat/completions", headers=PAGE | asks)
        assert allowed.status_code == 200, "a browser shows no key when it asks"
        assert allowed.headers["access-control-allow-origin"] == PAGE["origin"]
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        refused = await client.options("/v1/chat/completions", headers={"origin": "https://evil.example"} | asks)
        assert "access-control-allow-origin" not in refused.headers
        for key, status in (("key", 200), ("wrong", 401)):
            answer = await client.post(
                "/v1/chat/completions", json=CHAT, headers=PAGE | {"authorization": f"Bearer {key}"}
            )
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE["origin"], "so the page can read errors too"


async def test_without_origins_no_page_is_allowed() -> None:
    async with client_of() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=PAGE)
        assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


async def test_a_mounted_application_says_where_it_is() -> None:
    async with FakeAsyncLLM("a") as engine:
        outer = Starlette()
        outer.mount("/llm", create_app(engine))
        async with httpx.AsyncClient(transport=streaming_transport(outer), base_url="http://engine") as client:
            document = (await client.get("/llm/openapi.json")).json()
            (server,) = document["servers"]
            path = next(path for path in document["paths"] if path.endswith("/models"))
            assert (await client.get(server["url"] + path)).status_code == 200
