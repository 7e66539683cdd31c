"""`tokenizer.model`, SentencePiece's own file: a protobuf message, of which the few fields that matter are read here.

    ModelProto      1: pieces, each    1: piece   2: score (float)   3: kind
                    2: trainer         3: algorithm (1 unigram, 2 BPE)   24: blanks as suffixes   35: byte fallback
                                       41, 42, 43: ids of bos, eos, pad
                    3: normalizer      2: charsmap   3: a blank before the text   4: merge blanks

The format is small and will not change, so reading it takes no package: SentencePiece's own is 1 MB of C++ with a
second tokenizer, and protobuf would need the message's definition besides.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ....checkpoint.value_reader import read_bytes
from ....errors import ModelLoadError
from .sentencepiece import NORMAL, SentencePieces

_UNIGRAM, _BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_Value = int | bytes
_NO_ID = (1 << 64) - 1  # -1


@dataclass(frozen=True, slots=True)
class SentencePieceFile:
    """The model, and the tokens that it names for the beginning, the end and the padding of a text."""

    pieces: SentencePieces
    special_tokens: dict[str, str]


def read_sentencepiece(path: Path, *, legacy: bool = True) -> SentencePieceFile:
    """Read a model. ``legacy`` as of `SentencePieces`. Raises ModelLoadError for a file that is damaged, or of a kind
    that is not supported."""
    try:
        return _model(path, read_bytes(path), legacy)
    except (ValueError, LookupError, struct.error) as error:
        raise ModelLoadError(f"{path} can't be read as a SentencePiece model: {error!s:.200}") from error


def _model(path: Path, data: bytes, legacy: bool) -> SentencePieceFile:
    tokens: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, _Value] = {}
    normalizer: dict[int, _Value] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_bytes(value)))
            tokens.append(_bytes(piece[1]).decode())
            scores.append(struct.unpack("<f", _bytes(piece.get(2, b"\0" * 4)))[0])
            kinds.append(_int(piece.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_fields(_bytes(value)))
        elif number == 3:
            normalizer = dict(_fields(_bytes(value)))
    algorithm = _int(trainer.get(3, _UNIGRAM))
    if not tokens or algorithm not in (_UNIGRAM, _BPE) or trainer.get(24):
        what = "blanks at the ends of words" if trainer.get(24) else f"algorithm {algorithm}"
        raise ModelLoadError(
            f"{path} is a SentencePiece model of a kind that aengine can't build ({what if tokens else 'no pieces'}): "
            "it builds BPE and unigram ones; give another tokenizer with tokenizer=, a folder that has tokenizer.json"
        )
    ids = {
        "unk": trainer.get(40, 0),
        "bos": trainer.get(41, 1),
        "eos": trainer.get(42, 2),
        "pad": trainer.get(43, _NO_ID),
    }
    return SentencePieceFile(
        SentencePieces(
            tokens=tokens,
            scores=scores,
            kinds=kinds,
            is_unigram=algorithm == _UNIGRAM,
            byte_fallback=bool(trainer.get(35, 0)),
            add_prefix=bool(normalizer.get(3, 1)),
            merges_blanks=bool(normalizer.get(4, 1)),
            charsmap=_bytes(normalizer.get(2, b"")),
            legacy=legacy,
        ),
        {f"{role}_token": tokens[_int(i)] for role, i in ids.items() if _int(i) < len(tokens)},
    )


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Yield the numbers and values of a message's fields. Raises ValueError or IndexError for what is none."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        value: _Value
        if kind == _VARINT:
            value, place = _varint(data, place)
        elif kind in (_FIXED32, _FIXED64, _BYTES):
            size = 4 if kind == _FIXED32 else 8
            if kind == _BYTES:
                size, place = _varint(data, place)
            value = data[place : place + size]
            if len(value) < size:
                raise ValueError("it ends in the midst of a field")
            place += size
        else:
            raise ValueError(f"there is no field of type {kind}")
        yield key >> 3, value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _bytes(value: _Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field is of another type")
    return value


def _int(value: _Value) -> int:
    if not isinstance(value, int):
        raise ValueError("a field is of another type")
    return value
