"""Checks of single values that callers give, and how a message shows them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import wraps
from reprlib import Repr
from typing import Any, TypeVar

from ..errors import InvalidRequestError
from .checks import size_of

T = TypeVar("T")

_MOST_SHOWN = 1000  # characters and values of what is written out for a message; of more only the beginning is
_REPR = Repr()


def refuses_unknown_names(cls: type[T]) -> type[T]:
    """Make a dataclass' constructor raise InvalidRequestError, with the nearest name, for an unknown one."""
    construct = cls.__init__

    @wraps(construct)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        try:
            construct(self, *args, **values)
        except TypeError:
            known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
            for name in values.keys() - known:
                raise InvalidRequestError(unknown_name(name, known), param=name) from None
            raise

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def shown(value: object, length: int = 80) -> str:
    """Return at most ``length`` characters of its repr, for messages about values that may be anything."""
    try:
        text = repr(value) if size_of(value, _MOST_SHOWN) <= _MOST_SHOWN else _REPR.repr(value)
    except Exception:  # an integer of thousands of digits, a list nested as deeply, or its own __repr__
        text = f"<{type(value).__name__}>"
    return text if len(text) <= length else text[: length - 3] + "..."


def not_valid(param: str, value: object, wanted: str) -> InvalidRequestError:
    """Return the error of a value that must be as ``wanted`` says."""
    return InvalidRequestError(f"{param}={shown(value)} is not valid: it must be {wanted}", param=param)


def choices_of(cls: type) -> dict[str, list[str]]:
    """Return what each field that is a Literal may be, as its annotation says."""
    literals = {name: kind for name, kind in cls.__annotations__.items() if kind.startswith("Literal")}
    return {name: re.findall("'(.+?)'", kind) for name, kind in literals.items()}


def check_choices(given: object, choices: Mapping[str, Sequence[str]]) -> None:
    """Raise InvalidRequestError for an attribute that is none of its choices."""
    for name, allowed in choices.items():
        value = getattr(given, name)
        if not isinstance(value, str) or value not in allowed:
            raise not_valid(name, value, "one of " + ", ".join(map(repr, allowed)))


def checked_number(param: str, value: object, low: float, high: float, wanted: str, *, open_low: bool = False) -> float:
    """Return the number from ``low`` to ``high``. Raises InvalidRequestError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise not_valid(param, value, wanted)
    if not low <= value <= high or (open_low and value == low):  # NaN is in no range
        raise not_valid(param, value, wanted)
    return float(value)


def checked_integer(param: str, value: object, low: int, high: int, wanted: str) -> int:
    """Return the integer from ``low`` to ``high``. Raises InvalidRequestError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise not_valid(param, value, wanted)
    return value


def is_unicode(text: str) -> bool:
    """Return whether the text can be written as UTF-8: a lone surrogate, as JSON's "\\ud800" gives, can't."""
    try:
        str.encode(text)
    except UnicodeEncodeError:
        return False
    return True


def unknown_name(name: object, known: set[str]) -> str:
    """Return the message for a parameter that does not exist, with the nearest one that does."""
    near = nearest(str(name), known)
    hint = f"; did you mean {near!r}?" if near else f"; the known ones are {', '.join(sorted(known))}"
    return f"there is no parameter {name!r}{hint}"


def nearest(name: str, known: set[str]) -> str | None:
    """Return the name that was probably meant, if it is a slip of the pen apart. A name that is as far as another
    engine's name for something else (prompt_logprobs from logprobs) is not."""
    import difflib

    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.8)
    return near[0] if near else None
