"""Tokenizers out of GGUF metadata: the split before the merges, the merges, special tokens, damage."""

from __future__ import annotations

import logging
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizer_helpers import TEXTS, sentencepiece_vocab, smollm2, write_gguf
from tokenizers import pre_tokenizers

from aengine.checkpoint import GgufFile, resolve_model
from aengine.config import EngineConfig
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.errors import ModelLoadError


def naive_bpe(word: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Join the pair of lowest rank, leftmost first, until none is left."""
    while True:
        pairs = [(ranks[pair], i) for i, pair in enumerate(zip(word, word[1:])) if pair in ranks]
        if not pairs:
            return word
        _, i = min(pairs)
        word = [*word[:i], word[i] + word[i + 1], *word[i + 2 :]]


@pytest.mark.parametrize("text", [*TEXTS, "1234567890 17 3.14", "HTTPServer_v2", "ﬁ ½ ²", "x" * 50])
def test_smollm2_obeys_the_merges(text: str) -> None:
    path = resolve_model(EngineConfig(model="smollm2-135m")).path
    with GgufFile(path) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    ids = {token: i for i, token in enumerate(tokens)}
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected = []
    for part in filter(None, re.split(r"(\d)", text)) if text.isascii() else _split_numbers(text):
        for word, _ in byte_level.pre_tokenize_str(part):
            expected += [ids[token] for token in naive_bpe(list(word), ranks)]
    assert smollm2().encode(text) == expected


def _split_numbers(text: str) -> list[str]:
    parts = [""]
    for char in text:
        if unicodedata.category(char) in ("Nd", "Nl", "No"):
            parts += [char, ""]
        else:
            parts[-1] += char
    return [part for part in parts if part]


def test_smollm2_facts() -> None:
    tokenizer = smollm2()
    assert tokenizer.vocab_size == 49152
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.special_ids == set(range(17))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("17")] == ["1", "7"]
    assert tokenizer.encode("<|im_start|>user") == [1, tokenizer.token_id("user")]
    assert tokenizer.encode("hello", add_special_tokens=True) == tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.has_chat_template


def test_smollm2_round_trips(rng: random.Random) -> None:
    tokenizer = smollm2()
    alphabet = "ab zé世🙂\n\t'17.\u0301\u200d" + "".join(TEXTS)
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randrange(60)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    rows = sentencepiece_vocab()
    return {
        "ggml.model": "llama",
        "ggml.tokens": [row[0] for row in rows],
        "ggml.scores": [row[1] for row in rows],
        "ggml.token_type": [row[2] for row in rows],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }


def naive_sentencepiece(text: str) -> list[str]:
    """Characters; join the neighbours whose union has the highest score, leftmost first; bytes for the unknown."""
    scores = {token: score for token, score, kind in sentencepiece_vocab() if kind == 1}
    word = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(zip(word, word[1:])) if a + b in scores]
        if not pairs:
            break
        _, i = min(pairs)
        word = [*word[:i], word[i] + word[i + 1], *word[i + 2 :]]
    tokens = []
    for token in word:
        tokens += [token] if token in scores else [f"<0x{byte:02X}>" for byte in token.encode()]
    return tokens


def test_sentencepiece(tmp_path: Path, rng: random.Random) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", sentencepiece_metadata()))
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.encode("the")[0] == 1  # bos, unless the file says otherwise
    for _ in range(300):
        text = "".join(rng.choices("the quick  brown fox worn世界🙂é\n", k=rng.randrange(24)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [tokenizer.token_id(token) for token in naive_sentencepiece(text)], text
        assert tokenizer.decode(ids) == text
    ids = tokenizer.encode("the<|tool|>", add_special_tokens=False)
    assert ids[-1] == tokenizer.token_id("<|tool|>")
    assert tokenizer.decode(ids) == "the<|tool|>"  # user-defined, not special


def test_sentencepiece_without_the_first_space(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(ggml__add_space_prefix=False, ggml__add_bos_token=False, ggml__add_eos_token=True)
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", metadata))
    ids = tokenizer.encode("he")
    assert ids == [tokenizer.token_id("he"), 2]
    assert tokenizer.decode(tokenizer.encode(" he")) == " he"


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "12", "123", "Ġ1", "'S", "A'", "<|end_of_text|>", "<|eot_id|>", "<|user|>"]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "llama-bpe",
        "ggml.tokens": tokens,
        "ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "ggml.merges": ["1 2", "12 3", "Ġ 1", "' S"],
        "ggml.bos_token_id": len(tokens) - 3,
        "ggml.eos_token_id": len(tokens) - 2,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("llama-bpe", "1231 12", ["123", "1", " ", "12"]),
        ("qwen2", "1231 12", ["1", "2", "3", "1", " ", "1", "2"]),
        ("smollm", "12 1", ["1", "2", " ", "1"]),
        ("gpt-2", " 1", [" 1"]),
        ("llama-bpe", " 1", [" ", "1"]),
        ("llama-bpe", "A'S", ["A", "'S"]),  # contractions in capitals
        ("gpt-2", "A'S", ["A", "'", "S"]),
        ("qwen2", "e\u0301", ["\ufffd", "\ufffd"]),  # NFC: one character, two bytes
        ("gpt-2", "e\u0301", ["e", "\ufffd", "\ufffd"]),
        ("tekken", "123", ["1", "2", "3"]),
    ],
)
def test_splits_before_the_merges(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", byte_level_metadata(ggml__pre=pre)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in ids] == expected


def test_special_tokens(tmp_path: Path) -> None:
    metadata = byte_level_metadata(chat_template="hi {{ eos_token }}")
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", metadata))
    end_of_text, eot, user = (tokenizer.token_id(t) for t in ("<|end_of_text|>", "<|eot_id|>", "<|user|>"))
    assert tokenizer.special_ids == {end_of_text, eot}
    assert tokenizer.eos_token_ids == {end_of_text, eot}
    assert tokenizer.encode("1") == [end_of_text, tokenizer.token_id("1")]  # llama-bpe begins with bos
    assert tokenizer.encode("<|user|>", add_special_tokens=False) == [user]
    assert tokenizer.apply_chat_template([{"role": "user", "content": ""}]) == "hi <|eot_id|>"


def test_unknown_pre_tokenizer_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_gguf(tmp_path / "m.gguf", byte_level_metadata(ggml__pre="from-the-future"))
    with caplog.at_level(logging.WARNING, "aengine"):
        tokenizer = Tokenizer.load(source)
    assert "from-the-future" in caplog.text
    assert tokenizer.decode(tokenizer.encode(" 12 a")) == " 12 a"


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        (byte_level_metadata(ggml__model="rwkv"), "kind 'rwkv'"),
        ({"ggml.model": "gpt2"}, "lacks tokenizer.ggml.tokens"),
        (byte_level_metadata(ggml__merges=["1 ☃"]), "can't be built"),
        (byte_level_metadata(ggml__merges=["nonsense"]), "can't be built"),
        (byte_level_metadata(ggml__merges=[1, 2]), "merges=.* must be a list of texts"),
        (byte_level_metadata(ggml__token_type=[1, 1]), "token_type does not have one entry"),
        (byte_level_metadata(ggml__eos_token_id=99999), "eos_token_id is 99999"),
        (sentencepiece_metadata(ggml__scores=[0.0]), "scores does not have one entry"),
        (sentencepiece_metadata(ggml__add_space_prefix="yes"), "tokenizer.ggml.add_space_prefix='yes' must be true or"),
        (byte_level_metadata(ggml__add_bos_token=7), "tokenizer.ggml.add_bos_token=7 must be true or false"),
        (byte_level_metadata(ggml__model="x" * 5000), "a tokenizer of kind 'x{79};"),
        (byte_level_metadata(chat_templates=[5]), "tokenizer.chat_templates=.* must be a list of texts"),
        (byte_level_metadata(chat_template=5), "tokenizer.chat_template=5 must be a text"),
    ],
)
def test_damage(tmp_path: Path, metadata: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        Tokenizer.load(write_gguf(tmp_path / "m.gguf", metadata))
