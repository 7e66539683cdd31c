"""The registry: which families of models there are. To add one, see docs/internals/adding-a-model.md."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ...checkpoint.gguf_config import OTHER_ARCHITECTURE
from ...errors import ModelLoadError
from ..distributed.experts_group import ExpertsGroup
from ..distributed.group import ALONE, TensorGroup
from ..distributed.stage import WHOLE, PipelineStage
from ..model_config import ModelConfig, NotNativeError
from ..weights.formats import WeightFormats
from ..weights.gguf_names import GgufNames
from ..weights.scope import WeightScope
from .causal_lm import CausalLM

FAMILIES = {
    "cohere": "cohere.Cohere",
    "cohere2": "cohere.Cohere",
    "deepseek_v2": "deepseek.Deepseek",
    "deepseek_v3": "deepseek.Deepseek",
    "exaone4": "exaone4.Exaone4",
    "gemma": "gemma.Gemma",
    "gemma2": "gemma.Gemma2",
    "gemma3": "gemma.Gemma3",
    "gemma3_text": "gemma.Gemma3",
    "granite": "granite.Granite",
    "glm4": "glm4.Glm4",
    "glm4_moe": "glm4_moe.Glm4Moe",
    "glm4_moe_lite": "deepseek.Deepseek",
    "gpt_oss": "gpt_oss.GptOss",
    "kimi_k2": "deepseek.Deepseek",
    "lfm2": "lfm2.Lfm2",
    "llama": "llama.Llama",
    "mimo": "qwen2.Qwen2",
    "ministral3": "mistral.Mistral",
    "mistral": "mistral.Mistral",
    "mixtral": "mixtral.Mixtral",
    "olmo2": "olmo2.Olmo2",
    "olmo3": "olmo2.Olmo2",
    "phi": "phi.Phi",
    "phi3": "phi3.Phi3",
    "qwen2": "qwen2.Qwen2",
    "qwen3": "qwen3.Qwen3",
    "qwen3_5_moe_text": "qwen3_next.Qwen35",
    "qwen3_5_text": "qwen3_next.Qwen35",
    "qwen3_next": "qwen3_next.Qwen3Next",
    "qwen3_moe": "qwen3_moe.Qwen3Moe",
    "smollm3": "smollm3.SmolLM3",
    "stablelm": "stablelm.StableLM",
    "starcoder2": "starcoder2.Starcoder2",
}
"""By ``model_type`` of config.json, or ``general.architecture`` of a GGUF: the family's file and its class."""

GGUF_ARCHITECTURES = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "glm4": "glm4",
    "gpt-oss": "gpt_oss",
    "granite": "granite",
    "lfm2": "lfm2",
    "llama": "llama",
    "mistral": "mistral",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "smollm3": "smollm3",
}
"""The ``model_type`` of each ``general.architecture`` whose GGUF files are read."""


def read_config(
    hf_config: Mapping[str, Any],
    *,
    model_impl: str = "auto",
    folder: str | None = None,
    trust_remote_code: bool = False,
) -> ModelConfig:
    """Return the config of a model, by the rules of its family; of a model that has none, by transformers.

    Args:
        model_impl, trust_remote_code: the settings
        folder: of the model's files, where code may be among them

    Raises ModelLoadError: neither has this ``model_type``; a key is missing, or its value not supported.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str):
        raise ModelLoadError(f"config.json: model_type={model_type!r:.80} must be a string")
    is_gguf = "gguf_architecture" in hf_config
    is_known = model_type in (GGUF_ARCHITECTURES if is_gguf else FAMILIES)
    if is_gguf and not is_known:
        raise ModelLoadError(f"GGUF files of the architecture {model_type!r:.80} are not read: {OTHER_ARCHITECTURE}")
    reason = "model_impl='transformers' was asked for"
    if model_impl == "native" or (model_impl == "auto" and is_known):
        try:
            return _family(model_type).config_class.from_hf(hf_config)
        except NotNativeError as error:
            if model_impl == "native" or is_gguf:
                raise
            reason = str(error)
    from .transformers.config import read_transformers_config
    from .transformers.library import ModelFiles

    if model_type not in FAMILIES:
        reason = f"no native family has model_type {model_type!r:.80}: they are {', '.join(sorted(FAMILIES))}"
    return read_transformers_config(ModelFiles(hf_config, folder, trust_remote_code), reason)


def build_model(
    config: ModelConfig,
    formats: WeightFormats,
    group: TensorGroup = ALONE,
    stage: PipelineStage = WHOLE,
    experts_group: ExpertsGroup | None = None,
) -> CausalLM:
    """Return the model, or a stage of it, whose weights are yet to be loaded. Raises ModelLoadError.

    ``group``: the ranks among which its layers are divided; ``config`` is `ModelConfig.of_rank` for as many.
    ``experts_group``: those among which its experts are, if these are more.
    """
    if stage.size > 1 and config.implementation != "native":
        raise ModelLoadError(
            f"pipeline_parallel_size={stage.size}: {config.model_type!r} is computed by transformers' code, which "
            f"can't be divided by layers: use data_parallel_size instead"
        )
    assert config.num_ranks == group.size, f"a config of {config.num_ranks} ranks for a group of {group.size}"
    family = _family(config.model_type) if config.implementation == "native" else _transformers_model()
    divided = config.divides_experts
    scope = WeightScope(formats, group=group, divides_experts=divided, stage=stage, experts_group=experts_group)
    return family(config, scope)


def gguf_names(config: ModelConfig) -> GgufNames:
    """Return the names that tensors have in the family's GGUF files."""
    return _family(config.model_type).gguf


def _transformers_model() -> type[CausalLM]:
    from .transformers.model import TransformersModel

    return TransformersModel


def _family(model_type: str) -> type[CausalLM]:
    model_type = GGUF_ARCHITECTURES.get(model_type, model_type)
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelLoadError(f"model_type {model_type!r:.80} is not supported; these are: {known}")
    file, _, name = FAMILIES[model_type].partition(".")
    family: type[CausalLM] = getattr(import_module(f".{file}", __name__), name)
    return family
