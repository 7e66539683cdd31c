"""A vocabulary as llguidance reads it."""

from __future__ import annotations

import logging
from typing import NamedTuple

import llguidance

from ....errors import GrammarError, InvalidRequestError
from ..vocabulary import Vocabulary, in_turns, name_of
from . import unlocked
from .faults import matcher_message

logger = logging.getLogger("aengine.structured")

_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{length}}}' for length in (4, 7, 10, 30)),
    r'[^"\\\x00-\x1F\x7F]+',
]
"""Tokens of blanks, and of characters that any string may have: a mask takes each of these sets as one where all of it
is allowed, and walks over the rest. The library's own have 10 and 30 only: a string with fewer than 10 characters left
then takes it 1.3 ms (151,936 tokens), and at most 1.1 with these. Sets of all of 1 to 10 leave more pieces to walk."""


class Tables(NamedTuple):
    """A vocabulary in the library's form."""

    tokenizer: llguidance.LLTokenizer
    keep: object
    """What the tokenizer and its matchers need as long as they live."""


def tables_of(vocabulary: Vocabulary) -> Tables:
    """Build them from the bytes of each token: 0.3 s for 49,152 tokens and 2.4 s for 262,144, from the tokenizer on,
    without the GIL where the library's version is known (unlocked.py), else with it. To read a tokenizer.json by itself
    would take the library four times as long, and as much memory once more. Raises GrammarError."""
    if not vocabulary.eos_ids:
        raise GrammarError(
            "structured output needs a model with an end-of-sequence token, and this model's tokenizer names none",
            kind="unsupported",
        )
    by_bytes = _ByBytes(vocabulary)
    eos_ids = list(vocabulary.eos_ids)
    try:
        if unlocked.can_build():
            return Tables(*unlocked.build(by_bytes.tokens, by_bytes.special_token_ids, eos_ids, _SLICES, by_bytes))
        logger.info("the loop stands still: llguidance %s builds its tables with the GIL held", llguidance.__version__)
        wrapped = llguidance.TokenizerWrapper(by_bytes)
        return Tables(llguidance.LLTokenizer(wrapped, eos_token=eos_ids, slices=_SLICES), None)
    except Exception as error:
        raise GrammarError(
            f"llguidance can't read this model's tokenizer: {matcher_message(str(error))}", kind="unsupported"
        ) from error


class _ByBytes:
    """A tokenizer as `llguidance.TokenizerWrapper` takes it, which asks it for the tokens of forced text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        texts = vocabulary.token_bytes
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = [i for i, text in enumerate(texts) if not text]
        self.tokens = [texts[i] or name_of(i).encode() for i in in_turns(range(len(texts)))]
        self._texts = texts
        self._encode = vocabulary.encode
        self._ids: dict[bytes, int] = {}
        self._longest = 1

    def __call__(self, text: bytes) -> list[int]:
        ids = self._encoded(text)
        return self._cut(text) if ids is None else ids

    def _encoded(self, text: bytes) -> list[int] | None:
        """Encode as the model's tokenizer does, if that gives the same bytes. One that puts a blank before a text does
        so before the first of its words: that is a byte which no text has, and is taken away again."""
        if self._encode is None:
            return None
        try:
            string = text.decode()
            for before in ("", _BEFORE):
                lead = self._encode(before) if before else []
                ids = self._encode(before + string)
                if ids[: len(lead)] == lead:
                    ids = ids[len(lead) :]
                    if b"".join(self._texts[i] if i < len(self._texts) else b"" for i in ids) == text:
                        return ids
        except (UnicodeDecodeError, InvalidRequestError):  # parts of a character
            pass
        return None

    def _cut(self, text: bytes) -> list[int]:
        """Split ``text`` into the longest tokens, up to what no token begins."""
        if not self._ids:
            ids_by_text = {self._texts[i]: i for i in in_turns(range(len(self._texts))) if self._texts[i]}
            self._longest = max(map(len, ids_by_text), default=1)
            self._ids = ids_by_text
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


_BEFORE = "\x02"
