"""Answers a `PoolingRequest` on the engine's loop: its texts are encoded some at a time, and each is a request.

inputs ──> encoded, in a thread ──> submitted, some at a time ──> vectors ──> embeddings, logits or scores

The longest come first, so that those computed together are of like length. While the worker computes some, the next are
encoded. All end together: the first error, a deadline, or a cancelled caller ends the others.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import ContextLengthError, DeadlineExceededError, InvalidRequestError, RequestError
from ...ipc.messages import NO_RESULTS, Extras, int32
from ...limits.bounds import LONG_TEXT
from ...limits.values import shown
from ...outputs import Usage
from ...params import CallOptions, check_options
from ..core import EngineCore
from ..sampling_extras import prompt_logprobs_extra
from ..streams.prompt_logprobs import joined
from ..streams.token_stream import Token
from ..threads.pools import run_in_thread
from ..threads.turns import acting_for
from ..threads.yield_gil import yield_gil
from ..tokenizer.pooled_texts import YesNoPrompt, encode_texts
from ..tokenizer.prompt import check_token_ids, is_token_id
from ..tokenizer.tokenizer import Tokenizer
from ..user_request import UserRequest
from .requests import PoolingRequest, PoolingResult

T = TypeVar("T")

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

_CHUNK = 64
"""Texts that are encoded at once."""
_LARGE = 1 << 20
"""Bytes of vectors from which on a thread goes through them: some tenths of a millisecond."""
_MANY = 1024
"""Inputs, or token ids in them, from which on a thread goes through them: likewise."""


async def answer_pooling(core: EngineCore, request: PoolingRequest, context: Context | None) -> PoolingResult:
    """See `PoolingCalls.pool`. ``context``: of the caller, for those who listen."""
    core.sleeping.check_takes_requests()
    if "numpy" not in sys.modules:
        await run_in_thread("import", import_module, "numpy")  # importing numpy on the loop would block it
    call = _Call(core, request, context)
    if request.task == "score":
        return await _score(call, request)
    if request.task == "completions":
        return await _score_completions(call, request)
    if request.task not in core.limits.tasks:
        raise InvalidRequestError(_why_not(core, request.task))
    prompt = await _off_loop(len(request.inputs) >= _MANY, _prompt_of, core, request)
    values = await call.run(request.inputs, partial(_encode_inputs, call, prompt))
    if request.task == "embed":
        values = await _off_loop(values.nbytes >= _LARGE, _finished, values, request)
    return PoolingResult(values, call.usage())


async def _off_loop(is_large: bool, function: Callable[..., T], *args: Any) -> T:
    """Call a function, in a thread if its arguments are so large that the loop would notice."""
    return await run_in_thread("pooling", function, *args) if is_large else function(*args)


def _yielding(items: Iterable[T]) -> Iterator[T]:
    """Iterate over the items, and let the loop have the GIL after every few."""
    for number, item in enumerate(items):
        if not number % 256:
            yield_gil()
        yield item


def _why_not(core: EngineCore, task: str) -> str:
    """Return the message for a task that the model does not do, with what would help."""
    if task == "classify":
        return "this model has no head that classifies texts (a ...ForSequenceClassification has)"
    if core.pooling.fault:
        return f"this model gives no embeddings: {core.pooling.fault}"
    if "classify" in core.limits.tasks:
        return "this model classifies texts, and gives no embeddings: call score(), rerank() or classify()"
    return (
        "this model gives no embeddings: its checkpoint does not say how (1_Pooling/config.json); load a model of "
        "embeddings, or start the engine with pooling='last' or 'mean'"
    )


def _finished(values: Vectors, request: PoolingRequest) -> Vectors:
    """Return the embeddings cut to ``dimensions`` and normalised, as asked for. Raises InvalidRequestError for too many
    dimensions."""
    import numpy as np

    size = values.shape[1]
    if request.dimensions is not None:
        if request.dimensions > size:
            message = f"dimensions={request.dimensions}, but this model's embeddings have {size}"
            raise InvalidRequestError(message, param="dimensions")
        values = np.ascontiguousarray(values[:, : request.dimensions])
    return _normalised(values) if request.normalize else values


async def _score(call: _Call, request: PoolingRequest) -> PoolingResult:
    core, pairs = call.core, request.inputs
    tasks, labels = core.limits.tasks, core.ready.get("labels", ())
    are_many = len(pairs) >= _MANY
    await _off_loop(are_many, _check_pairs, pairs)
    tokenizer = call.tokenizer()
    if "classify" in tasks:
        if len(labels) != 1:
            raise InvalidRequestError(f"this model has {len(labels)} classes, and no score: call classify()")
        encode = partial(_encode_pairs, call)
        if core.ready.get("asks_yes_no"):
            question = await run_in_thread("encode", YesNoPrompt, tokenizer, request.instruction)
            encode = partial(_encode_questions, call, question, is_classified=True)
        logits = await call.run(pairs, encode)
        is_plain = core.pooling.score_activation.endswith("Identity")
        return PoolingResult(logits if is_plain else _sigmoid(logits), call.usage())
    if "embed" in tasks:
        texts, *sides = await _off_loop(are_many, _distinct_texts, pairs)
        vectors = await call.run(texts, partial(_encode_inputs, call, core.pooling.default_prompt))
        return PoolingResult(await _off_loop(vectors.nbytes >= _LARGE, _cosines, vectors, *sides), call.usage())
    if "generate" not in tasks:
        raise InvalidRequestError(_why_not(core, request.task))
    question = await run_in_thread("encode", YesNoPrompt, tokenizer, request.instruction)
    logits = await call.run(pairs, partial(_encode_questions, call, question))
    return PoolingResult(_sigmoid(logits[:, :1] - logits[:, 1:]), call.usage())


async def _score_completions(call: _Call, request: PoolingRequest) -> PoolingResult:
    if "generate" not in call.core.limits.tasks:
        raise InvalidRequestError("this model generates no text, of which completions could be scored", param="prompt")
    rows = await call.run(request.inputs, partial(_encode_completions, call, request.inputs), _joined_completions)
    return PoolingResult(rows, call.usage())


def _joined_completions(pieces: Sequence[array[float]]) -> Vectors:
    """Return the rows of all completions, see `PoolingResult`, of what the worker gave for each."""
    import numpy as np

    rows = [np.frombuffer(joined(own)[2], np.int32).reshape(-1, 4) for own in _yielding(pieces)]
    places = np.repeat(np.arange(len(rows), dtype=np.float32), [len(own) for own in rows])
    words = np.concatenate(rows)
    return np.stack((places, words[:, 0], words[:, 1].view(np.float32), words[:, 2]), axis=1).astype(np.float32)


def _check_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Raise InvalidRequestError for a text that is empty."""
    for place, pair in enumerate(_yielding(pairs)):
        if not all(pair):
            raise InvalidRequestError(f"pair {place} has an empty text", param="inputs")


