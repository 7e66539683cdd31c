"""The application's OpenAPI document, and what schemathesis makes of it: no body of whatever kind is a 500."""

from __future__ import annotations

import asyncio
import itertools
import json
import warnings
from collections import Counter
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pairs import some
from pydantic import BaseModel
from starlette.routing import Route

from aengine.server import create_app
from aengine.server.anthropic.requests import MessagesBody
from aengine.server.in_process import streaming_transport
from aengine.server.openai.embeddings import EmbeddingBody, RerankBody
from aengine.server.openai.requests import ChatBody, CompletionBody
from aengine.server.openai.responses.body import ResponseBody
from aengine.server.openai.tokens import TokenizeBody
from aengine.testing import FakeAsyncLLM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    import schemathesis


def client_of(engine: FakeAsyncLLM) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=streaming_transport(create_app(engine)), base_url="http://engine")


async def fetch_document() -> dict[str, Any]:
    async with client_of(FakeAsyncLLM()) as client:
        document: dict[str, Any] = (await client.get("/openapi.json")).json()
        return document


DOCUMENT = asyncio.run(fetch_document())
OPERATIONS = [
    (path, method, mode)
    for path, operations in DOCUMENT["paths"].items()
    for method in operations
    for mode in ("positive", "negative")
    if "requestBody" in operations[method] or mode == "positive"
]


def test_every_route_is_described() -> None:
    described = create_app(FakeAsyncLLM(), page=False)  # but for the page's own files
    routes = [route for route in described.routes if isinstance(route, Route) and not route.path.endswith("/")]
    for route in routes:
        for method in (route.methods or set()) - {"HEAD"}:
            operation = DOCUMENT["paths"][route.path.replace(":path}", "}")][method.lower()]
            has_body = method == "POST" and not route.path.endswith("/cancel")
            assert operation["summary"] and ("requestBody" in operation) == has_body, route.path
    ids = [one["operationId"] for operations in DOCUMENT["paths"].values() for one in operations.values()]
    assert len(set(ids)) == len(ids)
    assert "stream" in DOCUMENT["components"]["schemas"]["ChatBody"]["properties"]


@pytest.mark.slow
@pytest.mark.parametrize("count", some([4, 40], 4))
@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS, ids=str)
def test_no_request_is_a_500(path: str, method: str, mode: str, count: int) -> None:
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method.upper()]
    engine = FakeAsyncLLM(max_model_len=256)
    client = client_of(engine)
    statuses: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    @settings(
        max_examples=count if method == "post" else 2,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        runner.run(send(case.as_transport_kwargs(base_url="http://engine")))

    async def send(asked: dict[str, Any]) -> None:
        content = json.dumps(asked["json"]).encode() if "json" in asked else asked.get("data")
        answer = await client.request(
            asked["method"], asked["url"], params=asked["params"], content=content, headers=asked["headers"]
        )
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, f"{answer.status_code} {answer.text}: {asked}"
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    async def check_idle() -> None:
        assert engine.statistics().num_running == 0

    with asyncio.Runner() as runner:
        runner.run(engine.start())
        try:
            check()
            runner.run(check_idle())
        finally:
            runner.run(client.aclose())
            runner.run(engine.aclose())
    print(dict(statuses))


JSON_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([10**19, -(10**400), 1e300, "\ud800", "", "auto", "required", "$", "\0"]),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["type", "name", "role", "content", "function", "id", "schema", "\ud800", "text", "1"]),
            st.one_of(inner, st.sampled_from(["function", "message", "json_schema", "user", "object", "text"])),
            max_size=4,
        ),
    ),
    max_leaves=8,
)
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatBody, {"messages": MESSAGES}),
    ("/v1/completions", CompletionBody, {"prompt": "hello"}),
    ("/v1/responses", ResponseBody, {"input": MESSAGES}),
    ("/v1/messages", MessagesBody, {"messages": MESSAGES, "model": "fake", "max_tokens": 4}),
    ("/tokenize", TokenizeBody, {"messages": MESSAGES}),
    ("/v1/embeddings", EmbeddingBody, {"input": "hello"}),
    ("/rerank", RerankBody, {"query": "hello", "documents": ["hello"]}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "kind", "body"), BODIES, ids=lambda value: value if isinstance(value, str) else "")
def test_no_value_of_a_field_is_a_500(path: str, kind: type[BaseModel], body: dict[str, Any]) -> None:
    """Of each field several, alone and beside a value of the next field; and of what messages consist of."""
    engine = FakeAsyncLLM(max_model_len=256)
    client = client_of(engine)
    changes = st.fixed_dictionaries(dict.fromkeys(sorted(kind.model_fields), JSON_VALUES))

    @given(changes=changes, inside=st.lists(JSON_VALUES, min_size=10, max_size=10))
    @settings(max_examples=3, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    def check(changes: dict[str, Any], inside: list[Any]) -> None:
        for first, second in itertools.pairwise([*changes, min(changes)]):
            runner.run(send(body | {first: changes[first]}))
            runner.run(send(body | {first: changes[first], second: changes[second]}))
        name, value = next(iter(body.items()))
        for one in inside if isinstance(value, list) else ():
            runner.run(send(body | {name: [*value, one]}))
            runner.run(send(body | {name: [{**value[0], "content": one, "tool_calls": one, "type": one}]}))

    async def send(asked: dict[str, Any]) -> None:
        answer = await client.post(path, content=json.dumps(asked), headers={"content-type": "application/json"})
        assert answer.status_code < 500 or answer.status_code == 504, f"{answer.status_code} {answer.text}: {asked}"
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    with asyncio.Runner() as runner:
        runner.run(engine.start())
        try:
            check()
        finally:
            runner.run(client.aclose())
            runner.run(engine.aclose())


def test_an_application_is_made_without_its_description(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a tenth of a second, and an application is made for each client in the same process."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was not asked for")

    monkeypatch.setattr("aengine.server.app.openapi_document", refuse)
    create_app(FakeAsyncLLM())
