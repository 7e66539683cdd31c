"""Attacks over HTTP, of the kinds that docs/security.md lists: paths, keys, lengths, error texts, neighbours."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from serving import Served
from starlette.applications import Starlette
from starlette.routing import Route
from test_over_tcp import CHAT, connected, post, read_answer, served

from aengine import EngineClosedError, EngineError, InternalError, InvalidRequestError, ModelLoadError, WorkerDiedError
from aengine.server import create_app
from aengine.server.errors import http_error
from aengine.server.in_process import streaming_transport
from aengine.testing import FakeAsyncLLM, Reply

HELLO = [{"role": "user", "content": "hello"}]
PATHS = sorted({route.path for route in create_app(FakeAsyncLLM()).routes if isinstance(route, Route)})
OPEN = {"/", "/health", "/health/", "/livez", "/livez/", "/readyz", "/readyz/", "/page/{name}"}


@asynccontextmanager
async def client_of(engine: FakeAsyncLLM, prefix: str = "", **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    app: Any = create_app(engine, **options)
    if prefix:
        outer = Starlette()
        outer.mount(prefix, app)
        app = outer
    async with httpx.AsyncClient(transport=streaming_transport(app), base_url="http://engine", timeout=60) as client:
        yield client


async def test_what_a_value_might_have_been_is_not_told() -> None:
    """Pydantic names its own functions there, with their addresses."""
    async with FakeAsyncLLM("yes") as engine, client_of(engine) as client:
        for path, body in {
            "/score": {"text_1": {}, "text_2": "a"},
            "/rerank": {"query": "a", "documents": [{}]},
        }.items():
            answer = await client.post(path, json=body)
            assert answer.status_code == 400 and "0x" not in answer.text and "function" not in answer.text
            assert ".str" not in answer.text


# -- keys


def spellings(path: str) -> list[str]:
    """Other ways to write a path, of which one or another server or proxy makes the same."""
    first, _, rest = path[1:].partition("/")
    return [
        path,
        f"/{path}",
        f"//{path}",
        f"/.{path}",
        f"/x/..{path}",
        f"/health/..{path}",
        f"/page/..{path}",
        f"/health/%2e%2e{path}",
        f"/page/..%2f{path[1:]}",
        f"/page/%2e%2e{quote(path, safe='')}",
        f"/{first}//{rest}",
        f"/{first}/./{rest}",
        f"/{first}/%2e/{rest}",
        f"/{first.upper()}/{rest}",
        f"/{first}%2f{rest}",
        "/" + "".join(f"%{byte:02x}" for byte in path[1:].encode()),
        f"{path}/",
        f"{path}//",
        f"{path};x=1",
        f"{path}%00",
        f"{path}%20",
        f"{path}?key=",
        f"{path}%23/health",
        f"{path}%3f/health",
        "/" + path[1:].replace("/", "\\"),
        "/" + path.replace("/", "%5c"),
        f"/health{path}",
        f"/health;{path}",
    ]


OTHER_WORDS = {"x-http-method-override": "GET", "x-original-url": "/health", "x-rewrite-url": "/health"}


@pytest.mark.parametrize("prefix", ["", "/llm", "/v1"])
async def test_no_spelling_of_a_path_is_answered_without_the_key(prefix: str) -> None:
    """Every route checks the key itself: none is open because its path looks otherwise."""
    async with FakeAsyncLLM("yes") as engine, client_of(engine, prefix, api_keys="key") as client:
        for path in [path for path in PATHS if path not in OPEN and not path.endswith("/")]:
            plain = re.sub(r"{\w+(:path)?}", "a", path)
            for spelling in {*map(prefix.__add__, spellings(plain)), *spellings(prefix + plain)}:
                url = httpx.URL("http://engine").copy_with(raw_path=spelling.encode())
                for method in ("GET", "POST"):
                    answer = await client.request(method, url, headers=OTHER_WORDS)
                    is_page = answer.headers.get("content-type", "").startswith(("text/html", "text/css"))
                    assert answer.status_code in (401, 403, 404, 405) or is_page, (method, spelling, answer.text)
                    assert "location" not in answer.headers
        assert engine.statistics().num_requests == 0


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "key"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer key2"},
        {"authorization": "Bearer ke"},
        {"authorization": "Bearer Key"},
        {"authorization": "Basic key"},
        {"authorization": "Bearer null", "x-api-key": "key2"},
        {"cookie": "key=key", "x-forwarded-for": "127.0.0.1"},
    ],
)
async def test_what_is_no_key(headers: dict[str, str]) -> None:
    async with FakeAsyncLLM("yes") as engine, client_of(engine, api_keys="key") as client:
        answer = await client.get("/v1/models?api_key=key&key=key", headers=headers)
        assert answer.status_code == 401 and "key2" not in answer.text
        assert (await client.get("/v1/models", headers={"x-api-key": "key"})).status_code == 200


async def test_files_of_the_page_are_those_of_the_page() -> None:
    async with FakeAsyncLLM("yes") as engine, client_of(engine) as client:
        for name in ("..%2fapp.py", "%2e%2e%2fapp.py", "..%5capp.py", "../app.py", "%2fetc%2fpasswd", "files.py", "."):
            url = httpx.URL("http://engine").copy_with(raw_path=f"/page/{name}".encode())
            assert (await client.get(url)).status_code == 404


# -- two parsers


PARSERS = pytest.mark.parametrize("parser", ["h11", "httptools"])


@PARSERS
@pytest.mark.parametrize(
    ("path", "stream"), [("/v1/chat/completions", True), ("/tokenize", False), ("/nowhere", False)]
)
async def test_a_connection_with_two_lengths_is_answered_and_closed(path: str, stream: bool, parser: str) -> None:
    """RFC 9112, 6.3: what follows may be a request that a proxy has not seen as one."""
    pytest.importorskip(parser)
    content = json.dumps(CHAT | {"stream": stream}).encode()
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    engine = FakeAsyncLLM("yes")
    async with served(engine, parser=parser) as port:
        for first, second in (("content-length", "transfer-encoding"), ("transfer-encoding", "content-length")):
            async with connected(port) as (reader, writer):
                lengths = {"content-length": str(len(chunked)), "transfer-encoding": "chunked"}
                head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                head += f"{first}: {lengths[first]}\r\n{second}: {lengths[second]}\r\n\r\n"
                writer.write(head.encode() + chunked + b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
                text = await reader.read()  # to the end: the connection is closed
                assert text.startswith(b"HTTP/1.1 ") and text.count(b"HTTP/1.1 ") == 1, text
                assert b"connection: close" in text.lower() and b'"version"' not in text
        async with connected(port) as (reader, writer):
            writer.write(post("/v1/chat/completions", CHAT))
            assert (await read_answer(reader))[0] == 200


@pytest.mark.parametrize(
    "lengths",
    [
        "content-length: 5\r\ncontent-length: 6\r\n",
        "content-length: +5\r\n",
        "content-length: -5\r\n",
        "content-length: 5, 6\r\n",
        "content-length: 0x5\r\n",
        "content-length : 5\r\n",
        "transfer-encoding: xchunked\r\n",
        "transfer-encoding: chunked, identity\r\n",
        "transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
    ],
)
@PARSERS
async def test_lengths_that_can_be_read_in_two_ways_are_refused(lengths: str, parser: str) -> None:
    pytest.importorskip(parser)
    engine = FakeAsyncLLM("yes")
    async with served(engine, parser=parser) as port, connected(port) as (reader, writer):
        head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{lengths}\r\n"
        writer.write(head.encode() + b"0\r\n\r\nGET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        writer.write_eof()
        text = await reader.read()
        assert b" 200 " not in text and b'"version"' not in text


async def test_urls_lead_nowhere_else() -> None:
    """No answer is a redirect, and no URL of a request is fetched, however a parser reads it."""
    places = [
        "\\\\evil.example",
        "/\\evil.example",
        "//evil.example/v1",
        "http:\\\\evil.example",
        "http://a@evil.example",
    ]
    async with FakeAsyncLLM("yes") as engine, client_of(engine) as client:
        for place in places:
            for url in (httpx.URL("http://engine").copy_with(raw_path=b"/" + quote(place).encode()),):
                assert (await client.get(url)).status_code == 404
            image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": place}}]}
            answer = await client.post("/v1/chat/completions", json={"messages": [image]})
            assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("messages")
            shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": place}}}
            answer = await client.post("/v1/chat/completions", json={"messages": HELLO, "response_format": shape})
            assert answer.status_code == 400 and answer.json()["error"]["code"].startswith("schema_")
        assert engine.statistics().num_running == 0


# -- what errors tell

LEAK = re.compile(r"0x[0-9a-f]{6,}|/home/|/work/|/tmp/|/srv/|site-packages|\.py\b|Traceback|aengine\.\w+\.\w+| object>")
SECRET = "other callers' data in /srv/models/llama.gguf, <Scheduler object at 0x7f3a5c0b1d90>"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InternalError(SECRET), 500),
        (WorkerDiedError(SECRET), 503),
        (EngineClosedError(SECRET), 503),
        (ModelLoadError(SECRET), 503),
        (EngineError(SECRET), 503),
        (RuntimeError(SECRET), 500),
        (OSError(5, SECRET, "/srv/models"), 500),
        (KeyError(SECRET), 500),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_failures_of_the_engine_tell_clients_nothing_of_it(
    error: Exception, status: int, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(path, {"messages": HELLO})
    body |= {"model": "fake", "max_tokens": 4} if path == "/v1/messages" else {}
    script: Any = [Reply("abc", error=error)] if isinstance(error, EngineError) else ["abc"]
    async with FakeAsyncLLM(script * 2) as engine, client_of(engine, model_names="fake") as client:
        if not isinstance(error, EngineError):
            engine.stream = engine.stream_chat = engine.generate = raising(error)  # type: ignore[method-assign]
        for stream in (False, True):
            answer = await client.post(path, json=body | {"stream": stream})
            assert stream or answer.status_code == status, answer.text
            assert "error" in answer.text and not LEAK.search(answer.text) and "other callers" not in answer.text
    assert isinstance(error, EngineClosedError) or "other callers" in caplog.text, "the log says why"


def raising(error: Exception) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        raise error

    return call


def test_an_objects_address_is_not_told() -> None:
    error = InvalidRequestError(f"the chat template failed: {object()!r} is no text", param="messages")
    assert http_error(error).message == "the chat template failed: <object object> is no text"


async def test_no_answer_tells_where_the_server_lies() -> None:
    engine = FakeAsyncLLM("yes")
    engine._handle.config = engine.config.replace(model="/srv/models/llama")  # type: ignore[misc]
    async with engine, client_of(engine) as client:
        assert "llama" in (await client.get("/v1/models")).text
        for path in PATHS:
            for method, body in (
                ("GET", None),
                ("POST", {}),
                ("POST", {"messages": 1, "input": 1, "prompt": {}}),
                ("PUT", 1),
            ):
                answer = await client.request(method, path.replace("{", "").replace("}", ""), json=body)
                if not path.startswith("/page") and path != "/":
                    assert "/srv/" not in answer.text and "object at" not in answer.text, (path, answer.text[:500])


# -- one request and its neighbours


HOSTILE: list[tuple[str, dict[str, Any]]] = [
    *[("/v1/completions", {"prompt": "x", "cache_salt": salt}) for salt in ("\ud800", "", "\0", "x" * 100_000, 5, [])],
    *[("/v1/completions", {"prompt": "x", "n": n}) for n in (0, -1, 10**9, 2**63, 10**400, 1.5)],
    *[("/v1/completions", {"prompt": ["x"] * 2048, "n": 1024}), ("/v1/completions", {"prompt": "x", "best_of": 10**9})],
    *[("/v1/completions", {"prompt": "x", "logprobs": k}) for k in (65, 500, 10**9, -2)],
    *[("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": k}) for k in (65, 10**9)],
    ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(5000)}}),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"258": 1, "2147483647": 100}}),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": list(range(100_000))}),
    ("/v1/completions", {"prompt": "x", "allowed_token_ids": list(range(100_000))}),
    ("/v1/completions", {"prompt": "x", "allowed_token_ids": [2**31 - 1]}),
    ("/v1/completions", {"prompt": "x", "bad_words": ["x"] * 100_000}),
    ("/v1/completions", {"prompt": "x", "bad_words": ["0123456789" * 20]}),
    ("/v1/completions", {"prompt": "x", "stop": ["x" * 10**6]}),
    ("/v1/completions", {"prompt": [2**31 - 1]}),
    ("/v1/completions", {"prompt": [-1]}),
    ("/v1/completions", {"prompt": "x", "seed": 2**64}),
    ("/v1/completions", {"prompt": "x", "priority": 10**30}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "(((a{100}){100}){100}){100}"}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"grammar": "start: start"}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10**9, "min_tokens": 10**9}),
]


@pytest.mark.slow
def test_checks_are_no_asserts() -> None:
    """With ``python -O``, which leaves out every assert, the same requests are refused."""
    with Served("--port", 0, "--max-model-len", 512, "--no-access-log", script="a", PYTHONOPTIMIZE="1") as program:
        url = f"http://127.0.0.1:{program.port()}"
        for path, body in HOSTILE:
            content = json.dumps({"max_tokens": 2} | body)
            answer = httpx.post(url + path, content=content, headers={"content-type": "application/json"}, timeout=60)
            assert answer.status_code in (200, 400, 413), (body, answer.text[:300])
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 3})
        assert answer.json()["choices"][0]["text"] == "aaa"
        assert httpx.get(f"{url}/v1/models", headers={"host": "evil.example"}).status_code == 403


async def test_a_hostile_request_harms_no_other() -> None:
    """Each is answered, and what streams beside it and what comes after it are as ever."""
    async with (
        FakeAsyncLLM(lambda request: "a" * 400, token_delay=0.002, max_model_len=512) as engine,
        client_of(engine) as client,
    ):
        beside = asyncio.create_task(
            client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True}, timeout=None)
        )
        while not engine.statistics().num_running:
            await asyncio.sleep(0.001)
        for path, body in HOSTILE:
            content = json.dumps({"max_tokens": 2} | body)
            answer = await client.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 413), (body, answer.text[:300])
        text = (await beside).text
        assert '"finish_reason":"stop"' in text and engine.state == "running"
        while engine.statistics().num_running:
            await asyncio.sleep(0.001)