def _distinct_texts(pairs: Sequence[tuple[str, str]]) -> tuple[list[str], list[int], list[int]]:
    """Return the texts, each once, and the places among them of each pair's first and second."""
    places: dict[str, int] = {}
    first, second = ([places.setdefault(pair[side], len(places)) for pair in _yielding(pairs)] for side in (0, 1))
    return list(places), first, second


def _normalised(vectors: Vectors) -> Vectors:
    import numpy as np

    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _cosines(vectors: Vectors, first: list[int], second: list[int]) -> Vectors:
    """Return the cosines, [n, 1], of the vectors at n pairs of places."""
    vectors = _normalised(vectors)
    cosines: Vectors = (vectors[first] * vectors[second]).sum(axis=1, keepdims=True)
    return cosines


def _sigmoid(x: Vectors) -> Vectors:
    import numpy as np

    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _prompt_of(core: EngineCore, request: PoolingRequest) -> str:
    """Return the prefix that each text gets. Raises InvalidRequestError."""
    if request.prompt is None and request.prompt_name is None:
        return core.pooling.default_prompt if request.task == "embed" else ""
    if not all(isinstance(given, str) for given in request.inputs):
        raise InvalidRequestError("token ids can't begin with a prompt: give the texts", param="prompt")
    if request.prompt is not None:
        return request.prompt
    prompts = core.pooling.prompts
    if request.prompt_name not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        message = f"prompt_name={shown(request.prompt_name)}: the checkpoint has no such prompt; these are: {known}"
        raise InvalidRequestError(message, param="prompt_name")
    return prompts[request.prompt_name or ""]


