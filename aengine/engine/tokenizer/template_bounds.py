"""What a chat template may do at most: a template is a program, and comes with the files of a model.

`bounded` gives a rendering so many steps. A step is a round of a loop, 1,024 letters or 128 values that are made, cut
or looked through, 16 values that a filter goes through, a value within a list that is shown, compared, hashed or put
into another list; a filter is 8 of them, a call 16. Beyond that, numbers have a largest width, and texts a largest
length, which is checked before they are made.

Values within values are counted as often as they are there. So a list that holds one list twice, which holds one list
twice, and so on, can't be made large; nor can one be nested so deeply that its hash would overflow the stack.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.utils import Namespace

_STEPS = 1 << 20
_STEPS_A_MESSAGE = 1 << 8
_LETTERS_A_STEP = 1 << 10
_VALUES_A_STEP = 16
_ITEMS_A_STEP = 128
"""Items of a list that the interpreter makes or looks through in a step: 1,024 bytes of pointers."""
_FILTER_STEPS = 8
CALL_STEPS = 16
_MOST_LETTERS = 1 << 26
_MOST_SOURCE = 1 << 20
"""Letters of a template: compiling it takes time in proportion."""
_MOST_BITS = 1 << 12
_MOST_WIDTH = 1 << 17
"""Largest width to which a filter pads, fills or cuts. Jinja's own bound of ranges is 100,000."""
_WIDTHS = {"batch": _MOST_WIDTH, "center": _MOST_WIDTH, "indent": 1 << 10, "round": 1 << 10, "slice": _MOST_WIDTH,
           "tojson": 1 << 5, "truncate": _MOST_LETTERS, "wordwrap": _MOST_LETTERS}  # fmt: skip
"""Filters that take a number, and the largest."""
_SHOWING = ("format", "pprint", "string", "tojson", "xmlattr", "indent", "e", "escape", "forceescape", "urlencode")
"""Filters that make a text of all that is within a value."""
_LOOKING = ("count", "default", "d", "first", "last", "length", "random", "attr")
"""Filters that go through nothing."""
_COMPARING = ("dictsort", "groupby", "max", "min", "sort", "unique")
"""Filters that compare values, or hash them."""
_TEXTUAL = ("capitalize", "center", "e", "escape", "filesizeformat", "float", "forceescape", "format", "indent", "int",
            "lower", "replace", "reverse", "safe", "string", "striptags", "title", "tojson", "trim", "truncate",
            "upper", "urlencode", "urlize", "wordcount", "wordwrap")  # fmt: skip
"""Filters that take a text as a whole; others go through its letters."""
_SPLITTING = ("split", "rsplit", "splitlines")
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_PADDING = ("center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill")
BOUNDED_METHODS = frozenset([*_PADDING, *_SPLITTING, "replace", "translate"])
_WIDE = re.compile(r"%[-+ #0-9.]*?(\*|\d{6})")


class _Work:
    __slots__ = ("steps",)

    def __init__(self, steps: int) -> None:
        self.steps = steps


_work: ContextVar[_Work | None] = ContextVar("work of the template that is rendered", default=None)


@contextmanager
def bounded(num_messages: int) -> Iterator[None]:
    """Give what is rendered within a number of steps, after which it raises TemplateError."""
    token = _work.set(_Work(_STEPS + _STEPS_A_MESSAGE * num_messages))
    try:
        yield
    finally:
        _work.reset(token)


def check_source(source: str) -> None:
    """Raise TemplateError for a template that is too long to be compiled."""
    if len(source) > _MOST_SOURCE:
        _refuse(f"it has {len(source)} letters, where {_MOST_SOURCE} is the most")


def spend(steps: int = 1) -> None:
    """Count ``steps`` against the template's limit. Raises TemplateError beyond it."""
    work = _work.get()
    if work is not None:
        work.steps -= steps
        if work.steps < 0:
            _refuse(f"it takes more than {_STEPS} steps")


