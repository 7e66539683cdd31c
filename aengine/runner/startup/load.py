"""From the LOAD message to a runner that is ready: device, model, weights, KV memory, graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from ...checkpoint.source import ModelSource
from ...config import EngineConfig, num_worker_threads
from ...errors import ModelLoadError
from ..attention.torch_attention import DEFAULT_BLOCK_SIZE
from ..model_runner import ModelRunner
from ..models import build_model, read_config
from ..platforms.choice import choose_platform
from ..weights.formats import choose_formats
from ..weights.loader import LoadedWeights, load_weights
from .kv_memory import KvPlan
from .profile import profile
from .setup import Progress, RunnerSetup

__all__ = ["load_runner"]

logger = logging.getLogger("aengine.runner")


def load_runner(
    config: EngineConfig, source: Mapping[str, Any], rank: int, world_size: int, progress: Progress
) -> tuple[ModelRunner, dict[str, Any]]:
    """Make the runner of one rank; the second value is what READY tells the host.

    Raises:
        ModelLoadError: the device, the checkpoint or the memory is not what is needed; the message says what helps.
    """
    if world_size != 1:
        raise ModelLoadError(f"tensor_parallel_size={world_size} is not supported yet: leave it at 1")
    setup, weights = load(config, source, progress)
    plan = profile(setup, progress)
    runner = allocate(setup, plan, progress)
    return runner, _ready(setup, weights, plan, runner)


def load(config: EngineConfig, source: Mapping[str, Any], progress: Progress) -> tuple[RunnerSetup, LoadedWeights]:
    """Open the device and fill the model."""
    num_threads = num_worker_threads(config)
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(False)
    checkpoint = ModelSource.from_wire(source)
    model_config = read_config(checkpoint.hf_config)
    platform = choose_platform(config.device)
    platform.open()
    dtype = platform.choose_dtype(config.dtype, model_config.checkpoint_dtype)
    stored = None if checkpoint.format == "dummy" else checkpoint.hf_config  # random weights are never quantised
    formats = choose_formats(dtype, platform.device, stored)
    model = build_model(model_config, formats)
    attention = platform.choose_attention(config, model_config, formats.dtype)
    weights = load_weights(model, checkpoint, config.seed, progress, platform.device, platform.memory)
    setup = RunnerSetup(
        config=config,
        model_config=model_config,
        model=model,
        platform=platform,
        attention=attention,
        kv_dtype=formats.dtype,
        block_size=config.block_size or DEFAULT_BLOCK_SIZE,
        max_batched=config.max_num_batched_tokens or platform.default_batched_tokens,
        weight_bytes=platform.memory().allocated if platform.is_accelerator else weights.num_bytes,
        num_threads=num_threads,
    )
    return setup, weights


def allocate(setup: RunnerSetup, plan: KvPlan, progress: Progress) -> ModelRunner:
    """Make the runner, and capture one graph a batch size. Raises ModelLoadError."""
    begun = time.monotonic()
    with setup.errors_explained():
        runner = setup.make_runner(plan.num_blocks, plan.max_model_len)
        if runner.graphs is not None:
            runner.graphs.capture_all(lambda done, total: progress("graphs", done, total, "graphs"))
            setup.platform.synchronize()
            seconds = time.monotonic() - begun
            logger.info("%d graphs captured in %.1f s", runner.graphs.num_captured, seconds)
    return runner


def _ready(setup: RunnerSetup, weights: LoadedWeights, plan: KvPlan, runner: ModelRunner) -> dict[str, Any]:
    platform, formats = setup.platform, setup.model.weights.formats
    ready = {
        "num_blocks": plan.num_blocks,
        "block_size": setup.block_size,
        "max_model_len": plan.max_model_len,
        "max_num_batched_tokens": setup.max_batched,
        "vocab_size": setup.model_config.vocab_size,
        "dtype": str(formats.dtype).removeprefix("torch."),
        "weight_format": formats.name,
        "model_type": setup.model_config.model_type,
        "num_parameters": weights.num_parameters,
        "kv_cache_bytes": plan.num_blocks * setup.bytes_per_block,
        "device": str(platform.device),
        "is_accelerator": platform.is_accelerator,
        "attention_backend": setup.attention.name,
        "num_graphs": 0 if runner.graphs is None else runner.graphs.num_captured,
        "num_threads": torch.get_num_threads(),
    }
    if platform.is_accelerator:
        ready |= {"device_name": platform.name, "device_memory_total_bytes": platform.memory().total}
        logger.info("%s, %s, long prompts through %s", platform.name, formats.name, setup.attention.name)
    return ready
