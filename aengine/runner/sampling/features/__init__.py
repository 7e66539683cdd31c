"""The features that change logits, in the order in which they do."""

from __future__ import annotations

from .feature import SamplingFeature
from .penalties import Penalties
from .token_lists import TokenLists

__all__ = ["EXTRAS", "FEATURES", "SamplingFeature"]

FEATURES: tuple[type[SamplingFeature], ...] = (
    TokenLists,
    Penalties,
)
EXTRAS = frozenset(feature.extra for feature in FEATURES) - {""}
"""The names of the extras that some feature reads."""
