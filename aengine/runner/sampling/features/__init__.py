"""The features that change logits, in the order in which they do."""

from __future__ import annotations

from .allowed_tokens import AllowedTokens
from .bad_words import BadWords
from .feature import SamplingFeature
from .penalties import Penalties
from .token_lists import TokenLists

__all__ = ["EXTRAS", "FEATURES", "SamplingFeature"]

FEATURES: tuple[type[SamplingFeature], ...] = (
    TokenLists,
    AllowedTokens,
    BadWords,
    Penalties,
)
EXTRAS = frozenset(feature.extra for feature in FEATURES) - {""}
"""The names of the extras that some feature reads."""
