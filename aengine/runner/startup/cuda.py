"""From a model on a GPU to a runner that is ready: kernels compiled, memory profiled, KV allocated, graphs captured.

compile   every kernel that decode steps and prompts need, many at a time; from the disk cache if they are there
profile   the largest batch through `execute_model`, and the largest graph, over a KV cache of one request
allocate  the KV cache, out of what is left
capture   one graph a batch size
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton import OutOfResources

from ...config import EngineConfig
from ...errors import ModelLoadError
from ..attention.library import PrefillBackend
from ..attention.triton_attention import GpuKvCache
from ..graphs.cuda_graphs import BatchDescriptor, GraphKind, graph_sizes
from ..model_config import ModelConfig
from ..model_runner import ModelRunner
from ..models.decoder import DecoderModel
from .kv_memory import KvPlan, gpu_budget, plan_kv, profile_run, resolve_max_model_len
from .warm_up import compile_kernels

__all__ = ["GPU_BATCHED_TOKENS", "GpuSetup", "start_on_gpu"]

logger = logging.getLogger("aengine.runner")

Progress = Callable[[str, int, int, str], None]

GPU_BATCHED_TOKENS = 8192
MAX_GRAPH_TOKENS = 2048
"""Of a step with prompts: a larger one takes the GPU longer than the host takes to queue it op by op."""


@dataclass(frozen=True, slots=True)
class GpuSetup:
    """What is settled before memory is looked at."""

    config: EngineConfig
    model_config: ModelConfig
    model: DecoderModel
    device: torch.device
    prefill: PrefillBackend
    block_size: int
    max_batched: int
    weight_bytes: int
    num_threads: int  # that compile

    @property
    def bytes_per_block(self) -> int:
        return GpuKvCache.bytes_per_block(self.model_config, self.block_size, self.model.format.dtype)

    def make_runner(self, num_blocks: int, max_model_len: int) -> ModelRunner:
        config, model_config = self.config, self.model_config
        kv_cache = GpuKvCache(
            model_config,
            num_blocks,
            self.block_size,
            self.model.format.dtype,
            self.device,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            prefill=self.prefill,
        )
        return ModelRunner(
            self.model,
            kv_cache,
            vocab_size=model_config.vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=self.block_size,
            device=self.device,
            graph_sizes=graph_sizes(min(config.max_num_seqs, self.max_batched)),
            max_graph_tokens=min(MAX_GRAPH_TOKENS, self.max_batched),
            max_in_flight_steps=max(config.max_in_flight_steps, config.max_leased_steps),
            enforce_eager=config.enforce_eager,
        )


def start_on_gpu(setup: GpuSetup, progress: Progress) -> tuple[ModelRunner, KvPlan]:
    """Raises ModelLoadError when the memory, or what a multiprocessor has of it, does not suffice; the message says for
    what, and what helps."""
    try:
        return _start(setup, progress)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(setup.device)
        raise ModelLoadError(
            f"the GPU ran out of memory while the engine started: {_gib(total)} in all, {_gib(free)} free, weights "
            f"{_gib(setup.weight_bytes)}: lower gpu_memory_utilization, max_num_batched_tokens or max_num_seqs, or end "
            f"other processes on the GPU ({str(error).partition('. ')[0]})"
        ) from error
    except OutOfResources as error:
        model = setup.model_config
        raise ModelLoadError(
            f"a kernel needs more {error.name} than a program may have on {torch.cuda.get_device_name(setup.device)} "
            f"({error.required} of {error.limit}), with heads of {model.head_dim} in {setup.model.format.name}, "
            f"{model.num_heads // model.num_kv_heads} for a key-value head: use "
            f"{'' if setup.model.format.dtype.itemsize == 2 else 'a 16-bit dtype, '}another GPU or device='cpu'"
        ) from error


def _start(setup: GpuSetup, progress: Progress) -> tuple[ModelRunner, KvPlan]:
    config, device = setup.config, setup.device
    wanted_len = resolve_max_model_len(config, setup.model_config.max_position_embeddings)
    begun = time.monotonic()
    num_blocks = -(-min(wanted_len, setup.max_batched) // setup.block_size)  # of one request, which all share
    runner = setup.make_runner(num_blocks, wanted_len)
    progress("compile", 0, 0, "")
    compile_kernels(runner, setup.max_batched, setup.model_config.num_kv_heads, setup.num_threads)
    setup.prefill.join()  # before anything is captured
    compiled = time.monotonic()
    progress("profile", 0, 0, "")
    peak = _profile(setup, runner, wanted_len) - num_blocks * setup.bytes_per_block
    del runner
    gc.collect()  # the runner and its graphs know each other
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = max(0, total - free - torch.cuda.memory_reserved(device))
    plan = plan_kv(
        config,
        wanted_len=wanted_len,
        block_size=setup.block_size,
        bytes_per_block=setup.bytes_per_block,
        budget=gpu_budget(config, total=total, peak=peak, others=others, weights=setup.weight_bytes),
    )
    profiled = time.monotonic()
    runner = setup.make_runner(plan.num_blocks, plan.max_model_len)
    if runner.graphs is not None:
        runner.graphs.capture_all(lambda done, total: progress("graphs", done, total, "graphs"))
    torch.cuda.synchronize(device)
    captured = time.monotonic()
    logger.info(
        "kernels compiled in %.1f s, memory profiled in %.1f s, %d graphs captured in %.1f s",
        compiled - begun,
        profiled - compiled,
        0 if runner.graphs is None else runner.graphs.num_captured,
        captured - profiled,
    )
    return runner, plan


def _profile(setup: GpuSetup, runner: ModelRunner, max_model_len: int) -> int:
    """Bytes that this process needs at most: weights, rows, the runner's KV cache, the largest batch, the graphs."""
    device = setup.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile_run(
        runner,
        max_num_seqs=setup.config.max_num_seqs,
        max_num_batched_tokens=setup.max_batched,
        max_model_len=max_model_len,
        block_size=setup.block_size,
    )
    peak = torch.cuda.max_memory_allocated(device)
    if runner.graphs is None or setup.config.enforce_eager:
        return peak
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    runner.graphs.capture(BatchDescriptor(runner.graphs.max_size, GraphKind.SAMPLED))
    if runner.batch_graphs is not None and runner.batch_graphs.largest is not None:
        runner.batch_graphs.capture(runner.batch_graphs.largest)
    return peak + torch.cuda.memory_reserved(device) - before


def _gib(count: int) -> str:
    return f"{count / 1024**3:.2f} GiB"
