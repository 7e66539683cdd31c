"""`LoadedTokenizer`: what the files of a tokenizer say, whatever their format, and how a text is begun and ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer as it was loaded."""

    encoder: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Their texts, by role: "bos_token", ..."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """Jinja sources by name; "default" is the one of chats without tools."""


def put_around(encoder: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """Set which special tokens ``add_special_tokens=True`` puts before and after a text."""
    from tokenizers import processors

    pieces = [*([before] if before is not None else []), "$A", *([after] if after is not None else [])]
    used = [(name, encoder.token_to_id(name)) for name in dict.fromkeys((before, after)) if name is not None]
    if used:
        encoder.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=used)
