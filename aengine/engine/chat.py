"""Chats with tools, reasoning and a schema, over the engine's plain streams.

messages, tools, schema ──plan_chat (a thread)──> prompt ids + GrammarSpec ──submit──> TokenStream
ChatStream: token ──ChatParser──> deltas, and at the end a ChatMessage
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..chat import (
    ChatMessage,
    ChatParser,
    Delta,
    ReasoningFormat,
    Tool,
    ToolChoice,
    ToolFormat,
    compose,
    detect,
    suspects,
    tools_of,
)
from ..chat.history import with_instructions, written_out
from ..errors import DeadlineExceededError, GrammarError, InvalidRequestError
from ..grammar.output_type import OutputType
from ..grammar.spec import GrammarSpec
from ..outputs import Completion, FinishReason
from .chat_template import check_messages
from .stream import TokenStream
from .structured import GrammarService
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing import Self

__all__ = ["ChatPlan", "ChatStream", "check_grammar", "plan_chat", "plan_within"]


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What a chat asks of the engine, and how its answer is read."""

    prompt: list[int]
    spec: GrammarSpec | None
    tools: tuple[Tool, ...]  # that the answer may call
    tool_format: ToolFormat
    reasoning: ReasoningFormat | None
    output_type: OutputType | None


def plan_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    tool_choice: Any,
    parallel: bool | None,
    output_type: Any,
) -> ChatPlan:
    """Blocking, for a thread: large schemas take their time. Raises InvalidRequestError and GrammarError."""
    known = tools_of(tools)
    choice = ToolChoice.of(tool_choice, known)
    wanted = None if output_type is None else OutputType.of(output_type)
    check_messages(messages)
    tool_format, reasoning = detect(tokenizer.chat_template_source)
    shown = [tool.for_template() for tool in known]
    if tool_format.instructions:  # the template shows neither tools nor calls, or in a way that is not known
        messages = written_out(messages, tool_format)
        if shown:
            takes_system = _takes_system(tokenizer)
            messages = with_instructions(messages, tool_format.describe(shown), takes_system=takes_system)
        shown = []
    text = tokenizer.apply_chat_template(messages, tools=shown or None)
    if reasoning is not None:
        reasoning = reasoning.after_prompt(text)
    spec = compose(
        tools=known,
        tool_choice=choice,
        parallel=tool_format.parallel if parallel is None else parallel,
        tool_format=tool_format,
        reasoning=reasoning,
        schema=None if wanted is None else wanted.schema_text,
        token_id=tokenizer.control_token_id,
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    return ChatPlan(prompt, spec, choice.allowed(known), tool_format, reasoning, wanted)


def _takes_system(tokenizer: Tokenizer) -> bool:
    """Whether the chat template shows a system message; some raise, some pass over it."""
    probe = [{"role": "system", "content": "system-probe"}, {"role": "user", "content": "Hello"}]
    try:
        return "system-probe" in tokenizer.apply_chat_template(probe)
    except InvalidRequestError:
        return False


async def check_grammar(grammars: GrammarService, plan: ChatPlan) -> None:
    """Compile the plan's grammar; whoever asks next finds it. A GrammarError names the tool, or the answer's schema."""
    if plan.spec is None:
        return
    try:
        await grammars.prepare(plan.spec)
    except GrammarError as error:
        if error.kind == "too_complex":  # the parts would take as long
            raise
        schema = None if plan.output_type is None else plan.output_type.schema_text
        for owner, spec in suspects(tools=plan.tools, schema=schema):
            try:
                await grammars.prepare(spec)
            except GrammarError as found:
                raise GrammarError(f"{owner}: {found}", kind=found.kind, path=found.path) from None
        raise


async def plan_within(
    deadline: float | None, first_token_deadline: float | None, grammars: GrammarService, *asked: Any
) -> ChatPlan:
    """`plan_chat` of what was ``asked``, in a thread, and `check_grammar`, for as many seconds as both deadlines allow.

    Raises what those do, and DeadlineExceededError.
    """
    limit = min((seconds for seconds in (deadline, first_token_deadline) if seconds is not None), default=None)
    try:
        async with asyncio.timeout(limit) as timeout:
            plan = await grammars.run(plan_chat, *asked)
            await check_grammar(grammars, plan)
    except TimeoutError:
        if limit is None or not timeout.expired():
            raise
        message = f"the chat was not begun within its deadline of {limit:g} s"
        if limit != deadline:
            message = f"no token within first_token_deadline={limit:g} s (the chat was being prepared)"
        raise DeadlineExceededError(message, deadline=limit) from None
    return plan


class ChatStream:
    """The answer of one chat as it comes: an async iterator of deltas.

        async for delta in stream:      # ReasoningDelta, TextDelta, ToolCallStart, ToolCallDelta, ToolCallEnd
        stream.message                  # a ChatMessage: content, reasoning, tool_calls; so far, or whole at the end
        stream.completion               # once it has ended: usage, finish reason, parsed

    Closing, dropping or cancelling it ends the request, as with `TokenStream`.
    """

    def __init__(self, stream: TokenStream, plan: ChatPlan, tokenizer: Tokenizer) -> None:
        self._stream = stream
        self._output_type = plan.output_type
        self._parser = ChatParser(
            plan.tool_format, plan.reasoning, plan.tools, plan.output_type is not None, tokenizer.control_token_id
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
