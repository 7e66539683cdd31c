"""A tokenizer out of a GGUF file's metadata, which has the vocabulary and merges but only a name for the rest.

Two kinds (``tokenizer.ggml.model``):

    gpt2     byte-level BPE. ``tokenizer.ggml.pre`` names how text is split before the merges; the table below says
             what the tokenizer.json of that family does.
    llama    SentencePiece BPE: scores instead of merges, "▁" for the space, bytes as <0x00> to <0xFF>.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..checkpoint.gguf_file import GgufFile
from ..errors import ModelLoadError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["GgufTokenizer", "read_gguf_tokenizer"]

logger = logging.getLogger("aengine.tokenizer")

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_LETTERS_THEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """The splitting of a text before the merges. ``pattern`` None: GPT-2's, which ByteLevel has built in."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token is that token
    add_bos: bool = False  # when the file does not say


_GPT2 = _Splitting()
_DIGITS = _Splitting(single_digits=True)
_LLAMA3 = _Splitting(_LETTERS_THEN % r"\p{N}{1,3}", ignore_merges=True, add_bos=True)
_QWEN2 = _Splitting(_LETTERS_THEN % r"\p{N}", nfc=True)

_SPLITTINGS = {
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "mpt", "jais", "phi-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _Splitting(_TEKKEN, ignore_merges=True, add_bos=True),
}


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The tokenizer of a file: encoder, special tokens by role ("bos_token", ...), chat templates by name."""

    encoder: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_templates: dict[str, str] = field(default_factory=dict)


def read_gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
    """Build the tokenizer. Raises ModelLoadError saying what is missing, inconsistent or not supported."""
    tokens: list[str] = _strings(file, "tokenizer.ggml.tokens")
    types = file.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = [1] * len(tokens)
    elif not isinstance(types, list) or len(types) != len(tokens):
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.token_type does not have one entry a token")
    special_tokens = _special_tokens(file, tokens)
    model = file.metadata.get("tokenizer.ggml.model")
    try:
        if model == "gpt2":
            encoder, add_bos = _byte_level(file, tokens)
        elif model == "llama":
            encoder, add_bos = _sentencepiece(file, tokens, types)
        else:
            raise ModelLoadError(
                f"{file.path} has a tokenizer of kind {model!r}; aengine builds 'gpt2' (byte-level BPE) and 'llama' "
                "(SentencePiece) ones: give another with tokenizer=, a folder or hub id that has tokenizer.json"
            )
        _add_tokens(encoder, tokens, types, special_tokens.values())
        _add_template(file, encoder, special_tokens, add_bos)
    except ModelLoadError:
        raise
    except Exception as error:  # whatever the library raises for a vocabulary that does not fit together
        raise ModelLoadError(f"{file.path} has a tokenizer that can't be built: {error}") from error
    return GgufTokenizer(encoder, special_tokens, _chat_templates(file))


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    splitting = _SPLITTINGS.get(pre)
    if splitting is None:
        splitting = _GPT2
        logger.warning(
            "%s: pre-tokenizer %r is not known; GPT-2's is used, so some prompts may be split into other tokens "
            "than the model was trained on (tokenizer= takes a better one)",
            file.path,
            pre,
        )
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in _strings(file, "tokenizer.ggml.merges"))]
    encoder = Tokenizer(models.BPE(_vocab(tokens), merges, ignore_merges=splitting.ignore_merges))
    steps: list[Any] = []
    if splitting.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    encoder.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splitting.nfc:
        encoder.normalizer = normalizers.NFC()
    encoder.decoder = decoders.ByteLevel()
    return encoder, splitting.add_bos


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> tuple[tokenizers.Tokenizer, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.scores does not have one entry a token")
    vocab = _vocab(tokens)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    encoder = Tokenizer(models.BPE(vocab, _merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    to_text: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        to_text.append(decoders.Strip(" ", 1, 0))
    else:
        encoder.normalizer = normalizers.Replace(" ", "▁")
    encoder.decoder = decoders.Sequence(to_text)
    return encoder, True


def _merges(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return each way to split a token as a merge: SentencePiece joins the neighbours whose union scores highest."""
    merges = []
    for token, token_id in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[token_id], vocab[left], vocab[right], left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _vocab(tokens: list[str]) -> dict[str, int]:
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocab.setdefault(token, token_id)  # of two alike (padding) the first is the real one
    return vocab


def _add_tokens(encoder: tokenizers.Tokenizer, tokens: list[str], types: list[int], special: Iterable[str]) -> None:
    """Register with the encoder the tokens that are found in the text as they are, before it is split."""
    from tokenizers import AddedToken

    is_special = set(special)
    added = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN) or token in is_special:
            added.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            added.append(AddedToken(token, special=False, normalized=False))
    encoder.add_tokens(added)


def _add_template(file: GgufFile, encoder: tokenizers.Tokenizer, special_tokens: dict[str, str], add_bos: bool) -> None:
    """Set which special tokens ``add_special_tokens=True`` puts round a text."""
    from tokenizers import processors

    pieces, used = ["$A"], []
    bos, eos = special_tokens.get("bos_token"), special_tokens.get("eos_token")
    if bos is not None and file.metadata.get("tokenizer.ggml.add_bos_token", add_bos):
        pieces.insert(0, bos)
        used.append((bos, encoder.token_to_id(bos)))
    if eos is not None and file.metadata.get("tokenizer.ggml.add_eos_token", False):
        pieces.append(eos)
        used.append((eos, encoder.token_to_id(eos)))
    if used:
        encoder.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=used)


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    found = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ModelLoadError(
                f"{file.path}: tokenizer.ggml.{key}_token_id is {token_id!r}, but there are {len(tokens)} tokens"
            )
        found[f"{role}_token"] = tokens[token_id]
    return found


def _chat_templates(file: GgufFile) -> dict[str, str]:
    names = file.metadata.get("tokenizer.chat_templates", [])
    named = {str(name): file.metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    named["default"] = file.metadata.get("tokenizer.chat_template")
    return {name: template for name, template in named.items() if isinstance(template, str)}


def _strings(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelLoadError(
            f"{file.path} lacks {key}, so it has no tokenizer: give one with tokenizer=, a folder or hub id that has "
            "tokenizer.json (or use skip_tokenizer=True)"
        )
    return value
