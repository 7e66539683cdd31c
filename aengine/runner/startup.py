"""From the LOAD message to a runner that is ready: device, model, weights, KV memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..checkpoint.source import ModelSource
from ..config import EngineConfig, num_worker_threads
from ..errors import ModelLoadError
from .attention import DEFAULT_BLOCK_SIZE, KvCache
from .kv_memory import cpu_budget, plan_kv, resolve_max_model_len
from .layers.linear import LinearFormat
from .loader import load_weights
from .machine import free_memory
from .model_config import ModelConfig
from .model_runner import ModelRunner
from .models import build_model

__all__ = ["load_runner"]

logger = logging.getLogger("aengine.runner")

Progress = Callable[[str, int, int, str], None]

CPU_BATCHED_TOKENS = 512


def load_runner(
    config: EngineConfig, source: Mapping[str, Any], rank: int, world_size: int, progress: Progress
) -> tuple[ModelRunner, dict[str, Any]]:
    """Make the runner of one rank; the second value is what READY tells the host.

    Raises:
        ModelLoadError: the device, the checkpoint or the memory is not what is needed; the message says what helps.
    """
    if world_size != 1:
        raise ModelLoadError(f"tensor_parallel_size={world_size} is not supported yet: leave it at 1")
    device = _device(config)
    torch.set_num_threads(num_worker_threads(config))
    torch.set_grad_enabled(False)
    checkpoint = ModelSource.from_wire(source)
    model_config = ModelConfig.from_hf(checkpoint.hf_config)
    linear_format = LinearFormat.choose(config.dtype, device)
    model = build_model(model_config, linear_format, device)
    weights = load_weights(model, checkpoint, config.seed, progress)

    progress("profile", 0, 0, "")
    block_size = config.block_size or DEFAULT_BLOCK_SIZE
    max_batched = config.max_num_batched_tokens or CPU_BATCHED_TOKENS
    bytes_per_block = KvCache.bytes_per_block(model_config, block_size, linear_format.dtype)
    plan = plan_kv(
        config,
        wanted_len=resolve_max_model_len(config, model_config.max_position_embeddings),
        block_size=block_size,
        bytes_per_block=bytes_per_block,
        budget=cpu_budget(config, free=free_memory(), weights=weights.num_bytes),
    )
    kv_cache = KvCache(model_config, plan.num_blocks, block_size, linear_format.dtype, device)
    runner = ModelRunner(
        model,
        kv_cache,
        vocab_size=model_config.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        block_size=block_size,
        device=device,
    )
    ready = {
        "num_blocks": plan.num_blocks,
        "block_size": block_size,
        "max_model_len": plan.max_model_len,
        "max_num_batched_tokens": max_batched,
        "vocab_size": model_config.vocab_size,
        "device": str(device),
        "dtype": str(linear_format.dtype).removeprefix("torch."),
        "weight_format": linear_format.name,
        "model_type": model_config.model_type,
        "num_parameters": weights.num_parameters,
        "kv_cache_bytes": plan.num_blocks * bytes_per_block,
        "num_threads": torch.get_num_threads(),
    }
    return runner, ready


def _device(config: EngineConfig) -> torch.device:
    if config.device in ("auto", "cpu"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ModelLoadError(f"device={config.device!r}, but torch {torch.__version__} sees no CUDA device: use 'cpu'")
    raise ModelLoadError(f"device={config.device!r} is not supported by this version yet: use 'cpu'")
