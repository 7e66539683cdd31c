"""A vocabulary: control tokens are no text, other added tokens are, and nothing changes its id."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tokenizers
from grammar_helpers import TOKENIZERS, allowed_by, tiny, vocabulary
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from aengine.engine.structured.backends import load_backend
from aengine.engine.structured.llguidance.tokenizer import _ByBytes
from aengine.engine.structured.spec import GrammarSpec
from aengine.engine.structured.vocabulary import Vocabulary, row_of
from aengine.engine.tokenizer.tokenizer import Tokenizer


def test_control_tokens_and_padding_have_no_text(vocabulary_name: str) -> None:
    load, vocab_size = TOKENIZERS[vocabulary_name]
    tokenizer, words = load(), vocabulary(vocabulary_name)
    assert len(words.token_bytes) == words.vocab_size == vocab_size
    assert words.special_ids >= tokenizer.special_ids | set(words.eos_ids)
    for token_id, text in enumerate(words.token_bytes):
        is_text = token_id < tokenizer.vocab_size and token_id not in words.special_ids
        assert text == (tokenizer.token_bytes(token_id) if is_text else b"")


def test_added_tokens_that_are_not_special_are_text() -> None:
    words, tokenizer = vocabulary("tiny"), tiny()
    for text in ("<tool_call>", "</tool_call>", "a b"):
        token_id = tokenizer.token_id(text)
        assert token_id is not None
        assert words.token_bytes[token_id] == text.encode()


def test_forced_tokens_are_the_tokenizers_own(vocabulary_name: str) -> None:
    """As the model would write them, and those of names of control tokens are text."""
    load, _ = TOKENIZERS[vocabulary_name]
    words, cut = vocabulary(vocabulary_name), _ByBytes(vocabulary(vocabulary_name))
    text = 'The "quick" brown <tool_cal> naïve 世界 🙂 {"a": 12}'
    assert cut(text.encode()) == load().encode(text, False)
    for name in ("</tool_call>", *(load().decode([i], False) for i in sorted(words.special_ids)[:3])):
        ids = cut(name.encode())
        assert b"".join(words.token_bytes[i] for i in ids) == name.encode()
        assert not set(ids) & words.special_ids
    assert b"".join(words.token_bytes[i] for i in cut("🙂".encode()[:3])) == "🙂".encode()[:3]


def test_the_blank_that_a_tokenizer_puts_first_is_no_part_of_a_text() -> None:
    raw = {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **raw, "▁": 259, "a": 260, "b": 261, "ab": 262, "▁ab": 263}
    merges = [("a", "b"), ("▁", "ab")]
    encoder = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    encoder.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    encoder.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(encoder, special_tokens={"eos_token": "</s>"})
    assert tokenizer.encode("ab", False) == [263]
    assert _ByBytes(Vocabulary.of(tokenizer, 264))(b"ab ab") == [262, 263]


def test_end_row_has_the_end_ids_and_nothing_else() -> None:
    words = vocabulary("smollm2")
    row = words.eos_row()
    assert len(row) == words.row_bytes
    assert [i for i in range(len(row) * 8) if row[i // 8] >> i % 8 & 1] == list(words.eos_ids)
    assert row_of([0, 9, 31], 4) == bytes([1, 2, 0, 128])


def test_more_tokens_than_logits() -> None:
    """A model whose last layer is smaller than its tokenizer: the ids beyond don't exist."""
    tokenizer = tiny()
    words = Vocabulary.of(tokenizer, tokenizer.vocab_size - 3)
    assert len(words.token_bytes) == tokenizer.vocab_size - 3
    matcher = load_backend("llguidance", words).compile(GrammarSpec("regex", "ab?")).matcher()
    assert matcher.accept([tokenizer.vocab_size - 1]) == 0
    assert matcher.accept(tokenizer.encode("ab", False)) == 1


def test_an_added_token_whose_text_is_another_token() -> None:
    encoder = tokenizers.Tokenizer(models.BPE({"a": 0, "Ġ": 1, "b": 2, "Ġa": 3}, []))
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(["<end>"])
    encoder.add_tokens([AddedToken(" a", special=False, normalized=False)])
    words = Vocabulary.of(Tokenizer(encoder, special_tokens={"eos_token": "<end>"}), 6)
    assert words.token_bytes == (b"a", b" ", b"b", b" a", b"", b" a")
    matcher = load_backend("llguidance", words).compile(GrammarSpec("regex", "b a")).matcher()
    assert matcher.accept([2, 3, 4]) == 3


def other_families() -> dict[str, Tokenizer]:
    """SentencePiece's BPE with bytes, Unigram with Metaspace, WordPiece."""
    words = ["▁", "▁a", "a", "b", "▁b", "1", "2", "{", "}", '"', ":", ",", "[", "]"]
    raw = {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **raw, **{word: 259 + i for i, word in enumerate(words)}}
    bpe = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    unigram = tokenizers.Tokenizer(models.Unigram([(name, -float(i)) for name, i in vocab.items()], 0, True))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    unigram.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    pieces = {"[UNK]": 0, "</s>": 1, **{f"##{c}": 2 + i for i, c in enumerate("ab12")}, "a": 6, "b": 7, "1": 8, "2": 9}
    piece = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    piece.decoder = decoders.WordPiece()
    found = {}
    for name, encoder in (("bpe", bpe), ("unigram", unigram), ("wordpiece", piece)):
        encoder.add_special_tokens([token for token in ("<unk>", "[UNK]", "<s>", "</s>") if encoder.token_to_id(token)])
        encoder.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
        found[name] = Tokenizer(encoder, special_tokens={"eos_token": "</s>"})
    return found


@pytest.mark.parametrize("family", ["bpe", "unigram", "wordpiece"])
def test_tokenizers_of_other_families(family: str) -> None:
    """What a walk along the masks writes is what the grammar says, in the bytes of our detokenizer."""
    tokenizer = other_families()[family]
    words = Vocabulary.of(tokenizer, tokenizer.vocab_size + 5)
    backend = load_backend("llguidance", words)
    matcher = backend.compile(GrammarSpec("regex", "a[ab]{2}(12|<tool>)")).matcher()
    text = b""
    row = np.zeros((1, words.row_bytes // 4), np.int32)
    while not matcher.is_finished:
        matcher.fill(row, 0)
        may = allowed_by(row[0])
        assert all(words.token_bytes[i] for i in may)
        token_id = int(max(may, key=lambda i: len(words.token_bytes[i])))
        assert matcher.accept([token_id]) == 1
        text += words.token_bytes[token_id]
    assert re.fullmatch(rb"a[ab]{2}(12|<tool>)", text)
    matcher.fill(row, 0)
    assert allowed_by(row[0]).tolist() == list(words.eos_ids)
