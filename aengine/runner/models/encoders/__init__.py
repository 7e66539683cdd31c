"""The registry of encoders: models whose tokens all see each other, and that give vectors, not text."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ....checkpoint.value_reader import ValueReader
from ...weights.formats import WeightFormats
from ...weights.scope import WeightScope
from .encoder import Encoder, EncoderConfig

ENCODERS = {
    "bert": "bert.Bert",
    "distilbert": "distilbert.DistilBert",
    "gemma3_text": "embedding_gemma.EmbeddingGemma",
    "modernbert": "modernbert.ModernBert",
    "mpnet": "mpnet.MPNet",
    "nomic_bert": "nomic_bert.NomicBert",
    "roberta": "roberta.Roberta",
    "xlm-roberta": "roberta.XlmRoberta",
}
"""By ``model_type`` of config.json: the family's file and its class."""
GGUF_ENCODERS = {"nomic-bert": "nomic_bert"}
"""The ``model_type`` of each ``general.architecture`` of a GGUF that has another name."""


def is_encoder(hf_config: Mapping[str, Any]) -> bool:
    """Return whether the model is of a family of encoders, and no decoder of its kind."""
    keys = ValueReader(hf_config)
    model_type = keys.text("model_type")
    if model_type == "gemma3_text":
        return keys.flag("use_bidirectional_attention")
    return GGUF_ENCODERS.get(model_type, model_type) in ENCODERS and not keys.flag("is_decoder")


def read_encoder_config(hf_config: Mapping[str, Any]) -> EncoderConfig:
    """Return the config of an encoder. Raises ModelLoadError: a key is missing, or its value not supported."""
    return _family(hf_config["model_type"]).config_class.from_hf(hf_config)


def build_encoder(config: EncoderConfig, formats: WeightFormats) -> Encoder[Any]:
    """Return the model, whose weights are yet to be loaded."""
    return _family(config.model_type)(config, WeightScope(formats))


def _family(model_type: str) -> type[Encoder[Any]]:
    file, _, name = ENCODERS[GGUF_ENCODERS.get(model_type, model_type)].partition(".")
    family: type[Encoder[Any]] = getattr(import_module(f".{file}", __name__), name)
    return family
