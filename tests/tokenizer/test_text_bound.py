"""A text has at least as many tokens as its length says, whatever it is; and nothing is said where that isn't known."""

from __future__ import annotations

import pytest
import tokenizers
from conftest_api import encoder_of
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from aengine import EngineConfig
from aengine.checkpoint.source import resolve_model
from aengine.engine.tokenizer.text_bound import TextBound
from aengine.engine.tokenizer.tokenizer import Tokenizer

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def sentencepiece() -> tokenizers.Tokenizer:
    vocab = {**BYTES, "▁": 256, "a": 257, "▁a": 258, "aa": 259, "\u1f82": 260}
    merges = [("▁", "a"), ("a", "a")]
    encoder = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True))
    encoder.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    encoder.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return encoder


@pytest.fixture(scope="module")
def encoders() -> list[tokenizers.Tokenizer]:
    smollm2 = Tokenizer.load(resolve_model(EngineConfig.create("smollm2-135m", {})))
    return [encoder_of(smollm2), sentencepiece()]


PIECES = st.sampled_from(
    ["a", " ", "  ", "\n", "\x00", "é", "e\u0301", "\u03b1\u0313\u0300\u0345", "世", "🙂", "<0x0A>"]
)


TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)
CONTROLS = st.text(st.characters(categories=("Cc",)), max_size=60)


@given(st.lists(PIECES, max_size=60).map("".join) | TEXTS | CONTROLS, st.integers(1, 40))
def test_no_text_has_fewer_tokens(encoders: list[tokenizers.Tokenizer], text: str, times: int) -> None:
    text *= times
    for encoder in encoders:
        bound = TextBound.of(encoder)
        assert bound.most_characters > 0
        assert len(encoder.encode(text, add_special_tokens=False).ids) >= bound.least_tokens(text)


def test_characters_that_the_vocabulary_lacks_do_not_count(encoders: list[tokenizers.Tokenizer]) -> None:
    smollm2, fallback = encoders
    text = "\x1d" * 100_000
    assert smollm2.encode(text, add_special_tokens=False).ids == []
    assert TextBound.of(smollm2).least_tokens(text) == 0
    assert TextBound.of(smollm2).least_tokens(text + "a" * 100_000) == TextBound.of(smollm2).least_tokens("a" * 100_000)
    assert TextBound.of(fallback).least_tokens(text) > 0


def most_of(encoder: tokenizers.Tokenizer) -> int:
    return TextBound.of(encoder).most_characters


def lacking(token: str) -> tokenizers.Tokenizer:
    """The SentencePiece one, without a token of a byte."""
    vocab = {name: i for i, name in enumerate(name for name in sentencepiece().get_vocab() if name != token)}
    return tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))


def test_where_nothing_is_known() -> None:
    def changed(**parts: object) -> tokenizers.Tokenizer:
        encoder = sentencepiece()
        for name, part in parts.items():
            setattr(encoder, name, part)
        return encoder

    assert most_of(changed(normalizer=None)) == len("<0x00>")
    assert most_of(changed(normalizer=normalizers.NFC())) == 4 * len("<0x00>")
    for part in (
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.BertNormalizer()])},
        {"normalizer": normalizers.Replace("  ", " ")},
        {"normalizer": normalizers.Replace(tokenizers.Regex(" +"), " ")},
        {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
        {"model": models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")},
        {"model": models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True)},
    ):
        assert most_of(changed(**part)) == 0
    swallowing = sentencepiece()
    swallowing.add_tokens([AddedToken("<x>", rstrip=True)])
    assert most_of(swallowing) == 0
    assert most_of(lacking("<0x41>")) == 0
    assert most_of(lacking("<0xFF>")) > 0  # no text has that byte
