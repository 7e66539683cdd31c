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

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

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
    """Any text of at least one character; with ``matching``, none at all too, if all of the patterns take that."""

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


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """A part that joins others. Equal ones have one digest, made once of those of the parts: a part may be reached in
    2 ** n ways, and comparing or hashing by the members would go all of them."""

    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        found = hashlib.blake2b(type(self).__name__.encode(), digest_size=16)
        names: tuple[str, ...] = self.__match_args__  # a dataclass keeps what it was made of there
        values = [getattr(self, name) for name in names]
        for member in values[0] if isinstance(values[0], tuple) else values:
            written = member.digest if isinstance(member, _Joined) else repr(member).encode()
            found.update(len(written).to_bytes(8) + written)
        object.__setattr__(self, "digest", found.digest())

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, _Joined) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True, eq=False)
class Seq(_Joined):
    """All of the parts, one after the other."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AnyOf(_Joined):
    """One of the parts."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repeat(_Joined):
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
    yield from (one for one in _inner_first(part) if not isinstance(one, _Joined))


def alternatives(part: Part) -> Iterator[AnyOf]:
    """Yield the alternatives within ``part``, each once, and after those within it."""
    yield from (one for one in _inner_first(part) if isinstance(one, AnyOf) and one is not part)


def _inner_first(part: Part) -> Iterator[Part]:
    """Yield each part, each once, after its members, without recursion."""
    begun: set[Part] = set()
    stack: list[tuple[Part, bool]] = [(part, False)]
    while stack:
        one, is_left = stack.pop()
        if is_left:
            yield one
        elif one not in begun:
            begun.add(one)
            stack.append((one, True))
            members = one.parts if isinstance(one, Seq | AnyOf) else (one.part,) if isinstance(one, Repeat) else ()
            stack.extend((member, False) for member in reversed(members))
