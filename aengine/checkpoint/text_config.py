"""The text model's settings, out of a config.json that has them below ``text_config``, beside those for images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["text_config"]


def text_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content itself if it is of a text model alone, else the text model's.

    What the latter leaves open (dtype, special tokens, quantization) is as above it, and so are tied embeddings in any
    case, which transformers looks up there.
    """
    text = hf_config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(hf_config)
    parts = {key for key in hf_config if key.endswith("_config")} - {"quantization_config", "compression_config"}
    above = {key: value for key, value in hf_config.items() if key not in parts}
    tied = {"tie_word_embeddings": above["tie_word_embeddings"]} if "tie_word_embeddings" in above else {}
    return {**above, **{key: value for key, value in text.items() if value is not None}, **tied}
