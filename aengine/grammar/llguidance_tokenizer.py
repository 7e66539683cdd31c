"""A vocabulary as llguidance reads it."""

from __future__ import annotations

import llguidance

from ..errors import GrammarError
from .llguidance_errors import matcher_message
from .vocabulary import Vocabulary, name_of

__all__ = ["tokenizer_of"]

_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (4, 7, 10, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
]
"""Tokens of blanks, and of characters that any string may have: a mask takes each of these sets as one where all of it
is allowed, and walks over the rest. The library's own have 10 and 30 only: a string with fewer than 10 characters left
then takes it 1.3 ms (151,936 tokens), and at most 1.1 with these. Sets of all of 1 to 10 leave more pieces to walk."""


def tokenizer_of(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """From tokenizer.json where the library reads it as we do, else from the bytes of each token."""
    if not vocabulary.eos_ids:
        raise GrammarError(
            "structured output needs a model with an end-of-sequence token, and this model's tokenizer names none",
            kind="unsupported",
        )
    eos_ids = list(vocabulary.eos_ids)
    try:
        tokenizer = llguidance.LLTokenizer(
            vocabulary.tokenizer_json, n_vocab=vocabulary.vocab_size, eos_token=eos_ids, slices=_SLICES
        )
        if _agrees(tokenizer, vocabulary):
            return tokenizer
    except ValueError:  # a decoder that it does not know, or more tokens than logits
        pass
    try:
        wrapped = llguidance.TokenizerWrapper(_ByBytes(vocabulary))
        return llguidance.LLTokenizer(wrapped, n_vocab=vocabulary.vocab_size, eos_token=eos_ids, slices=_SLICES)
    except Exception as error:
        raise GrammarError(
            f"llguidance can't read this model's tokenizer: {matcher_message(str(error))}", kind="unsupported"
        ) from error


def _agrees(tokenizer: llguidance.LLTokenizer, vocabulary: Vocabulary) -> bool:
    """Whether the library knows every token as control or as the text that our detokenizer makes of it."""
    for token_id, text in enumerate(vocabulary.token_bytes):
        if not tokenizer.is_special_token(token_id) and tokenizer.decode_bytes([token_id]) != text:
            return False
    return True


class _ByBytes:
    """A tokenizer as `llguidance.TokenizerWrapper` takes it: forced text is cut into the longest tokens."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = [i for i, text in enumerate(vocabulary.token_bytes) if not text]
        self.tokens = [text or name_of(i).encode() for i, text in enumerate(vocabulary.token_bytes)]
        self._ids = {text: i for i, text in enumerate(vocabulary.token_bytes) if text}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:  # no token begins so: the rest can't be written
                break
            ids.append(self._ids[text[start:end]])
            start = end
        return ids
