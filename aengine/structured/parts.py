"""The parts that a grammar is composed of: texts, special tokens, JSON schemas, patterns, and what joins them.

    Seq(Repeat(TextUpTo("</think>"), most=1),
        AnyOf(Seq(Text('{"name": "add", "arguments": '), Json('{"type":"object"}', origin="the tool 'add'"), Text("}")),
              FreeText(without=("{",))))

Parts are plain values: equal ones are the same grammar, and nothing here knows how a library writes them. A part that a
caller has written (a schema, a regex, choices) names its origin, so that a fault in it can be blamed on it.

A lexer takes the longest token of the grammar and never goes back. So two parts that may begin at one place must differ
before either of them ends: `FreeText` excludes what begins another part (``without``, ``not_first``), instead of
standing beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BLANKS",
    "AnyOf",
    "Choice",
    "FreeText",
    "Json",
    "Part",
    "Regex",
    "Repeat",
    "Seq",
    "SpecialToken",
    "Text",
    "TextUpTo",
    "any_of",
    "leaves",
    "seq",
]

BLANKS = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Text:
    """A fixed text."""

    text: str
    after_blanks: bool = False
    """Any number of `BLANKS` may stand before it."""


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """One token by its id: a control token, which no text contains."""

    token_id: int


@dataclass(frozen=True, slots=True)
class Json:
    """JSON that a schema describes."""

    schema: str
    """The schema as JSON text, checked by `check_schema`."""
    origin: str = ""
    whitespace: Literal["compact", "any"] = "compact"
    relax: bool = False
    """Keywords that can't be enforced are left out, with a warning, instead of refused."""
    made_of: tuple[Json, ...] = ()
    """The schemas of other origins that were copied into this one: a fault is looked for in those."""
    tool: str | None = None
    """The tool whose arguments it describes."""


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that the whole ``pattern`` matches."""

    pattern: str
    origin: str = ""
    not_first: tuple[str, ...] = ()
    """It begins with none of these."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the texts."""

    options: tuple[str, ...]
    origin: str = ""
    not_first: tuple[str, ...] = ()
    """Options that begin with one of these are left out."""


@dataclass(frozen=True, slots=True)
class FreeText:
    """Any text of at least one character."""

    without: tuple[str, ...] = ()
    """It contains none of these."""
    not_first: tuple[str, ...] = ()
    """It begins with none of these."""
    after_blanks: bool = False
    """Nor with `BLANKS` and then one of ``not_first``."""
    matching: tuple[str, ...] = ()
    """The whole text matches each of these patterns."""


@dataclass(frozen=True, slots=True)
class TextUpTo:
    """Any text, up to and with the first ``end``."""

    end: str
    not_first: tuple[str, ...] = ()
    """It begins with none of these."""
    matching: tuple[str, ...] = ()
    """The text before the end matches each of these patterns, as a whole."""


@dataclass(frozen=True, slots=True)
class Seq:
    """All of the parts, one after the other."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """One of the parts."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part ``least`` to ``most`` times; None: any number of times."""

    part: Part
    least: int = 0
    most: int | None = None


Leaf = Text | SpecialToken | Json | Regex | Choice | FreeText | TextUpTo
Part = Leaf | Seq | AnyOf | Repeat


def seq(*parts: Part) -> Part:
    """Return the parts in order as one: nested sequences are flattened, and texts that follow each other joined."""
    flat: list[Part] = []
    for part in parts:
        for member in part.parts if isinstance(part, Seq) else (part,):
            last = flat[-1] if flat else None
            if isinstance(member, Text) and not member.after_blanks and isinstance(last, Text):
                flat[-1] = Text(last.text + member.text, last.after_blanks)
            elif member != Text(""):
                flat.append(member)
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def any_of(*parts: Part) -> Part:
    """Return the parts as alternatives, or the only one of them. Alternatives of alternatives are flattened."""
    flat = [member for part in parts for member in (part.parts if isinstance(part, AnyOf) else (part,))]
    return flat[0] if len(flat) == 1 else AnyOf(tuple(dict.fromkeys(flat)))


def leaves(part: Part) -> Iterator[Leaf]:
    """Yield each part that is not composed of others, in order, each once."""
    seen: set[Part] = set()
    stack = [part]
    while stack:
        one = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        if isinstance(one, Seq | AnyOf):
            stack.extend(reversed(one.parts))
        elif isinstance(one, Repeat):
            stack.append(one.part)
        else:
            yield one
