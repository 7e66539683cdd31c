"""Numbers of JSON schemas as the library reads them: as doubles, and not always the nearest. Needs no library.

Of ``{"enum": [1234567890123456789]}`` it would admit 1234567890123456768 alone. What it can't hold to exactly, and
bounds that it can't make a state machine of, are found here, before it sees them.
"""

from __future__ import annotations

from typing import Any

_MOST_EXACT = 2**53
_LEAST_INT64, _MOST_INT64 = -(2**63), 2**63 - 1
_MOST_DOUBLE = 1.7976931348623157e308
_MOST_FAR = 10**17
"""Largest ``minimum`` that is positive, and ``maximum`` that is negative. Measured, as the next two."""
_LEAST_NEAR = 1e-30
_MOST_DIVISOR = (2**32 - 1) // 10  # the library keeps remainders in 32 bits, and takes ten times one with each digit
_LOWER = ("minimum", "exclusiveMinimum")
_BOUNDS = (*_LOWER, "maximum", "exclusiveMaximum")


def inexact_value(value: Any) -> Any:
    """Return a number in a constant, at any depth, that the library would read as another; None if there is none."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            rest += one.values()
        elif isinstance(one, list):
            rest += one
        elif not _is_exact(one) or (isinstance(one, int) and not _LEAST_INT64 < one <= _MOST_INT64):
            return one
    return None


def says_nothing(keyword: str, value: object) -> bool:
    """Return whether a bound lies at or beyond what 64 bits, or a double, can hold."""
    if not _is_number(value) or keyword not in _BOUNDS:
        return False
    if isinstance(value, int):
        return value <= _LEAST_INT64 if keyword in _LOWER else value >= _MOST_INT64
    assert isinstance(value, float)
    return value <= -_MOST_DOUBLE if keyword in _LOWER else value >= _MOST_DOUBLE


def unusable_bound(part: dict[str, Any], keyword: str) -> str:
    """Return why the library can't hold to a bound or a divisor of ``part``; "" if it can."""
    value = part[keyword]
    if not _is_number(value):
        return ""  # the library reports what is wrong with it
    if keyword == "multipleOf":
        if value <= 0:
            return "it is not above 0"
        digits = repr(value).partition("e")[0].replace(".", "").rstrip("0")
        number = int(digits) if isinstance(value, float) else value
        return "it has too many digits" if max(number, value) > _MOST_DIVISOR else ""
    if not _is_exact(value) or (keyword.startswith("exclusive") and abs(value) >= _MOST_EXACT):
        return "it has too many digits"
    is_away = value > 0 if keyword in _LOWER else value < 0
    if abs(value) > (_MOST_FAR if is_away else _MOST_INT64) or (is_away and abs(value) < _LEAST_NEAR):
        return "it is too large or too small"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(value: object) -> bool:
    """Return whether the library reads a number as what it is: it takes the digits as an integer, and multiplies that
    by a power of ten, or divides it, each rounded."""
    if not _is_number(value):
        return True
    if isinstance(value, int):
        return value.bit_length() - (value & -value).bit_length() < 53  # from the first digit to the last that is not 0
    assert isinstance(value, float)
    digits, _, exponent = repr(abs(value)).partition("e")
    whole, _, fraction = digits.partition(".")
    power = int(exponent or "0") - len(fraction)
    number = float(int(whole + fraction))
    return abs(value) == (number * float(f"1e{power}") if power >= 0 else number / float(f"1e{-power}"))
