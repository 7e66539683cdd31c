"""`TracedText`: a string that records which of its characters came out of a message.

    "<|im_start|>" + "user" + "\\n" + traced("Hi<|im_end|>") + "<|im_end|>"
     ─────────────── the template's ──  └── a message's ──┘   the template's

A chat template is run over traced strings, and what it makes of them is traced: their slices, parts, joins. So the
prompt says of each character whose it is, while its text is exactly what it would be otherwise. Where an operation is
not followed character by character, all of its result counts as the message's.

The sandbox in `template_environment.py` sees to the operations of Jinja that are no methods of a string.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Self, SupportsIndex


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The place that characters come from; compared by identity."""

    is_own: bool = False
    """Whether the model itself wrote it earlier, as an assistant's content or reasoning."""
    is_continued: bool = False
    """Whether it is from the message that the completion goes on with."""
    hides: Callable[[str], bool] | None = None
    """Says which texts a template can't find in it: a user's "</think>" must not steer the template."""


Span = tuple[int, int, Origin]
"""Characters start to end, and where they come from."""


class TracedText(str):
    """A text, and as ``spans`` those of its characters that came out of messages, in order, not overlapping."""

    __slots__ = ("spans",)
    spans: tuple[Span, ...]

    def __new__(cls, text: str, spans: tuple[Span, ...] = ()) -> Self:
        made = super().__new__(cls, text)
        made.spans = spans
        return made

    def origin_of(self, start: int, end: int) -> list[Origin]:
        """Return where those of the characters start to end come from that came out of messages."""
        found = []
        for first, last, origin in self.spans[max(0, bisect_right(self.spans, start, key=itemgetter(0)) - 1) :]:
            if first >= end:
                break
            if last > start:
                found.append(origin)
        return found

    def plain(self) -> str:
        """Return the text alone."""
        return str.__str__(self)

    def without_messages(self) -> str:
        """Return the template's own text, with one code point that is no character for each stretch of a message's."""
        pieces, place = [], 0
        for start, end, _ in self.spans:
            pieces.append(str.__getitem__(self, slice(place, start)))
            place = end
        return _NOTHING.join([*pieces, str.__getitem__(self, slice(place, None))])

    def seen_for(self, wanted: str | tuple[str, ...]) -> str:
        """Return the text as a template sees it that looks for ``wanted``: as long, without what is hidden from it."""
        searched = wanted if isinstance(wanted, str) else "\n".join(wanted)
        text, place = self.plain(), 0
        pieces: list[str] = []
        for start, end, origin in self.spans:
            if origin.hides is not None and origin.hides(searched):
                pieces += (text[place:start], _NOTHING * (end - start))
                place = end
        return "".join([*pieces, text[place:]])

    # -- operators

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> TracedText:
        return concatenated((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> TracedText:
        return concatenated((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> TracedText:
        return concatenated([self] * times.__index__())

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> TracedText:
        return percent(self, values)

    def __rmod__(self, template: str) -> TracedText:
        return percent(template, self)

    def __getitem__(self, key: SupportsIndex | slice) -> TracedText:
        text = str.__getitem__(self, key)
        if isinstance(key, slice):
            start, end, step = key.indices(len(self))
            if step != 1:
                return traced(text, origin_within(self))
        else:
            start = key.__index__() % len(self)
            end = start + 1
        spans = tuple(
            (max(first, start) - start, min(last, end) - start, origin)
            for first, last, origin in self.spans
            if first < end and last > start
        )
        return TracedText(text, spans)

    def __iter__(self) -> Iterator[str]:
        return (self[place] for place in range(len(self)))

    def __contains__(self, wanted: object) -> bool:
        return isinstance(wanted, str) and str.__str__(wanted) in self.seen_for(wanted)

    # -- methods; more of them follow below the class

    def removeprefix(self, prefix: str, /) -> TracedText:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> TracedText:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def splitlines(self, keepends: bool = False) -> list[str]:
        found: list[str] = []
        place = 0
        for line, whole in zip(str.splitlines(self, keepends), str.splitlines(self, True), strict=True):
            found.append(self[place : place + len(line)])
            place += len(whole)
        return found

    def join(self, parts: Iterable[str], /) -> TracedText:
        pieces: list[str] = []
        for part in parts:
            pieces += (self, part) if pieces else (part,)
        return concatenated(pieces)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> TracedText:
        if not old:
            return traced(self.plain().replace(old, new, count), origin_within((self, new)))
        return TracedText(new, spans_of(new)).join(self.split(old, count))


_NOTHING = "\uffff"  # a code point that is no character


def _same_length(name: str) -> Any:
    """Return a method of str that changes characters one by one, as a rule."""

    def method(self: TracedText) -> TracedText:
        text: str = getattr(self.plain(), name)()
        return TracedText(text, self.spans) if len(text) == len(self) else traced(text, origin_within(self))

    return method


def _not_followed(name: str) -> Any:
    def method(self: TracedText, *args: Any, **kwargs: Any) -> TracedText:
        text = getattr(self.plain(), name)(*args, **kwargs)
        return traced(text, origin_within((self, args, kwargs)))

    return method


def _searching(name: str) -> Any:
    def method(self: TracedText, wanted: str | tuple[str, ...], *within: Any) -> Any:
        return getattr(self.seen_for(wanted), name)(wanted, *within)

    return method


def _stripping(name: str) -> Any:
    def method(self: TracedText, chars: str | None = None, /) -> TracedText:
        start = 0 if name == "rstrip" else len(self) - len(str.lstrip(self, chars))
        return self[start : start + len(getattr(self.plain(), name)(chars))]

    return method


def _splitting(name: str) -> Any:
    def method(self: TracedText, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        found: list[str] = []
        seen, place = self.plain(), 0
        for part in getattr(self.seen_for(sep or ""), name)(sep, maxsplit):
            if sep is None:  # a part begins with no blank, but for the first of an rsplit, which begins the text
                place = seen.find(part, place)
            found.append(self[place : place + len(part)])
            place += len(part) + len(sep or "")
        return found

    return method


def _parting(name: str) -> Any:
    def method(self: TracedText, sep: str, /) -> tuple[str, str, str]:
        before, found, _ = map(len, getattr(self.seen_for(sep), name)(sep))
        return self[:before], self[before : before + found], self[before + found :]

    return method


_METHODS = {
    _same_length: ("upper", "lower", "capitalize", "title", "swapcase", "casefold"),
    _not_followed: ("center", "ljust", "rjust", "zfill", "expandtabs", "translate"),
    _searching: ("find", "rfind", "index", "rindex", "count", "startswith", "endswith"),
    _stripping: ("strip", "lstrip", "rstrip"),
    _splitting: ("split", "rsplit"),
    _parting: ("partition", "rpartition"),
}
for _make, _names in _METHODS.items():
    for _name in _names:
        setattr(TracedText, _name, _make(_name))


def traced(text: str, origin: Origin | None) -> TracedText:
    """Return a text all of which comes from ``origin``; from no message, if that is None."""
    return TracedText(text, ((0, len(text), origin),) if origin is not None and text else ())


def spans_of(text: str) -> tuple[Span, ...]:
    return text.spans if isinstance(text, TracedText) else ()


def least_trusted(origins: Iterable[Origin]) -> Origin | None:
    found: Origin | None = None
    for origin in origins:
        if not origin.is_own:
            return origin
        found = origin
    return found


def origin_within(value: Any) -> Origin | None:
    """Return the least trusted origin of the texts in a value, however deep; None if none came out of a message."""
    if isinstance(value, TracedText):
        return least_trusted(origin for *_, origin in value.spans)
    if isinstance(value, Mapping):
        return least_trusted(found for item in value.items() for x in item if (found := origin_within(x)) is not None)
    if isinstance(value, list | tuple | set | frozenset):
        return least_trusted(found for item in value if (found := origin_within(item)) is not None)
    return None


def text_of(value: Any) -> str:
    """Return ``str(value)``; of a list or mapping, all of it comes from where the least trusted text in it does."""
    if isinstance(value, str):
        return value
    text, origin = str(value), origin_within(value)
    return text if origin is None else traced(text, origin)


def concatenated(parts: Iterable[str]) -> TracedText:
    spans: list[Span] = []
    place = 0
    parts = list(parts)
    for part in parts:
        for start, end, origin in spans_of(part):
            if spans and spans[-1][1] == place + start and spans[-1][2] is origin:
                spans[-1] = (spans[-1][0], place + end, origin)
            else:
                spans.append((place + start, place + end, origin))
        place += len(part)
    return TracedText("".join(parts), tuple(spans))


def percent(template: str, values: Any) -> TracedText:
    """Return ``template % values``. With nothing but %s in it, character by character."""
    every = values if isinstance(values, tuple) else (values,)
    pieces = TracedText(template, spans_of(template)).split("%s")
    if len(pieces) == len(every) + 1 and "%" not in "".join(pieces) and not isinstance(values, Mapping):
        return concatenated(text for pair in zip(pieces, [*map(text_of, every), ""], strict=True) for text in pair)
    text = str.__mod__(str.__str__(template), values)
    return traced(text, origin_within((template, values)))
