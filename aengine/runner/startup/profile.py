"""Profile of the device's memory, and the KV cache's share of it.

the CPU           a share of what is free
an accelerator    compile: every kernel that decode steps and prompts need, many at a time; from the disk cache if
                           they are there
                  profile: the largest batch through `execute_model`, and the largest graph, over a KV cache of one
                           request; the KV cache may have what they leave
"""

from __future__ import annotations

import gc
import logging
import time

from ...checkpoint.early_checks import resolve_max_model_len
from ...limits.memory import free_memory
from ..model_runner import ModelRunner
from ..weights.sources.loader import Progress
from .kv_memory import KvPlan, check_swap_space, cpu_budget, gpu_budget, plan_kv, profile_run
from .layer_kinds import one_layer_of_each_kind
from .setup import RunnerSetup
from .warm_up import compile_kernels

logger = logging.getLogger("aengine.runner")


def profile(setup: RunnerSetup, progress: Progress) -> KvPlan:
    """Measure the plan that this rank alone would take. Raises ModelLoadError when the memory does not suffice; the
    message names its use and the cure."""
    wanted_len = resolve_max_model_len(setup.config, setup.model_config.max_position_embeddings)
    layout, left = setup.kv_layout, free_memory()
    with setup.errors_explained():
        if setup.platform.is_accelerator:
            budget = _accelerator_budget(setup, wanted_len, progress)
        else:
            progress("profile", 0, 0, "")
            sizes = {"free": left, "weights": setup.weight_bytes, "num_processes": setup.num_processes}
            budget = cpu_budget(setup.config, **sizes)
            left = max(0, left // setup.num_processes - budget)
    check_swap_space(setup.config.swap_space_bytes, page_bytes=layout.page_bytes, free=left)
    return plan_kv(
        setup.config,
        wanted_len=wanted_len,
        groups=layout.groups,
        page_bytes=layout.page_bytes,
        budget=budget,
        step_tokens=setup.max_batched,
    )


def _accelerator_budget(setup: RunnerSetup, wanted_len: int, progress: Progress) -> int:
    """Return the bytes for KV, beside everything else that this process will need at most."""
    begun = time.monotonic()
    longest = min(wanted_len, setup.max_batched)
    # blocks of the longest request, shared by all requests of the rehearsal
    num_blocks = max(-(-longest // group.block_size) for group in setup.kv_layout.groups)
    runner = setup.make_runner(num_blocks, wanted_len, is_rehearsal=True)
    progress("compile", 0, 0, "")
    config = setup.model_config
    rows = config.hidden_size, setup.model.weights.formats.dtype
    kv_heads = {num_kv_heads for _, num_kv_heads, _ in config.head_shapes}

    def exchange() -> None:
        setup.group.warm_up(*rows)
        if setup.experts_group is not None:
            setup.experts_group.warm_up(*rows)
        if setup.link is not None:
            setup.link.warm_up()

    with one_layer_of_each_kind(setup.model, setup.kv_layout.layers):
        sizes = (setup.max_batched, kv_heads, setup.num_threads)
        compile_kernels(runner, *sizes, has_experts=config.num_experts > 0, exchange=exchange)
    exchange()
    setup.attention.join()  # must have ended before anything is captured
    compiled = time.monotonic()
    progress("profile", 0, 0, "")
    with runner.decode_kinds.only(runner.decode_kinds.kinds[-1]):  # the one that takes the most memory
        peak = _peak(setup, runner, wanted_len) - num_blocks * setup.kv_layout.page_bytes
    del runner
    gc.collect()  # the runner and its graphs reference each other
    setup.platform.release_cached()
    memory = setup.platform.memory()
    logger.info("kernels compiled in %.1f s, memory profiled in %.1f s", compiled - begun, time.monotonic() - compiled)
    return gpu_budget(
        setup.config,
        total=memory.total,
        peak=peak,
        others=max(0, memory.total - memory.free - memory.reserved),
        weights=setup.weight_bytes,
    )


def _peak(setup: RunnerSetup, runner: ModelRunner, max_model_len: int) -> int:
    """Return the bytes that this process needs at most: weights, rows, the runner's KV cache, the largest batch, the
    graphs."""
    platform = setup.platform
    peak = platform.peak_of(
        lambda: profile_run(
            runner,
            max_num_seqs=setup.config.max_num_seqs,
            max_num_batched_tokens=setup.max_batched,
            max_model_len=max_model_len,
        )
    )
    if runner.graphs is None or setup.graph_mode == "NONE":
        return peak
    batch = None if runner.batch_graphs is None else runner.batch_graphs.largest
    runner.graphs.step.run_padded(runner.graphs.max_size, has_end=True)
    if runner.batch_graphs is not None and batch is not None:
        runner.batch_graphs.load(batch)
    drafts = runner.speculation.graphs
    if drafts is not None:
        drafts.step.run_padded(drafts.max_size, has_end=False)
    runner.proposer.rehearse()
    platform.release_cached()
    before = platform.memory().reserved
    runner.graphs.capture(runner.graphs.max_size)
    if runner.batch_graphs is not None and batch is not None:
        runner.batch_graphs.capture(batch)
    if drafts is not None:
        drafts.capture(drafts.max_size)
    runner.proposer.capture(lambda done, total: None, largest_only=True)
    return peak + platform.memory().reserved - before
