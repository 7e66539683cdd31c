"""Embeddings through frameworks: LangChain's own tests, and LlamaIndex's index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from llama_index.core import VectorStoreIndex
from llama_index.core.schema import TextNode

from aengine.integrations.langchain import AEngineEmbeddings
from aengine.integrations.llama_index import AEngineEmbedding
from aengine.testing import FakeAsyncLLM, FakeLLM

_ENGINES: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def llm() -> Iterator[FakeLLM]:
    with FakeLLM() as llm:
        _ENGINES["llm"] = llm
        yield llm
    _ENGINES.clear()


class TestLangChain(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[AEngineEmbeddings]:
        return AEngineEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"engine": _ENGINES["llm"]}


async def test_langchain_options() -> None:
    async with FakeAsyncLLM() as engine:
        embeddings = AEngineEmbeddings(engine, dimensions=4, truncate=True)
        store = await InMemoryVectorStore.afrom_texts(["one", "two", "three"], embeddings)
        found = await store.asimilarity_search("two", k=1)
        assert found[0].page_content == "two" and len(await embeddings.aembed_query("x")) == 4


async def test_llama_index() -> None:
    async with FakeAsyncLLM() as engine:
        model = AEngineEmbedding(engine)
        index = VectorStoreIndex(embed_model=model, nodes=[], use_async=True)
        nodes = [TextNode(text=text) for text in ("one", "two", "three")]
        for node, vector in zip(nodes, await model.aget_text_embedding_batch([n.text for n in nodes]), strict=True):
            node.embedding = vector
        index.insert_nodes(nodes)
        found = await index.as_retriever(similarity_top_k=1).aretrieve("two")
        assert found[0].text == "two" and found[0].score == pytest.approx(1)


def test_llama_index_blocking(llm: FakeLLM) -> None:
    model = AEngineEmbedding(llm, options={"dimensions": 3})
    assert np.allclose(model.get_text_embedding("a"), model.get_query_embedding("a"))
    assert len(model.get_text_embedding_batch(["a"] * 25)) == 25 and len(model.get_text_embedding("a")) == 3
