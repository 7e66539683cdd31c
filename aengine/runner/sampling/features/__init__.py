"""The features that change logits, in the order in which they do."""

from __future__ import annotations

from .allowed_tokens import AllowedTokens
from .bad_words import BadWords
from .feature import SamplingFeature
from .penalties import Penalties
from .token_lists import TokenLists

__all__ = ["FEATURES", "SamplingFeature"]

FEATURES: tuple[type[SamplingFeature], ...] = (
    TokenLists,
    AllowedTokens,
    BadWords,
    Penalties,
)
