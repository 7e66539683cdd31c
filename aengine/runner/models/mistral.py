"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama's shape; in the first release every layer has a sliding window.

What differs is in the config (`ModelConfig.from_hf`), so the shared decoder is all of it.
"""

from __future__ import annotations

from .decoder import DecoderModel

__all__ = ["Mistral"]


class Mistral(DecoderModel):
    pass
