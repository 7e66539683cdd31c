"""A lower bound of a text's number of tokens by its length alone: a text that can't fit need not be encoded.

Encoding takes a second for each MB, and a hundred times its memory. Nothing is known of tokenizers that drop parts of a
text (blanks, control characters) or make one token of many unknown characters.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

__all__ = ["most_characters"]

_COMPOSED = 4
"""Most characters that become one under NFC (a vowel with three marks)."""


def most_characters(encoder: tokenizers.Tokenizer) -> int:
    """The most characters that one token may stand for; 0 if that is not known. Blocking: looks at each token."""
    model = encoder.model
    keeps_unknown = "ByteLevel" in _types(encoder.pre_tokenizer) or bool(getattr(model, "byte_fallback", False))
    added = encoder.get_added_tokens_decoder().values()
    if type(model).__name__ != "BPE" or not keeps_unknown or any(token.lstrip or token.rstrip for token in added):
        return 0
    shrinks = _shrinking(_state(encoder.normalizer))
    if shrinks == 0 or not _splits_only(_state(encoder.pre_tokenizer)):
        return 0
    # A token's name has a letter for each byte, or for each character; <0x0A> is longer than what it stands for.
    return shrinks * max(map(len, encoder.get_vocab()), default=0)


def _shrinking(state: dict[str, Any] | None) -> int:
    """Return by how much a normalizer may shorten a text; 0 if that is not known."""
    if state is None:
        return 1
    kind = state.get("type")
    if kind == "Sequence":
        factor = 1
        for one in state.get("normalizers", ()):
            factor *= _shrinking(one)
        return factor
    if kind == "NFC":
        return _COMPOSED
    if kind in ("NFD", "Prepend"):
        return 1
    if kind == "Replace":
        pattern = state.get("pattern", {}).get("String")
        return 1 if isinstance(pattern, str) and len(state.get("content", "")) >= len(pattern) > 0 else 0
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
