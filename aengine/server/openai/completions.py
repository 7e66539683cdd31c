"""``/v1/completions``."""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import lru_cache, partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ...engine.threads.yield_gil import yield_gil
from ...errors import AEngineError
from ...limits.bounds import MAX_PROMPT_LOGPROBS
from ...outputs import Choice, Completion, FinishReason, Logprob, Token, Usage
from ..errors import aborted, check_not_aborted
from ..http import HTTPError, WrittenJSON, as_utf8, begin_events, event, while_connected
from ..logs import note_usage
from ..service import Service
from .answers import (
    KNOWN_TOKENS,
    AnswerId,
    PromptWriter,
    TokenRow,
    answer_id,
    dumps,
    finish_reason,
    json_number,
    num_values_of,
    rows_of,
    tokens_at_once,
    usage_of,
)
from .errors import error_events
from .requests import CompletionBody

if TYPE_CHECKING:
    from ...engine.streams.token_stream import TokenStream
    from ...engine.tokenizer.prompt import Prompt
    from ...engine.tokenizer_view import AsyncTokenizer, TokenizerView

_NULL = WrittenJSON("null")
_FIELDS = "tokens", "token_logprobs", "top_logprobs", "text_offset"


async def completions(service: Service, request: Request) -> Response:
    """Complete one prompt or several, whole or as it comes."""
    body = await service.body(request, CompletionBody)
    name = answer_id("cmpl", request, body.request_id)
    head = {"id": name.text, "object": "text_completion", "created": int(time.time()), "model": service.model_of(body)}
    head["system_fingerprint"] = service.system_fingerprint
    writer = _Writer(service, body, head)
    if body.stream:
        streams = await _begin(service, body, name)
        note_usage(request, *streams)
        await writer.set_echoes(service.engine.async_tokenizer)
        chunks = writer.chunks(streams)
        rest = streams[0].rest if len(streams) == 1 else asyncio.sleep
        return await begin_events(request, chunks, service.pace, rest, partial(error_events, body), name.headers)
    answers = await while_connected(request, _whole(service, body, name))
    note_usage(request, *answers)
    check_not_aborted(choice for answer in answers for choice in answer.choices)
    await writer.set_echoes(service.engine.async_tokenizer)
    return await service.answer(lambda: head | writer.whole(answers), num_values_of(*answers), name.headers)


def _requests(body: CompletionBody, name: AnswerId) -> list[tuple[Prompt, dict[str, Any]]]:
    """Return each prompt with the options of its request. Raises HTTPError 400 and InvalidRequestError."""
    options = {"params": body.params(), **body.request_options()}
    ids = [name.request_id, *(f"{name.request_id}-{i}" for i in range(1, len(body.prompts)))]
    return [(prompt, options | {"request_id": one}) for prompt, one in zip(body.prompts, ids, strict=True)]


async def _whole(service: Service, body: CompletionBody, name: AnswerId) -> list[Completion[Any]]:
    """Complete all prompts; when one fails, the others are ended, and its error is raised."""
    requests = _requests(body, name)
    if len(requests) == 1:
        return [await service.engine.generate(requests[0][0], **requests[0][1])]
    calls: list[asyncio.Future[Completion[Any]]] = []
    try:
        for prompt, options in requests:
            calls.append(asyncio.ensure_future(service.engine.generate(prompt, **options)))
            await _turn(len(calls))
        await _check_num_logprobs(calls)
        return [call.result() for call in calls]
    finally:
        running = [call for call in calls if call.cancel()]
        if running:
            await asyncio.wait(running)


async def _check_num_logprobs(calls: Sequence[asyncio.Future[Completion[Any]]]) -> None:
    """Await all. Raises HTTPError 400 once their prompts' log-probabilities are more than one prompt may have."""
    num_logprobs = 0
    for call in asyncio.as_completed(calls):
        columns = (await call).prompt_logprobs
        num_logprobs += len(columns) * len(columns[-1] or ()) if columns else 0
        if num_logprobs > MAX_PROMPT_LOGPROBS:
            most = f"the prompts' log-probabilities are more than {MAX_PROMPT_LOGPROBS}: ask for fewer in one request"
            raise HTTPError(400, most, param="prompt")


