"""Qwen2 and 2.5 (Yang et al. 2024, arXiv:2407.10671): Llama's shape with biases on q, k and v.

What differs is in the config (`ModelConfig.from_hf`), so the shared decoder is all of it.
"""

from __future__ import annotations

from .decoder import DecoderModel

__all__ = ["Qwen2"]


class Qwen2(DecoderModel):
    pass
