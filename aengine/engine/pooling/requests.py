"""Calls that give vectors and scores in place of text: embed, score, rerank, classify.

Each is one `PoolingRequest`, and something to do with its result.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from ...errors import InvalidRequestError
from ...limits.bounds import MAX_INPUTS, MAX_SCORED_COMPLETIONS
from ...limits.values import shown, unknown_name
from ...outputs import Usage

if TYPE_CHECKING:
    from typing import Unpack

    import numpy as np
    from numpy.typing import NDArray

EmbedInput = str | Sequence[int]
"""A text, or its token ids."""


class PoolingOptions(TypedDict, total=False):
    """The keyword arguments that embed, score, rerank and classify have in common."""

    truncate: bool
    """Cut texts that are too long, at their end. False (the default): they are a ContextLengthError."""
    deadline: float | None
    """Seconds from now by which all of the call must be done."""
    priority: int
    """Lower is served earlier; equal ones in order of arrival. Default: 0."""
    cache_salt: str | None
    """Prefix KV is shared only among requests of equal salt."""
    lora: str | None
    """The adapter with which the texts are computed, one of the setting `loras` or of `AsyncLLM.add_lora`."""
    tenant: str | None
    """Who asks: tenants get fair shares of the engine (docs/tenants.md)."""


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document, and how well it answers the query."""

    index: int  # the document's place among those given
    score: float  # higher is better
    document: str


@dataclass(frozen=True, slots=True, eq=False)
class ScoredCompletion:
    """A completion's tokens, and how likely they are after the prompt. Its arrays can't be written."""

    token_ids: NDArray[np.int64]  # [n]
    logprobs: NDArray[np.float32]  # [n], each after those before it
    is_greedy: bool  # each token is the likeliest at its place

    @property
    def logprob(self) -> float:
        """The completion's log-probability: the sum of its tokens'."""
        return float(self.logprobs.sum(dtype="float64"))


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """A call for vectors or scores. Plain data."""

    task: Literal["embed", "classify", "score", "completions"]
    inputs: Sequence[Any]
    """Texts or token ids; for "score" pairs of texts, for "completions" of a prompt and what follows it."""
    prompt: str | None = None
    """The beginning of each text."""
    prompt_name: str | None = None
    """The name of the checkpoint's prompt that each text begins with."""
    instruction: str | None = None
    """What to look for, in words, for a reranker that takes an instruction."""
    normalize: bool = True
    dimensions: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """`PoolingOptions`."""

    def __post_init__(self) -> None:
        if len(self.inputs) > MAX_INPUTS:
            message = f"there are {len(self.inputs)} texts: one call may have {MAX_INPUTS}"
            raise InvalidRequestError(message, param="inputs")
        known = PoolingOptions.__annotations__.keys()
        for name in self.options.keys() - known:
            raise InvalidRequestError(unknown_name(name, set(known)), param=name)
        for name, value in (("normalize", self.normalize), ("truncate", self.options.get("truncate", False))):
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{name}={shown(value)} is not valid: it must be True or False", param=name)
        for name in ("prompt", "prompt_name", "instruction"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidRequestError(f"{name} must be a string, or None, not {type(value).__name__}", param=name)
        if self.prompt is not None and self.prompt_name is not None:
            raise InvalidRequestError("give a prompt or a prompt_name, not both", param="prompt_name")
        size = self.dimensions
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            message = f"dimensions={shown(size)} is not valid: it must be an integer >= 1, or None"
            raise InvalidRequestError(message, param="dimensions")


class PoolingResult(NamedTuple):
    """The answer to a `PoolingRequest`."""

    values: NDArray[np.float32]
    """[n, size]: vectors, logits of classes; of "score" [n, 1]; of "completions" a row for each token of them: the
    place of its pair, its id, its log-probability, the likeliest's id."""
    usage: Usage
    """Tokens of all inputs together. None is generated."""


class PoolingCalls:
    """Calls of an engine whose model gives vectors or scores."""

    pool: Callable[[PoolingRequest], Coroutine[Any, Any, PoolingResult]]
    """Answers a request as it is: what the other calls are made of, with the number of tokens."""

    async def embed(
        self,
        inputs: EmbedInput | Sequence[EmbedInput],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> NDArray[np.float32]:
        """Return the embeddings of texts: float32 [n, size], also for one text.

        Args:
            inputs: a text, or its token ids; or a list of either.
            normalize: make each vector's length 1.
            dimensions: only so many elements, the first (for models that were trained for it); normalised after that.
            prompt: what each text begins with, as ``"query: "``.
            prompt_name: a prompt of the checkpoint's (config_sentence_transformers.json), as ``"query"``. Without
                either, its default prompt, if it has one. Token ids get none.
            options: truncate, deadline, priority, cache_salt, lora, tenant: see `PoolingOptions`.

        Cancelling the task that awaits it ends its requests.

        Raises:
            InvalidRequestError: the model gives no embeddings, or something about the inputs or options is wrong.
            ContextLengthError: a text is too long, and truncate is False.
            EngineOverloadedError, DeadlineExceededError, EngineClosedError, EngineError: as of `AsyncLLM.stream`.
        """
        asked = PoolingRequest(
            "embed",
            _listed(inputs),
            prompt=prompt,
            prompt_name=prompt_name,
            normalize=normalize,
            dimensions=dimensions,
            options=options,
        )
        return (await self.pool(asked)).values

    async def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], **options: Unpack[PoolingOptions]
    ) -> NDArray[np.float32]:
        """Return how well documents fit queries: float32 [n], higher is better.

        One query is scored with each document; of several, each with the document at its place. A cross-encoder scores
        pairs, as its config says (by default a number from 0 to 1); a decoder that generates by how likely it answers
        "yes" to whether the document meets the query (0 to 1); a model of embeddings by their cosine. Errors as of
        `embed`.
        """
        return (await self.pool(PoolingRequest("score", _pairs(queries, documents), options=options))).values[:, 0]

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        **options: Unpack[PoolingOptions],
    ) -> list[RankedDocument]:
        """Return the documents by how well they answer the query, the best first; scored as `score` does.

        Args:
            top_n: return only so many.
            instruction: what to look for, for rerankers that are told so in words (Qwen3-Reranker).

        Errors as of `embed`.
        """
        if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
            raise InvalidRequestError(f"top_n={shown(top_n)} is not valid: it must be an integer >= 1", param="top_n")
        if not isinstance(query, str):
            raise InvalidRequestError(f"query must be a string, not {type(query).__name__}", param="query")
        asked = PoolingRequest("score", _pairs(query, documents), instruction=instruction, options=options)
        return _ranked(documents, await self.pool(asked), top_n)

    async def classify(
        self, inputs: EmbedInput | Sequence[EmbedInput], **options: Unpack[PoolingOptions]
    ) -> NDArray[np.float32]:
        """Return the logits of the model's classes, float32 [n, num_labels]; the names of these are
        ``describe()["labels"]``. Errors as of `embed`."""
        return (await self.pool(PoolingRequest("classify", _listed(inputs), options=options))).values

    async def score_completions(
        self, prompt: EmbedInput, completions: Sequence[EmbedInput], **options: Unpack[PoolingOptions]
    ) -> list[ScoredCompletion]:
        """Return how likely each of the completions is after the prompt, by the model's own probabilities.

        The prompt is computed once, and its KV shared. A text is encoded together with the prompt's: its tokens are
        those that the prompt alone does not begin with. Token ids are taken as they are. ``truncate`` has no effect.

        Raises:
            InvalidRequestError: the model generates no text, or something about the prompt or the completions is wrong.
            ContextLengthError: the prompt and a completion are too long.
            EngineOverloadedError, DeadlineExceededError, EngineClosedError, EngineError: as of `AsyncLLM.stream`.
        """
        if isinstance(completions, str | bytes | Mapping) or not isinstance(completions, Sequence):
            message = f"completions must be a list of texts or of token ids, not {type(completions).__name__}"
            raise InvalidRequestError(message, param="completions")
        if len(completions) > MAX_SCORED_COMPLETIONS:
            message = f"there are {len(completions)} completions: one call may have {MAX_SCORED_COMPLETIONS}"
            raise InvalidRequestError(message, param="completions")
        for param, given in (("prompt", prompt), *(("completions", one) for one in completions)):
            if isinstance(given, bytes | Mapping) or not isinstance(given, Sequence) or not given:
                raise InvalidRequestError(f"{param}: {shown(given)} is no text and no token ids, or empty", param=param)
        asked = PoolingRequest("completions", [(prompt, one) for one in completions], options=options)
        return _scored((await self.pool(asked)).values, len(completions))


