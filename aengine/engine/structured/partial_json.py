"""`partial_json`: the value that the beginning of a JSON text says so far. Needs pydantic.

A snapshot is a prefix of the value that the whole text will have:

    text so far                     snapshot
    {"name": "Ad                    {"name": "Ad"}                  a string: its letters so far
    {"name": "Ada", "ag             {"name": "Ada"}                 a key: once its value has begun
    {"name": "Ada", "age": 3        {"name": "Ada"}                 a number: once it is known to end (36 may come)
    {"name": "Ada", "age": 36, "l   {"name": "Ada", "age": 36}
    ... "likes": ["tea", "co        {..., "likes": ["tea", "co"]}   a list: its members so far

So between two snapshots nothing is taken back: strings, lists and objects only grow at their end, and everything
but the last member at each level is final. (Except for a key given twice: the later value wins, as in ``json.loads``.)
"""

from __future__ import annotations

from typing import Any

from ...errors import InvalidRequestError


def partial_json(text: str, *, has_ended: bool = False) -> Any:
    """Read ``text`` from its beginning: 0.1 to 4 microseconds a KB.

    ``has_ended``: nothing follows, so a number at its end is whole. Returns None when no value has begun. It is meant
    for what a grammar held to JSON: of other texts, some that are no JSON are read as far as they are.

    Raises:
        InvalidRequestError: the text is not the beginning of a JSON value, or of one that pydantic does not read (half
            of a surrogate pair, more than 200 levels, an integer of more than 4300 digits); or there is no pydantic.
    """
    try:
        from pydantic_core import from_json
    except ImportError:
        raise InvalidRequestError("partial values need pydantic: pip install pydantic") from None

    if not has_ended and not _ends_in_string(text):
        text = text.rstrip("-+.0123456789")
    try:
        members = from_json("[" + text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError as error:
        reason = str(error).partition(" at line ")[0]
        raise InvalidRequestError(f"the text is not JSON: {reason}") from error
    return members[0] if members else None


def _ends_in_string(text: str) -> bool:
    return text.replace("\\\\", "").replace('\\"', "").count('"') % 2 == 1