async def _begin(service: Service, body: CompletionBody, name: AnswerId) -> list[TokenStream]:
    """Begin all prompts. Dropping the streams ends them, so an error of a later prompt leaves none behind."""
    streams: list[TokenStream] = []
    for prompt, options in _requests(body, name):
        streams.append(service.engine.stream(prompt, **options))
        await _turn(len(streams))
    return streams


async def _turn(number: int) -> None:
    """Let other tasks run after every few prompts."""
    if not number % 16:
        await asyncio.sleep(0)


async def _read_all(streams: Sequence[TokenStream]) -> AsyncGenerator[tuple[int, list[Token]], None]:
    """Yield (index of a stream, tokens that have come) until all have ended. Closing it closes all."""
    async with AsyncExitStack() as stack:
        for stream in streams:
            await stack.enter_async_context(stream)
        if len(streams) == 1:
            while tokens := await streams[0].read():
                yield 0, tokens
            return
        reading: set[asyncio.Future[list[Token]]] = set()
        ready: asyncio.Queue[tuple[int, asyncio.Future[list[Token]]]] = asyncio.Queue()

        def read(index: int) -> None:
            one = asyncio.ensure_future(streams[index].read())
            reading.add(one)
            one.add_done_callback(lambda done: ready.put_nowait((index, done)))

        try:
            for index in range(len(streams)):
                read(index)
            while reading:
                index, done = await ready.get()
                reading.discard(done)
                if tokens := done.result():
                    read(index)
                    yield index, tokens
        finally:
            for one in reading:
                one.cancel()
            if reading:
                await asyncio.wait(reading)


def _total(usages: Sequence[Usage]) -> Usage:
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )


