"""``POST /v1/responses``, and what can be done with a response that is stored."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ....errors import AEngineError
from ....outputs import FinishReason, Usage
from ...errors import aborted, check_not_aborted, http_error
from ...http import HTTPError, JSONAnswer, as_utf8, begin_events, while_connected
from ...logs import note_usage
from ...service import Service
from ..answers import MOST_EVENTS, EntryWriter, answer_id, dumps, merged, tokens_at_once
from .body import ResponseBody
from .input_items import items_of
from .items import Events, Items
from .messages import messages_of, with_instructions
from .store import ResponseStore

if TYPE_CHECKING:
    from ....chat import ChatCompletion
    from ....engine.streams.chat_stream import ChatStream


async def create_response(service: Service, request: Request) -> Response:
    """Answer with a response, whole or as it comes."""
    body = await service.body(request, ResponseBody)
    conversation = _Conversation(service.responses, body)
    name = answer_id("resp", request, body.request_id)
    params, options = body.params(), body.chat_options()
    stream = service.engine.stream_chat(conversation.messages, params, request_id=name.request_id, **options)
    note_usage(request, stream)
    writer = _Writer(service, body, conversation, f"resp_{name.fresh}")
    if body.stream:
        chunks = writer.chunks(stream)
        return await begin_events(request, chunks, service.pace, stream.rest, writer.failed, name.headers)
    return _json(await while_connected(request, writer.whole(stream)), name.headers)


async def show_response(service: Service, request: Request) -> Response:
    """Answer with a response that is stored."""
    if request.query_params.get("stream") == "true":
        raise HTTPError(400, "a stored response is not streamed again", param="stream")
    return _json(service.responses.get(request.path_params["id"]).response_json)


async def delete_response(service: Service, request: Request) -> Response:
    """Forget a response that is stored."""
    response_id = request.path_params["id"]
    service.responses.delete(response_id)
    return JSONAnswer({"id": response_id, "object": "response", "deleted": True})


async def count_input_tokens(service: Service, request: Request) -> Response:
    """Answer with the number of tokens of a response's input."""
    body = await service.body(request, ResponseBody)
    messages = _Conversation(service.responses, body).messages
    options = body.chat_options()
    counting = service.engine.async_tokenizer.count(
        messages, options["tools"], chat_template_kwargs=options["chat_template_kwargs"]
    )
    count = await while_connected(request, counting)
    return JSONAnswer({"object": "response.input_tokens", "input_tokens": count})


class _Conversation:
    """Messages of one body, after those of the response before.

    Raises HTTPError 400.
    """

    def __init__(self, store: ResponseStore, body: ResponseBody) -> None:
        self._store = store
        self._input = store.with_items(body.input)
        previous = body.previous_response_id
        self._before = None if previous is None else store.get(previous, "previous_response_id")
        earlier = self._before.messages if self._before else ()
        if self._before is not None:
            body.go_on_with(self._before.chain)
        self._new = messages_of(self._input, earlier)
        if not self._new and not earlier:
            raise HTTPError(400, "the input is empty: give it at least one item", param="input")
        self.messages = with_instructions([*earlier, *self._new], body.instructions)

    def put(self, response_id: str, response: bytes, items: Items, completion: ChatCompletion[Any]) -> None:
        """Store the response, and with it the conversation."""
        messages = [*self._new, completion.message.to_dict()]
        self._store.put(response_id, response, items.output, self._before, messages, items_of(self._input))