@dataclass(frozen=True, slots=True)
class PooledText:
    """The tokens of a text that gets a vector: the logits of ``pooled_token_ids``, if there are any, else as the
    model's pooling says. ``num_first_tokens``: leading tokens that belong to the first of two texts; 0: there is one.
    """

    token_ids: Sequence[int]
    num_first_tokens: int = 0
    pooled_token_ids: tuple[int, ...] = ()

    @property
    def extras(self) -> Extras:
        """The columns that runner/pooling/ reads."""
        return {"pooling": [int32(self.pooled_token_ids).tobytes(), int32([self.num_first_tokens]).tobytes()]}

    def results_from(self, core: EngineCore) -> int:
        """See `NewRequest`. The mean of all hidden states is of none that are left out."""
        return 0 if core.ready.get("pooling") == "mean" else NO_RESULTS


@dataclass(frozen=True, slots=True)
class ScoredText:
    """The tokens of a prompt, and of a completion from ``begin`` on."""

    token_ids: Sequence[int]
    begin: int

    @property
    def extras(self) -> Extras:
        return prompt_logprobs_extra(1, samples=False)

    def results_from(self, core: EngineCore) -> int:
        return self.begin - 1


Encoded = PooledText | ScoredText


# -- in the tokenizer's thread


def _encode_inputs(call: _Call, prompt: str, inputs: Sequence[Any]) -> list[PooledText]:
    texts = [prompt + given for given in inputs if isinstance(given, str)]
    encoded = iter(encode_texts(call.tokenizer(), texts, call.most, truncate=call.truncate) if texts else ())
    return [PooledText(next(encoded).token_ids if isinstance(given, str) else given.tolist()) for given in inputs]


def _encode_pairs(call: _Call, pairs: Sequence[tuple[str, str]]) -> list[PooledText]:
    encoded = encode_texts(call.tokenizer(), pairs, call.most, truncate=call.truncate)
    return [PooledText(text.token_ids, text.num_first_tokens) for text in encoded]


def _encode_questions(
    call: _Call, question: YesNoPrompt, pairs: Sequence[tuple[str, str]], *, is_classified: bool = False
) -> list[PooledText]:
    """Encode each pair as a question. ``is_classified``: a head gives the score, not the logits of yes and no."""
    encoded = question.encode(pairs, call.most, truncate=call.truncate)
    answers = () if is_classified else question.answers
    return [PooledText(text.token_ids, pooled_token_ids=answers) for text in encoded]


def _encode_completions(
    call: _Call, inputs: Sequence[tuple[Any, Any]], pairs: Sequence[tuple[Any, Any]]
) -> list[ScoredText]:
    """Encode some pairs of ``inputs``. Errors name the completion by its place there."""
    alone: dict[str, Sequence[int]] = {}  # the tokens of the prompts, which are one as a rule
    return [_scored_text(call, inputs, pair, alone) for pair in pairs]


def _scored_text(
    call: _Call, inputs: Sequence[tuple[Any, Any]], pair: tuple[Any, Any], alone: dict[str, Sequence[int]]
) -> ScoredText:
    (prompt, completion), most, vocab_size = pair, call.most, call.core.limits.vocab_size

    def name() -> str:
        return f"completions[{next(place for place, one in enumerate(inputs) if one is pair)}]"

    if isinstance(prompt, str) != isinstance(completion, str):
        raise InvalidRequestError("give prompt and completions as texts, or both as token ids", param="completions")
    if isinstance(prompt, str):
        encode = call.tokenizer().encode
        own = alone[prompt] = alone.get(prompt) or encode(prompt)
        ids = encode(prompt + completion)
        begin = next((i for i, (one, other) in enumerate(zip(own, ids)) if one != other), min(len(own), len(ids)))
    else:
        begin, ids = len(prompt), [*prompt, *completion]
    if len(ids) > most:
        raise ContextLengthError(len(ids), most, what=f"the prompt and {name()}")
    if not 0 < begin < len(ids):
        message = f"{name()}: it and the prompt must have a token each, one of a prompt before the first"
        raise InvalidRequestError(message, param="completions")
    if bool not in {*map(type, ids)}:
        try:
            return ScoredText(check_token_ids(ids, vocab_size, most, generates=False), begin)
        except InvalidRequestError:
            pass
    wrong = next(i for i, one in enumerate(ids) if isinstance(one, bool) or not is_token_id(one, vocab_size))
    param = "prompt" if wrong < begin else "completions"
    place = f"prompt[{wrong}]" if wrong < begin else f"{name()}[{wrong - begin}]"
    message = (
        f"{place}={shown(ids[wrong])} is not a token id of this model: they are integers from 0 to {vocab_size - 1}"
    )
    raise InvalidRequestError(message, param=param)


