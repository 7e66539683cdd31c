"""A caller's prompt: checked and copied at once, encoded off the loop.

    str             ──> TextPart      ─┐
    token ids       ──> TokensPart    ─┼─ encode(tokenizer, max_model_len) ──> token ids
    chat messages   ──> MessagesPart  ─┘

`part_of` checks all that can be told without a tokenizer, and copies what a caller could change later. Nobody looks at
the form of a prompt after it. A chat with tools is a part as well: see `aengine.engine.chat.plan.ChatRequest`.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import ContextLengthError, InvalidRequestError
from ...limits.bounds import LONG_TEXT
from ...limits.checks import check_num_characters, check_num_messages, check_size, is_long
from ...limits.values import shown
from .messages import Messages, checked_messages

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

_WANTED = "a text, a list of token ids, or a list of chat messages such as {'role': 'user', 'content': '...'}"


class PromptPart:
    """One kind of prompt, checked, and copied from the caller's."""

    __slots__ = ()
    kind: ClassVar[str]
    """"text", "token_ids", "messages" or "chat"."""


@dataclass(frozen=True, slots=True)
class TextPart(PromptPart):
    """A text, not empty."""

    kind: ClassVar[str] = "text"
    text: str

    @property
    def is_long(self) -> bool:
        """Whether it takes so long to encode that others should not wait for it."""
        return str.__len__(self.text) > LONG_TEXT

    def encode(self, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
        """Return the token ids. Takes milliseconds or more for long texts: call it off the loop.

        Raises:
            ContextLengthError: the text is so long that it can't fit, and was not encoded.
            InvalidRequestError: it is not Unicode (a lone surrogate), or has no tokens.
        """
        check_num_characters(str.__len__(self.text), max_model_len)
        return _not_empty(tokenizer.encode(str.__str__(self.text)))  # a subclass of str may have methods of its own


@dataclass(frozen=True, slots=True)
class TokensPart(PromptPart):
    """Token ids that a caller has encoded; `check_token_ids` checks that they are this model's."""

    kind: ClassVar[str] = "token_ids"
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class MessagesPart(PromptPart):
    """Chat messages, for the model's chat template."""

    kind: ClassVar[str] = "messages"
    messages: Messages

    @property
    def is_long(self) -> bool:
        """See `TextPart.is_long`."""
        return is_long(self.messages)

    def encode(self, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
        """See `TextPart.encode`; InvalidRequestError also if the messages don't fit the template."""
        check_size(self.messages, max_model_len)
        text = tokenizer.apply_chat_template(self.messages)
        check_num_characters(len(text), max_model_len)
        return _not_empty(tokenizer.encode(text, add_special_tokens=False))  # the template wrote the special tokens


def part_of(prompt: Prompt, max_model_len: int | None = None) -> TextPart | TokensPart | MessagesPart:
    """Return the checked prompt. Raises InvalidRequestError for a value that is no prompt or is empty, and
    ContextLengthError for more messages than the context has tokens."""
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError("the prompt is empty: give it at least one character", param="prompt")
        if max_model_len is not None:
            check_num_characters(str.__len__(prompt), max_model_len)
        return TextPart(prompt)
    if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Sequence):
        raise InvalidRequestError(f"a prompt must be {_WANTED}, not {type(prompt).__name__}", param="prompt")
    if not prompt:
        raise InvalidRequestError("the prompt is empty: give it at least one token or message", param="prompt")
    first = next(iter(prompt), None)
    if isinstance(first, Mapping):
        if max_model_len is not None:
            check_num_messages(max_model_len, prompt)  # checked before the messages are read
        return MessagesPart(checked_messages(prompt))
    if isinstance(first, int) and not isinstance(first, bool):
        return TokensPart(prompt)  # type: ignore[arg-type]
    if isinstance(first, str):
        cure = "a call takes one prompt: begin one for each with asyncio.gather, or give the list to LLM.generate"
        raise InvalidRequestError(f"a prompt must be {_WANTED}, not a list of str; {cure}", param="prompt")
    raise InvalidRequestError(f"a prompt must be {_WANTED}, not a list of {type(first).__name__}", param="prompt")


def _not_empty(ids: list[int]) -> list[int]:
    if not ids:
        raise InvalidRequestError("the prompt has no tokens", param="prompt")
    return ids


def check_token_ids(ids: Sequence[int], vocab_size: int, max_model_len: int, *, generates: bool = True) -> list[int]:
    """Return the ids as a list of valid ones. ``generates``: they leave room for at least one more token.

    Raises:
        InvalidRequestError: something in it is no token id of this model.
        ContextLengthError: too many of them.
    """
    if len(ids) + generates > max_model_len:
        raise ContextLengthError(len(ids), max_model_len, generates=generates)
    try:
        column = array("i", ids)  # takes whatever has __index__, numpy's integers too
        if min(column) >= 0 and max(column) < vocab_size:
            return column.tolist()
    except (TypeError, OverflowError, ValueError):
        pass
    for i, token_id in enumerate(ids):
        if not is_token_id(token_id, vocab_size):
            raise InvalidRequestError(
                f"prompt[{i}]={shown(token_id)} is not a token id of this model: "
                f"they are integers from 0 to {vocab_size - 1}",
                param="prompt",
            )
    raise InvalidRequestError("the prompt has no tokens", param="prompt")


def is_token_id(value: Any, vocab_size: int) -> bool:
    try:
        return 0 <= operator.index(value) < vocab_size
    except TypeError:
        return False
