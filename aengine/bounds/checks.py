"""Checks of what a caller can make large, before any work that grows with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized

from ..errors import ContextLengthError, InvalidRequestError
from . import CHARACTERS_PER_TOKEN, LONG_TEXT, MAX_NAME_CHARACTERS, MAX_VALUES, MOST_MESSAGES

__all__ = [
    "check_name",
    "check_num_characters",
    "check_num_items",
    "check_num_messages",
    "check_num_values",
    "check_size",
    "is_long",
    "most_characters",
    "size_of",
]

_NODE = 50  # characters that take as long as a value of a list or a mapping, as a message's role


def check_num_messages(max_model_len: int, *lists: object) -> None:
    """Raise ContextLengthError if there are as many messages and tools as tokens in the context: each has one at least.

    ``lists``: of messages and of tools; what is no list is left to those who read it.
    """
    number = sum(len(one) for one in lists if isinstance(one, Sequence) and not isinstance(one, str | bytes))
    if number >= max_model_len:
        raise ContextLengthError(number, max_model_len, at_least=True)


def check_num_items(param: str, items: Sized, contents: Iterable[object]) -> None:
    """Raise InvalidRequestError for more items of a conversation, or more parts in all their ``contents`` that are
    lists, than are looked at one by one."""
    if len(items) > MOST_MESSAGES:
        raise InvalidRequestError(f"{param} has {len(items)} items: there may be {MOST_MESSAGES}", param=param)
    num_parts = sum(len(one) for one in contents if isinstance(one, list))
    if num_parts > MOST_MESSAGES:
        message = f"the items of {param} have {num_parts} parts: there may be {MOST_MESSAGES}"
        raise InvalidRequestError(message, param=param)


def check_num_characters(number: int, max_model_len: int, *, generates: bool = True) -> None:
    """Raise ContextLengthError for a text of so many characters, whatever its tokens are."""
    if number > most_characters(max_model_len):
        least = number // CHARACTERS_PER_TOKEN
        raise ContextLengthError(least, max_model_len, at_least=True, generates=generates)


def most_characters(max_model_len: int) -> int:
    """Characters of the longest text that is read."""
    return max(2 * LONG_TEXT, CHARACTERS_PER_TOKEN * max_model_len)


def check_size(value: object, max_model_len: int) -> None:
    """Raise ContextLengthError if JSON-like data has more characters and values than can be read. Takes its time on
    large data: call it off the loop."""
    check_num_characters(size_of(value, most_characters(max_model_len), node=1), max_model_len)


def is_long(*values: object) -> bool:
    """Whether a prompt of this JSON-like data takes many milliseconds to make, so that others should not wait for it.
    Itself it takes a fraction of one."""
    return size_of(values, LONG_TEXT, node=_NODE) > LONG_TEXT


def size_of(value: object, most: int, *, node: int = 1) -> int:
    """Count characters, and ``node`` for each value, and stop at more than ``most``."""
    size, stack = 0, [value]
    while stack and size <= most:
        one = stack.pop()
        if isinstance(one, str):
            size += str.__len__(one)
        elif isinstance(one, Mapping | list | tuple):
            size += node * len(one)
            if size <= most:  # else it may be large
                stack.extend(one)
                stack.extend(one.values() if isinstance(one, Mapping) else ())
    return size


def check_num_values(*values: object) -> None:
    """Raise InvalidRequestError for JSON-like data of more values than a message between processes may have."""
    left = MAX_VALUES
    stack: list[object] = [*values]
    while stack:
        one = stack.pop()
        if isinstance(one, Mapping | list | tuple):
            left -= len(one)
            if left < 0:
                raise InvalidRequestError(f"the request has more than {MAX_VALUES} values: send less")
            if not (one and isinstance(one, list) and isinstance(one[0], int)):  # token ids have no values in them
                stack.extend(one.values() if isinstance(one, Mapping) else one)


def check_name(name: str, value: str | None) -> None:
    """Raise InvalidRequestError for a name or a key that is too long."""
    if value is not None and len(value) > MAX_NAME_CHARACTERS:
        message = f"{name} has {len(value)} characters: it may have {MAX_NAME_CHARACTERS}"
        raise InvalidRequestError(message, param=name)
