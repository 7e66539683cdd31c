"""``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ...chat import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from ...errors import AEngineError
from ...outputs import FinishReason, Usage
from ..errors import aborted, check_not_aborted
from ..http import as_utf8, begin_events, event, while_connected
from ..logs import note_usage
from ..service import Service
from .answers import (
    MOST_EVENTS,
    EntryWriter,
    PromptWriter,
    answer_id,
    dumps,
    finish_reason,
    merged,
    num_values_of,
    rows_of,
    tokens_at_once,
    usage_of,
)
from .errors import error_events
from .messages import chat_messages
from .requests import ChatBody, StreamOptions

if TYPE_CHECKING:
    from ...engine.streams.chat_stream import ChatStream


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer a chat, whole or as it comes."""
    body = await service.body(request, ChatBody)
    name = answer_id("chatcmpl", request, body.request_id)
    messages = chat_messages(body.messages)
    stream = service.engine.stream_chat(messages, body.params(), request_id=name.request_id, **body.chat_options())
    note_usage(request, stream)
    head = {"id": name.text, "created": int(time.time()), "model": service.model_of(body)}
    head["system_fingerprint"] = service.system_fingerprint
    writer = _Writer(service, body, head)
    if body.stream:
        chunks = writer.chunks(stream)
        failed = partial(error_events, body)
        return await begin_events(request, chunks, service.pace, stream.rest, failed, name.headers)
    completion = await while_connected(request, stream.wait())
    check_not_aborted(completion.choices)
    return await service.answer(lambda: head | writer.whole(completion), num_values_of(completion), name.headers)


