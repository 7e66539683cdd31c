"""The text model's settings, out of a config.json that has them below ``text_config``, beside those for images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .safetensors_files import stored_names

_TIED = "tie_word_embeddings"


def text_config(hf_config: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Return the content itself if it is of a text model alone, else the text model's.

    What the latter leaves open (dtype, special tokens, quantization) is as above it. Whether embeddings are tied is
    read above only, as transformers does. Where nothing is said there, transformers takes a default of its class for
    the whole model, and ``folder`` decides: with safetensors of which none is an output matrix they are tied.
    """
    text = hf_config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(hf_config)
    parts = {key for key in hf_config if key.endswith("_config")} - {"quantization_config", "compression_config"}
    above = {key: value for key, value in hf_config.items() if key not in parts}
    settings = {**above, **{key: value for key, value in text.items() if value is not None}}
    tied = above.get(_TIED)
    if tied is None and folder is not None:
        names = stored_names(folder)
        tied = not any("lm_head" in name.split(".") for name in names) if names else None
    return settings if tied is None else {**settings, _TIED: tied}
