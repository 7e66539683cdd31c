"""What answers report beside the text: tokens that were cached, and whether it is worth another try."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from aengine import InternalError, WorkerDiedError
from aengine.errors import EngineError
from aengine.server import create_app
from aengine.server.in_process import streaming_transport
from aengine.testing import FakeAsyncLLM

LONG = "0123456789abcdef" * 8
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/v1/completions?two": {"prompt": [LONG, LONG + "!"]},
}


def client_of(engine: FakeAsyncLLM) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=streaming_transport(create_app(engine)), base_url="http://engine")


@pytest.mark.parametrize("path", BODIES)
async def test_cached_tokens_are_counted(path: str) -> None:
    """Of all prompts together, whole and streamed: as the engine counts them."""
    async with FakeAsyncLLM("yes") as engine, client_of(engine) as client:
        for is_first in (True, False):
            hits = engine.statistics().prefix_cache_hits
            usage = (await client.post(path, json=BODIES[path])).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == engine.statistics().prefix_cache_hits - hits
            assert (cached >= 112 * path.count("two") + 112) or is_first
        options = {"stream": True, "stream_options": {"include_usage": True}}
        events = (await client.post(path, json=BODIES[path] | options)).text.split("data: ")
        assert json.loads(events[-2])["usage"] == usage


async def test_a_deadline_that_has_passed_is_not_tried_again() -> None:
    """OpenAI's and Anthropic's clients try any other 5xx again, and would wait as long once more."""
    async with FakeAsyncLLM("a" * 100, token_delay=1.0) as engine, client_of(engine) as client:
        bodies = BODIES | {"/v1/messages": BODIES["/v1/chat/completions"] | {"model": "fake", "max_tokens": 9}}
        for path, body in bodies.items():
            answer = await client.post(path, json=body | {"deadline": 0.05})
            assert (answer.status_code, answer.headers["x-should-retry"]) == (504, "false"), answer.text


@pytest.mark.parametrize("error", [InternalError("each step raises"), WorkerDiedError("of it", is_of_request=True)])
async def test_a_request_that_fails_in_the_engine_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: EngineError
) -> None:
    """It would end a worker once more."""
    async with FakeAsyncLLM("yes") as engine, client_of(engine) as client:

        def fail(*args: Any, **options: Any) -> Any:
            raise error

        for name in ("generate", "stream", "stream_chat"):
            monkeypatch.setattr(engine, name, fail)
        for path, body in BODIES.items():
            answer = await client.post(path, json=body)
            assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false"), answer.text
