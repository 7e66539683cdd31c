"""A server that only its machine's address protects: no page of another origin uses it, by whatever name."""

from __future__ import annotations

import argparse
import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from aengine.cli.listening import bind_tcp, is_loopback
from aengine.cli.serve import app_options
from aengine.server import create_app
from aengine.server.in_process import streaming_transport
from aengine.testing import FakeAsyncLLM

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
EVIL = "https://evil.example"


@asynccontextmanager
async def client_of(**options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with FakeAsyncLLM("a") as engine:
        transport = streaming_transport(create_app(engine, **options))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
            yield client


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        *[
            (host, True)
            for host in ("localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:1", "10.1.2.3", "[::1]:80")
        ],
        *[(host, True) for host in ("chat.example", "Chat.Example:8000")],
        *[(host, False) for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "1.2.3")],
        *[
            (host, False)
            for host in ("", "localhost@evil.example", "evil.example:80:80", "[evil.example]", "a/localhost")
        ],
        *[(host, False) for host in ("xlocalhost", "localhost evil.example", "evil.example#localhost", "::1")],
    ],
)
async def test_only_known_hosts_are_answered(host: str, is_known: bool) -> None:
    async with client_of(allow_hosts="chat.example") as client:
        for path in ("/v1/models", "/stats", "/", "/page/page.js", "/v1/responses/resp_1", "/metrics", "/openapi.json"):
            answer = await client.get(path, headers={"host": host})
            assert (answer.status_code != 403) == is_known, (path, answer.text)
        for path in ("/health", "/livez", "/readyz"):
            assert (await client.get(path, headers={"host": host})).status_code == 200, "probes come by any name"
        answer = await client.post("/v1/messages", json={}, headers={"host": host})
        assert answer.status_code == 400 if is_known else answer.json()["error"]["type"] == "permission_error"


async def test_a_second_host_is_looked_at_too() -> None:
    async with client_of(allow_hosts=()) as client:
        answer = await client.get("/v1/models", headers=[("host", "localhost"), ("host", "evil.example")])
        assert answer.status_code == 403 and "allow-host" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        *[(origin, True) for origin in ("http://localhost:8000", "https://localhost:8000", "https://chat.example")],
        *[(origin, False) for origin in (EVIL, "null", "http://localhost", "http://localhost:3000", "")],
        *[(origin, False) for origin in ("http://localhost:8000.evil.example", "http://localhost:8000@evil.example")],
        *[(origin, False) for origin in ("http://evil.example/localhost:8000", "chat.example", "ftp://localhost:8000")],
    ],
)
async def test_only_pages_of_its_own_may_use_it(origin: str, is_allowed: bool) -> None:
    async with client_of(allow_hosts=(), allow_origins="https://chat.example") as client:
        headers = {"origin": origin}
        for answer in (
            await client.post("/v1/chat/completions", json=CHAT, headers=headers),
            await client.get("/v1/models", headers=headers),
        ):
            assert answer.status_code == (200 if is_allowed else 403), answer.text
        assert (await client.get("/health", headers=headers)).status_code == 200


async def test_an_application_looks_at_neither_unless_told() -> None:
    headers = {"host": "evil.example", "origin": EVIL}
    async with client_of() as client:
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
    async with client_of(allow_hosts="*", allow_origins="*") as client:
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
    async with FakeAsyncLLM("a") as engine, engine.openai_client() as inside:
        assert (await inside.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x"}])).choices


@pytest.mark.parametrize("kind", [None, "text/plain", "text/plain; application/json", "text/plain, x/a+json", "x+json"])
async def test_a_body_without_its_content_type_is_refused(kind: str | None) -> None:
    """A page may send those that the first three are without asking before."""
    headers = {} if kind is None else {"content-type": kind}
    async with client_of() as client:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize", "/v1/embeddings"):
            answer = await client.post(path, content=b'{"messages": []}', headers=headers)
            assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1.2.3", "::1", "::ffff:127.0.0.1"])
def test_a_server_on_loopback_without_a_key_is_told(host: str) -> None:
    try:
        (listener,) = bind_tcp(host, 0)
    except Exception:
        pytest.skip(f"this machine has no {host}")
    with listener:
        assert is_loopback(listener)
        assert options_of(listener)["allow_hosts"] == []
        assert options_of(listener, allow_host=["a"])["allow_hosts"] == ["a"]
        assert options_of(listener, api_key=["secret"])["allow_hosts"] is None


def test_other_addresses_are_not() -> None:
    (listener,) = bind_tcp("0.0.0.0", 0)
    with listener, socket.socket(socket.AF_UNIX) as unix:
        assert options_of(listener)["allow_hosts"] is None and options_of(unix)["allow_hosts"] is None
        assert options_of(listener, allow_host=["a"])["allow_hosts"] == ["a"]


def options_of(listener: socket.socket, **given: Any) -> dict[str, Any]:
    args: dict[str, Any] = {"served_model_name": None, "api_key": [], "max_body_bytes": 1, "workers": 0}
    args |= {"allow_origin": [], "allow_host": [], "admin_key": None, "lora_dir": None, "weights_dir": None}
    args |= {"api_keys_file": None, "max_keep": 60.0}
    return app_options(argparse.Namespace(**args | given), listener)


async def test_probes_tell_alive_from_ready() -> None:
    engine = FakeAsyncLLM("a")
    transport = streaming_transport(create_app(engine, api_keys="key"))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:

        async def statuses() -> tuple[int, int]:
            both = await asyncio.gather(client.get("/livez"), client.get("/readyz/"))
            return both[0].status_code, both[1].status_code

        assert await statuses() == (200, 503), "it is not started yet"
        async with engine:
            assert await statuses() == (200, 200)
            await engine.drain()
            assert await statuses() == (200, 503)
        assert await statuses() == (503, 503)
