"""The application under uvicorn, over a TCP connection of this machine: what clients do to connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from aengine.server import create_app
from aengine.testing import FakeAsyncLLM


@asynccontextmanager
async def served(engine: FakeAsyncLLM, prefix: str = "", parser: Any = "h11", **options: Any) -> AsyncIterator[int]:
    """The port on which the application is served, mounted under ``prefix`` if there is one."""
    app = create_app(engine, **options)
    config = uvicorn.Config(
        Starlette(routes=[Mount(prefix, app)]) if prefix else app,
        port=0,
        log_config=None,
        lifespan="on",
        http=parser,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    server.capture_signals = nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except OSError:  # the server has closed it
            pass


def post(path: str, body: Any, **headers: Any) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"host": "engine", "content-type": "application/json", "content-length": len(content)} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read an answer that tells its length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = head.partition("content-length: ")[2].partition("\r\n")[0]
    return int(head.split()[1]), await reader.readexactly(int(length))


async def idle(engine: FakeAsyncLLM) -> None:
    while engine.statistics().num_running or engine.statistics().num_waiting:
        await asyncio.sleep(0.001)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
LONG = "a" * 20_000


async def test_one_connection_answers_many_requests() -> None:
    engine = FakeAsyncLLM("yes")
    async with served(engine) as port, connected(port) as (reader, writer):
        for _ in range(3):
            writer.write(post("/v1/chat/completions", CHAT))
            status, body = await read_answer(reader)
            assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "yes"
        writer.write(post("/v1/chat/completions", b"{"))
        assert (await read_answer(reader))[0] == 400
        writer.write(post("/v1/chat/completions", CHAT) * 2)  # one behind the other
        assert [(await read_answer(reader))[0] for _ in range(2)] == [200, 200]
    assert engine.state == "closed", "the application's lifespan has closed the engine"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_that_closes_ends_its_request(path: str, stream: bool) -> None:
    body = {"messages": CHAT["messages"], "prompt": "hello", "input": "hello", "stream": stream}
    wanted = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}[path]
    engine = FakeAsyncLLM(LONG, token_delay=0.005)
    async with served(engine) as port:
        async with connected(port) as (reader, writer):
            ask = {wanted: body[wanted], "stream": stream}
            ask["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 20_000
            writer.write(post(path, ask))
            if stream:
                await reader.readuntil(b"data: ")
            while not engine.statistics().num_running:
                await asyncio.sleep(0.001)
        await idle(engine)
        assert engine.statistics().num_aborted == 1


async def test_a_half_closed_connection_harms_nobody() -> None:
    engine = FakeAsyncLLM(["a" * 100, "yes"], token_delay=0.001)
    async with served(engine) as port, connected(port) as (reader, writer), connected(port) as (other, to_other):
        writer.write(post("/v1/chat/completions", CHAT | {"stream": True}))
        await reader.readuntil(b"data: ")
        writer.write_eof()
        await idle(engine)  # answered or ended, but not for ever
        to_other.write(post("/v1/chat/completions", CHAT))
        assert (await read_answer(other))[0] == 200


async def test_a_client_that_does_not_read_ends_with_its_time() -> None:
    """Nothing piles up in the server: its events wait in the engine as tokens, for as long as unread_timeout allows."""
    engine = FakeAsyncLLM(lambda request: "a" * 30_000 if request.text == "hello" else "yes", unread_timeout=0.3)
    async with served(engine) as port, connected(port) as (reader, writer), connected(port) as (other, to_other):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post("/v1/chat/completions", CHAT | {"stream": True, "logprobs": True, "top_logprobs": 20}))
        while not engine.statistics().num_running:
            await asyncio.sleep(0.001)
        await idle(engine)
        to_other.write(post("/v1/chat/completions", {"messages": [{"role": "user", "content": "you?"}]}))
        status, body = await read_answer(other)
        assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "yes"


async def test_a_huge_upload_is_refused_before_it_has_come() -> None:
    engine = FakeAsyncLLM("yes")
    async with served(engine, max_body_bytes=10_000) as port:
        async with connected(port) as (reader, writer):
            writer.write(post("/v1/chat/completions", b"", **{"content-length": 10**12}))
            status, body = await read_answer(reader)
            assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
        async with connected(port) as (reader, writer):
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
            writer.write(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
            writer.write(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
            assert (await read_answer(reader))[0] == 413


WRECKS = [
    b"NONSENSE\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: many\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"",
]


async def test_what_is_no_http_harms_nobody() -> None:
    engine = FakeAsyncLLM("yes")
    async with served(engine) as port:
        for wreck in WRECKS:
            async with connected(port) as (_, writer):
                writer.write(wreck)
                await writer.drain()
        async with connected(port) as (reader, writer):
            writer.write(post("/v1/chat/completions", CHAT))
            assert (await read_answer(reader))[0] == 200
        assert engine.statistics().num_requests == 1