# -- on the loop


def _joined(vectors: Sequence[array[float]]) -> Vectors:
    import numpy as np

    return np.frombuffer(b"".join(map(memoryview, vectors)), dtype=np.float32).reshape(len(vectors), -1)


class _Call:
    """The texts of one call under way."""

    def __init__(self, core: EngineCore, request: PoolingRequest, context: Context | None) -> None:
        options: Mapping[str, Any] = request.options
        self.core = core
        self.truncate = bool(options.get("truncate", False))
        self._options = CallOptions(**{name: value for name, value in options.items() if name != "truncate"})
        check_options(self._options)
        if self._options.adapter is not None:
            core.adapters.check(self._options.adapter)
        limit, own = core.limits.max_model_len, core.pooling.max_tokens
        is_asked = core.config.max_model_len is not None
        self.most = limit if own is None or is_asked else min(limit, own)
        """Most tokens of a text."""
        self._context = context
        self._vectors: list[array[float]] = []
        self._open: dict[int, UserRequest] = {}
        self._ended: list[int] = []  # keys of ``_open`` whose requests have ended since the last look
        self._news: asyncio.Future[None] | None = None
        self._window = 2 * core.config.max_num_seqs * len(core.replicas)
        self._num_done = self._num_tokens = self._num_cached = 0

    def tokenizer(self) -> Tokenizer:
        """Return the engine's tokenizer. Raises InvalidRequestError if there is none."""
        if self.core.tokenizer is None:
            message = "a text needs a tokenizer, and the engine was started with skip_tokenizer=True: give token ids"
            raise InvalidRequestError(message, param="inputs")
        return self.core.tokenizer

    def usage(self) -> Usage:
        return Usage(self._num_tokens, 0, self._num_cached)

    async def run(
        self,
        inputs: Sequence[Any],
        encode: Callable[[Sequence[Any]], Sequence[Encoded]],
        join: Callable[[Sequence[array[float]]], Vectors] = _joined,
    ) -> Vectors:
        """Return the vectors of the inputs, float32 [n, size], or what ``join`` makes of their numbers; ``encode`` is
        called in a thread."""
        import numpy as np

        if not inputs:
            return np.empty((0, self._size()), dtype=np.float32)
        self._vectors = [array("f")] * len(inputs)
        account = self.core.accounts.of(self._options.tenant)
        self.core.queue.check_quota(account)
        before = acting_for.set(account)
        try:
            async with asyncio.timeout(self._options.deadline) as limit:
                checked, chunks = await _off_loop(_are_large(inputs), self._arranged, inputs)
                await self._compute(checked, chunks, encode)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._expired(len(inputs)) from None
        finally:
            acting_for.reset(before)
            for request in self._open.values():
                request.mailbox.abort()
            self._open.clear()
        num_bytes = len(inputs) * self._vectors[0].itemsize * len(self._vectors[0])
        return await _off_loop(num_bytes >= _LARGE, join, self._vectors)

    def _size(self) -> int:
        ready = self.core.ready
        return int(ready.get("embedding_size") or len(ready.get("labels", ())) or 1)

    def _arranged(self, inputs: Sequence[Any]) -> tuple[list[Any], list[list[int]]]:
        """Return the inputs, checked, and their places: the longest first, as many together as are encoded at once.
        Raises as `_checked`."""
        import numpy as np

        checked = [self._checked(place, given) for place, given in enumerate(_yielding(inputs))]
        lengths = np.fromiter(map(_length, _yielding(checked)), np.int64, len(checked))
        order = np.argsort(-lengths, kind="stable").tolist()  # numpy sorts without the GIL
        return checked, [order[begin : begin + _CHUNK] for begin in range(0, len(order), _CHUNK)]

    def _checked(self, place: int, given: Any) -> Any:
        """Return a text or a pair as it is, token ids as a column. Raises InvalidRequestError, ContextLengthError."""
        if isinstance(given, str | tuple):
            if not given:
                raise InvalidRequestError(f"inputs[{place}] is empty: give it at least one character", param="inputs")
            if isinstance(given, str):
                self.tokenizer()
                return str.__str__(given)
            if not all(isinstance(part, int) for part in given):
                return given
        vocab_size = self.core.limits.vocab_size
        try:
            if len(given) > self.most:
                if not self.truncate:
                    raise ContextLengthError(len(given), self.most, generates=False)
                given = given[: self.most]
            ids = array("i", given)
            if min(ids) >= 0 and max(ids) < vocab_size:
                return ids
        except (TypeError, OverflowError, ValueError):
            pass
        wanted = f"a text, or a list of token ids from 0 to {vocab_size - 1}"
        raise InvalidRequestError(f"inputs[{place}]={shown(given)} must be {wanted}, and not empty", param="inputs")

    def _expired(self, num_inputs: int) -> DeadlineExceededError:
        text = f"{self._num_done} of {num_inputs} inputs were done within the deadline of {self._options.deadline:g} s"
        error = DeadlineExceededError(text, deadline=float(self._options.deadline or 0))
        for request in self._open.values():
            request.mailbox.fail(error)
        return error

    async def _compute(
        self, inputs: list[Any], chunks: list[list[int]], encode: Callable[[Sequence[Any]], Sequence[Encoded]]
    ) -> None:
        encoding: asyncio.Future[Sequence[Encoded]] | None = None
        try:
            for number, chunk in enumerate(chunks):
                encoding = encoding or self._begin(chunk, inputs, encode)
                texts = await encoding
                encoding = self._begin(chunks[number + 1], inputs, encode) if number + 1 < len(chunks) else None
                for place, text in zip(chunk, texts, strict=True):
                    await self._submit(place, text)
            while self._open:
                await self._take_ended()
        finally:
            if encoding is not None and not encoding.cancel() and not encoding.cancelled():
                encoding.exception()  # its error is retrieved: another one is raised

    def _begin(
        self, chunk: list[int], inputs: list[Any], encode: Callable[[Sequence[Any]], Sequence[Encoded]]
    ) -> asyncio.Future[Sequence[Encoded]]:
        """Encode a chunk of the texts in a thread."""
        own = [inputs[place] for place in chunk]
        return self.core.admission.preparation.run(encode, own, is_long=max(map(_length, own)) > LONG_TEXT)

    async def _submit(self, place: int, text: Encoded) -> None:
        while len(self._open) >= self._window or (self._open and self.core.queue.is_full):
            await self._take_ended()
        self.core.sleeping.check_takes_requests()
        self._open[place] = self.core.admission.submit_for_result(
            text.token_ids,
            text.extras,
            _End(self, place),
            self._options,
            results_from=text.results_from(self.core),
            context=self._context,
        )
        self._num_tokens += len(text.token_ids)

    async def _take_ended(self) -> None:
        """Wait until some have ended, and take their vectors. Raises the error of one that failed."""
        if not self._ended:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        ended, self._ended = self._ended, []
        for place in ended:
            mailbox = self._open.pop(place).mailbox
            if mailbox.error is not None:
                raise mailbox.error
            vector = mailbox.choices[0].numbers
            if not vector:
                raise RequestError("the call was aborted: its requests were ended by abort_all()")
            self._vectors[place] = vector
            self._num_done += 1
            self._num_cached += mailbox.cached_tokens

    def note_end(self, place: int) -> None:
        self._ended.append(place)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


def _are_large(inputs: Sequence[Any]) -> bool:
    """Return whether there are many inputs or many token ids. A text counts as one, however long: it is not read
    here."""
    sizes = (len(given) if hasattr(given, "__len__") and not isinstance(given, str) else 1 for given in inputs)
    return len(inputs) >= _MANY or sum(sizes) >= _MANY


def _length(given: Any) -> int:
    """Return the length of a text in characters, of a pair that of both, of token ids about as many."""
    if isinstance(given, str):
        return len(given)
    return sum(map(len, given)) if isinstance(given, tuple) else 4 * len(given)


class _End:
    """A `Buffer` that is told of the end of one text."""

    __slots__ = ("_call", "_place", "is_due")

    def __init__(self, call: _Call, place: int) -> None:
        self._call = call
        self._place = place
        self.is_due = False

    def note_news(self) -> None:
        self._call.note_end(self._place)

    def oldest_unread(self) -> Token | None:
        return None
