"""The splitting of texts before a byte-level BPE joins bytes, by the names that GGUF files have for it.

Each is what the tokenizer.json of that family does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS_THEN = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # a percent sign stands for numbers
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(upper: str, lower: str, suffix: str, numbers: str, line_ends: str) -> str:
    """Return a pattern for which a word ends where small letters are followed by capitals."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]*[{lower}]+{suffix}|[^\r\n\p{{L}}\p{{N}}]?[{upper}]+[{lower}]*{suffix}|"
        rf"{numbers}| ?[^\s\p{{L}}\p{{N}}]+[{line_ends}]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_TEKKEN = _cased(_UPPER, _LOWER, "", r"\p{N}", r"\r\n/")
_GPT4O = _cased(_UPPER, _LOWER, _CONTRACTIONS + "?", r"\p{N}{1,3}", r"\r\n/")
_NO_HAN = r"&&[^\p{Han}]"
_KIMI = r"[\p{Han}]+|" + _cased(_UPPER + _NO_HAN, _LOWER + _NO_HAN, _CONTRACTIONS + "?", r"\p{N}{1,3}", r"\r\n")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Splitting:
    """The splitting of a text before the merges. No ``patterns``: GPT-2's, which ByteLevel has built in."""

    patterns: tuple[str, ...] = ()
    """Applied one after the other, each to what the one before has left."""
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is a token is that token."""
    add_bos: bool = False
    """Whether a text begins with the BOS token when the file does not say."""

    def apply(self, encoder: tokenizers.Tokenizer) -> None:
        """Set the encoder's normalizer and pre-tokenizer."""
        from tokenizers import Regex, normalizers, pre_tokenizers

        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
        steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        encoder.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if self.nfc:
            encoder.normalizer = normalizers.NFC()


DEFAULT = Splitting()
_DIGITS = Splitting(single_digits=True)
_LLAMA3 = Splitting((_LETTERS_THEN % r"\p{N}{1,3}",), ignore_merges=True, add_bos=True)
_THREE_DIGITS = Splitting((_LETTERS_THEN % r"\p{N}{1,3}",))
_ONE_DIGIT = Splitting((_LETTERS_THEN % r"\p{N}",))
_QWEN2 = Splitting((_LETTERS_THEN % r"\p{N}",), nfc=True)

SPLITTINGS = {
    **dict.fromkeys(
        ("gpt-2", "gpt2", "olmo", "mpt", "jais", "phi-2", "exaone4", "trillion", "granite-docling", "modern-bert"),
        DEFAULT,
    ),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _THREE_DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2", "solar-open"), _ONE_DIGIT),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), Splitting((_GPT4O,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Splitting(_DEEPSEEK3)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), Splitting((_BAILING,))),
    "qwen35": Splitting((_QWEN35,), nfc=True),
    "tekken": Splitting((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
    "kimi-k2": Splitting((_KIMI,)),
    "seed-coder": Splitting((_SEED,)),
}
