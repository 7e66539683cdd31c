"""`Conversation`: what a session has said and heard, and the turn that is under way.

begin ──> Turn ──ended by itself, at its limit, or left by its reader──> its messages and its answer are history
            └──raised (an error, a deadline), or left before a token───> nothing of it is
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

from ...errors import InvalidRequestError
from ...outputs import Usage
from ..chat.messages import ChatMessage
from ..streams.chat_record import ChatRecord
from ..tokenizer.messages import Messages, checked_messages

Said = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""What a turn adds: a user's text, a message, several, or nothing, as after results of tools."""


@dataclass(frozen=True, slots=True)
class SessionUsage(Usage):
    """Tokens of all turns of a session, those that were undone and the one that runs included."""

    turns: tuple[Usage, ...] = ()
    """Those of each turn."""

    @classmethod
    def of(cls, turns: Sequence[Usage]) -> SessionUsage:
        sums = {field.name: sum(getattr(turn, field.name) for turn in turns) for field in fields(Usage)}
        return cls(**sums, turns=tuple(turns))


class Stream(Protocol):
    """Interface of a turn's stream, which its reader holds."""

    @property
    def request_id(self) -> str: ...
    @property
    def record(self) -> ChatRecord: ...


S = TypeVar("S", bound=Stream)


@dataclass(slots=True, eq=False)
class Turn:
    """One turn under way."""

    asked: Messages
    continues: bool  # the answer goes on with the last message
    stream: weakref.ref[Any]
    record: ChatRecord
    request_id: str


class Conversation(Generic[S]):
    """The messages of a session. Any thread may begin a turn; one runs at a time."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], abort: Callable[[str], object]) -> None:
        """``abort`` ends the request of a turn whose stream was dropped. Raises InvalidRequestError."""
        self._messages: Messages = checked_messages(messages) if messages else []
        self._abort = abort
        self._usages: list[Usage] = []
        self._turn: Turn | None = None
        self._lock = threading.Lock()

    def begin(self, said: Said, begin: Callable[[Messages], S], *, continues: bool) -> S:
        """Begin a turn by ``begin(all messages)``, which returns its stream. Raises InvalidRequestError, also while
        another turn runs, and what ``begin`` raises: the conversation is then as before."""
        asked = _messages_of(said)
        if not self._lock.acquire(blocking=False):  # another thread begins one, or a listener that is told of this one
            raise _under_way()
        try:
            self.settle()
            if self._turn is not None:
                raise _under_way()
            stream = begin([*self._messages, *asked])
            self._turn = Turn(asked, continues, weakref.ref(stream), stream.record, stream.request_id)
        finally:
            self._lock.release()
        return stream

    def end(self, request_id: str, answer: ChatMessage | None, usage: Usage | None = None) -> None:
        """End the turn of this request, if it is under way. ``answer``: None: it is undone; ``usage``: None: as far as
        it is known."""
        turn = self._turn
        if turn is not None and turn.request_id == request_id:
            self._turn = None
            self._usages.append(turn.record.usage if usage is None else usage)
            if answer is not None:
                self._messages = _with_answer(turn, self._messages, answer)

    def settle(self, *, leaves: bool = False) -> None:
        """End the turn under way if it has ended, or nobody can read it any more. ``leaves``: in any case."""
        turn = self._turn
        if turn is None or not (leaves or turn.record.has_ended or turn.stream() is None):
            return
        if not turn.record.has_ended:
            self._abort(turn.request_id)
        answer, usage = turn.record.said()
        is_undone = turn.record.error is not None or (turn.record.is_cut and says_nothing(answer))
        self.end(turn.request_id, None if is_undone else answer, usage)

    @property
    def messages(self) -> Messages:
        """A copy of all messages, with what the turn under way has said so far."""
        self.settle()
        turn = self._turn
        if turn is None:
            return self._messages.copy()
        answer, _ = turn.record.said()
        return [*self._messages, *turn.asked] if says_nothing(answer) else _with_answer(turn, self._messages, answer)

    @property
    def usage(self) -> SessionUsage:
        self.settle()
        turn = self._turn
        return SessionUsage.of([*self._usages, *([] if turn is None else [turn.record.usage])])

    # -- tools

    @property
    def open_calls(self) -> list[Mapping[str, Any]]:
        """The calls of the last answer that have no result yet, as OpenAI writes them."""
        messages = self.messages
        answered = set()
        while messages and messages[-1]["role"] == "tool":
            answered.add(messages.pop().get("tool_call_id"))
        calls = messages[-1].get("tool_calls") or () if messages else ()
        return [call for call in calls if call["id"] not in answered]

    def add_result(self, call_id: str, content: str) -> None:
        """Add the result of a call. Raises InvalidRequestError: the last answer has no such call without a result."""
        known = [call["id"] for call in self.open_calls]
        if self._turn is not None or call_id not in known:
            has = "has none" if not known else f"has {', '.join(map(repr, known))}"
            message = f"there is no call {call_id!r:.100} without a result: the last answer {has}"
            raise InvalidRequestError(message, param="call")
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def says_nothing(answer: ChatMessage) -> bool:
    """Return whether an answer that is not whole has nothing yet that a message could have."""
    return not (answer.content or answer.reasoning or any(call.is_complete for call in answer.tool_calls))


def _under_way() -> InvalidRequestError:
    message = (
        "a turn of this session is under way: read its stream to the end, or close it; fork() the session for turns "
        "side by side"
    )
    return InvalidRequestError(message, param="message")


def _messages_of(said: Said) -> Messages:
    if said is None:
        return []
    if isinstance(said, str):
        said = {"role": "user", "content": said}
    if isinstance(said, Mapping):
        said = [said]
    return checked_messages(said)


def _with_answer(turn: Turn, before: Messages, answer: ChatMessage) -> Messages:
    messages, said = [*before, *turn.asked], answer.to_dict()
    if turn.continues and messages:
        first = messages.pop()
        for key in ("content", "reasoning_content"):
            if begun := first.get(key):
                said[key] = _text_of(begun) + (said.get(key) or "")
    if not said.get("tool_calls"):
        said["content"] = said["content"] or ""  # chat templates write None as it is
    return [*messages, said]


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
