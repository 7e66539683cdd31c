"""`ChatRecord`: what has come of a chat's first answer, for whoever keeps the conversation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...outputs import FinishReason, Token, Usage
from ...params import SamplingParams
from ..chat.messages import ChatMessage
from .chat_answers import ParsedAnswers
from .token_stream import Mailbox

_ONE = SamplingParams()
Said = tuple[ChatMessage, int]
"""What an answer says so far, and how many of its tokens are reasoning."""


class ChatRecord:
    """What has come of a chat, read or not. A stream that nobody else holds is dropped, and its request ended, though
    its record is held."""

    def __init__(self, place: list[Mailbox], said: Callable[[Mailbox], Said]) -> None:
        """``place`` holds the mailbox, see `TokenStream.place`; ``said`` reads it."""
        self._place = place
        self._said = said

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self._place[0].done

    @property
    def error(self) -> BaseException | None:
        """What the chat has failed with."""
        return self._place[0].error

    @property
    def is_cut(self) -> bool:
        """Whether the answer was ended from outside: by its reader, or by `abort`."""
        mailbox = self._place[0]
        return not mailbox.choices or mailbox.finish_reason in (None, FinishReason.ABORT)

    @property
    def usage(self) -> Usage:
        """The tokens so far, of all answers; those of reasoning are not counted."""
        return self._place[0].usage()

    def said(self) -> tuple[ChatMessage, Usage]:
        """Return what the first answer says so far, and the tokens. All that has come is read anew each time."""
        message, num_reasoning_tokens = self._said(self._place[0])
        return message, replace(self.usage, reasoning_tokens=num_reasoning_tokens)


def said_by_tokens(mailbox: Mailbox) -> Said:
    """Read a mailbox that has tokens."""
    if mailbox.plan is None:  # the chat is yet to be planned, or could not be
        return ChatMessage(), 0
    answers, choice = ParsedAnswers(mailbox.plan, _ONE), mailbox.choices[0]
    reason = FinishReason.STOP if choice.finish_reason is FinishReason.TOOL_CALLS else choice.finish_reason
    tokens = [Token(*one) for one in zip(choice.texts, choice.token_ids)]  # another thread may be adding to them
    if tokens:
        tokens[-1] = tokens[-1]._replace(finish_reason=reason)
    answers.read(tokens)
    answers.finish()
    return answers.messages[0], answers.num_reasoning_tokens
