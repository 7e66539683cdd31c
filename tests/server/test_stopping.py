"""Requests that the server itself ends, as it does when it stops: half an answer never passes for a whole one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from aengine.cli.serve import _close
from aengine.server import create_app
from aengine.server.in_process import streaming_transport
from aengine.server.serve import StopSignals
from aengine.testing import FakeAsyncLLM

HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/chat/completions?n": {"messages": HELLO, "n": 2, "max_tokens": 5000},
    "/v1/completions": {"prompt": "hello", "max_tokens": 5000},
    "/v1/completions?n": {"prompt": ["hello", "you"], "max_tokens": 5000},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"model": "fake", "messages": HELLO, "max_tokens": 5000},
}


async def answer_that_is_aborted(path: str, stream: bool, first_token_delay: float = 0) -> httpx.Response:
    """Ask, and let the server stop once the answer has begun."""
    async with FakeAsyncLLM("a" * 5000, token_delay=first_token_delay or 0.002) as engine:
        transport = streaming_transport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            asking = asyncio.create_task(client.post(path, json=BODIES[path] | {"stream": stream}))
            while engine.statistics().generated_tokens < (0 if first_token_delay else 20) or not engine.requests:
                await asyncio.sleep(0.001)
            assert not await engine.drain(0.001)
            engine.abort_all()
            return await asking


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_answer_is_an_error_to_try_again(path: str) -> None:
    answer = await answer_that_is_aborted(path, False)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert "send it again" in answer.json()["error"]["message"]
    assert answer.headers.get("x-should-retry") != "false"


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_ends_with_an_error(path: str) -> None:
    answer = await answer_that_is_aborted(path, True)
    assert answer.status_code == 200
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    *_, before, last = events
    if path == "/v1/messages":
        assert last["type"] == "error" and last["error"]["type"] == "api_error"
        assert "message_stop" not in answer.text
    elif path == "/v1/responses":
        assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"
        assert last["response"]["status"] == "failed" and last["response"]["output"]
    else:
        assert last["error"]["code"] == "request_aborted" and last["error"]["type"] == "server_error"
        assert {choice["finish_reason"] for choice in before["choices"]} == {"abort"}
        assert answer.text.endswith("data: [DONE]\n\n")
    assert (
        "send it again" in answer.text
        and '"length"' not in answer.text
        and "max_output_tokens" not in str(last.get("incomplete_details"))
    )


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_has_not_begun_has_a_status(path: str) -> None:
    answer = await answer_that_is_aborted(path, True, first_token_delay=30)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"


async def test_closing_ends_with_the_grace() -> None:
    ended = []

    class Engine:
        async def aclose(self) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("aclose")

        def terminate(self) -> None:
            ended.append("terminate")

    stop: Any = StopSignals()
    stop.note()
    async with asyncio.timeout(60):
        await _close(Engine(), stop, 0.01)  # type: ignore[arg-type]
        stop.note()
        await _close(Engine(), stop, 1e6)  # type: ignore[arg-type]
    assert ended == ["aclose", "terminate"]
