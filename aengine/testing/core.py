"""The engine's core over a script: no model is looked for, and each request is given its lines on the way in."""

from __future__ import annotations

from typing import Any, ClassVar

from ..chat import tools_of
from ..checkpoint.source import ModelSource
from ..config import EngineConfig
from ..engine.admission import Admission
from ..engine.core import EngineCore, ProgressCallback
from ..engine.step_loop import Forcing
from ..engine.user_request import Call, Limits
from ..params import shown
from ..scheduler.request import Request
from ..tokenizer.tokenizer import Tokenizer
from .executor import ScriptedExecutor
from .script import Line, Script, ScriptError
from .vocabulary import tokenizer

__all__ = ["ScriptedCore", "ThinkingCore"]

_MOST_CHOICES = 1024  # of one call


class ScriptedCore(EngineCore):
    _executor: ScriptedExecutor
    thinks: ClassVar[bool] = False

    @classmethod
    async def _resolve(cls, config: EngineConfig, report: ProgressCallback) -> ModelSource:
        return ModelSource(config.model, "", "dummy", {})

    @classmethod
    async def _load_tokenizer(
        cls, config: EngineConfig, source: ModelSource
    ) -> tuple[Tokenizer | None, frozenset[int]]:
        known = tokenizer(cls.thinks)
        if config.allow_special_tokens:
            known = known.allowing_special_tokens()
        return None if config.skip_tokenizer else known, known.eos_token_ids

    def _forcing(self, is_gpu: bool) -> Forcing:
        return Forcing(most_rows=0, least_tokens=0.0)  # each token is sampled: the script's must be what comes

    def _new_admission(self, limits: Limits) -> Admission:
        script = self._executor.script
        return ScriptedAdmission(
            self.loop, self.tokenizer, limits, self._counters, self._observer, self.grammars, script=script
        )


class ThinkingCore(ScriptedCore):
    thinks = True


class ScriptedAdmission(Admission):
    """Asks the script when a call begins, and so only for calls that nothing is wrong with."""

    def __init__(self, *args: Any, script: Script) -> None:
        super().__init__(*args)
        self._script = script
        self._num_lines = 0

    def _begin(self, call: Call) -> None:
        try:
            lines = [self._next_line(call, choice) for choice in range(call.params.n)]
        except Exception as error:  # the script's own, too
            self._fail(call, error)  # type: ignore[arg-type]
            return
        # Rows know a request by its seed.
        call.params = call.params.replace(seed=self._num_lines)
        self._script.lines.update(enumerate(lines, start=self._num_lines))
        self._num_lines += len(lines)
        delay = max(line.delay for line in lines)
        if delay:
            self._num_encoding += 1
            self._loop.call_later(delay, self._begin_late, call)
        else:
            super()._begin(call)

    def _begin_late(self, call: Call) -> None:
        self._num_encoding -= 1
        self._let_in_soon()
        if self._calls.get(call.request_id) is call:
            super()._begin(call)

    def _next_line(self, call: Call, choice: int) -> Line:
        asked: dict[str, Any] = {"prompt": call.prompt, "params": call.params}
        if (chat := call.chat) is not None:
            asked["prompt"], asked["output_type"] = chat.messages, chat.output_type
            asked["params"] = call.params.replace(structured_output=chat.structured_output)
            asked["tools"], asked["tool_choice"] = tools_of(chat.tools), chat.tool_choice
        elif call.asked_type is not None:
            asked["output_type"] = call.asked_type.wanted
        elif call.mailbox.output_type is not None:
            asked["output_type"] = call.mailbox.output_type.wanted
        return self._script.next_line(request_id=call.request_id, choice=choice, **asked)

    def on_request_end(self, request: Request) -> None:
        call = self._calls.get(request.request_id)
        if call is not None and call.mailbox.error is not None:
            line = self._script.lines[request.seed]
            call.mailbox.error = line.error or ScriptError(
                f"the request's grammar does not allow what the script says, {shown(line.text)}: it stops after "
                f"{shown(''.join(call.mailbox.choices[request.index].texts), 200)}"
            )
        super().on_request_end(request)
