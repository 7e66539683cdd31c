"""`TracedText`: a string that knows which of its characters came out of a message.

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
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Origin", "Span", "TracedText", "concatenated", "origin_within", "percent", "text_of", "traced"]


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Where characters come from; compared by identity."""

    is_own: bool = False
    """From what the model itself wrote earlier: an assistant's content or reasoning."""
    is_continued: bool = False
    """From the message that the completion goes on with."""
    hides: Callable[[str], bool] | None = None
    """Says which texts a template can't find in it: a user's "</think>" must not steer the template."""


Span = tuple[int, int, Origin]
"""Characters start to end, and where they come from."""


class TracedText(str):
    """The text, and as ``spans`` those of its characters that came out of messages, in order, not overlapping."""

    __slots__ = ("spans",)
    spans: tuple[Span, ...]

    def __new__(cls, text: str, spans: tuple[Span, ...] = ()) -> Self:
        made = super().__new__(cls, text)
        made.spans = spans
        return made

    def origin_of(self, start: int, end: int) -> list[Origin]:
        """Of the characters start to end: where those come from that came out of messages."""
        found = []
        for first, last, origin in self.spans[max(0, bisect_right(self.spans, start, key=_start_of) - 1) :]:
            if first >= end:
                break
            if last > start:
                found.append(origin)
        return found

    def plain(self) -> str:
        """The text alone."""
        return str.__str__(self)

    def without_messages(self) -> str:
        """The template's own text, with one code point that is no character for each stretch of a message's."""
        pieces, place = [], 0
        for start, end, _ in self.spans:
            pieces.append(str.__getitem__(self, slice(place, start)))
            place = end
        return _NOTHING.join([*pieces, str.__getitem__(self, slice(place, None))])

    def wholly(self, text: str) -> TracedText:
        """Text made of this one in a way that is not followed."""
        return traced(text, least_trusted(origin for *_, origin in self.spans))

    def seen_for(self, wanted: str | tuple[str, ...]) -> str:
        """The text, as a template sees it that looks for ``wanted``: as long, without what is hidden from it."""
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
        if not isinstance(key, slice):
            place = key.__index__() % len(self)
            return self._cut(text, place, place + 1)
        start, end, step = key.indices(len(self))
        return self._cut(text, start, end) if step == 1 else self.wholly(text)

    def _cut(self, text: str, start: int, end: int) -> TracedText:
        """``text``, which is self[start:end]."""
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

    # -- methods that take a part of it

    def lstrip(self, chars: str | None = None, /) -> TracedText:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> TracedText:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None, /) -> TracedText:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> TracedText:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> TracedText:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(self.seen_for(sep or "").split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(self.seen_for(sep or "").rsplit(sep, maxsplit), sep)

    def _located(self, parts: list[str], sep: str | None) -> list[str]:
        """Parts of the text, in order, with ``sep`` or blanks between them."""
        found: list[str] = []
        seen, place = self.plain(), 0
        for part in parts:
            if sep is None:  # a part begins with no blank, but for the first of an rsplit, which begins the text
                place = seen.find(part, place)
            found.append(self[place : place + len(part)])
            place += len(part) + len(sep or "")
        return found

    def splitlines(self, keepends: bool = False) -> list[str]:
        found: list[str] = []
        place = 0
        for line, whole in zip(str.splitlines(self, keepends), str.splitlines(self, True), strict=True):
            found.append(self[place : place + len(line)])
            place += len(whole)
        return found

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, _ = self.seen_for(sep).partition(sep)
        return self._three(len(before), len(found))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, _ = self.seen_for(sep).rpartition(sep)
        return self._three(len(before), len(found))

    def _three(self, before: int, found: int) -> tuple[str, str, str]:
        return self[:before], self[before : before + found], self[before + found :]

    # -- methods that look for something

    def find(self, wanted: str, *within: Any) -> int:
        return self.seen_for(wanted).find(wanted, *within)

    def rfind(self, wanted: str, *within: Any) -> int:
        return self.seen_for(wanted).rfind(wanted, *within)

    def index(self, wanted: str, *within: Any) -> int:
        return self.seen_for(wanted).index(wanted, *within)

    def rindex(self, wanted: str, *within: Any) -> int:
        return self.seen_for(wanted).rindex(wanted, *within)

    def count(self, wanted: str, *within: Any) -> int:
        return self.seen_for(wanted).count(wanted, *within)

    def startswith(self, wanted: str | tuple[str, ...], *within: Any) -> bool:
        return self.seen_for(wanted).startswith(wanted, *within)

    def endswith(self, wanted: str | tuple[str, ...], *within: Any) -> bool:
        return self.seen_for(wanted).endswith(wanted, *within)

    # -- methods that make another text

    def join(self, parts: Iterable[str], /) -> TracedText:
        pieces: list[str] = []
        for part in parts:
            pieces += (self, part) if pieces else (part,)
        return concatenated(pieces)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> TracedText:
        if not old:
            return traced(self.plain().replace(old, new, count), origin_within((self, new)))
        return TracedText(new, spans_of(new)).join(self.split(old, count))


def _start_of(span: Span) -> int:
    return span[0]


_NOTHING = "\uffff"  # a code point that is no character


def _same_length(name: str) -> Any:
    """A method of str that changes characters one by one, as a rule."""

    def method(self: TracedText) -> TracedText:
        text: str = getattr(self.plain(), name)()
        return TracedText(text, self.spans) if len(text) == len(self) else self.wholly(text)

    return method


def _not_followed(name: str) -> Any:
    def method(self: TracedText, *args: Any, **kwargs: Any) -> TracedText:
        text = getattr(self.plain(), name)(*args, **kwargs)
        return traced(text, origin_within((self, args, kwargs)))

    return method


for _name in ("upper", "lower", "capitalize", "title", "swapcase", "casefold"):
    setattr(TracedText, _name, _same_length(_name))
for _name in ("center", "ljust", "rjust", "zfill", "expandtabs", "translate"):
    setattr(TracedText, _name, _not_followed(_name))


def traced(text: str, origin: Origin | None) -> TracedText:
    """A text that comes from ``origin`` from its first to its last character; from no message, if that is None."""
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
    """The least trusted origin of the texts in a value, however deep; None if none came out of a message."""
    if isinstance(value, TracedText):
        return least_trusted(origin for *_, origin in value.spans)
    if isinstance(value, Mapping):
        return least_trusted(found for item in value.items() for x in item if (found := origin_within(x)) is not None)
    if isinstance(value, list | tuple | set | frozenset):
        return least_trusted(found for item in value if (found := origin_within(item)) is not None)
    return None


def text_of(value: Any) -> str:
    """``str(value)``; of a list or mapping, all of it comes from what the least trusted text in it comes from."""
    if isinstance(value, str):
        return value
    text, origin = str(value), origin_within(value)
    return text if origin is None else traced(text, origin)


def concatenated(parts: Iterable[str]) -> TracedText:
    """``"".join(parts)``."""
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
    """``template % values``. With nothing but %s in it, character by character."""
    every = values if isinstance(values, tuple) else (values,)
    pieces = TracedText(template, spans_of(template)).split("%s")
    if len(pieces) == len(every) + 1 and "%" not in "".join(pieces) and not isinstance(values, Mapping):
        return concatenated(text for pair in zip(pieces, [*map(text_of, every), ""], strict=True) for text in pair)
    text = str.__mod__(str.__str__(template), values)
    return traced(text, origin_within((template, values)))
