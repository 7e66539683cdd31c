"""`AEngineEmbeddings`: embeddings of LangChain over an engine in the same process."""

from __future__ import annotations

from typing import Any

from ..async_llm import AsyncLLM
from ..llm import LLM
from .openai_style import async_side, blocking_side

try:
    from langchain_core.embeddings import Embeddings
except ImportError as error:
    raise ImportError(f"{__name__} needs langchain-core: pip install langchain-core ({error})") from error

__all__ = ["AEngineEmbeddings"]


class AEngineEmbeddings(Embeddings):
    """Embeddings of LangChain that an engine computes.

    The async methods need an engine on the same event loop, the blocking ones an `LLM`, or an `AsyncLLM` with
    ``own_thread=True``. The engine's errors are raised as they are.
    """

    def __init__(
        self,
        engine: AsyncLLM | LLM,
        *,
        query_prompt_name: str | None = None,
        document_prompt_name: str | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            engine: running when a call is made.
            query_prompt_name, document_prompt_name: the checkpoint's prompts that queries and documents begin with.
            options: of `AsyncLLM.embed`: dimensions, normalize, truncate, deadline, priority, ...
        """
        self._engine = engine
        self._prompts = query_prompt_name, document_prompt_name
        self._options = options

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        found = blocking_side(self._engine).embed(texts, prompt_name=self._prompts[1], **self._options)
        return found.tolist()

    def embed_query(self, text: str) -> list[float]:
        found = blocking_side(self._engine).embed(text, prompt_name=self._prompts[0], **self._options)
        return found[0].tolist()

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        found = await async_side(self._engine).embed(texts, prompt_name=self._prompts[1], **self._options)
        return found.tolist()

    async def aembed_query(self, text: str) -> list[float]:
        found = await async_side(self._engine).embed(text, prompt_name=self._prompts[0], **self._options)
        return found[0].tolist()
