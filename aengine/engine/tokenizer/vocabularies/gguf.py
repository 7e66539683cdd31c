"""A tokenizer out of a GGUF file's metadata, which has the vocabulary and merges but only a name for the rest.

Kinds (``tokenizer.ggml.model``):

    gpt2     byte-level BPE; ``tokenizer.ggml.pre`` names how text is split before the merges (`splitting.py`)
    llama    SentencePiece BPE: scores instead of merges, "▁" for the space, bytes as <0x00> to <0xFF>; Gemma's too
    t5       SentencePiece unigram, with its table of characters
    gemma4   BPE by merges over characters with "▁" for the space, bytes as <0x00> to <0xFF>
    bert     WordPiece, with "▁" before whole words in place of "##" within them
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ....checkpoint.gguf_file import GgufFile
from ....checkpoint.value_reader import ValueReader
from ....errors import ModelLoadError
from .loaded import LoadedTokenizer, put_around
from .sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, SentencePieces, add_tokens, first_ids
from .splitting import DEFAULT, SPLITTINGS
from .word_piece import word_piece

if TYPE_CHECKING:
    import tokenizers

logger = logging.getLogger("aengine.tokenizer")

_IDS = {
    "bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "cls_token": "cls",
    "sep_token": "seperator", "mask_token": "mask",
}  # fmt: skip
"""The roles of special tokens as GGUF names them; "seperator" is its own spelling."""


def read_gguf_tokenizer(file: GgufFile) -> LoadedTokenizer:
    """Build the tokenizer. Raises ModelLoadError saying what is missing, inconsistent or not supported."""
    tokens: list[str] = _strings(file, "tokenizer.ggml.tokens")
    kinds = _values(file).integers("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.token_type does not have one entry a token")
    special_tokens = _special_tokens(file, tokens)
    model = _values(file).text("tokenizer.ggml.model")
    build = _BUILDERS.get(model)
    if build is None:
        raise ModelLoadError(
            f"{file.path} has a tokenizer of kind {model!r:.80}; aengine builds {', '.join(map(repr, _BUILDERS))}: "
            "give another with tokenizer=, a folder or hub id that has tokenizer.json"
        )
    try:
        encoder, add_bos, add_eos = build(file, tokens, kinds, special_tokens)
        add_tokens(encoder, tokens, kinds, special_tokens.values())
        if model != "bert":
            _put_around(file, encoder, special_tokens, add_bos, add_eos)
    except ModelLoadError:
        raise
    except Exception as error:  # whatever the library raises for a vocabulary that does not fit together
        raise ModelLoadError(f"{file.path} has a tokenizer that can't be built: {error!s:.200}") from error
    return LoadedTokenizer(encoder, special_tokens, _chat_templates(file))


_Built = tuple["tokenizers.Tokenizer", bool, bool]
"""The encoder, and whether a text begins with BOS and ends with EOS when the file does not say."""


def _byte_level(file: GgufFile, tokens: list[str], kinds: list[int], special: dict[str, str]) -> _Built:
    from tokenizers import Tokenizer, decoders, models

    pre = _values(file).text("tokenizer.ggml.pre", "default")
    splitting = SPLITTINGS.get(pre)
    if splitting is None:
        splitting = DEFAULT
        logger.warning(
            "%s: pre-tokenizer %.80r is not known; GPT-2's is used, so some prompts may be split into other tokens "
            "than the model was trained on (tokenizer= takes a better one)",
            file.path,
            pre,
        )
    encoder = Tokenizer(models.BPE(first_ids(tokens), _merges(file), ignore_merges=splitting.ignore_merges))
    splitting.apply(encoder)
    encoder.decoder = decoders.ByteLevel()
    return encoder, splitting.add_bos, False


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    merges = _strings(file, "tokenizer.ggml.merges")
    return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]


def _sentencepiece(file: GgufFile, tokens: list[str], kinds: list[int], special: dict[str, str]) -> _Built:
    return _pieces(file, tokens, kinds).encoder(), True, False


def _pieces(file: GgufFile, tokens: list[str], kinds: list[int]) -> SentencePieces:
    add_prefix = _values(file).flag("tokenizer.ggml.add_space_prefix", True)
    return SentencePieces(tokens=tokens, scores=_scores(file, tokens), kinds=kinds, add_prefix=add_prefix)


def _unigram(file: GgufFile, tokens: list[str], kinds: list[int], special: dict[str, str]) -> _Built:
    charsmap = file.metadata.get("tokenizer.ggml.precompiled_charsmap") or []
    pieces = replace(
        _pieces(file, tokens, kinds),
        is_unigram=True,
        byte_fallback=BYTE in kinds,
        merges_blanks=_values(file).flag("tokenizer.ggml.remove_extra_whitespaces", True),
        charsmap=bytes(byte & 0xFF for byte in charsmap),
    )
    return pieces.encoder(), False, True


def _gemma4(file: GgufFile, tokens: list[str], kinds: list[int], special: dict[str, str]) -> _Built:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = first_ids(tokens)
    unknown = special.get("unk_token")
    encoder = Tokenizer(models.BPE(vocab, _merges(file), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    encoder.normalizer = normalizers.Replace(" ", "▁")
    encoder.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return encoder, True, False


def _bert(file: GgufFile, tokens: list[str], kinds: list[int], special: dict[str, str]) -> _Built:
    if "bos_token" in special:  # older files have no name for CLS
        special.setdefault("cls_token", special["bos_token"])
    named = {*special.values(), *(t for t, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, UNKNOWN))}
    pieces = [_bert_piece(token) if token not in named else token for token in tokens]
    return word_piece(first_ids(pieces), special), False, False


def _bert_piece(token: str) -> str:
    return token[1:] if token.startswith("▁") else f"##{token}"


_BUILDERS: dict[Any, Callable[[GgufFile, list[str], list[int], dict[str, str]], _Built]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "t5": _unigram,
    "gemma4": _gemma4,
    "bert": _bert,
}


def _scores(file: GgufFile, tokens: list[str]) -> list[float]:
    scores = _values(file).numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.scores does not have one entry a token")
    return scores


def _put_around(
    file: GgufFile, encoder: tokenizers.Tokenizer, special_tokens: dict[str, str], add_bos: bool, add_eos: bool
) -> None:
    values = _values(file)
    bos = special_tokens.get("bos_token") if values.flag("tokenizer.ggml.add_bos_token", add_bos) else None
    eos = special_tokens.get("eos_token") if values.flag("tokenizer.ggml.add_eos_token", add_eos) else None
    put_around(encoder, bos, eos)


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    found = {}
    for role, key in _IDS.items():
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ModelLoadError(
                f"{file.path}: tokenizer.ggml.{key}_token_id is {token_id!r:.80}, but there are {len(tokens)} tokens"
            )
        found[role] = tokens[token_id]
    return found


def _chat_templates(file: GgufFile) -> dict[str, str]:
    values = _values(file)
    keys = {name: f"tokenizer.chat_template.{name}" for name in values.texts("tokenizer.chat_templates")}
    keys["default"] = "tokenizer.chat_template"
    return {name: values.text(key) for name, key in keys.items() if values.raw(key) is not None}


def _values(file: GgufFile) -> ValueReader:
    return ValueReader(file.metadata, str(file.path))


def _strings(file: GgufFile, key: str) -> list[str]:
    value = _values(file).texts(key)
    if not value:
        raise ModelLoadError(
            f"{file.path} lacks {key}, so it has no tokenizer: give one with tokenizer=, a folder or hub id that has "
            "tokenizer.json (or use skip_tokenizer=True)"
        )
    return value
