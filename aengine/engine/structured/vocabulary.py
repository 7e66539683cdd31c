"""`Vocabulary`: a model's tokens, as grammar libraries must see them to be right.

Two things go wrong when a library is given a tokenizer as it is, so it is given the bytes of each token instead:

- Control tokens (``<|im_end|>``) and ids that only pad the model's last layer may never stand inside a text. Their
  bytes are empty here, and no grammar's text contains them; a grammar can still ask for a control token by its id.
- Added tokens that are not ``special`` (``<tool_call>``, ``<think>`` of some models) are text, and are allowed wherever
  their text is.

A forced text may look like a control token: ``{"enum": ["</s>"]}``. `encode` spells it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Vocabulary:
    """The tokens of one model. Made by `of`; immutable."""

    vocab_size: int
    """The width of the model's logits: at least the number of tokens."""
    token_bytes: tuple[bytes, ...]
    """[vocab_size] What each token adds to a text; b"" for control tokens and padding."""
    eos_ids: tuple[int, ...]
    """Every id that ends a completion, in ascending order."""
    special_ids: frozenset[int]
    """Control tokens: never text."""
    encode: Callable[[str], list[int]] | None = None
    """The ids that the model's tokenizer gives a text; it may put something before it. None: not known here."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
        """Make the vocabulary of a model whose logits are ``vocab_size`` wide. Blocking: 0.2 s for a large one."""
        known = min(tokenizer.vocab_size, vocab_size)
        eos_ids = tuple(sorted(i for i in tokenizer.eos_token_ids if 0 <= i < known))
        special_ids = frozenset(i for i in tokenizer.special_ids if i < vocab_size) | frozenset(eos_ids)
        token_bytes = tuple(b"" if i in special_ids else tokenizer.token_bytes(i) for i in in_turns(range(known)))
        return cls(
            vocab_size=vocab_size,
            token_bytes=token_bytes + (b"",) * (vocab_size - known),
            eos_ids=eos_ids,
            special_ids=special_ids,
            encode=lambda text: tokenizer.encode_plain(text, False),
        )

    @property
    def row_bytes(self) -> int:
        """The size of one row of a bitmask."""
        return -(-self.vocab_size // 32) * 4

    def eos_row(self) -> bytes:
        """Return a row of a bitmask that allows the end-of-sequence ids alone."""
        return row_of(self.eos_ids, self.row_bytes)


def row_of(token_ids: Sequence[int], row_bytes: int) -> bytes:
    row = bytearray(row_bytes)
    for token_id in token_ids:
        row[token_id // 8] |= 1 << token_id % 8
    return bytes(row)


def name_of(token_id: int) -> str:
    """Return the libraries' name of a token that is no text; a grammar writes ``<[ID]>`` instead."""
    return f"<|aeng:{token_id}|>"


def in_turns(ids: range) -> Iterator[int]:
    """Yield ``ids``, for long work in Python in a thread, and release the GIL now and then: the event loop's thread
    would wait 5 ms for it otherwise."""
    for i in ids:
        if i % _TURN == 0:
            time.sleep(_TURN_SECONDS)
        yield i


_TURN = 512
"""Tokens; some 0.3 ms."""
_TURN_SECONDS = 0.00005  # 0: this thread would have the GIL again before another wakes up