class _Writer:
    """Writes the answer to one body."""

    def __init__(self, service: Service, body: ResponseBody, conversation: _Conversation, response_id: str) -> None:
        self._body = body
        self._conversation = conversation
        self._entries = EntryWriter(service.engine.tokenizer) if body.wants_logprobs else None
        self._most = min(MOST_EVENTS, tokens_at_once(body.top_logprobs))  # deltas a turn of the loop
        self._is_stored = body.store is not False and service.responses.is_kept
        defaults = service.engine.describe()["sampling_defaults"]
        self._response: dict[str, Any] = {
            # Whoever knows the id can continue the response, so it is random, and never what a client asked for.
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": service.model_of(body),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": self._is_stored,
            "temperature": _either(body.temperature, defaults.get("temperature"), 1.0),
            "text": {"format": body.text_format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.functions.shown,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": _either(body.top_p, defaults.get("top_p"), 1.0),
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
        }

    async def whole(self, stream: ChatStream) -> bytes:
        """Return the response once it is there."""
        items = Items(None, self._entries, self._body.functions.fields)
        async with aclosing(stream):
            while deltas := await stream.read():
                for number, delta in enumerate(deltas, 1):
                    items.add(delta)
                    if not number % self._most:
                        await asyncio.sleep(0)
        check_not_aborted(stream.completion.choices)
        return b"".join(self._finish(items, stream.completion))

    async def chunks(self, stream: ChatStream) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events, those that are there at once together.

        What fails before the first event is raised; what fails later is an event.
        """
        events = Events(self._most)
        items = Items(events, self._entries, self._body.functions.fields)
        has_begun = False
        async with aclosing(stream):
            try:
                while deltas := await stream.read():
                    if not has_begun:
                        has_begun = self._begin(events, items)
                    for delta in merged(deltas):
                        items.add(delta)
                        if events.is_full:
                            for piece in events.take():
                                yield piece
                                await asyncio.sleep(0)  # the server does not wait for a reader that has room
                    for piece in events.take():
                        yield piece
            except AEngineError as error:
                if not has_begun:
                    raise
                items.finish(is_complete=False)
                self._fail(http_error(error, self._body))
                events.add_written("response.failed", b'"response":', *self._written(items))
                for piece in events.take():
                    yield piece
                return
        if not has_begun:
            check_not_aborted(stream.completion.choices)
            self._begin(events, items)
        response = self._finish(items, stream.completion)
        events.add_written(f"response.{self._response['status']}", b'"response":', *response)
        for piece in events.take():
            yield piece
            await asyncio.sleep(0)

    def failed(self, error: Exception) -> bytes:
        """Return the only event of a stream that fails before its first one."""
        failed, events = http_error(error, self._body), Events(self._most)
        events.add("error", code=failed.code, message=failed.message, param=failed.param)
        return b"".join(events.take())

    def _begin(self, events: Events, items: Items) -> bool:
        for kind in ("response.created", "response.in_progress"):
            events.add_written(kind, b'"response":', *self._written(items))
        return True

    def _written(self, items: Items) -> list[bytes]:
        """Return the response as JSON, in pieces."""
        return [as_utf8(dumps(self._response)[:-1]), b',"output":', *items.written, b"}"]

    def _finish(self, items: Items, completion: ChatCompletion[Any]) -> list[bytes]:
        """Complete the response, and store it. Returns it as JSON, in pieces."""
        reason = completion.finish_reason
        is_complete = reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
        items.finish(is_complete)
        self._response["usage"] = _usage_of(completion.usage, is_kept=self._body.keep is not None)
        if warnings := [*self._body.functions.warnings, *completion.warnings]:
            self._response["warnings"] = warnings
        if is_complete:
            self._response |= {"status": "completed", "completed_at": int(time.time())}
        elif reason is FinishReason.LENGTH:
            self._response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            self._fail(aborted())
        written = self._written(items)
        if self._is_stored:
            self._conversation.put(self._response["id"], b"".join(written), items, completion)
        return written

    def _fail(self, error: HTTPError) -> None:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._response |= {"status": "failed", "error": {"code": code, "message": error.message}}


def _json(written: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(written, headers=headers, media_type="application/json")


def _usage_of(usage: Usage, *, is_kept: bool) -> dict[str, Any]:
    written = usage.prompt_tokens - usage.cached_tokens if is_kept else 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": written},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _either(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)
