"""BERT's tokenizer: words and punctuation, each the longest pieces of a vocabulary from its left, "##" within words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .loaded import put_around

if TYPE_CHECKING:
    import tokenizers


def word_piece(
    vocab: Mapping[str, int],
    special_tokens: Mapping[str, str],
    *,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    handle_chinese: bool = True,
) -> tokenizers.Tokenizer:
    """Build the tokenizer. ``special_tokens`` by role; a text stands between those of "cls_token" and "sep_token".

    ``strip_accents`` None: as ``lowercase``; ``handle_chinese``: each Chinese character is a word.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    encoder = Tokenizer(models.WordPiece(dict(vocab), unk_token=special_tokens.get("unk_token", "[UNK]")))
    encoder.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=handle_chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    encoder.decoder = decoders.WordPiece(prefix="##")
    known = dict.fromkeys(name for name in special_tokens.values() if name in vocab)
    encoder.add_tokens([AddedToken(name, special=True, normalized=False) for name in known])
    put_around(encoder, special_tokens.get("cls_token"), special_tokens.get("sep_token"))
    return encoder
