"""A tokenizer out of a checkpoint's folder. The first of these files is taken:

    tokenizer.json       the library's own format
    tekken.json          Mistral's
    tokenizer.model      SentencePiece's, also spiece.model (T5) and tokenizer.model.v3 (Mistral)
    vocab.txt            BERT's

and beside it tokenizer_config.json, special_tokens_map.json, added_tokens.json, chat_template.jinja and
additional_chat_templates/NAME.jinja.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....checkpoint.value_reader import ValueReader, check_size, read_json, read_text
from ....errors import ModelLoadError
from .loaded import ROLES, LoadedTokenizer, put_around
from .sentencepiece_file import read_sentencepiece
from .tekken import read_tekken
from .word_piece import word_piece

if TYPE_CHECKING:
    import tokenizers

_FILES = ("tokenizer.json", "tekken.json", "tokenizer.model", "spiece.model", "tokenizer.model.v*", "vocab.txt")
_SENTENCEPIECE_CLASSES = ("Llama", "CodeLlama", "Gemma", "T5", "Mistral", "PreTrained", "Tokenizers", "")
_BERT_CLASSES = ("Bert", "DistilBert", "Electra", "MobileBert", "PreTrained", "Tokenizers", "")
"""Classes of transformers, without "Tokenizer", that keep the ids of the file. Others renumber its pieces."""
_BERT_ROLES = {
    "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]",
}  # fmt: skip
_MOST_GROWTH = 64
"""Most times as long as it is that normalising makes a caller's text. The blank that SentencePiece adds counts as 2."""
_MOST_DIGITS = 10  # digits of a token's id
_CURE = (
    "where transformers is installed, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER) writes a "
    "tokenizer.json"
)


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has one of the files of a tokenizer."""
    return _file_in(folder) is not None


def read_folder(folder: Path) -> LoadedTokenizer:
    """Load the tokenizer. Raises ModelLoadError, which names the cure, when there is none that can be read."""
    path = _file_in(folder)
    if path is None:
        raise ModelLoadError(_missing(folder))
    settings, older = (_optional_json(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    special_tokens = {}
    for role in ROLES:
        text = _token_text(settings if role in settings else older, role)
        if text is not None:
            special_tokens[role] = text
    if path.name == "tokenizer.json":
        encoder = _read_encoder(path)
    elif path.name == "tekken.json":
        encoder, found = read_tekken(path)
        special_tokens = found | special_tokens
    elif path.name == "vocab.txt":
        special_tokens = _BERT_ROLES | special_tokens
        encoder = _from_vocab(path, settings, special_tokens)
    else:
        encoder, found = _from_sentencepiece(path, settings)
        special_tokens = found | special_tokens
    _add_missing_tokens(encoder, settings.at("added_tokens_decoder"))
    if path.name != "tokenizer.json":
        more = (settings if "additional_special_tokens" in settings else older).elements("additional_special_tokens")
        special = {*special_tokens.values(), *(_token_text(more, place) for place in more)}
        _add_old_tokens(encoder, _optional_json(folder / "added_tokens.json"), special)
    if path.name.startswith(("tokenizer.model", "spiece")):
        _begin_and_end(encoder, settings, special_tokens)
    return LoadedTokenizer(encoder, special_tokens, _chat_templates(folder, settings))


def _file_in(folder: Path) -> Path | None:
    found = (path for pattern in _FILES for path in sorted(folder.glob(pattern), reverse=True))
    return next((path for path in found if path.is_file()), None)


def _missing(folder: Path) -> str:
    others = ("vocab.json", "sentencepiece.bpe.model", "tiktoken.model", "*tokenization*.py", "*.tiktoken")
    found = sorted({path.name for pattern in others for path in folder.glob(pattern)})
    hint = ""
    if found:
        hint = f" ({', '.join(found)} there takes a class of transformers: {_CURE})"
    return (
        f"{folder} has no tokenizer.json{hint}: give a folder or hub id that has one, or one of tekken.json, "
        "tokenizer.model and vocab.txt, with tokenizer=, or start with skip_tokenizer=True"
    )


def _read_encoder(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer

    check_size(path)
    try:
        encoder = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"{path} can't be read as a tokenizer: {error!s:.300}") from error
    for name in ("normalizer", "decoder", "post_processor"):
        part = getattr(encoder, name)
        growth = 1 if part is None else _growth(json.loads(part.__getstate__()))
        if growth > _MOST_GROWTH:
            raise ModelLoadError(f"{path}: {name} may make a text {growth:.3g} times as long: {_MOST_GROWTH} at most")
    encoder.no_truncation()  # some files keep a training set-up
    encoder.no_padding()
    return encoder


def _growth(part: Any) -> float:
    """Return how many times as long a step of tokenizer.json may make a text, about; 1 if it replaces nothing."""
    steps = [step for key in ("normalizers", "decoders", "processors") for step in part.get(key, ())]
    own = len(part.get("prepend", "")) + 1.0
    if part["type"] == "Replace":
        own = max(1.0, len(part["content"]) / max(1, len(part["pattern"].get("String", ""))))
    elif part["type"] == "TemplateProcessing":
        own = max(1.0, len(part["single"]) / 4)
    return min(1e9, math.prod(map(_growth, steps), start=own))


def _from_sentencepiece(path: Path, settings: ValueReader) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    _check_class(path, settings, _SENTENCEPIECE_CLASSES)
    found = read_sentencepiece(path, legacy=settings.flag("legacy", True))
    try:
        return found.pieces.encoder(), found.special_tokens
    except Exception as error:  # whatever the library raises for pieces that don't fit together
        raise ModelLoadError(f"{path} can't be built as a tokenizer: {error}") from error


def _from_vocab(path: Path, settings: ValueReader, special_tokens: dict[str, str]) -> tokenizers.Tokenizer:
    _check_class(path, settings, _BERT_CLASSES)
    tokens = read_text(path).split("\n")
    vocab = {token.rstrip("\r"): i for i, token in enumerate(tokens) if token or i < len(tokens) - 1}
    missing = [
        special_tokens[role] for role in ("unk_token", "cls_token", "sep_token") if special_tokens[role] not in vocab
    ]
    if missing:
        raise ModelLoadError(f"{path} is no vocabulary of BERT's kind: it lacks {', '.join(missing):.200}")
    return word_piece(
        vocab,
        special_tokens,
        lowercase=settings.flag("do_lower_case", True),
        strip_accents=None if settings.raw("strip_accents") is None else settings.flag("strip_accents"),
        handle_chinese=settings.flag("tokenize_chinese_chars", True),
    )


def _check_class(path: Path, settings: ValueReader, known: tuple[str, ...]) -> None:
    """Raise ModelLoadError where the tokenizer class that the settings name makes other ids of the same file."""
    name = settings.text("tokenizer_class")
    plain = name.removesuffix("Backend").removesuffix("Fast").removesuffix("Tokenizer")
    if plain not in known or settings.raw("auto_map"):
        owner = f"transformers' {name:.80}" if name else "code of the model's own"
        raise ModelLoadError(
            f"{path} is read by {owner}, which gives its tokens other ids: {_CURE}; give that folder with tokenizer="
        )


def _begin_and_end(encoder: tokenizers.Tokenizer, settings: ValueReader, special_tokens: dict[str, str]) -> None:
    """Put BOS before a text and EOS after it: as the settings say, else as transformers does for that class."""
    is_t5 = settings.text("tokenizer_class").startswith("T5")
    adds_bos = settings.flag("add_bos_token", "add_bos_token" not in settings and not is_t5)  # null means False there
    adds_eos = settings.flag("add_eos_token", "add_eos_token" not in settings and is_t5)
    bos = special_tokens.get("bos_token") if adds_bos else None
    eos = special_tokens.get("eos_token") if adds_eos else None
    known = [name if name is not None and encoder.token_to_id(name) is not None else None for name in (bos, eos)]
    put_around(encoder, *known)


def _optional_json(path: Path) -> ValueReader:
    return ValueReader(read_json(path) if path.is_file() else {}, str(path))


def _token_text(values: ValueReader, key: str) -> str | None:
    """Return a special token's text: it is written as that, or as an object with its content."""
    if isinstance(values.raw(key), Mapping):
        return _token_text(values.at(key), "content")
    return None if values.raw(key) is None else values.text(key)


