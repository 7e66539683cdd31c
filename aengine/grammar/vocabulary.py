"""`Vocabulary`: a model's tokens, as grammar libraries must see them to be right.

Three things go wrong when a library is given a tokenizer as it is, and are mended here:

- Control tokens (``<|im_end|>``) and ids that only pad the model's last layer may never stand inside a text. Their
  bytes are empty here, and no grammar's text contains them; a grammar can still ask for a control token by its id.
- A forced text may look like an added token: ``{"enum": ["</tool_call>"]}``. llguidance tokenises it, gets that token,
  and locks itself out, as the token is none of text. So added tokens get names that no text has, ``<|aeng:ID|>``.
- Added tokens that are not ``special`` (``<tool_call>``, ``<think>`` of some models) are text. They become ordinary
  tokens that no merge leads to, so that they are allowed wherever their text is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Vocabulary"]


class TokenizerLike(Protocol):
    """What is needed of `aengine.engine.tokenizer.Tokenizer`."""

    vocab_size: int
    special_ids: frozenset[int]
    eos_token_ids: frozenset[int]

    def to_json(self) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Vocabulary:
    """The tokens of one model. Made by `of`; immutable."""

    tokenizer_json: str
    """The tokenizer in the format of the ``tokenizers`` library, its added tokens renamed."""
    vocab_size: int
    """The width of the model's logits: at least the number of tokens."""
    token_bytes: tuple[bytes, ...]
    """[vocab_size] What each token adds to a text; b"" for control tokens and padding."""
    eos_ids: tuple[int, ...]
    """Every id that ends a completion, in ascending order."""
    special_ids: frozenset[int]
    """Control tokens: never text."""

    @classmethod
    def of(cls, tokenizer: TokenizerLike, vocab_size: int) -> Vocabulary:
        """Of a tokenizer and a model whose logits are ``vocab_size`` wide. Blocking: a second for a large one."""
        known = min(tokenizer.vocab_size, vocab_size)
        eos_ids = tuple(sorted(i for i in tokenizer.eos_token_ids if 0 <= i < known))
        special_ids = frozenset(i for i in tokenizer.special_ids if i < vocab_size) | frozenset(eos_ids)
        token_bytes = tuple(b"" if i in special_ids else tokenizer.token_bytes(i) for i in range(known))
        return cls(
            tokenizer_json=_renamed(tokenizer.to_json(), special_ids),
            vocab_size=vocab_size,
            token_bytes=token_bytes + (b"",) * (vocab_size - known),
            eos_ids=eos_ids,
            special_ids=special_ids,
        )

    @property
    def row_bytes(self) -> int:
        """The size of one row of a bitmask."""
        return -(-self.vocab_size // 32) * 4

    def eos_row(self) -> bytes:
        """A row of a bitmask in which only the end-of-sequence ids are allowed."""
        return row_of(self.eos_ids, self.row_bytes)


def row_of(token_ids: Sequence[int], row_bytes: int) -> bytes:
    row = bytearray(row_bytes)
    for token_id in token_ids:
        row[token_id // 8] |= 1 << token_id % 8
    return bytes(row)


def name_of(token_id: int) -> str:
    """What a token that is no text is called inside the libraries; a grammar writes ``<[ID]>`` instead."""
    return f"<|aeng:{token_id}|>"


def _renamed(tokenizer_json: str, special_ids: frozenset[int]) -> str:
    """The tokenizer with control tokens renamed, and the other added tokens made ordinary ones."""
    data = json.loads(tokenizer_json)
    data["post_processor"] = None  # it names the tokens that begin a prompt, and a grammar's text has none
    data["truncation"] = data["padding"] = None
    byte_level = '"ByteLevel"' in json.dumps(data.get("decoder"))
    model = data["model"]
    kept: list[dict[str, Any]] = []
    for token in sorted(data.get("added_tokens", ()), key=lambda token: token["id"]):
        token_id, old = token["id"], token["content"]
        new = _written(old, byte_level)
        is_text = not token["special"] and token_id not in special_ids and _is_free(model, new, token_id)
        if not is_text:
            new = name_of(token_id)
            kept.append({**token, "content": new, "special": True, "normalized": False, "lstrip": False})
            if model.get("unk_token") == old:
                model["unk_token"] = new
        _set_name(model, token_id, old, new)
    data["added_tokens"] = kept
    return json.dumps(data, ensure_ascii=False)


def _is_free(model: dict[str, Any], name: str, token_id: int) -> bool:
    """Whether an ordinary token may have this name: only where the model's list is by name, and no other has it."""
    vocab = model.get("vocab")
    return isinstance(vocab, dict) and vocab.get(name, token_id) == token_id


def _set_name(model: dict[str, Any], token_id: int, old: str, new: str) -> None:
    """Enter the new name into the model's own list, so that the token keeps its id."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        if vocab.get(old) == token_id:
            del vocab[old]
        vocab[new] = token_id
    elif isinstance(vocab, list) and token_id < len(vocab):  # Unigram: [name, score], the id is the place
        vocab[token_id][0] = new


def _written(text: str, byte_level: bool) -> str:
    """A text as the vocabulary writes it: GPT-2's letters for bytes, or SentencePiece's sign for a blank."""
    if not byte_level:
        return text.replace(" ", "▁")
    letters = _byte_letters()
    return "".join(letters[byte] for byte in text.encode())


def _byte_letters() -> list[str]:
    """Printable bytes of Latin-1 stand for themselves, the others are moved to U+0100 and on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]
