"""SentencePiece models as tokenizers of the ``tokenizers`` library: BPE and unigram, with and without byte fallback.

    text ─charsmap─> ─blanks─> ─"▁" before it─> ─" " to "▁"─> pieces

A text has the ids that SentencePiece gives it, but for characters of several code points (a letter with a combining
mark, a line end of two) where a model has a table of characters: the library replaces those as a whole, as in
transformers. Around pieces that are found as they are (control and user-defined ones) it is as in transformers: each
stretch between them has a "▁" before it (``legacy``), or only the one that begins the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces, as SentencePiece numbers them, and GGUF after it."""
_LONGEST_PIECE = 1 << 10
"""Letters, or bytes. SentencePiece makes pieces of 16 letters unless told otherwise; runs of blanks are longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieces:
    """A SentencePiece model: what its pieces are and how a text is prepared for them."""

    tokens: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    is_unigram: bool = False
    byte_fallback: bool = True
    """Characters without a piece become bytes, <0x00> to <0xFF>; else the unknown token."""
    add_prefix: bool = True
    """A text begins with a blank."""
    merges_blanks: bool = False
    """Blanks at both ends are dropped, and several in a row are one."""
    charsmap: bytes = b""
    """The table of characters that are replaced, as SentencePiece compiles it."""
    legacy: bool = True
    """A blank goes before each stretch of text, not only the first."""

    def encoder(self) -> tokenizers.Tokenizer:
        """Build the tokenizer, which has the control and user-defined pieces as added tokens.

        Raises what the library raises for pieces that don't fit together, ValueError for one that is too long.
        """
        from tokenizers import Tokenizer

        check_pieces(self.tokens)
        encoder = Tokenizer(self._unigram() if self.is_unigram else self._bpe())
        self._set_normalizer(encoder)
        self._set_decoder(encoder)
        add_tokens(encoder, self.tokens, self.kinds)
        return encoder

    def _unigram(self) -> Any:
        from tokenizers import models

        unknown = self.kinds.index(UNKNOWN) if UNKNOWN in self.kinds else None
        pieces = list(zip(self.tokens, map(float, self.scores), strict=True))
        return models.Unigram(pieces, unk_id=unknown, byte_fallback=self.byte_fallback)

    def _bpe(self) -> Any:
        from tokenizers import models

        unknown = next((t for t, kind in zip(self.tokens, self.kinds, strict=True) if kind == UNKNOWN), None)
        return models.BPE(
            first_ids(self.tokens), self._merges(), unk_token=unknown, fuse_unk=True, byte_fallback=self.byte_fallback
        )

    def _merges(self) -> list[tuple[str, str]]:
        """Return all merges in the order in which SentencePiece joins: the neighbours whose union scores highest first;
        none makes a control token or a byte."""
        vocab = first_ids(self.tokens)
        apart = (UNKNOWN, CONTROL, USER_DEFINED, BYTE)
        joined = {token: i for token, i in vocab.items() if self.kinds[i] not in apart}
        return every_merge(joined, {token: -self.scores[i] for token, i in joined.items()})

    def _set_normalizer(self, encoder: tokenizers.Tokenizer) -> None:
        from tokenizers import Regex, normalizers, pre_tokenizers

        steps: list[Any] = [normalizers.Precompiled(self.charsmap)] if self.charsmap else []
        if self.merges_blanks:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if not self.add_prefix or self.legacy:
            steps += [normalizers.Prepend("▁")] * self.add_prefix
            steps.append(normalizers.Replace(" ", "▁"))
        else:
            encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        if steps:
            encoder.normalizer = steps[0] if len(steps) == 1 else normalizers.Sequence(steps)

    def _set_decoder(self, encoder: tokenizers.Tokenizer) -> None:
        from tokenizers import decoders

        steps: list[Any] = [decoders.Replace("▁", " ")]
        steps += [decoders.ByteFallback()] * self.byte_fallback
        steps.append(decoders.Fuse())
        steps += [decoders.Strip(" ", 1, 0)] * self.add_prefix
        encoder.decoder = decoders.Sequence(steps)


def every_merge(ids: Mapping[str, int], order: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return each way to split a token in two others as a merge, those of the token that is first in ``order`` first,
    then by the ids."""
    merges = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((order[token], token_id, ids[left], ids[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def check_pieces(pieces: Iterable[str]) -> None:
    """Raise ValueError for a piece so long that to try all the ways to split it would hold up a start."""
    longest = max(map(len, pieces), default=0)
    if longest > _LONGEST_PIECE:
        raise ValueError(f"a token has a length of {longest}: {_LONGEST_PIECE} at most")


def first_ids(tokens: Iterable[str]) -> dict[str, int]:
    """Return ids by token. Of two that are alike (padding) the first is the real one."""
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocab.setdefault(token, token_id)
    return vocab


def add_tokens(
    encoder: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int], special: Iterable[str] = ()
) -> None:
    """Register the tokens that are found in a text as they are, before it is split. ``special``: more control ones."""
    from tokenizers import AddedToken

    is_special = set(special)
    added = []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, UNKNOWN) or token in is_special:
            added.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            added.append(AddedToken(token, special=False, normalized=False))
    encoder.add_tokens(added)