def _add_missing_tokens(encoder: tokenizers.Tokenizer, listed: ValueReader) -> None:
    """Add the tokens that tokenizer_config.json lists and the vocabulary lacks; they take the next ids, in order."""
    from tokenizers import AddedToken

    by_id = {int(key): key for key in listed if key.isdecimal() and len(key) < _MOST_DIGITS}
    next_id = encoder.get_vocab_size()
    added: dict[str, AddedToken] = {}  # added together: the library takes as long for one token as for all
    for token_id, key in sorted(by_id.items()):
        text = _token_text(listed, key)
        if not text or text in added or encoder.token_to_id(text) is not None or token_id != next_id + len(added):
            continue
        own = listed.at(key) if isinstance(listed.raw(key), Mapping) else ValueReader({})
        flags = {name: own.flag(name) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        added[text] = AddedToken(text, **flags)
    encoder.add_tokens(list(added.values()))


def _add_old_tokens(encoder: tokenizers.Tokenizer, ids: ValueReader, special: Container[str | None]) -> None:
    """Add the tokens of added_tokens.json, ids by text, which is older than tokenizer_config.json's list."""
    as_listed = {str(ids.integer(text, least=0)): {"content": text, "special": text in special} for text in ids}
    _add_missing_tokens(encoder, ValueReader(as_listed))


def _chat_templates(folder: Path, settings: ValueReader) -> dict[str, str]:
    """Return templates by name. chat_template.jinja goes before the one in tokenizer_config.json."""
    templates: dict[str, str] = {}
    if isinstance(settings.raw("chat_template"), list):
        listed = settings.elements("chat_template")
        for entry in map(listed.at, listed):
            templates[entry.text("name", "default")] = entry.text("template")
    elif settings.raw("chat_template") is not None:
        templates["default"] = settings.text("chat_template")
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    for name, path in files.items():
        if path.is_file():
            templates[name] = read_text(path)
    return templates
