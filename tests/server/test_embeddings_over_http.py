"""Embeddings, reranking and scores over HTTP: OpenAI's own client, vLLM's bodies, and errors of OpenAI's shape."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from aengine.engine.pooling.requests import PoolingRequest, PoolingResult
from aengine.remote import connect, serve_engine
from aengine.server import create_app
from aengine.server.http import json_in_pieces
from aengine.server.in_process import openai_client, streaming_transport
from aengine.testing import FakeAsyncLLM


@pytest.fixture(params=["this process", "another"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    """The fake engine, or another process' side of it."""
    async with FakeAsyncLLM() as fake:
        if request.param == "this process":
            yield fake
            return
        path = str(tmp_path / "engine.sock")
        async with serve_engine(fake, path), connect(path) as remote:
            yield remote


def client_of(engine: Any) -> httpx.AsyncClient:
    app = create_app(engine, model_names="fake")
    return httpx.AsyncClient(transport=streaming_transport(app), base_url="http://engine")


async def test_openais_client(engine: Any) -> None:
    expected = await engine.embed(["one", "two"])
    async with openai_client(engine) as client:
        for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = await client.embeddings.create(model="fake", input=["one", "two"], **encoding)
            assert [one.index for one in answer.data] == [0, 1] and answer.model == "fake"
            vectors = [one.embedding for one in answer.data]
            if encoding.get("encoding_format") == "base64":
                vectors = [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in vectors]
            assert np.abs(np.array(vectors) - expected).max() < 1e-6
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == 6
        ids = [65, 66, 67]
        for given in ("one", ids, [ids]):
            answer = await client.embeddings.create(model="fake", input=given, dimensions=4)
            assert len(answer.data) == 1 and len(answer.data[0].embedding) == 4
        many = await client.embeddings.create(model="fake", input=["x"] * 2000)
        assert len(many.data) == 2000


async def test_rerank_and_score(engine: Any) -> None:
    texts = ["b", "a query", "c"]
    async with client_of(engine) as client:
        body: dict[str, Any] = {"model": "fake", "query": "a query", "documents": [*texts[:2], {"text": "c"}]}
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            answer = (await client.post(path, json=body)).json()
            assert answer["results"][0]["index"] == 1 and answer["id"].startswith("rerank-")
            assert [one["document"]["text"] for one in answer["results"]] == [
                texts[one["index"]] for one in answer["results"]
            ]
            scores = [one["relevance_score"] for one in answer["results"]]
            assert len(scores) == 3 and scores == sorted(scores, reverse=True) and scores[0] == pytest.approx(1)
        first = (await client.post("/v1/rerank", json=body | {"top_n": 1, "return_documents": False})).json()
        assert [set(one) for one in first["results"]] == [{"index", "relevance_score"}]
        answer = (await client.post("/v1/score", json={"text_1": "a query", "text_2": texts})).json()
        assert [one["index"] for one in answer["data"]] == [0, 1, 2] and answer["data"][1]["score"] == pytest.approx(1)
        assert answer["usage"]["total_tokens"] > 0


async def test_large_answers_are_written_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    pieces = json_in_pieces

    def noted(content: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return pieces(content)

    monkeypatch.setattr("aengine.server.service.json_in_pieces", noted)
    monkeypatch.setattr("aengine.server.service.FEW_VALUES", 10)
    texts = ["x"] * 20
    async with FakeAsyncLLM() as engine, client_of(engine) as client:
        assert (await client.post("/v1/rerank", json={"query": "a", "documents": texts})).status_code == 200
        assert (await client.post("/v1/score", json={"text_1": "a", "text_2": texts})).status_code == 200
        for encoding in ("float", "base64"):
            body = {"input": texts, "encoding_format": encoding}
            assert (await client.post("/v1/embeddings", json=body)).status_code == 200
    assert threads == ["aengine-http"] * 4


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input"),
        ("/v1/embeddings", {"input": [[1], []]}, "input"),
        ("/v1/embeddings", {"input": [-1]}, "input"),
        ("/v1/embeddings", {"input": {"a": 1}}, "input"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 99}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "q"}, "prompt_name"),
        ("/v1/embeddings", {"input": "a", "nope": 1}, "nope"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    ],
)
async def test_bad_bodies(engine: Any, path: str, body: dict[str, Any], param: str) -> None:
    async with client_of(engine) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param), answer.text


async def test_a_text_that_is_too_long(engine: Any) -> None:
    async with openai_client(engine, max_retries=0) as client:
        long = [65] * 40_000
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model="fake", input=long)
        assert caught.value.code == "context_length_exceeded"
        cut = await client.embeddings.create(model="fake", input=long, extra_body={"truncate_prompt_tokens": -1})
        assert cut.usage.prompt_tokens == 32_768


async def test_a_client_that_leaves_ends_its_requests() -> None:
    async with FakeAsyncLLM(token_delay=0.2) as engine, client_of(engine) as client:
        call = asyncio.ensure_future(client.post("/v1/embeddings", json={"input": ["x"] * 2000}))
        while not engine.statistics().num_running:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while engine.statistics().num_running or engine.statistics().num_waiting:
            await asyncio.sleep(0.01)
        assert engine.statistics().num_aborted > 0


async def test_an_adapter_is_a_model() -> None:
    class Engine(FakeAsyncLLM):
        async def has_lora(self, name: str) -> bool:
            return name == "mine"

        async def pool(self, request: PoolingRequest) -> PoolingResult:
            assert request.options["lora"] == "mine"
            return await super().pool(replace(request, options={}))

    async with Engine() as engine, client_of(engine) as client:
        for path, body in (
            ("/v1/embeddings", {"input": "one"}),
            ("/v1/score", {"text_1": "one", "text_2": "two"}),
            ("/v1/rerank", {"query": "one", "documents": ["two"]}),
        ):
            answer = await client.post(path, json={"model": "mine"} | body)
            assert answer.status_code == 200 and answer.json()["model"] == "mine", path
            assert (await client.post(path, json={"model": "other"} | body)).status_code == 404, path
