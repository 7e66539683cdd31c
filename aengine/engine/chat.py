"""Chats with tools, reasoning and a schema, over the engine's plain streams.

messages, tools, schema ──plan_chat (a thread)──> prompt ids + GrammarSpec ──submit──> TokenStream
ChatStream: token ──ChatParser──> deltas, and at the end a ChatMessage
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..chat import ChatMessage, ChatParser, Delta, ReasoningFormat, Tool, ToolChoice, ToolFormat, blame, compose, detect
from ..errors import GrammarError, InvalidRequestError
from ..grammar.backend import Compiled
from ..grammar.output_type import OutputType
from ..grammar.spec import GrammarSpec
from ..outputs import Completion, FinishReason
from .stream import TokenStream
from .structured import GrammarService
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing import Self

__all__ = ["ChatPlan", "ChatStream", "check_grammar", "plan_chat"]


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What a chat asks of the engine, and how its answer is read."""

    prompt: list[int]
    spec: GrammarSpec | None
    tools: tuple[Tool, ...]  # that the answer may call
    tool_format: ToolFormat
    reasoning: ReasoningFormat | None
    schema: str | None


def plan_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: tuple[Tool, ...],
    choice: ToolChoice,
    parallel: bool | None,
    schema: str | None,
) -> ChatPlan:
    """Blocking, for a thread. Raises InvalidRequestError (messages, template) and GrammarError (schemas)."""
    tool_format, reasoning = detect(tokenizer.chat_template_source)
    shown = [tool.for_template() for tool in tools]
    instructions = tool_format.describe(shown) if shown else ""
    if instructions:
        messages = _with_instructions(messages, instructions)
    text = tokenizer.apply_chat_template(messages, tools=None if instructions else shown or None)
    if reasoning is not None:
        reasoning = reasoning.after_prompt(text)
    spec = compose(
        tools=tools,
        tool_choice=choice,
        parallel=tool_format.parallel if parallel is None else parallel,
        tool_format=tool_format,
        reasoning=reasoning,
        schema=schema,
        token_id=tokenizer.control_token_id,
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    return ChatPlan(prompt, spec, choice.allowed(tools), tool_format, reasoning, schema)


def _with_instructions(messages: Sequence[Mapping[str, Any]], instructions: str) -> list[Mapping[str, Any]]:
    """The tools' description in the system message, for a template that shows none."""
    first = messages[0] if messages else {}
    if isinstance(first, Mapping) and first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


async def check_grammar(grammars: GrammarService, plan: ChatPlan) -> Compiled | None:
    """Compile the plan's grammar. A GrammarError names the tool, or says that it is the answer's schema."""
    if plan.spec is None:
        return None
    try:
        return await grammars.prepare(plan.spec)
    except GrammarError as error:
        raise await grammars.explain(partial(_blame, error, plan)) from None


def _blame(error: GrammarError, plan: ChatPlan, compile_spec: Any) -> GrammarError:
    return blame(error, compile_spec, tools=plan.tools, schema=plan.schema)


class ChatStream:
    """The answer of one chat as it comes: an async iterator of deltas.

        async for delta in stream:      # ReasoningDelta, TextDelta, ToolCallStart, ToolCallDelta, ToolCallEnd
        stream.message                  # a ChatMessage: content, reasoning, tool_calls; so far, or whole at the end
        stream.completion               # once it has ended: usage, finish reason, parsed

    Closing, dropping or cancelling it ends the request, as with `TokenStream`.
    """

    def __init__(
        self, stream: TokenStream, plan: ChatPlan, output_type: OutputType | None, tokenizer: Tokenizer
    ) -> None:
        self._stream = stream
        self._output_type = output_type
        self._parser = ChatParser(
            plan.tool_format, plan.reasoning, plan.tools, plan.schema is not None, tokenizer.control_token_id
        )
        self._deltas: deque[Delta] = deque()
        self._is_read = False

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._is_read:
                raise StopAsyncIteration
            try:
                token = await anext(self._stream)
            except StopAsyncIteration:
                self._is_read = True
                self._deltas.extend(self._parser.finish())
            else:
                self._deltas.extend(self._parser.feed(token.text, token.token_id))
        return self._deltas.popleft()

    @property
    def message(self) -> ChatMessage:
        """What has come so far; the whole answer once the stream has been read to its end."""
        return self._parser.message

    @property
    def completion(self) -> Completion:
        """Once it has been read to its end; ``message`` is in it, and ``parsed`` is of the message's content.

        Raises InvalidRequestError before.
        """
        if not self._is_read:
            raise InvalidRequestError(f"stream {self.request_id} has not been read to its end yet")
        completion, message = self._stream.completion, self.message
        choice = completion.choices[0]
        if self._output_type is not None and choice.finish_reason is FinishReason.STOP and not message.tool_calls:
            parsed, parse_error = self._output_type.parse(message.content or "")
            choice = replace(choice, parsed=parsed, parse_error=parse_error)
        return replace(completion, choices=(choice,), message=message)

    async def wait(self) -> Completion:
        """Read to the end."""
        async for _ in self:
            pass
        return self.completion

    async def aclose(self) -> None:
        """Abort the request if it still runs. Idempotent."""
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
