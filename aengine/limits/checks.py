"""Checks of what a caller can make large, before any work that grows with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

from ..errors import ContextLengthError, InvalidRequestError
from .bounds import CHARACTERS_PER_TOKEN, LONG_TEXT, MAX_MESSAGES, MAX_NAME_CHARACTERS, MAX_VALUES

_PLAIN = frozenset({str, int, float, bool, type(None)})
_HOLDERS = (dict, list, tuple, Mapping)
_NODE = 50  # characters that take as long as a value of a list or a mapping, as a message's role


def check_num_messages(max_model_len: int, messages: object, tools: object = None) -> None:
    """Raise ContextLengthError if there are as many messages and tools as tokens in the context, or as many parts and
    calls in the messages: each has one at least. What is no list is left to those who read it."""
    number = sum(map(len, filter(_is_list, (messages, tools))))  # type: ignore[arg-type]
    if number < max_model_len and _is_list(messages):
        number = max(number, num_parts_of(messages))  # type: ignore[arg-type]
    if number >= max_model_len:
        raise ContextLengthError(number, max_model_len, at_least=True)


def check_num_items(param: str, items: Sized, contents: Iterable[object]) -> None:
    """Raise InvalidRequestError for more items of a conversation, or more parts in all their ``contents`` that are
    lists, than are looked at one by one."""
    if len(items) > MAX_MESSAGES:
        raise InvalidRequestError(f"{param} has {len(items)} items: there may be {MAX_MESSAGES}", param=param)
    num_parts = sum(len(one) for one in contents if isinstance(one, list))
    if num_parts > MAX_MESSAGES:
        message = f"the items of {param} have {num_parts} parts: there may be {MAX_MESSAGES}"
        raise InvalidRequestError(message, param=param)


def num_parts_of(messages: Sequence[Any]) -> int:
    """Return the number of text parts in the contents that are lists, and of calls."""
    known = [message for message in messages if isinstance(message, Mapping)]
    listed = [message.get(key) for message in known for key in ("content", "tool_calls")]
    return sum(len(one) for one in listed if isinstance(one, list | tuple))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def check_num_characters(number: int, max_model_len: int, *, generates: bool = True) -> None:
    """Raise ContextLengthError for a text of so many characters, whatever its tokens are."""
    if number > most_characters(max_model_len):
        least = number // CHARACTERS_PER_TOKEN
        raise ContextLengthError(least, max_model_len, at_least=True, generates=generates)


def most_characters(max_model_len: int) -> int:
    """Return how many characters a text may have; a longer one is refused unread."""
    return max(2 * LONG_TEXT, CHARACTERS_PER_TOKEN * max_model_len)


def check_size(value: object, max_model_len: int) -> None:
    """Raise ContextLengthError if JSON-like data has more characters and values than can be read. Takes its time on
    large data: call it off the loop."""
    check_num_characters(size_of(value, most_characters(max_model_len), node=1), max_model_len)


def is_long(*values: object) -> bool:
    """Return whether a prompt of this JSON-like data takes many milliseconds to make, so that others should not wait
    for it. The check itself takes a fraction of one."""
    return size_of(values, LONG_TEXT, node=_NODE) > LONG_TEXT


def size_of(value: object, most: int, *, node: int = 1, character: int = 1) -> int:
    """Count ``character`` for each character, and ``node`` for each value, and stop at more than ``most``.

    It goes level by level, and no level is made that has more than ``most`` values.
    """
    size, level = 0, [value]
    while level and size <= most:
        if character:
            size += character * sum(str.__len__(one) for one in level if isinstance(one, str))
        holders: list[Any] = [one for one in level if type(one) not in _PLAIN and isinstance(one, _HOLDERS)]
        size += node * sum(len(one) for one in holders)
        if size > most:
            break
        level = [inner for one in holders for inner in one]
        level += [inner for one in holders if isinstance(one, Mapping) for inner in one.values()]
    return size


def check_num_values(*values: object) -> None:
    """Raise InvalidRequestError for JSON-like data of more values than a message between processes may have."""
    if size_of(values, MAX_VALUES, character=0) > MAX_VALUES:
        raise InvalidRequestError(f"the request has more than {MAX_VALUES} values: send less")


def check_name(name: str, value: str | None) -> None:
    """Raise InvalidRequestError for a name or a key that is too long."""
    if value is not None and len(value) > MAX_NAME_CHARACTERS:
        message = f"{name} has {len(value)} characters: it may have {MAX_NAME_CHARACTERS}"
        raise InvalidRequestError(message, param=name)
