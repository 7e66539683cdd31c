"""Answers of a fake engine: `Reply`, the `Script` that gives one to each completion, and what a script may be.

script: one for all, a list, or a function ──reply_to(FakeRequest)──> Reply ──Line.of──> token ids
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..chat import FORMATS, Tool
from ..errors import AEngineError
from ..limits.values import shown
from ..params import SamplingParams
from .vocabulary import END_OF_TURN, ids_of

if TYPE_CHECKING:
    from ..engine.tokenizer.prompt import Prompt

_NOTHING: Any = object()
_FREE_TEXT = "ok"


class ScriptError(AssertionError):
    """The test's script is wrong: it has no answer left, or one that the request's grammar forbids."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FakeRequest:
    """A completion that was asked for. A request with n > 1 is n of them."""

    index: int
    """Completions that the engine was asked for before this one."""
    request_id: str
    prompt: Prompt
    """The prompt as it was given: a text, token ids (of bytes), or messages."""
    params: SamplingParams
    choice: int = 0
    """Which of the request's n completions."""
    tools: tuple[Tool, ...] = ()
    tool_choice: Any = None
    output_type: Any = None

    @property
    def messages(self) -> Sequence[Mapping[str, Any]] | None:
        """The chat's messages; None if the prompt is none."""
        prompt: Any = self.prompt
        return prompt if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping) else None

    @property
    def text(self) -> str:
        """The prompt as text; of a chat, its last message's content."""
        if self.messages is None:
            return self.prompt if isinstance(self.prompt, str) else bytes(self.prompt).decode(errors="replace")  # type: ignore[arg-type]
        content = self.messages[-1].get("content") or ""
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """A completion, from its beginning to its end.

    ``Reply("text")``, ``Reply(tool_calls=[("get_weather", {"city": "Paris"})])``, ``Reply(value=Report(...))``, ...
    """

    text: str = ""
    _: dataclasses.KW_ONLY
    reasoning: str = ""
    """Before the text; of an engine with ``reasoning=True``."""
    tool_calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    """After the text: names and arguments."""
    value: Any = _NOTHING
    """In place of a text: data, written as JSON. A dict, too, may stand for a value of the request's output_type."""
    delay: float = 0.0
    """Seconds before the first token, as a long prompt takes."""
    error: AEngineError | None = None
    """Raised after all of that, in place of the end."""
    num_deaths: int = 0
    """After all of that, the worker dies so many times, before the completion ends as usual."""

    def written(self, request: FakeRequest) -> str:
        """Return the text as the model would write it."""
        text, shape = self.text, request.params.structured_output
        if self.value is not _NOTHING:
            text = _json(_of_type(self.value, request.output_type))
        elif request.output_type is not None or (shape is not None and shape.is_json):
            text = _as_compact(text)
        parts = [f"<think>\n{self.reasoning}\n</think>\n"] * bool(self.reasoning) + [text]
        if self.tool_calls:
            known = FORMATS["hermes"]
            calls = [
                known.head(name) + _json(_in_order(name, arguments, request.tools)) + known.after_arguments
                for name, arguments in self.tool_calls
            ]
            parts.append(known.separator.join(calls))
        return "".join(parts)


ReplyLike = Any
"""A Reply, a text, an error to be raised at once, data for JSON, or None: whatever the request's grammar allows."""


class Line:
    """The tokens that the script gives one completion, by their index in it."""

    def __init__(self, reply: Reply | None, text: str) -> None:
        """``reply``: what the completion says; None: its tokens do not matter."""
        self.text = text
        self.is_free = reply is None
        self.error = None if reply is None else reply.error
        self.delay = 0.0 if reply is None else reply.delay
        self._num_deaths = 0 if reply is None else reply.num_deaths
        self._ids = ids_of(text)

    @classmethod
    def of(cls, reply: Reply | None, request: FakeRequest) -> Line:
        return cls(reply, _FREE_TEXT if reply is None else reply.written(request))

    def token(self, place: int) -> int:
        """Return the id at ``place``; the end of sequence after the last one."""
        return self._ids[place] if place < len(self._ids) else END_OF_TURN

    def fails_at(self, place: int) -> bool:
        return self.error is not None and place >= len(self._ids)

    def kills_at(self, place: int) -> bool:
        """Return whether the worker dies now. Counts the times."""
        if place < len(self._ids) or not self._num_deaths:
            return False
        self._num_deaths -= 1
        return True


class Script:
    """Gives each completion its line. Safe in threads."""

    def __init__(self, replies: ReplyLike | Sequence[ReplyLike] | Callable[[FakeRequest], ReplyLike]) -> None:
        self._replies = replies
        self._lock = threading.Lock()
        self.requests: list[FakeRequest] = []
        self.lines: dict[int, Line] = {}  # lines by the seed of the scheduler's request, which is different for each

    def next_line(self, **asked: Any) -> Line:
        """Return the script's reply to the next request. Raises what the script says is to be raised, and ScriptError
        when the script is at its end."""
        with self._lock:
            request = FakeRequest(index=len(self.requests), **asked)
            self.requests.append(request)
            reply = self._reply_at(request.index)
        if callable(reply) and not isinstance(reply, type):
            reply = reply(request)
        if isinstance(reply, BaseException):
            raise reply
        return Line.of(_reply_of(reply), request)

    def _reply_at(self, index: int) -> ReplyLike:
        if not isinstance(self._replies, list | tuple):
            return self._replies
        if index >= len(self._replies):
            raise ScriptError(f"the script has {len(self._replies)} replies, and this is completion {index + 1}")
        return self._replies[index]


def _reply_of(reply: ReplyLike) -> Reply | None:
    if reply is None or isinstance(reply, Reply):
        return reply
    return Reply(reply) if isinstance(reply, str) else Reply(value=reply)


def _json(value: Any) -> str:
    """Format as the grammar of JSON does: blanks after commas and colons, and nowhere else."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        from pydantic_core import to_jsonable_python

        return json.dumps(to_jsonable_python(value, by_alias=True), ensure_ascii=False)


def _of_type(value: Any, output_type: Any) -> Any:
    """Return the value as the type writes it: its keys in order, its defaults; as it is, if the type refuses it."""
    if output_type is None:
        return value
    from ..engine.structured.output_type import OutputType

    adapter = OutputType.of(output_type).adapter
    try:
        return adapter.dump_python(adapter.validate_python(value), mode="json", by_alias=True)
    except ValueError:  # pydantic's errors are ValueErrors; a test may want to see their effect
        return value


def _as_compact(text: str) -> str:
    try:
        return _json(json.loads(text))
    except ValueError:
        return text


def _in_order(name: str, arguments: Mapping[str, Any], tools: Sequence[Tool]) -> Mapping[str, Any]:
    """Return the arguments in the order of the tool's parameters, by which the grammar goes."""
    if not isinstance(arguments, Mapping):
        raise ScriptError(f"the arguments of the call of {name!r} must be a mapping, not {shown(arguments)}")
    known: Mapping[str, Any] = next((tool.parameters.get("properties", {}) for tool in tools if tool.name == name), {})
    return {key: arguments[key] for key in [*(k for k in known if k in arguments), *arguments]}