class _Writer:
    """Writes the answer to one body."""

    def __init__(self, service: Service, body: CompletionBody, head: dict[str, Any]) -> None:
        self.body = body
        self.head = head
        self.num_choices = 1 if body.n is None else body.n  # completions of each prompt
        self._texts: _TokenTexts | None = None
        if body.logprobs is not None:
            self._texts = _TokenTexts(service.engine.tokenizer, skips_special=body.skip_special_tokens is not False)
        self._prompts = PromptWriter(service.engine.tokenizer)
        self._echoes: list[str] = []  # text of each prompt that is repeated before its completions
        self._first_ids: list[int] = []  # its first token, which has no log-probability, if the others' are repeated

    async def set_echoes(self, tokenizer: AsyncTokenizer) -> None:
        """Make the texts of the prompts, if they are asked for."""
        if self.body.echo:
            prompts: Sequence[Any] = self.body.prompts
            self._echoes = [
                prompt if isinstance(prompt, str) else await tokenizer.decode(prompt, skip_special_tokens=False)
                for prompt in prompts
            ]
        if self.body.echoed_logprobs is not None:
            ids = [await tokenizer.encode(one) if isinstance(one, str) else one for one in self.body.prompts]
            self._first_ids = [own[0] for own in ids]

    def whole(self, answers: Sequence[Completion[Any]]) -> dict[str, Any]:
        choices = (
            self.choice(i, choice, answer.prompt_logprobs or ())
            for i, answer in enumerate(answers)
            for choice in answer.choices
        )
        usage = usage_of(_total([answer.usage for answer in answers]))
        warnings = [warning for answer in answers[:1] for warning in answer.warnings]
        return {"choices": choices, "usage": usage} | ({"warnings": warnings} if warnings else {})

    def choice(
        self, prompt_index: int, choice: Choice[Any], of_prompt: Sequence[tuple[Logprob, ...] | None]
    ) -> dict[str, Any]:
        echo = self.echo(prompt_index)
        logprobs, most = None, self.body.prompt_logprobs
        if choice.logprobs is not None:
            rows = rows_of(choice.logprobs)
            if self._first_ids:
                first: TokenRow = (self._first_ids[prompt_index], None, ())
                rows = chain([first], self._rows_of_prompt(of_prompt), rows)
            logprobs = self.new_logprobs(prompt_index).take(rows)
        shown = {} if most is None else {"prompt_logprobs": self._prompts.entries(of_prompt, most)}
        return shown | {
            "index": prompt_index * self.num_choices + choice.index,
            "text": echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }

    def _rows_of_prompt(self, of_prompt: Sequence[tuple[Logprob, ...] | None]) -> Iterable[TokenRow]:
        end = 1 + (self.body.echoed_logprobs or 0)
        return rows_of(row[:end] for row in of_prompt if row is not None)

    async def chunks(self, streams: Sequence[TokenStream]) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events, those that are there at once together.

        What fails before the first event is raised; what fails later is an event.
        """
        writer = _ChunkWriter(self, streams)
        most = tokens_at_once(self.body.logprobs)
        async with aclosing(_read_all(streams)) as reading:
            try:
                async for index, tokens in reading:
                    for i in range(0, len(tokens), most):
                        if i:  # the server does not wait for a reader that has room
                            await asyncio.sleep(0)
                        if events := writer.events(index, tokens[i : i + most]):
                            yield as_utf8("".join(events))
            except AEngineError as error:
                if not writer.has_begun:
                    raise
                yield error_events(self.body, error)
                return
        is_aborted = any(stream.completion.finish_reason is FinishReason.ABORT for stream in streams)
        if is_aborted and not writer.has_begun:
            raise aborted()
        ending = error_events(self.body, aborted()) if is_aborted else event("[DONE]")
        yield as_utf8("".join(writer.last_events())) + ending

    def echo(self, prompt_index: int) -> str:
        """Return the text of the prompt that its completions begin with."""
        return self._echoes[prompt_index] if self._echoes else ""

    def new_logprobs(self, prompt_index: int) -> _Logprobs:
        assert self._texts is not None, "logprobs are asked for"
        return _Logprobs(self._texts, 0 if self._first_ids else len(self.echo(prompt_index)))


class _ChunkWriter:
    """Writes the chunks of one answer, as server-sent events. What all of them share is written once."""

    def __init__(self, writer: _Writer, streams: Sequence[TokenStream]) -> None:
        self._writer = writer
        self._streams = streams
        self._num_choices = writer.num_choices
        self._head = dumps(writer.head)[:-1]
        options = writer.body.stream_options
        self._include_usage = options is not None and options.include_usage
        self._is_continuous = options is not None and options.has_usage_so_far
        self._begun: set[int] = set()  # choices that have a written chunk
        self._usages = [Usage(0, 0)] * len(streams)
        self._total = Usage(0, 0)
        self._has_logprobs = writer.body.logprobs is not None
        self._logprobs: dict[int, _Logprobs] = {}  # log-probabilities of the choices that have begun

    @property
    def has_begun(self) -> bool:
        return bool(self._begun)

    def events(self, index: int, tokens: Sequence[Token]) -> list[str]:
        """Return a chunk for each choice of a prompt that has news."""
        events = []
        if self._is_continuous:
            self._note_usage(index)
        tail = self._tail()
        for choice, group in groupby(tokens, lambda token: token.index):
            run = list(group)
            number = index * self._num_choices + choice
            text = "".join([token.text for token in run])
            if number not in self._begun:
                self._begun.add(number)
                text = self._writer.echo(index) + text
                if self._has_logprobs:
                    self._logprobs[number] = self._writer.new_logprobs(index)
            shown = "null"
            if self._has_logprobs:
                rows: list[TokenRow] = [(token.token_id, token.logprob, token.top_logprobs) for token in run]
                shown = self._logprobs[number].take_written(rows)
            reason = run[-1].finish_reason
            if text or reason is not None or self._has_logprobs:
                stop_reason = None if reason is None else self._streams[index].stop_reasons[choice]
                events.append(self._chunk(number, text, shown, reason, tail, stop_reason))
        return events

    def last_events(self) -> list[str]:
        """Return the ends of choices that were aborted, and the usage."""
        for index in range(len(self._streams)):
            self._note_usage(index)
        tail = self._tail()
        events = [
            self._chunk(i * self._num_choices + choice.index, "", "null", choice.finish_reason, tail)
            for i, stream in enumerate(self._streams)
            for choice in stream.completion.choices
            if choice.finish_reason is FinishReason.ABORT
        ]
        if self._include_usage:
            events.append(f'data: {self._head},"choices":[],"usage":{self._usage()}}}\n\n')
        return events

    def _chunk(
        self,
        number: int,
        text: str,
        logprobs: str,
        reason: FinishReason | None,
        tail: str,
        stop_reason: str | int | None = None,
    ) -> str:
        shown = "null" if reason is None else f'"{finish_reason(reason)}","stop_reason":{dumps(stop_reason)}'
        return (
            f'data: {self._head},"choices":[{{"index":{number},"text":{dumps(text)},"logprobs":{logprobs},'
            f'"finish_reason":{shown}}}]{tail}'
        )

    def _tail(self) -> str:
        if self._is_continuous:
            return f',"usage":{self._usage()}}}\n\n'
        return ',"usage":null}\n\n' if self._include_usage else "}\n\n"

    def _note_usage(self, index: int) -> None:
        """Add the usage of a stream until now to the sum of all."""
        before, now, total = self._usages[index], self._streams[index].usage, self._total
        self._usages[index] = now
        self._total = Usage(
            total.prompt_tokens + now.prompt_tokens - before.prompt_tokens,
            total.completion_tokens + now.completion_tokens - before.completion_tokens,
            total.cached_tokens + now.cached_tokens - before.cached_tokens,
        )

    def _usage(self) -> str:
        return dumps(usage_of(self._total))


class _TokenTexts:
    """The texts of tokens as one answer's logprobs have them, written as JSON."""

    def __init__(self, tokenizer: TokenizerView, *, skips_special: bool) -> None:
        self.bytes_of = tokenizer.token_bytes
        self.written = lru_cache(KNOWN_TOKENS)(partial(_written_text, tokenizer))
        self.hidden = frozenset(tokenizer.special_tokens.values()) if skips_special else frozenset()


