"""A lower bound of a text's number of tokens by its characters alone: a text that can't fit need not be encoded.

Encoding takes a second for each MB, and a hundred times its memory. Nothing is known of tokenizers that drop blanks or
whole classes of characters, or make one token of many unknown characters. Control characters that a vocabulary lacks
(SmolLM2's has no U+001D) have no tokens, so they don't count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .token_text import gpt2_bytes

if TYPE_CHECKING:
    import tokenizers

__all__ = ["TextBound"]

_COMPOSED = 4
"""Most characters that become one under NFC (a vowel with three marks)."""


_CONTROL = frozenset((*range(0x20), 0x7F))
_IN_NO_TEXT = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
_LEADING = frozenset(range(0xC0, 0x100))
"""Bytes that others follow in UTF-8: a character that lacks the token of this one has those of the others."""


@dataclass(frozen=True, slots=True)
class TextBound:
    """What one token of a tokenizer may stand for at most."""

    most_characters: int
    """Characters of one token; 0: that is not known."""
    dropped: str = ""
    """Control characters that have no tokens."""

    @classmethod
    def of(cls, encoder: tokenizers.Tokenizer) -> TextBound:
        """Find the bound. Blocking: looks at each token."""
        vocab = encoder.get_vocab()
        added = encoder.get_added_tokens_decoder().values()
        dropped = _dropped(encoder, vocab)
        if dropped is None or any(token.lstrip or token.rstrip for token in added):
            return cls(0)
        shrinks = _shrinking(_state(encoder.normalizer), dropped)
        if shrinks == 0 or not _splits_only(_state(encoder.pre_tokenizer)):
            return cls(0)
        # A token's name has a letter for each byte, or for each character; <0x0A> is longer than what it stands for.
        return cls(shrinks * max(map(len, vocab), default=0), dropped)

    def least_tokens(self, text: str) -> int:
        """Return the least tokens that the text has: 0 if that is not known."""
        if not self.most_characters:
            return 0
        num_characters = str.__len__(text) - sum(str.count(text, letter) for letter in self.dropped)
        return num_characters // self.most_characters


def _dropped(encoder: tokenizers.Tokenizer, vocab: dict[str, int]) -> str | None:
    """Return the control characters that have no token of their own; None if other characters may have none."""
    model = encoder.model
    if type(model).__name__ != "BPE":
        return None
    if "ByteLevel" in _types(encoder.pre_tokenizer):
        lacking = {byte for letter, byte in gpt2_bytes().items() if letter not in vocab} - _LEADING
        return "".join(map(chr, sorted(lacking))) if lacking <= _CONTROL else None
    if not getattr(model, "byte_fallback", False):
        return None
    # A character of which one byte is no token is unknown as a whole, and unknown ones are dropped or fused.
    return "" if all(f"<0x{byte:02X}>" in vocab for byte in range(256) if byte not in _IN_NO_TEXT) else None


def _shrinking(state: dict[str, Any] | None, dropped: str) -> int:
    """Return by how much a normalizer may shorten a text; 0 if that is not known. ``dropped``: what counts as none."""
    if state is None:
        return 1
    kind = state.get("type")
    if kind == "Sequence":
        factor = 1
        for one in state.get("normalizers", ()):
            factor *= _shrinking(one, dropped)
        return factor
    if kind == "NFC":
        return _COMPOSED
    if kind in ("NFD", "Prepend"):
        return 1
    if kind == "Replace":
        pattern, content = state.get("pattern", {}).get("String"), state.get("content", "")
        keeps = isinstance(pattern, str) and len(content) >= len(pattern) > 0 and not set(dropped) & set(content)
        return 1 if keeps else 0
    return 0


def _splits_only(state: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer cuts a text without dropping parts of it."""
    if state is None:
        return True
    kind = state.get("type")
    if kind == "Sequence":
        return all(_splits_only(one) for one in state.get("pretokenizers", ()))
    return kind in ("ByteLevel", "Metaspace", "Digits") or (kind == "Split" and state.get("behavior") != "Removed")


def _types(part: Any) -> str:
    return json.dumps(_state(part))


def _state(part: Any) -> dict[str, Any] | None:
    """Return what the library writes of a normalizer or a pre-tokenizer into tokenizer.json."""
    if part is None:
        return None
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state