class _Writer:
    """Writes the answer to one body."""

    def __init__(self, service: Service, body: ChatBody, head: dict[str, Any]) -> None:
        self._body = body
        self._head = head
        self._tokenizer = service.engine.tokenizer
        self._entries = EntryWriter(self._tokenizer)

    # -- a whole answer

    def whole(self, completion: ChatCompletion) -> dict[str, Any]:
        answer = {
            "object": "chat.completion",
            "choices": (self.choice(choice) for choice in completion.choices),
            "usage": _usage_of(completion.usage),
        }
        if self._body.prompt_logprobs is not None:
            writer, most = PromptWriter(self._tokenizer), self._body.prompt_logprobs
            answer["prompt_logprobs"] = writer.entries(completion.prompt_logprobs or (), most)
        return answer | ({"warnings": list(completion.warnings)} if completion.warnings else {})

    def choice(self, choice: ChatChoice) -> dict[str, Any]:
        logprobs = None
        if choice.logprobs is not None:
            logprobs = {"content": map(self._entries.entry, rows_of(choice.logprobs)), "refusal": None}
        return {
            "index": choice.index,
            "message": self._message(choice.message),
            "logprobs": logprobs,
            "finish_reason": finish_reason(choice.finish_reason, is_forced=self._body.names_function),
            "stop_reason": choice.stop_reason,
        }

    def _message(self, message: ChatMessage) -> dict[str, Any]:
        written: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
        if message.reasoning is not None and self._body.include_reasoning:
            written["reasoning_content"] = message.reasoning
        if message.tool_calls:
            written["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        return written

    # -- an answer as it comes

    async def chunks(self, stream: ChatStream) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events, those that are there at once together.

        What fails before the first event is raised; what fails later is an event.
        """
        options = self._body.stream_options or StreamOptions()
        has_several = self._body.n is not None and self._body.n > 1
        most = min(MOST_EVENTS, tokens_at_once(self._body.top_logprobs))
        writer = _ChunkWriter(self._head, most, options.include_usage, is_forced=self._body.names_function)
        async with aclosing(stream):
            try:
                while deltas := await stream.read():
                    if options.has_usage_so_far:
                        writer.set_usage(usage_of(stream.usage))
                    for delta in merged(deltas):
                        self._write(writer, delta)
                        if writer.is_full:
                            yield writer.take()
                            await asyncio.sleep(0)  # the server does not wait for a reader that has room
                    if has_several:
                        ends = zip(stream.finish_reasons, stream.stop_reasons)
                        for index, (reason, stop_reason) in enumerate(ends):
                            if reason is not None:
                                writer.end(index, reason, stop_reason)
                    if writer.has_events:
                        yield writer.take()
            except AEngineError as error:
                if not writer.has_begun:
                    raise
                yield error_events(self._body, error)
                return
            completion = stream.completion
        is_aborted = completion.finish_reason is FinishReason.ABORT
        if is_aborted and not writer.has_begun:
            raise aborted()
        for choice in completion.choices:
            writer.end(choice.index, choice.finish_reason, choice.stop_reason)
        if options.include_usage:
            writer.write_usage(_usage_of(completion.usage))
        yield writer.take() + (error_events(self._body, aborted()) if is_aborted else event("[DONE]"))

    def _write(self, writer: _ChunkWriter, delta: Delta) -> None:
        logprobs = f'{{"content":{self._entries.entries(delta.tokens)},"refusal":null}}' if delta.tokens else "null"
        match delta:
            case TextDelta(text=text):
                writer.write_text(delta.choice, "content", text, logprobs)
            case ReasoningDelta(text=text) if self._body.include_reasoning:
                writer.write_text(delta.choice, "reasoning_content", text, logprobs)
            case ToolCallStart():
                function = {"name": delta.name, "arguments": ""}
                call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
                writer.write(delta.choice, {"tool_calls": [call]}, logprobs)
            case ToolCallDelta():
                call = {"index": delta.index, "function": {"arguments": delta.arguments}}
                writer.write(delta.choice, {"tool_calls": [call]}, logprobs)
            case _ if delta.tokens:  # tokens are sent even if their text is not shown
                writer.write(delta.choice, {}, logprobs)


def _usage_of(usage: Usage) -> dict[str, Any]:
    return usage_of(usage) | {"completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}


class _ChunkWriter:
    """Writes the chunks of one stream, as server-sent events. What all of them share is written once."""

    def __init__(self, head: dict[str, Any], most_events: int, include_usage: bool, *, is_forced: bool) -> None:
        self._most_events = most_events
        self._is_forced = is_forced
        self._head = dumps(head | {"object": "chat.completion.chunk"})[:-1]
        self._tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._events: list[str] = []
        self._begun: set[int] = set()  # choices whose role has been written
        self._ended: set[int] = set()

    @property
    def has_begun(self) -> bool:
        """Whether anything was written."""
        return bool(self._begun)

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    @property
    def is_full(self) -> bool:
        """Whether what was written should be taken first: a reader that is slow would be sent all at once, and the loop
        stand still meanwhile."""
        return len(self._events) >= self._most_events

    def take(self) -> bytes:
        """Return what was written since the last time."""
        text = "".join(self._events)
        self._events.clear()
        return as_utf8(text)

    def set_usage(self, usage: dict[str, Any]) -> None:
        """Set the usage that the next chunks report."""
        self._tail = f',"usage":{dumps(usage)}}}\n\n'

    def write_text(self, choice: int, key: str, text: str, logprobs: str) -> None:
        """Write a chunk whose delta has one text; the most frequent one."""
        role = self._role(choice)
        self._add(choice, f'{{{role}"{key}":{dumps(text)}}}', logprobs, "null")

    def write(self, choice: int, delta: dict[str, Any], logprobs: str) -> None:
        role = {"role": "assistant", "content": None} if self._role(choice) else {}
        self._add(choice, dumps(role | delta), logprobs, "null")

    def end(self, choice: int, reason: FinishReason, stop_reason: str | int | None) -> None:
        """Write a choice's last chunk, once."""
        if choice not in self._ended:
            self._ended.add(choice)
            delta = '{"role":"assistant","content":""}' if self._role(choice) else "{}"
            word = finish_reason(reason, is_forced=self._is_forced)
            self._add(choice, delta, "null", f'"{word}","stop_reason":{dumps(stop_reason)}')

    def write_usage(self, usage: dict[str, Any]) -> None:
        self._events.append(f'data: {self._head},"choices":[],"usage":{dumps(usage)}}}\n\n')

    def _role(self, choice: int) -> str:
        """Return the role, of the first chunk of a choice."""
        if choice in self._begun:
            return ""
        self._begun.add(choice)
        return '"role":"assistant",'

    def _add(self, choice: int, delta: str, logprobs: str, reason: str) -> None:
        self._events.append(
            f'data: {self._head},"choices":[{{"index":{choice},"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":{reason}}}]{self._tail}'
        )
