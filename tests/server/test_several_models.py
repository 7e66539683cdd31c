"""Several models behind one application: each is loaded when it is asked for, and only as many as may be."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from aengine import InvalidRequestError
from aengine.server import AwakeModels, create_app
from aengine.server.in_process import streaming_transport
from aengine.server.several import awake, early_answer
from aengine.testing import FakeAsyncLLM

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "PATIENCE", 0.0)


def chat(model: object, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": HELLO, "max_tokens": 50, **more}


@asynccontextmanager
async def served(
    most_awake: int | None = 1, wait: float = 60.0, token_delay: float = 0.0, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, FakeAsyncLLM], AwakeModels]]:
    engines = {name: FakeAsyncLLM(f"from {name}", token_delay=token_delay) for name in ("a", "b")}
    models = AwakeModels(engines, most_awake=most_awake, wait=wait)
    app = create_app(models, **options)
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=streaming_transport(app), base_url="http://several") as client:
            yield client, engines, models
    assert {engine.state for engine in engines.values()} <= {"new", "closed"}


def states(engines: dict[str, FakeAsyncLLM]) -> list[str]:
    return [engine.state for engine in engines.values()]


async def test_each_model_answers_by_its_name_and_sleeps_for_the_other() -> None:
    async with served() as (client, engines, _):
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(one["id"], one["state"], one["max_model_len"]) for one in listed] == [
            ("a", "new", None),
            ("b", "new", None),
        ]
        for name in "abab":
            answer = await client.post("/v1/chat/completions", json=chat(name))
            assert answer.json()["choices"][0]["message"]["content"] == f"from {name}"
            assert answer.json()["model"] == name
            assert [state == "running" for state in states(engines)] == [name == "a", name == "b"]
        assert [one["state"] for one in (await client.get("/v1/models")).json()["data"]] == ["asleep", "running"]
        assert (await client.get("/v1/models/b")).json()["state"] == "running"
        message = {"model": "a", "max_tokens": 50, "messages": HELLO}
        assert (await client.post("/v1/messages", json=message)).json()["content"][0]["text"] == "from a"
        response = (await client.post("/v1/responses", json={"model": "b", "input": "hello"})).json()
        assert (await client.get(f"/v1/responses/{response['id']}")).json() == response
        more = {"model": "a", "input": "again", "previous_response_id": response["id"]}
        assert (await client.post("/v1/responses", json=more)).json()["model"] == "a"
        metrics = (await client.get("/metrics")).text
        assert 'model_name="a"' in metrics and 'model_name="b"' in metrics
        assert [(await client.get(path)).status_code for path in ("/livez", "/readyz", "/health", "/version")] == [
            200
        ] * 4
        assert "/v1/chat/completions" in (await client.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/v1/chat/completions", chat("c"), 404, "the model 'c' is not served here; served: 'a', 'b'"),
        ("/v1/chat/completions", {"messages": HELLO}, 400, "model must be one of those that are served: 'a', 'b'"),
        ("/v1/chat/completions", chat(["a"]), 400, "model must be one of"),
        ("/v1/chat/completions", [1], 400, "model must be one of"),
        ("/v1/chat/completions", chat("a", surprise=1), 400, "surprise is not supported"),
        ("/v1/completions", {"model": "a", "prompt": "x" * 3000}, 413, "at most 2000 bytes"),
        ("/v1/nothing", {}, 404, "Not Found"),
        ("/tokenizer_info", {}, 405, "Method Not Allowed"),
    ],
)
async def test_wrong_requests(path: str, body: Any, status: int, text: str) -> None:
    async with served(max_body_bytes=2000) as (client, engines, _):
        answer = await client.post(path, json=body)
        assert answer.status_code == status and text in answer.json()["error"]["message"], answer.text
        assert "surprise" in str(body) or states(engines) == ["new", "new"]


async def test_the_page_lists_the_models_and_talks_to_one() -> None:
    async with served(api_keys="secret") as (client, engines, _):
        assert (await client.get("/")).status_code == (await client.get("/page/page.js")).status_code == 200
        assert (await client.get("/stats")).status_code == 401
        client.headers["authorization"] = "Bearer secret"
        assert (await client.get("/stats")).json() == {
            "models": [{"id": "a", "state": "new"}, {"id": "b", "state": "new"}]
        }
        assert (await client.get("/stats?model=a")).json() == {"model": "a", "state": "new"}
        assert states(engines) == ["new", "new"], "looking at them loads none"
        await client.post("/v1/chat/completions", json=chat("a"))
        stats = (await client.get("/stats?model=a")).json()
        assert (stats["model"], stats["state"], stats["num_finished"]) == ("a", "running", 1)
        assert (await client.get("/stats?model=c")).status_code == 404
    async with served(page=False) as (client, _, _):
        assert [(await client.get(path)).status_code for path in ("/", "/stats")] == [404, 404]


async def test_what_changes_a_model_says_which(tmp_path: Path) -> None:
    key = {"authorization": "Bearer admin"}
    async with served(most_awake=2, admin_key="admin", lora_dir=tmp_path) as (client, engines, _):
        for name in "ab":
            await client.post("/v1/chat/completions", json=chat(name))
        for path, level in (
            ("/sleep?model=b", None),
            ("/sleep?model=a&level=2", None),
            ("/sleep?model=a", {"level": 1}),
        ):
            assert (await client.post(path, headers=key, json=level)).json() == {"is_sleeping": True}, path
        assert states(engines) == ["asleep", "asleep"]
        assert (await client.post("/wake_up?model=b", headers=key)).json() == {"is_sleeping": False}
        assert states(engines) == ["asleep", "running"]
        assert (await client.post("/wake_up?model=c", headers=key)).status_code == 404
        named = {"lora_name": "b", "lora_path": "x"}
        taken = await client.post("/v1/load_lora_adapter?model=a", headers=key, json=named)
        assert taken.status_code == 400 and "another model's" in taken.text


async def test_nobody_without_a_key_wakes_a_model() -> None:
    async with served(api_keys="secret") as (client, engines, _):
        assert (await client.post("/v1/chat/completions", json=chat("a"))).status_code == 401
        assert states(engines) == ["new", "new"]
        answer = await client.post("/v1/chat/completions", json=chat("a"), headers={"authorization": "Bearer secret"})
        assert answer.status_code == 200


async def test_a_model_stays_awake_while_it_answers() -> None:
    async with served(token_delay=0.001) as (client, engines, _):
        stream = client.stream("POST", "/v1/chat/completions", json=chat("a", stream=True))
        async with stream as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            other = asyncio.create_task(client.post("/v1/chat/completions", json=chat("b")))
            rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert "".join(rest).count('"content"') > 1
        assert (await other).json()["choices"][0]["message"]["content"] == "from b"
        assert [state == "running" for state in states(engines)] == [False, True]


async def test_what_finds_no_room_is_told_when_to_come_again_and_a_client_may_leave() -> None:
    async with served(wait=0.05, token_delay=0.5) as (client, engines, models):
        async with client.stream("POST", "/v1/chat/completions", json=chat("a", stream=True)) as answer:
            assert answer.status_code == 200
            refused = await client.post("/v1/chat/completions", json=chat("b"))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert "has no room: requests are being answered by 'a'" in refused.json()["error"]["message"]
            leaving = asyncio.create_task(client.post("/v1/chat/completions", json=chat("b")))
            while not models.statistics().num_waiting:
                await asyncio.sleep(0)
            leaving.cancel()
            while models.statistics().num_waiting:
                await asyncio.sleep(0)
            assert states(engines) == ["running", "new"]


@pytest.mark.parametrize(
    ("path", "more", "ending"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, "data: [DONE]"),
        ("/v1/completions", {"prompt": "hello"}, "data: [DONE]"),
        ("/v1/messages", {"messages": HELLO}, "event: error"),
        ("/v1/responses", {"input": "hello", "max_tokens": None}, "event: error"),
    ],
)
async def test_comments_keep_a_stream_alive_while_its_model_waits(
    monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any], ending: str
) -> None:
    monkeypatch.setattr(early_answer, "PING_SECONDS", 0.005)
    body = {key: value for key, value in (chat("b", stream=True) | {"messages": None} | more).items() if value}
    async with served(wait=0.05) as (client, engines, models):
        async with models.use("a"):
            lines = (await client.post(path, json=body)).text.splitlines()
            assert lines[:2] == [": ping", ""] and ending in lines
            error = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
            assert "has no room" in json.dumps(error) and (error["type"] == "error" if "event" in ending else True)
            async with client.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
                await anext(answer.aiter_lines())
            while models.statistics().num_waiting:  # the client has left
                await asyncio.sleep(0)
            assert states(engines) == ["running", "new"]
    async with served() as (client, _, models):
        async with models.use("a"):
            asking = asyncio.create_task(client.post(path, json=body))
            await asyncio.sleep(0.03)  # some comments have come
        text = (await asking).text
        assert text.startswith(": ping")
        assert "from b" in "".join(re.findall(r'"(?:content|text|delta)":"([^"]*)"', text))


async def test_who_holds_a_model_keeps_it_awake() -> None:
    """Also between its turn and its request."""
    engine = FakeAsyncLLM("a", sleep_after=0.005)
    models = AwakeModels({"a": engine})
    async with models.use("a"):
        await asyncio.sleep(0.05)  # it would have fallen asleep by now
        assert engine.state == "running"
    while not engine.is_sleeping:
        await asyncio.sleep(0.001)
    await models.aclose()


def test_names_of_models_are_those_they_are_given_by() -> None:
    with pytest.raises(InvalidRequestError, match="the names that they are given by"):
        create_app({"a": FakeAsyncLLM("x")}, model_names="b")
    with pytest.raises(InvalidRequestError, match="at least one model"):
        create_app({})
