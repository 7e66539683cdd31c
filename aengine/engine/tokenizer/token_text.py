"""Text of tokens: the decoders of the ``tokenizers`` library, one token at a time.

Decoding a list of ids is mapping each id to its string, leaving out ids that are unknown (and special ones when asked
to), and giving the strings to the tokenizer's decoder. For each family of decoders there is a class here that gives
the same text piece by piece, each piece as soon as it is certain:

    ByteLevelText       a token is some bytes of UTF-8, perhaps part of a character    GPT-2, Llama 3, Qwen, SmolLM
    ByteFallbackText    a token is a text, or one byte written <0x0A>                  Llama 2, Mistral, Gemma
    StreamedText        anything else, by the library's own stream; slow               WordPiece, Metaspace, ...

Pieces are computed when a token is first seen and kept, so nothing is built at start.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

Piece = str | bytes | None
"""Whole characters; bytes that need company; nothing (an id that is left out)."""

_REPLACEMENT = "\ufffd"
_MOST_HELD = 16  # tokens held as parts of one character; more are no character
_NUM_BEFORE = 8  # earlier tokens that may change the text of later ones
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def gpt2_bytes() -> dict[str, int]:
    """Return GPT-2's letters for bytes: printable ones stand for themselves, the rest are moved to U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


class _Pieces(dict[int, Piece]):
    """Pieces by id, filled as ids are asked for; at most one entry for each id of the vocabulary."""

    __slots__ = ("_make", "_vocab_size")

    def __init__(self, make: Callable[[int], Piece], vocab_size: int) -> None:
        self._make = make
        self._vocab_size = vocab_size

    def __missing__(self, token_id: int) -> Piece:
        if not 0 <= token_id < self._vocab_size:
            return None
        piece = self[token_id] = self._make(token_id)
        return piece


class IncrementalDecoder(ABC):
    """One text in the making. The joined answers of `put` and a last `flush` are what ``decode`` gives for all the ids.

    A `flush` before the end cuts the text there: bytes before it and after it make no character together.
    """

    __slots__ = ()

    @abstractmethod
    def put(self, token_id: int) -> str:
        """Add a token; return the text that it makes certain: whole characters, "" while one is incomplete."""

    def flush(self) -> str:
        """End the text; return what an unfinished character turns into."""
        return ""

    def take_likely(self) -> str:
        """Return characters that have become whole since the last call but that `put` holds back, because a later token
        may still change them. If the text ends here, they are in it."""
        return ""