def spend_on(value: Any) -> None:
    """Take a step for each value within a list or mapping, as often as it is there, and for 1,024 letters."""
    if isinstance(value, str):
        spend(len(value) // _LETTERS_A_STEP)
    elif isinstance(value, Mapping):
        spend(1 + len(value))
        for key, item in value.items():
            spend_on(key)
            spend_on(item)
    elif isinstance(value, list | tuple | set | frozenset | MappingView):
        spend(1 + len(value))
        for item in value:  # type: ignore[union-attr]  # each view is of one class with an iterator
            spend_on(item)
    elif isinstance(value, range):
        spend(len(value))
    elif isinstance(value, Namespace):
        spend_on(value._Namespace__attrs)


def spend_on_length(value: Any) -> None:
    """Take steps for what is copied, cut or looked through, but not for what is within."""
    if isinstance(value, str):
        spend(len(value) // _LETTERS_A_STEP)
    elif isinstance(value, list | tuple | Mapping):
        spend(len(value) // _ITEMS_A_STEP)


def weighed(value: Any) -> Any:
    """Return the value, after `spend_on`: a filter that a template's comparisons and literals are compiled with."""
    if not isinstance(value, str) or len(value) >= _LETTERS_A_STEP:
        spend_on(value)
    return value


def cut(value: Any) -> Any:
    """Return the value, after `spend_on_length`: a filter that a template's slices are compiled with."""
    spend_on_length(value)
    return value


def spend_on_call(function: Any, args: Iterable[Any]) -> None:
    """Take the steps of a call; more for a method of a text or list, which looks through it, and for ``dict``."""
    spend(CALL_STEPS)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, str | list | tuple | Mapping):
        spend_on_length(owner)
    elif function is not dict:
        args = (value for value in args if isinstance(value, tuple))  # tuples may be keys, which are hashed
    for value in args:
        spend_on(value)


class counted:  # a filter
    """Iterate over the items of a template's loop, and count each round as a step."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        work = _work.get()
        for value in self._values:
            if work is not None:
                work.steps -= 1
                if work.steps < 0:
                    _refuse(f"it takes more than {_STEPS} steps")
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # the TypeError is what Jinja expects


def counted_filter(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter: what it is given and what it makes takes steps, and its numbers have a bound."""
    first = 1 if hasattr(make, "jinja_pass_arg") else 0
    most = _WIDTHS.get(name)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        spend(_FILTER_STEPS)
        for value in args[first:]:
            if name in _COMPARING and isinstance(value, str):
                spend(len(value))
            elif name in _SHOWING or name in _COMPARING or (name in _TEXTUAL and isinstance(value, str)):
                spend_on(value)
            elif name not in _LOOKING and isinstance(value, Sized):
                spend(len(value) // _VALUES_A_STEP)
        if most is not None:
            for value in (*args[first + 1 :], *kwargs.values()):
                check_number(value, most)
        if name == "format":
            check_percent(str(args[first]), kwargs or args[first + 1 :])
        if name == "indent":
            text, width = str(args[first]), next(iter((*args[first + 1 :], *kwargs.values())), 4)
            check_lengths([len(text), (text.count("\n") + 1) * (width if isinstance(width, int) else len(str(width)))])
        if name == "sum" and not isinstance(kwargs.get("start", [*args[first + 2 :], 0][0]), int | float):
            _refuse("it sums up what are no numbers")
        result = make(*args, **kwargs)
        if isinstance(result, str):
            spend_on(result)
        return result

    return made


def counted_test(test: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a test: what it compares takes steps."""

    @functools.wraps(test)
    def made(*args: Any) -> Any:
        for value in args:
            weighed(value)
        return test(*args)

    return made


def check_number(value: Any, most: int) -> None:
    """Raise TemplateError for a number above ``most``."""
    if isinstance(value, int) and value > most:
        _refuse(f"it asks for {value:.3g}, where {most} is the most")


def check_lengths(lengths: Iterable[int]) -> None:
    """Raise TemplateError if texts of these lengths, joined, would be too long; they take steps as well."""
    total = sum(lengths)
    if total > _MOST_LETTERS:
        _refuse(f"it makes a text of {total:.3g} letters, where {_MOST_LETTERS} is the most")
    spend(total // _LETTERS_A_STEP)


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateError for a ``+``, ``*`` or ``**`` whose outcome would be too large."""
    spend()
    if operator == "+":
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            total = len(left) + len(right)
            if total >= _LETTERS_A_STEP:
                check_lengths([total])
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MOST_BITS:
            _refuse(f"it computes a number of {bits:.3g} bits")
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, str | list | tuple) and isinstance(times, int):
                check_lengths([len(many) * max(0, times)])
                if not isinstance(many, str):
                    spend(len(many) * max(0, times) // _ITEMS_A_STEP)


def check_percent(template: str, values: Any) -> None:
    """Raise TemplateError for a ``%`` whose text asks for a great width, for one that is given, or shows too much."""
    if _WIDE.search(template):
        _refuse("it formats a text to a great width")
    if not isinstance(values, Mapping):
        spend_on(values)
        return
    shown = template.count("%")  # each may show the same value
    check_lengths([shown * max((len(value) for value in values.values() if isinstance(value, str)), default=0)])
    for _ in range(shown):
        spend_on(values)


def check_text_method(name: str, owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TemplateError for a method of a text or number whose outcome would be too large."""
    if name in _PADDING:
        for value in (*args, *kwargs.values()):
            check_number(value, _MOST_WIDTH)
        if name == "expandtabs":
            check_lengths([len(owner) * max((n for n in (*args, *kwargs.values()) if isinstance(n, int)), default=8)])
    elif name in _SPLITTING:
        lines = name == "splitlines"
        spend((sum(map(owner.count, _LINE_ENDS)) if lines else _num_pieces(owner, *args, **kwargs)) // 2)
    elif name == "translate":
        _refuse("it translates letters")
    elif name == "replace" and len(args) > 1:
        check_replace(owner, args[0], args[1])


def _num_pieces(text: str, sep: Any = None, maxsplit: Any = -1) -> int:
    """Return how many texts `str.split` makes at most."""
    spend_on_length(text)
    pieces = str.count(text, sep) if isinstance(sep, str) and sep else len(text) // 2
    return min(pieces, maxsplit) if isinstance(maxsplit, int) and maxsplit >= 0 else pieces


def check_replace(text: str, old: Any, new: Any) -> None:
    """Raise TemplateError if the text with each ``old`` replaced would be too long."""
    if isinstance(old, str) and isinstance(new, str) and (len(text) + 1) * len(new) > _MOST_LETTERS:
        check_lengths([len(text), str.count(text, old) * len(new)])


def _refuse(problem: str) -> NoReturn:
    raise TemplateError(f"the template was stopped: {problem}")
