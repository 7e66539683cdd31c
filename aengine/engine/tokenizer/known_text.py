"""`KnownText`: a rendered chat with its tokens, so that of the next one that begins like it only the rest is encoded.

    known   <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n
    text    <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Hello <|im_end|> \\n ...
            ╰───────── tokens that are known ─────╯╰──── encoded: it begins with a control token ───────

A control token divides a text: what stands on either side of it has the same tokens whatever stands on the other.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .traced_text import TracedText

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class KnownText:
    """A text up to its last control token, with the tokens before that one."""

    head: str = ""
    """With the name of the control token."""
    num_characters: int = 0
    """Characters before it."""
    spans: tuple[tuple[int, int, bool], ...] = ()
    """Whose the characters of the head are: two texts may be the same, of which one has a message's in the place of the
    template's."""
    ids: array[int] | Sequence[int] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: TracedText, ids: Sequence[int]) -> KnownText:
        """Return what can be known of a text with these tokens; nothing if that is not certain."""
        last = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in tokenizer.special_ids), None)
        if last is None or not tokenizer.messages.counts_tell:
            return NOTHING
        name, plain = tokenizer.messages.markers[ids[last]], text.plain()
        place = plain.rfind(name)
        rest = b"".join(tokenizer.token_bytes(i) for i in ids[last + 1 :])
        if place < 0 or plain[place + len(name) :].encode() != rest:
            return NOTHING
        end = place + len(name)
        return cls(plain[:end], place, _spans_of(text, end), array("i", ids[:last]))

    def encode(self, tokenizer: Tokenizer, text: TracedText) -> list[int]:
        """Return the tokens of a text, as `Tokenizer.encode`."""
        if not self.head or not text.plain().startswith(self.head) or _spans_of(text, len(self.head)) != self.spans:
            return tokenizer.encode(text, add_special_tokens=False)
        return [*self.ids, *tokenizer.encode(text[self.num_characters :], add_special_tokens=False)]


NOTHING = KnownText()


def _spans_of(text: TracedText, end: int) -> tuple[tuple[int, int, bool], ...]:
    return tuple((first, min(last, end), origin.is_own) for first, last, origin in text.spans if first < end)
