"""Whether a model's weights have adapters."""

from __future__ import annotations

import logging
from dataclasses import replace

from ...config import EngineConfig
from ...errors import ModelLoadError
from ...limits.loras import DEFAULT_RANK
from ..model_config import ModelConfig
from ..models.gpt_oss import GptOssConfig
from ..platforms.platform import Platform
from ..weights.formats import WeightFormats
from .rows import LoraRows

logger = logging.getLogger("aengine.runner")


def with_loras(
    formats: WeightFormats, config: EngineConfig, model_config: ModelConfig, platform: Platform
) -> WeightFormats:
    """Return the formats of weights that adapters may change, if the settings ask for any. Raises ModelLoadError."""
    if not config.num_lora_slots:
        return formats
    if formats.is_compiled:
        logger.info("steps in which a request has an adapter run op by op, others as a tape")
    rank, expert_rank = config.max_lora_rank or DEFAULT_RANK, config.max_lora_expert_rank or 0
    if expert_rank and model_config.implementation != "native":
        raise ModelLoadError(
            f"max_lora_expert_rank={expert_rank}: a model that transformers computes has no adapters of its experts: "
            f"leave it at 0"
        )
    if expert_rank and not model_config.num_experts:
        raise ModelLoadError(f"max_lora_expert_rank={expert_rank}: the model has no experts: leave it out")
    if expert_rank and isinstance(model_config, GptOssConfig) and model_config.is_gguf:
        raise ModelLoadError(
            f"max_lora_expert_rank={expert_rank}: a GGUF of gpt-oss has gate and up apart, and adapters have their "
            f"rows in turns: use the checkpoint in safetensors"
        )
    if expert_rank and config.enable_expert_parallel and config.data_parallel_size > 1:
        raise ModelLoadError(
            f"max_lora_expert_rank={expert_rank}: replicas that share experts have no adapters of these: "
            f"leave it at 0, or use tensor_parallel_size"
        )
    num_layers = model_config.num_layers if model_config.implementation == "native" else 0  # others are whole
    sizes = config.num_lora_slots, rank, config.max_num_seqs, formats.dtype, num_layers
    return replace(formats, step_rows=LoraRows(*sizes, platform, expert_rank))


def refuse_loras(config: EngineConfig, what: str) -> None:
    """Raise ModelLoadError if the settings ask for adapters."""
    if config.num_lora_slots:
        raise ModelLoadError(f"{what} has no adapters: leave loras and max_loras out")
