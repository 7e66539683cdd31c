"""From what the caller wrote as prompt to checked token ids."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ContextLengthError, InvalidRequestError
from ..params import shown
from .messages import checked_messages

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

__all__ = ["Prompt", "check_token_ids", "encode_prompt", "is_long", "prompt_kind"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

_WANTED = "a text, a list of token ids, or a list of chat messages such as {'role': 'user', 'content': '...'}"


def prompt_kind(prompt: Prompt) -> str:
    """ "text", "token_ids" or "messages". Raises InvalidRequestError for anything else, or for nothing."""
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError("the prompt is empty: give it at least one character", param="prompt")
        return "text"
    if isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Sequence):
        raise InvalidRequestError(f"a prompt must be {_WANTED}, not {type(prompt).__name__}", param="prompt")
    if not prompt:
        raise InvalidRequestError("the prompt is empty: give it at least one token or message", param="prompt")
    first = next(iter(prompt), None)
    if isinstance(first, Mapping):
        return "messages"
    if isinstance(first, int) and not isinstance(first, bool):
        return "token_ids"
    raise InvalidRequestError(f"a prompt must be {_WANTED}, not a list of {type(first).__name__}", param="prompt")


LONG_TEXT = 50_000
"""Characters from which on a text is a matter of many milliseconds."""


def is_long(prompt: Prompt, kind: str) -> bool:
    """Whether it takes so long to encode that others should not wait for it."""
    if kind == "text":
        return len(prompt) > LONG_TEXT
    size = 0
    for message in prompt:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list | tuple) else [content]
        texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
        size += sum(len(text) for text in texts if isinstance(text, str))
    return size > LONG_TEXT


def encode_prompt(prompt: Prompt, kind: str, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
    """Token ids of a text or of chat messages. Takes its time on long ones: call it off the loop.

    Raises:
        ContextLengthError: the text is so long that it can't fit, and was not encoded.
        InvalidRequestError: the messages do not fit the model's chat template, the text is not Unicode (a lone
            surrogate), or it has no tokens.
    """
    if kind == "messages":
        text = tokenizer.apply_chat_template(checked_messages(prompt))
        _check_length(text, tokenizer, max_model_len)
        ids = tokenizer.encode(text, add_special_tokens=False)  # the template wrote them
    else:
        assert isinstance(prompt, str)
        _check_length(prompt, tokenizer, max_model_len)
        ids = tokenizer.encode(str.__str__(prompt))  # whatever methods a class of its own has
    if not ids:
        raise InvalidRequestError("the prompt has no tokens", param="prompt")
    return ids


def _check_length(text: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    length = str.__len__(text)
    if length > LONG_TEXT and (least := tokenizer.least_tokens(length)) >= max_model_len:
        raise ContextLengthError(least, max_model_len, at_least=True)


def check_token_ids(ids: Sequence[int], vocab_size: int, max_model_len: int) -> list[int]:
    """The ids as a list of valid ones that leave room for at least one more.

    Raises:
        InvalidRequestError: something in it is no token id of this model.
        ContextLengthError: too many of them.
    """
    if len(ids) >= max_model_len:
        raise ContextLengthError(len(ids), max_model_len)
    try:
        column = array("i", ids)  # takes whatever has __index__, numpy's integers too
        if min(column) >= 0 and max(column) < vocab_size:
            return column.tolist()
    except (TypeError, OverflowError, ValueError):
        pass
    for i, token_id in enumerate(ids):
        if not _is_token_id(token_id, vocab_size):
            raise InvalidRequestError(
                f"prompt[{i}]={shown(token_id)} is not a token id of this model: "
                f"they are integers from 0 to {vocab_size - 1}",
                param="prompt",
            )
    raise InvalidRequestError("the prompt has no tokens", param="prompt")


def _is_token_id(value: Any, vocab_size: int) -> bool:
    try:
        return 0 <= operator.index(value) < vocab_size
    except TypeError:
        return False
