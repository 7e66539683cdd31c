"""`AEngineEmbedding`: embeddings of LlamaIndex over an engine in the same process."""

from __future__ import annotations

from typing import Any

from ..async_llm import AsyncLLM
from ..llm import LLM
from .openai_style import async_side, blocking_side

try:
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr
except ImportError as error:
    raise ImportError(f"{__name__} needs llama-index-core: pip install llama-index-core ({error})") from error

__all__ = ["AEngineEmbedding", "OverEngine"]


class OverEngine(BaseModel):
    """Parent of LlamaIndex's models that an engine answers: they have the engine, and its model's name."""

    _engine: AsyncLLM | LLM = PrivateAttr()

    def __init__(self, engine: AsyncLLM | LLM, **values: Any) -> None:
        """
        Args:
            engine: running when a call is made.
            values: the fields, and those of LlamaIndex's own class (callback_manager, ...).
        """
        super().__init__(**{"model_name": async_side(engine).config.model_name, **values})
        self._engine = engine


class AEngineEmbedding(OverEngine, BaseEmbedding):
    """Embeddings of LlamaIndex that an engine computes.

    The async methods need an engine on the same event loop, the blocking ones an `LLM`, or an `AsyncLLM` with
    ``own_thread=True``. The engine's errors are raised as they are.
    """

    query_prompt_name: str | None = Field(default=None, description="The checkpoint's prompt of queries.")
    text_prompt_name: str | None = Field(default=None, description="The checkpoint's prompt of documents.")
    options: dict[str, Any] = Field(default_factory=dict, description="Of AsyncLLM.embed.")

    @classmethod
    def class_name(cls) -> str:
        return "AEngineEmbedding"

    def _blocking(self, texts: str | list[str], prompt_name: str | None) -> list[list[float]]:
        found = blocking_side(self._engine).embed(texts, prompt_name=prompt_name, **self.options)
        return found.tolist()

    async def _async(self, texts: str | list[str], prompt_name: str | None) -> list[list[float]]:
        found = await async_side(self._engine).embed(texts, prompt_name=prompt_name, **self.options)
        return found.tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._blocking(query, self.query_prompt_name)[0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._blocking(text, self.text_prompt_name)[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._blocking(texts, self.text_prompt_name)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return (await self._async(query, self.query_prompt_name))[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self._async(text, self.text_prompt_name))[0]

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await self._async(texts, self.text_prompt_name)
