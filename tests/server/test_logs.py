"""What `aengine serve` logs of its requests, of the engine and of its end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from serving import Served, rest_of

from aengine.server import create_app
from aengine.server.in_process import streaming_transport
from aengine.server.logs import AccessLog, JSONFormatter, rates
from aengine.server.serve import ShutdownLog
from aengine.testing import FakeAsyncLLM

HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": ["hello", "you"]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"model": "fake", "messages": HELLO, "max_tokens": 9},
    "/v1/embeddings": {"input": ["hello", "you"]},
}


@asynccontextmanager
async def client_of(engine: FakeAsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    transport = streaming_transport(AccessLog(create_app(engine)))
    async with engine, httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_line_for_each_request(path: str, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    if stream and path == "/v1/embeddings":
        pytest.skip("has no stream")
    caplog.set_level(logging.INFO, "aengine.access")
    engine = FakeAsyncLLM("yes")
    async with client_of(engine) as client:
        body = BODIES[path] | ({"stream": True} if stream else {})
        answer = await client.post(path, json=body, headers={"x-request-id": "mine"})
        numbers = engine.statistics()
        (record,) = [one for one in caplog.records if one.name == "aengine.access"]
        fields = vars(record)
        assert (fields["method"], fields["path"], fields["status"]) == ("POST", path, answer.status_code)
        request_id = answer.headers.get("x-request-id") or answer.headers.get("request-id")
        assert fields["request_id"] == request_id and fields["seconds"] > 0
        assert fields["prompt_tokens"] == numbers.prompt_tokens > 0
        assert fields["generated_tokens"] == numbers.generated_tokens
        said = f"{numbers.prompt_tokens} prompt and {numbers.generated_tokens} generated tokens"
        assert said in record.getMessage() and f"POST {path} 200 in " in record.getMessage()


async def test_who_leaves_and_what_is_wrong_have_lines_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine.access")
    engine = FakeAsyncLLM("a" * 1000, token_delay=0.005)
    async with client_of(engine) as client:
        await client.post("/v1/chat/completions", json={"messages": []})
        await client.get("/v1/nothing%0a127.0.0.1:1%20GET%20/forged%20200")
        async with client.stream("POST", "/v1/chat/completions", json={"messages": HELLO, "stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                break
        while engine.statistics().num_running:
            await asyncio.sleep(0.001)
        wrong, missing, left = [record.getMessage() for record in caplog.records if record.name == "aengine.access"]
    assert " 400 in " in wrong
    assert "\n" not in missing and "nothing%0A127" in missing, "no line is begun by a client"
    assert "the client left" in left and re.search(r"and [1-9]\d* generated", left)


@pytest.mark.parametrize("body", [{"cache_salt": "x" * 1025}, {"unknown": 1}, {}])
@pytest.mark.parametrize("path", BODIES)
async def test_what_fails_has_an_id_too(path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The client's own, where the interface has one; whether it fails as a body, as a request or in the engine."""
    caplog.set_level(logging.INFO, "aengine.access")
    engine = FakeAsyncLLM("yes")
    async with client_of(engine) as client:
        if not body:
            await engine.aclose()
        given = await client.post(path, json=BODIES[path] | body, headers={"x-request-id": "mine"})
        fresh = await client.post(path, json=BODIES[path] | body)
        assert given.status_code == fresh.status_code >= 400
    ids = [vars(record)["request_id"] for record in caplog.records if record.name == "aengine.access"]
    assert ids[0] == ("mine" if path != "/v1/messages" else given.headers["request-id"])
    assert ids[1] and ids[1] == (fresh.headers.get("x-request-id") or fresh.headers.get("request-id"))


async def test_probes_have_a_logger_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine.access")
    async with client_of(FakeAsyncLLM("yes")) as client:
        for path in ("/health", "/livez", "/readyz/", "/metrics", "/v1/models"):
            await client.get(path)
    names = [record.name for record in caplog.records if record.name.startswith("aengine.access")]
    assert names == ["aengine.access.probes"] * 4 + ["aengine.access"]


def test_json_is_one_object_a_line() -> None:
    record = logging.makeLogRecord({"name": "a", "levelname": "INFO", "msg": "two\nlines %s", "args": ("ä",)})
    record.status, record.odd = 200, object  # type: ignore[attr-defined]
    try:
        raise ValueError("x")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    (line,) = JSONFormatter().format(record).splitlines()
    shown = json.loads(line)
    assert (shown["message"], shown["level"], shown["status"]) == ("two\nlines ä", "INFO", 200)
    assert "ValueError: x" in shown["exception"] and re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}Z", shown["time"])


async def test_rates_between_two_statistics() -> None:
    async with FakeAsyncLLM("a" * 100) as engine:
        before = engine.statistics()
        assert rates(before, before, 1.0) is None, "nothing was done"
        await engine.chat(HELLO)
        after = engine.statistics()
        found = rates(before, after, 2.0)
        assert found is not None and found["generated_tokens_per_second"] == round(after.generated_tokens / 2, 1)
        assert found["prompt_tokens_per_second"] == round(after.prompt_tokens / 2, 1) and found["running"] == 0


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "no request is running"), (1, "1 request has 14.0 s to end"), (3, "3 requests have 14.0 s to end")],
)
async def test_who_is_waited_for(count: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine.server")
    async with FakeAsyncLLM("a" * 1000, token_delay=0.005) as engine:
        tasks = [asyncio.create_task(engine.chat(HELLO)) for _ in range(count)]
        while engine.statistics().num_running < count:
            await asyncio.sleep(0.001)
        with ShutdownLog(engine, 14.0):
            engine.abort_all()
            await asyncio.gather(*tasks)
    begun, ended = [record.getMessage() for record in caplog.records if record.name == "aengine.server"]
    assert begun == f"stopping: no new connections; {said}"
    how = {0: "all requests have ended", 1: "1 request was ended before the answer was whole"}
    assert ended.endswith(how.get(count, "3 requests were ended before the answer was whole"))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_end_is_told(workers: int) -> None:
    """Who is waited for, for how long, and how it ended; as JSON every line is an object."""
    options = ["--workers", workers] * bool(workers)
    with Served("--port", 0, "--grace", 2, "--report-every", 0.2, *options, token_delay=0.3) as served:
        stream = served.begin_stream()
        served.until(r"generated tokens/s, 1 running, 0 waiting, [\d.]+ % of the KV cache")
        served.signal()
        served.until(r"stopping: no new connections; 1 request has [\d.]+ s to end")
        rest_of(stream)
        assert served.end() == 0
        assert re.search(r"stopping: after [\d.]+ s 1 request was ended before the answer was whole", served.log)
        assert served.log.count("stopping:") == 2
        assert re.search(
            r"POST /v1/chat/completions 200 in [\d.]+ s, \d+ prompt and \d+ generated tokens, chatcmpl-", served.log
        )


@pytest.mark.slow
def test_a_log_of_json() -> None:
    with Served("--port", 0, "--log-format", "json", "--no-probe-log") as served:
        port = served.until(r'is served at http://127\.0\.0\.1:(\d+)"')[1]
        for path in ("/health", "/v1/models"):
            assert httpx.get(f"http://127.0.0.1:{port}{path}").status_code == 200
        served.until("/v1/models")
        served.signal()
        assert served.end() == 0
        lines = [json.loads(line) for line in served.log.splitlines()]
        assert [line["path"] for line in lines if line["logger"].startswith("aengine.access")] == ["/v1/models"]
        assert "all requests have ended" in lines[-1]["message"]