class _Logprobs:
    """Writes the logprobs of one completion, and counts the characters before each of its tokens."""

    def __init__(self, texts: _TokenTexts, offset: int) -> None:
        self._texts = texts
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, rows: Iterable[TokenRow]) -> dict[str, list[WrittenJSON]]:
        """Return OpenAI's ``logprobs`` of the tokens that follow."""
        texts = self._texts
        taken: dict[str, list[WrittenJSON]] = {name: [] for name in _FIELDS}
        tokens, token_logprobs, top_logprobs, text_offset = taken.values()
        for token_id, logprob, others in rows:
            yield_gil()
            tokens.append(texts.written(token_id))
            token_logprobs.append(WrittenJSON(json_number(logprob)))
            likeliest = {**dict(others), token_id: logprob}
            top_logprobs.append(_NULL if logprob is None else self._likeliest(token_id, likeliest))
            text_offset.append(WrittenJSON(self._offset))
            if token_id not in texts.hidden:
                self._offset += len(self._decoder.decode(texts.bytes_of(token_id)))
        return taken

    def take_written(self, rows: Iterable[TokenRow]) -> str:
        """Return the same as JSON."""
        fields = [f'"{name}":[{",".join(values)}]' for name, values in self.take(rows).items()]
        return f"{{{','.join(fields)}}}"

    def _likeliest(self, chosen: int, logprobs: dict[int, float | None]) -> WrittenJSON:
        """Return each token's logprob under its text. Of several with one text that is the chosen one, else the first;
        the others are under their ids, as vLLM writes them."""
        written = self._texts.written
        ids: dict[str, int] = {written(chosen): chosen}
        entries = []
        for token_id, logprob in logprobs.items():
            text: str = written(token_id)
            key = text if ids.setdefault(text, token_id) == token_id else f'"token_id:{token_id}"'
            entries.append(f"{key}:{json_number(logprob)}")
        return WrittenJSON(f"{{{','.join(entries)}}}")


def _written_text(tokenizer: TokenizerView, token_id: int) -> WrittenJSON:
    """Return the token's text, or of one that is no UTF-8 by itself its bytes as OpenAI writes them; as JSON."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return WrittenJSON(dumps(raw.decode()))
    except UnicodeDecodeError:
        return WrittenJSON(dumps("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)))
