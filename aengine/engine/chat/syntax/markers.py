"""The control tokens that a format writes: its markers, as far as a vocabulary has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...structured.parts import FreeText, Part, Repeat, SpecialToken, Text, TextUpTo, seq

_TOKEN = re.compile("([\ud800-\udfff])")
"""A control token, as `Markers` writes it."""


class TextTokenId(int):
    """The id of an added token that is not special: it marks as a control token does, but its name is also text, and
    may stand in one."""


TokenId = Callable[[str], int | None]
"""The id of the token that has this name as a whole: a control token, or a `TextTokenId`. None: it is but a text."""


@dataclass(frozen=True, slots=True)
class Markers:
    """Markers that are tokens of a vocabulary. Only these mark then, and not their names in other tokens' letters.

    Within this package such a token is written as one lone surrogate, which no text contains, so that text and tokens
    together are one string to search in.
    """

    ids: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, names: Iterable[str], token_id: TokenId) -> Markers:
        """Return those of the names that the vocabulary has, longest first."""
        found = {name: token_id(name) for name in sorted(set(names), key=lambda name: (-len(name), name))}
        return cls(tuple((name, known) for name, known in found.items() if known is not None))

    def encode(self, text: str) -> str:
        """Return a format's string with its tokens as surrogates."""
        for index, (name, _) in enumerate(self.ids):
            text = text.replace(name, chr(0xD800 + index))
        return text

    def part(self, text: str) -> Part:
        """Return an encoded string as a part of a grammar: texts and tokens, in order."""
        pieces = _TOKEN.split(text)  # texts and tokens in turn
        return seq(*(SpecialToken(self.ids[ord(p) - 0xD800][1]) if i % 2 else Text(p) for i, p in enumerate(pieces)))

    def text_up_to(self, end: str, matching: tuple[str, ...] = ()) -> Part:
        """Return any text, or one that all of the patterns match, and behind it the encoded ``end``."""
        if self.id_of(end[0]) is None:
            return TextUpTo(end, matching=matching)
        name = self.in_text(end)
        text = FreeText(without=(name,) if name else (), matching=matching)
        return seq(text if matching else Repeat(text, most=1), self.part(end))

    def id_of(self, letter: str) -> int | None:
        """Return the token that a letter stands for."""
        index = ord(letter) - 0xD800
        return self.ids[index][1] if 0 <= index < len(self.ids) else None

    @property
    def names_of_text(self) -> dict[str, str]:
        """The names of tokens that are text (`TextTokenId`), by letter."""
        return {
            chr(0xD800 + index): name
            for index, (name, token_id) in enumerate(self.ids)
            if isinstance(token_id, TextTokenId)
        }

    def spellings(self, text: str) -> tuple[str, str]:
        """Return how a caller's text may come: in letters, and with the tokens whose names are text."""
        with_tokens = text
        for letter, name in self.names_of_text.items():
            with_tokens = with_tokens.replace(name, letter)
        return text, with_tokens

    def in_text(self, encoded: str) -> str:
        """Return what text must be kept from, for this string to stand out; "" if it begins with a control token."""
        return encoded if self.id_of(encoded[0]) is None else self.names_of_text.get(encoded[0], "")


NO_MARKERS = Markers(())
