"""The engine's core over a script: no model is looked for, and each request is given its lines on the way in."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from ..chat import Tool, tools_of
from ..checkpoint.source import ModelSource
from ..engine.admission import Admission
from ..engine.chat.plan import ChatRequest
from ..engine.core import EngineCore
from ..engine.handles.start import EngineStart
from ..engine.tokenizer.prompt import MessagesPart, TextPart, TokensPart
from ..engine.tokenizer.tokenizer import Tokenizer
from ..engine.user_request import UserRequest
from ..errors import InternalError
from ..limits.values import shown
from ..outputs import FinishReason
from .executor import SCRIPT_ERROR, ScriptedExecutor
from .script import Line, Script, ScriptError
from .vocabulary import tokenizer


class ScriptedStart(EngineStart):
    reasoning: ClassVar[bool] = False

    def _core_class(self) -> type[EngineCore]:
        return ScriptedCore

    async def _resolve(self) -> ModelSource:
        return ModelSource(self._config.model, "", "dummy", {})

    async def _load_tokenizer(self, source: ModelSource) -> tuple[Tokenizer | None, frozenset[int]]:
        known = tokenizer(self.reasoning)
        if self._config.allow_special_tokens:
            known = known.allowing_special_tokens()
        return None if self._config.skip_tokenizer else known, known.eos_token_ids


class ReasoningStart(ScriptedStart):
    reasoning = True


class ScriptedCore(EngineCore):
    def _new_admission(self, **parts: Any) -> Admission:
        executor = self.replicas[0].worker.executor
        assert isinstance(executor, ScriptedExecutor)
        return ScriptedAdmission(executor.script, **parts)


class ScriptedAdmission(Admission):
    """Takes a completion's line from the script when the request begins, and so for valid requests only."""

    def __init__(self, script: Script, **parts: Any) -> None:
        super().__init__(**parts)
        self._script = script
        self._num_lines = 0
        self._late: set[asyncio.Task[None]] = set()  # tasks that take lines in the order of their requests
        self._order = asyncio.Lock()

    def _begin(self, request: UserRequest, turn: asyncio.Future[None] | None) -> None:
        has_tools = isinstance(request.prompt, ChatRequest) and bool(request.prompt.tools)
        if not request.samples:
            super()._begin(request, turn)
        elif turn is None and not has_tools and not self._late:
            self._begin_after(request, ())
        else:
            request.preparing = self._loop.create_task(self._begin_late(request, turn), name="aengine-script")
            if turn is None:
                self._late.add(request.preparing)
                request.preparing.add_done_callback(self._late.discard)

    async def _begin_late(self, request: UserRequest, turn: asyncio.Future[None] | None) -> None:
        """Begin in turn. Tools are read in a thread, as the engine does: large schemas take their time."""
        tools: tuple[Tool, ...] = ()
        try:
            if turn is not None:
                await turn
            async with self._order:
                if isinstance(request.prompt, ChatRequest) and request.prompt.tools:
                    tools = await self.preparation.run(tools_of, request.prompt.tools, is_long=request.prompt.is_long)
                request.preparing = None
                self._begin_after(request, tools)
        except Exception as error:
            request.preparing = None
            request.mailbox.fail(error)

    def _begin_after(self, request: UserRequest, tools: tuple[Tool, ...]) -> None:
        """Take the lines, and begin after their delay."""
        try:
            delay = self._take_lines(request, tools)
        except Exception as error:  # the script's own, too
            request.mailbox.fail(error)
            return
        if delay:
            request.preparing = self._loop.create_task(self._begin_delayed(request, delay), name="aengine-script")
        else:
            super()._begin(request, None)

    async def _begin_delayed(self, request: UserRequest, delay: float) -> None:
        await asyncio.sleep(delay)
        request.preparing = None
        super()._begin(request, None)

    def _take_lines(self, request: UserRequest, tools: tuple[Tool, ...]) -> float:
        """Take the lines of the request's completions from the script. Returns the seconds until they may begin."""
        lines = [self._next_line(request, choice, tools) for choice in range(request.params.n)]
        # Rows know a request by its seed.
        request.params = request.params.replace(seed=self._num_lines)
        self._script.lines.update(enumerate(lines, start=self._num_lines))
        self._num_lines += len(lines)
        return max(line.delay for line in lines)

    def _next_line(self, request: UserRequest, choice: int, tools: tuple[Tool, ...]) -> Line:
        prompt, params = request.prompt, request.params
        asked: dict[str, Any] = {"params": params}
        if isinstance(prompt, ChatRequest):
            asked["prompt"], asked["output_type"] = prompt.messages, prompt.output_type
            asked["tools"], asked["tool_choice"] = tools, prompt.tool_choice
        elif isinstance(prompt, MessagesPart):
            asked["prompt"] = prompt.messages
        elif isinstance(prompt, TextPart):
            asked["prompt"] = prompt.text
        else:
            assert isinstance(prompt, TokensPart)
            asked["prompt"] = prompt.token_ids
        if request.asked_type is not None:
            asked["output_type"] = request.asked_type.wanted
        elif request.mailbox.output_type is not None:
            asked["output_type"] = request.mailbox.output_type.wanted
        return self._script.next_line(request_id=request.request_id, choice=choice, **asked)

    def _ended(self, request_id: str) -> None:
        request = self._requests[request_id]
        mailbox = request.mailbox
        if isinstance(mailbox.error, InternalError) and str(mailbox.error) == SCRIPT_ERROR:
            failed = next(one for one in request.requests if one.finish_reason is FinishReason.ERROR)
            line = self._script.lines[failed.seed]
            mailbox.error = line.error or ScriptError(
                f"the request's grammar does not allow what the script says, {shown(line.text)}: it stops after "
                f"{shown(''.join(mailbox.choices[failed.index].texts), 200)}"
            )
        super()._ended(request_id)