def _scored(rows: NDArray[np.float32], num_completions: int) -> list[ScoredCompletion]:
    if not num_completions:
        return []
    places, ids, likeliest = rows[:, (0, 1, 3)].astype("int64").T
    is_other = ids != likeliest
    for array in (ids, rows):
        array.setflags(write=False)
    ends = places.searchsorted(range(num_completions + 1)).tolist()
    return [
        ScoredCompletion(ids[begin:end], rows[begin:end, 2], not is_other[begin:end].any())
        for begin, end in pairwise(ends)
    ]


def _ranked(documents: Sequence[str], result: PoolingResult, top_n: int | None) -> list[RankedDocument]:
    texts = [documents] if isinstance(documents, str) else documents
    ranked = [RankedDocument(i, score, texts[i]) for i, score in enumerate(result.values[:, 0].tolist())]
    ranked.sort(key=lambda one: -one.score)
    return ranked[:top_n]


def _listed(inputs: Any) -> list[Any]:
    """Return the inputs as a list. Raises InvalidRequestError for what is neither a text, ids, nor a list of these."""
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, bytes | bytearray | Mapping) or not isinstance(inputs, Sequence):
        wanted = "a text, token ids, or a list of either"
        raise InvalidRequestError(f"inputs must be {wanted}, not {type(inputs).__name__}", param="inputs")
    is_one = bool(inputs) and isinstance(inputs[0], int)
    return [inputs] if is_one else list(inputs)


def _pairs(queries: Any, documents: Any) -> list[tuple[str, str]]:
    sides = []
    for name, given in (("queries", queries), ("documents", documents)):
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, Sequence) or isinstance(texts, bytes) or not all(isinstance(t, str) for t in texts):
            raise InvalidRequestError(f"{name} must be a text or a list of texts", param=name)
        sides.append(list(texts))
    first, second = sides
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        message = f"{len(first)} queries and {len(second)} documents: give one query, or as many as documents"
        raise InvalidRequestError(message, param="queries")
    return list(zip(first, second, strict=True))
