"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ..errors import check_not_aborted
from ..http import JSONAnswer, begin_events, while_connected
from ..logs import note_usage
from ..service import Service
from .answers import blocks_of, ending_of, usage_of
from .conversation import conversation_of
from .errors import REQUEST_ID, request_id_of
from .events import error_event, event_chunks
from .requests import CountBody, MessagesBody

if TYPE_CHECKING:
    from ...chat import Delta
    from ...engine.streams.chat_stream import ChatStream


async def create_message(service: Service, request: Request) -> Response:
    """Answer a conversation, whole or as it comes."""
    body = await service.body(request, MessagesBody)
    body.check_thread()
    conversation, rendering = conversation_of(body)
    name = f"msg_{uuid.uuid4().hex}"
    params, options = body.params(), body.chat_options()
    stream = service.engine.stream_chat(conversation, params, request_id=name, **rendering, **options)
    note_usage(request, stream)
    headers = {REQUEST_ID: request_id_of(request)}
    head: dict[str, Any] = {"id": name, "type": "message", "role": "assistant", "model": body.model}
    if body.stream:
        chunks = event_chunks(request, body, stream, head)
        failed = partial(error_event, request, body)
        return await begin_events(request, chunks, service.pace, stream.rest, failed, headers)
    deltas = await while_connected(request, _all_of(stream))
    completion = stream.completion
    check_not_aborted(completion.choices)
    answer = head | {
        "content": blocks_of(deltas, completion.message, shows_thinking=body.shows_thinking),
        **ending_of(completion, body),
        "usage": usage_of(completion.usage, body.keep),
    }
    if completion.warnings:
        answer["warnings"] = list(completion.warnings)
    return JSONAnswer(answer, headers=headers)


async def _all_of(stream: ChatStream) -> list[Delta]:
    deltas: list[Delta] = []
    async with aclosing(stream):
        while read := await stream.read():
            deltas += read
    return deltas


async def count_tokens(service: Service, request: Request) -> Response:
    """Answer with the number of tokens that a message's prompt would have."""
    body = await service.body(request, CountBody)
    body.check_thread()
    conversation, rendering = conversation_of(body)
    options: Any = rendering | {"chat_template_kwargs": body.template_variables() or None}
    counting = service.engine.async_tokenizer.count(conversation, body.tool_dicts(), **options)
    return JSONAnswer(
        {"input_tokens": await while_connected(request, counting)}, headers={REQUEST_ID: request_id_of(request)}
    )
