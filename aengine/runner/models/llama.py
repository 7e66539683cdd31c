"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288), SmolLM2, and whatever else has its shape. Biases are optional.

What differs is in the config (`ModelConfig.from_hf`), so the shared decoder is all of it.
"""

from __future__ import annotations

from .decoder import DecoderModel

__all__ = ["Llama"]


class Llama(DecoderModel):
    pass
