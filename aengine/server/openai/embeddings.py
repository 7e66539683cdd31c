"""`/v1/embeddings`, OpenAI's; `/v1/rerank`, as Cohere's and Jina's; `/v1/score`. The last two as vLLM has them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StrictBool
from starlette.requests import Request
from starlette.responses import Response

from ...engine.pooling.requests import PoolingRequest, PoolingResult
from ...outputs import Usage
from ..http import HTTPError, while_connected
from ..logs import note_usage
from ..service import Service
from .answers import answer_id
from .requests import Body, Ignored, Many, ModelBody, Prompts, Text, TokenIds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Said = Annotated[Text, Field(min_length=1)]


class PoolingBody(ModelBody):
    model: str | None = None
    user: Ignored = None
    truncate: StrictBool = False
    truncate_prompt_tokens: Literal[-1] | None = Field(None, description="-1: as `truncate`, vLLM's name for it.")
    priority: int = 0
    cache_salt: str | None = None

    def options(self) -> dict[str, Any]:
        truncate = self.truncate or self.truncate_prompt_tokens is not None
        own = {"truncate": truncate, "priority": self.priority, "cache_salt": self.cache_salt}
        return own | {"lora": self.adapter} | self._caller.asker.options(self.cache_salt)


class EmbeddingBody(PoolingBody):
    input: Annotated[str | Many[str] | TokenIds | Many[TokenIds], Prompts]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    normalize: StrictBool = True
    prompt_name: str | None = None

    def field_names(self) -> dict[str, str]:
        return {"inputs": "input"}

    def request(self) -> PoolingRequest:
        """Return the pooling request of the body. Raises HTTPError 400 and InvalidRequestError."""
        if not self.input:
            raise HTTPError(400, "input is empty: give it at least one text", code="invalid_value", param="input")
        is_one = isinstance(self.input, str) or isinstance(self.input[0], int)
        return PoolingRequest(
            "embed",
            [self.input] if is_one else self.input,
            prompt_name=self.prompt_name,
            normalize=self.normalize,
            dimensions=self.dimensions,
            options=self.options(),
        )


class Document(Body):
    text: str


class RerankBody(PoolingBody):
    query: Said
    documents: Annotated[Many[str | Document], Field(min_length=1), Prompts]
    top_n: Annotated[int, Field(ge=0)] | None = Field(None, description="0, null: all.")
    return_documents: StrictBool = True
    instruction: str | None = None

    def field_names(self) -> dict[str, str]:
        return {"inputs": "documents"}


class ScoreBody(PoolingBody):
    text_1: Annotated[Said | Many[Said], Prompts]
    text_2: Annotated[str | Many[str], Prompts]
    instruction: str | None = None

    def field_names(self) -> dict[str, str]:
        return {"inputs": "text_2"}


async def embeddings(service: Service, request: Request) -> Response:
    """Answer with the embeddings of texts"""
    body = await service.body(request, EmbeddingBody)
    result = await while_connected(request, service.engine.pool(body.request()))
    note_usage(request, result)
    head = {"object": "list", "model": service.model_of(body), "usage": _usage(result.usage)}
    values = result.values
    if body.encoding_format == "base64":

        def in_base64() -> dict[str, Any]:
            return head | {"data": _data([base64.b64encode(_bytes(row)).decode() for row in values])}

        return await service.answer(in_base64, len(values))
    return await service.answer(lambda: head | {"data": _data(values.tolist())}, values.size)


async def rerank(service: Service, request: Request) -> Response:
    """Answer with documents by how well they answer a query, the best first"""
    body = await service.body(request, RerankBody)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    pairs = [(body.query, text) for text in texts]
    result = await _scored(service, request, pairs, body, body.instruction)
    name = answer_id("rerank", request)
    head = {"id": name.text, "model": service.model_of(body), "usage": _usage(result.usage)}

    def answer() -> dict[str, Any]:
        scores: list[float] = result.values[:, 0].tolist()
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
        results = [
            {"index": i}
            | ({"document": {"text": texts[i]}} if body.return_documents else {})
            | {"relevance_score": scores[i]}
            for i in best
        ]
        return head | {"results": results}

    return await service.answer(answer, len(texts), name.headers)


async def score(service: Service, request: Request) -> Response:
    """Answer with how well texts fit each other"""
    body = await service.body(request, ScoreBody)
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second) or not first:
        message = f"{len(first)} and {len(second)} texts: give one text_1, or as many as text_2"
        raise HTTPError(400, message, code="invalid_value", param="text_1")
    pairs = list(zip(first, second, strict=True))
    result = await _scored(service, request, pairs, body, body.instruction)
    name = answer_id("score", request)
    head = {"id": name.text, "object": "list", "model": service.model_of(body), "usage": _usage(result.usage)}

    def answer() -> dict[str, Any]:
        scores = result.values[:, 0].tolist()
        return head | {"data": [{"index": i, "object": "score", "score": one} for i, one in enumerate(scores)]}

    return await service.answer(answer, len(pairs), name.headers)


async def _scored(
    service: Service, request: Request, pairs: Sequence[tuple[str, str]], body: PoolingBody, instruction: str | None
) -> PoolingResult:
    asked = PoolingRequest("score", pairs, instruction=instruction, options=body.options())
    result = await while_connected(request, service.engine.pool(asked))
    note_usage(request, result)
    return result


def _data(vectors: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]


def _bytes(row: NDArray[np.float32]) -> bytes:
    """Return float32, the least significant byte first, whatever the machine's order."""
    return row.astype("<f4").tobytes()


def _usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