class TokenTable(ABC):
    """The texts of a vocabulary's tokens; makes decoders that share them."""

    def __init__(self, encoder: tokenizers.Tokenizer, special_ids: frozenset[int], vocab_size: int) -> None:
        self._encoder = encoder
        self._special_ids = special_ids
        self._vocab_size = vocab_size

    @cached_property
    def _shown(self) -> _Pieces:
        # A copy makes them: a cycle with this table would keep the encoder, of tens of MB, until a garbage collection.
        return _Pieces(copy.copy(self)._piece_of_id, self._vocab_size)

    @cached_property
    def _skipped(self) -> _Pieces:
        shown, special_ids = self._shown, self._special_ids
        return _Pieces(lambda i: None if i in special_ids else shown[i], self._vocab_size)

    def _piece_of_id(self, token_id: int) -> Piece:
        token = self._encoder.id_to_token(token_id)
        return self.piece(token) if token else None

    def pieces(self, skip_special_tokens: bool) -> _Pieces:
        return self._skipped if skip_special_tokens else self._shown

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token stands for within a text; b"" if there is no such token."""
        piece = self._shown[token_id]
        return piece.encode() if isinstance(piece, str) else piece or b""

    @abstractmethod
    def piece(self, token: str) -> Piece: ...

    @abstractmethod
    def decoder(self, skip_special_tokens: bool, after: Sequence[int] = ()) -> IncrementalDecoder:
        """Return the decoder of a text that goes on with that of the tokens ``after``: some begin a text otherwise."""


class ByteLevelTable(TokenTable):
    _bytes = gpt2_bytes()

    def piece(self, token: str) -> Piece:
        try:
            raw = bytes(map(self._bytes.__getitem__, token))
        except KeyError:  # an added token, written in plain text
            return token
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    def decoder(self, skip_special_tokens: bool, after: Sequence[int] = ()) -> ByteLevelText:
        return ByteLevelText(self.pieces(skip_special_tokens))


class ByteLevelText(IncrementalDecoder):
    """Bytes are joined until they are characters; what can't become one turns into U+FFFD."""

    __slots__ = ("_pending", "_pieces", "_utf8")

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._utf8 = _new_utf8_decoder("replace")
        self._pending = False

    def put(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece.__class__ is str and not self._pending:
            return piece
        if piece is None:
            return ""
        if isinstance(piece, str):  # a character begins, so the one before stays incomplete
            return self.flush() + piece
        text = self._utf8.decode(piece)
        self._pending = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        self._pending = False
        return self._utf8.decode(b"", True)


class ByteFallbackTable(TokenTable):
    """Tokens to which ``replace`` is applied; ``strip_left`` spaces are taken off the whole text."""

    def __init__(self, *args: Any, replace: list[tuple[str, str]], byte_fallback: bool, strip_left: int) -> None:
        super().__init__(*args)
        self._replace = replace
        self._byte_fallback = byte_fallback
        self._strip_left = strip_left

    def piece(self, token: str) -> Piece:
        for old, new in self._replace:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        return bytes.fromhex(match[1]) if match else token

    def decoder(self, skip_special_tokens: bool, after: Sequence[int] = ()) -> ByteFallbackText:
        pieces = self.pieces(skip_special_tokens)
        has_begun = any(pieces[token_id] for token_id in after)
        return ByteFallbackText(pieces, 0 if has_begun else self._strip_left)


class ByteFallbackText(IncrementalDecoder):
    """Byte tokens are held until another token comes: only then is their text known.

    The library decodes a run of byte tokens as one, and if any of it is not UTF-8, each byte of the run becomes
    U+FFFD, those of complete characters too.
    """

    __slots__ = ("_num_taken", "_pieces", "_plain", "_run", "_strip_left")

    def __init__(self, pieces: _Pieces, strip_left: int) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._num_taken = 0  # bytes of the run that `take_likely` has returned
        self._strip_left = strip_left
        self._plain = not strip_left  # nothing is held and nothing stripped: the fast path

    def put(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if self._plain and piece.__class__ is str:
            return piece
        if piece is None:
            return ""
        if isinstance(piece, bytes):
            self._run += piece
            self._plain = False
            return ""
        return self._stripped(self._end_of_run() + piece)

    def flush(self) -> str:
        return self._stripped(self._end_of_run())

    def take_likely(self) -> str:
        num_stripped = min(self._strip_left, len(self._run) - len(self._run.lstrip(b" "))) if self._strip_left else 0
        try:
            text = self._run[max(self._num_taken, num_stripped) :].decode()
        except UnicodeDecodeError:  # a character is incomplete, or the run can't be UTF-8 any more
            return ""
        self._num_taken = len(self._run)
        return text

    def _end_of_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        self._num_taken = 0
        return text

    def _stripped(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != " ":
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        self._plain = not self._strip_left
        return text


class StreamedTable(TokenTable):
    def piece(self, token: str) -> Piece:
        return self._decode(["a", token])[len(self._decode(["a"])) :]  # the first of a text may be special

    def _decode(self, tokens: list[str]) -> str:
        decoder = self._encoder.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(tokens)

    def decoder(self, skip_special_tokens: bool, after: Sequence[int] = ()) -> StreamedText:
        decoder = StreamedText(self._encoder, self.pieces(skip_special_tokens))
        for token_id in after[-_NUM_BEFORE:]:
            decoder.put(token_id)
        decoder.flush()
        return decoder


class StreamedText(IncrementalDecoder):
    """Decodes by the library's own stream, which decodes the last tokens again with each.

    Where the decoder changes text that has been returned already, that text stays, and the token counts by itself.
    """

    __slots__ = ("_encoder", "_held", "_pieces", "_stream")

    def __init__(self, encoder: tokenizers.Tokenizer, pieces: _Pieces) -> None:
        self._encoder = encoder
        self._pieces = pieces
        self._held: list[int] = []  # ids that have given no text yet
        self._stream = _new_stream()

    def put(self, token_id: int) -> str:
        if self._pieces[token_id] is None:
            return ""
        self._held.append(token_id)
        try:
            text: str | None = self._stream.step(self._encoder, token_id)
        except Exception:  # the library raises it when the earlier text begins differently now
            return self.flush()
        if text is None:
            return self.flush() if len(self._held) == _MOST_HELD else ""
        self._held.clear()
        return text

    def flush(self) -> str:
        if not self._held:
            return ""
        text = self._encoder.decode(self._held, skip_special_tokens=False)
        self._held.clear()
        self._stream = _new_stream()
        return text


def _new_stream() -> Any:
    from tokenizers.decoders import DecodeStream

    return DecodeStream(skip_special_tokens=False)


def token_table(encoder: tokenizers.Tokenizer, special_ids: frozenset[int], vocab_size: int) -> TokenTable:
    """Return the table for an encoder's kind of decoder."""
    decoder = encoder.decoder
    settings: dict[str, Any] = {} if decoder is None else json.loads(decoder.__getstate__())
    kind = settings.get("type")
    if kind == "ByteLevel":
        return ByteLevelTable(encoder, special_ids, vocab_size)
    if kind == "Sequence":
        options = _byte_fallback_options(settings["decoders"])
        if options is not None:
            return ByteFallbackTable(encoder, special_ids, vocab_size, **options)
        if [step["type"] for step in settings["decoders"]] == ["ByteLevel"]:
            return ByteLevelTable(encoder, special_ids, vocab_size)
    return StreamedTable(encoder, special_ids, vocab_size)


def _byte_fallback_options(steps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the options of a sequence Replace*, ByteFallback?, Fuse, Strip? (on the left); None for another one."""
    kinds = [step["type"] for step in steps]
    if not re.fullmatch(r"(Replace )*(ByteFallback )?Fuse( Strip)?", " ".join(kinds)):
        return None
    replace = []
    for step in steps[: kinds.count("Replace")]:
        if "String" not in step["pattern"]:
            return None
        replace.append((step["pattern"]["String"], step["content"]))
    strip = steps[-1] if kinds[-1] == "Strip" else None
    if strip is not None and (strip["content"] != " " or strip["stop"]):
        return None
    return {
        "replace": replace,
        "byte_fallback": "ByteFallback" in kinds,
        "strip_left": strip["start"] if strip is not None else 0,
    }
