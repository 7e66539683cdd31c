"""Qwen3, dense (Yang et al. 2025, arXiv:2505.09388): Llama's shape, with q and k normalised head by head.

What differs is in the config (`ModelConfig.from_hf`), so the shared decoder is all of it.
"""

from __future__ import annotations

from .decoder import DecoderModel

__all__ = ["Qwen3"]


class Qwen3(DecoderModel):
    pass
