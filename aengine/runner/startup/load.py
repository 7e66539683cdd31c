"""From the LOAD message to a runner that is ready: device, model, weights, KV memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...checkpoint.source import ModelSource
from ...config import EngineConfig, num_worker_threads
from ...errors import ModelLoadError
from ...system.memory import free_memory
from ..attention.torch_attention import DEFAULT_BLOCK_SIZE, KvCache
from ..layers.linear import LinearFormat
from ..model_config import ModelConfig
from ..model_runner import ModelRunner
from ..models import build_model
from ..models.decoder import DecoderModel
from ..platforms.cuda import GpuDevice, gpu_dtype, open_gpu
from ..weights.loader import LoadedWeights, load_weights
from .kv_memory import KvPlan, cpu_budget, plan_kv, resolve_max_model_len

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
    torch.set_num_threads(num_worker_threads(config))
    torch.set_grad_enabled(False)
    checkpoint = ModelSource.from_wire(source)
    model_config = ModelConfig.from_hf(checkpoint.hf_config)
    gpu = open_gpu(config)
    if gpu is None:
        return _load_on_cpu(config, checkpoint, model_config, progress)
    return _load_on_gpu(config, gpu, checkpoint, model_config, progress)


def _load_on_cpu(
    config: EngineConfig, checkpoint: ModelSource, model_config: ModelConfig, progress: Progress
) -> tuple[ModelRunner, dict[str, Any]]:
    device = torch.device("cpu")
    linear_format = LinearFormat.choose(config.dtype, device)
    model = build_model(model_config, linear_format, device)
    weights = load_weights(model, checkpoint, config.seed, progress)

    progress("profile", 0, 0, "")
    block_size = config.block_size or DEFAULT_BLOCK_SIZE
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
    ready = _ready(model, weights, plan, block_size, bytes_per_block)
    ready |= {
        "device": "cpu",
        "attention_backend": "torch",
        "num_graphs": 0,
        "max_num_batched_tokens": config.max_num_batched_tokens or CPU_BATCHED_TOKENS,
        "num_threads": torch.get_num_threads(),
    }
    return runner, ready


def _load_on_gpu(
    config: EngineConfig, gpu: GpuDevice, checkpoint: ModelSource, model_config: ModelConfig, progress: Progress
) -> tuple[ModelRunner, dict[str, Any]]:
    from ..attention.library import choose_prefill_backend
    from .cuda import GPU_BATCHED_TOKENS, GpuSetup, start_on_gpu

    torch.cuda.set_device(gpu.device)
    # cuBLAS may cut a product along K; the parts are then added in float32 too.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    linear_format = LinearFormat.choose(gpu_dtype(config.dtype, model_config, gpu), gpu.device)
    model = build_model(model_config, linear_format, gpu.device)
    heads = (model_config.num_heads, model_config.num_kv_heads, model_config.head_dim)
    prefill = choose_prefill_backend(config.attention_backend, gpu.device, linear_format.dtype, *heads)
    weights = load_weights(model, checkpoint, config.seed, progress, device=gpu.device)
    setup = GpuSetup(
        config=config,
        model_config=model_config,
        model=model,
        device=gpu.device,
        prefill=prefill,
        block_size=config.block_size or DEFAULT_BLOCK_SIZE,
        max_batched=config.max_num_batched_tokens or GPU_BATCHED_TOKENS,
        weight_bytes=torch.cuda.memory_allocated(gpu.device),
        num_threads=num_worker_threads(config),
    )
    runner, plan = start_on_gpu(setup, progress)
    logger.info("%s, %s, long prompts through %s", gpu.name, linear_format.name, prefill.name)
    ready = _ready(model, weights, plan, setup.block_size, setup.bytes_per_block)
    ready |= {
        "device": str(gpu.device),
        "device_name": gpu.name,
        "device_memory_total_bytes": torch.cuda.get_device_properties(gpu.device).total_memory,
        "attention_backend": prefill.name,
        "max_num_batched_tokens": setup.max_batched,
        "num_graphs": 0 if runner.graphs is None else runner.graphs.num_captured,
        "num_threads": torch.get_num_threads(),
    }
    return runner, ready


def _ready(
    model: DecoderModel, weights: LoadedWeights, plan: KvPlan, block_size: int, bytes_per_block: int
) -> dict[str, Any]:
    return {
        "num_blocks": plan.num_blocks,
        "block_size": block_size,
        "max_model_len": plan.max_model_len,
        "vocab_size": model.config.vocab_size,
        "dtype": str(model.format.dtype).removeprefix("torch."),
        "weight_format": model.format.name,
        "model_type": model.config.model_type,
        "num_parameters": weights.num_parameters,
        "kv_cache_bytes": plan.num_blocks * bytes_per_block,
    }
