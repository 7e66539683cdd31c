"""Numbers of KV blocks by memory, and the longest request.

      the machine's (or the GPU's) memory
    ┌─────────────────────────────────────────┬──────────────────────────┬───────────┐
    │ in use: weights, the largest batch's    │ KV cache: num_blocks     │ left free │
    │ activations, other processes            │ pages for all KV groups  │           │
    └─────────────────────────────────────────┴──────────────────────────┴───────────┘

The KV's share is kv_cache_memory_bytes if given. Else on a GPU what gpu_memory_utilization leaves above the peak of the
largest batch, run through `execute_model` itself; on a CPU a quarter of what is free, at most 4 GiB, divided among the
processes. Never more than max_num_seqs requests of max_model_len tokens can use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...config import EngineConfig
from ...errors import ModelLoadError, NotEnoughMemoryError
from ...ipc.messages import KVCacheGroup, NewRequest, SchedulerOutput, int32, kv_capacity
from ..model_runner import ModelRunner

GIB = 1024**3
CPU_DEFAULT = 4 * GIB
_FEWEST_TOKENS = 16  # a pool that can't hold even this is a mistake, not a choice


@dataclass(frozen=True, slots=True)
class KvPlan:
    num_blocks: int
    max_model_len: int  # tokens of prompt and completion; the pool holds at least one request as long


def plan_kv(
    config: EngineConfig,
    *,
    wanted_len: int,
    groups: Sequence[KVCacheGroup],
    page_bytes: int,
    budget: int,
    step_tokens: int,
) -> KvPlan:
    """Split ``budget`` bytes into pages. ``step_tokens``: most tokens of a request in a step.

    Raises:
        ModelLoadError: they do not hold one request of ``config.max_model_len`` tokens; or, if that is not given,
            hardly any tokens at all. NotEnoughMemoryError if the memory that is free sets the budget.
    """

    def pages_for(num_tokens: int) -> int:
        return sum(group.most_blocks(num_tokens, step_tokens) for group in groups)

    num_blocks = min(budget // page_bytes, config.max_num_seqs * pages_for(wanted_len))
    room = kv_capacity(groups, num_blocks, wanted_len, step_tokens)
    needed = config.max_model_len or min(_FEWEST_TOKENS, wanted_len)
    if room < needed:
        per_token = sum(page_bytes / group.block_size for group in groups)
        kind = ModelLoadError if config.kv_cache_memory_bytes else NotEnoughMemoryError
        raise kind(
            f"the KV cache has {_size(budget)}, room for {room} tokens at {_size(per_token)} each, but "
            f"{'max_model_len=' if config.max_model_len else 'at least '}{needed} are needed: "
            f"raise kv_cache_memory_bytes to {pages_for(needed) * page_bytes} or more"
            + (", or lower max_model_len" if config.max_model_len else ", or free memory")
        )
    return KvPlan(num_blocks, room)


def cpu_budget(config: EngineConfig, *, free: int, weights: int, num_processes: int) -> int:
    """Bytes for KV on a CPU. ``free``: what is free now that ``weights`` bytes of weights are loaded;
    ``num_processes``: ranks of all replicas, which share it.

    Raises NotEnoughMemoryError if kv_cache_memory_bytes is more than that: the machine would kill the worker later,
    when the cache fills.
    """
    asked = config.kv_cache_memory_bytes
    if asked is None:
        return min(CPU_DEFAULT, free // 4) // num_processes
    if asked > free // config.num_ranks:
        ranks = f" on each of {config.num_ranks} ranks" if config.num_ranks > 1 else ""
        raise NotEnoughMemoryError(
            f"kv_cache_memory_bytes={asked} ({_size(asked)}){ranks}, but only {_size(free)} is free after "
            f"{_size(weights)} of weights: lower kv_cache_memory_bytes, or free memory"
        )
    return asked


def gpu_budget(config: EngineConfig, *, total: int, peak: int, others: int, weights: int) -> int:
    """Bytes for KV on a GPU of ``total`` bytes. ``peak``: this process's most during the largest batch, weights
    included; ``others``: what other processes hold.

    Raises NotEnoughMemoryError if nothing is left.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    budget = int(total * config.gpu_memory_utilization) - peak - others
    if budget <= 0:
        raise NotEnoughMemoryError(
            f"no GPU memory is left for the KV cache: of {_size(total)}, gpu_memory_utilization="
            f"{config.gpu_memory_utilization} allows {_size(total * config.gpu_memory_utilization)}; weights take "
            f"{_size(weights)}, the largest batch {_size(peak - weights)}, other processes {_size(others)}: raise "
            f"gpu_memory_utilization, lower max_num_batched_tokens or max_num_seqs, or end the other processes"
        )
    return budget


def check_swap_space(asked: int, *, page_bytes: int, free: int) -> None:
    """Raise ModelLoadError if swap_space_bytes, ``asked``, holds not one page; NotEnoughMemoryError if it is more than
    ``free``, what the host has left for this rank: the machine would kill the worker later, when the places fill."""
    if 0 < asked < page_bytes:
        raise ModelLoadError(
            f"swap_space_bytes={asked} holds no page, which has {page_bytes} bytes: raise it, or set 0"
        )
    if asked > free:
        raise NotEnoughMemoryError(
            f"swap_space_bytes={asked} ({_size(asked)}) on each rank, but only {_size(free)} of the host's memory is "
            f"left: lower swap_space_bytes, or free memory"
        )


def profile_run(runner: ModelRunner, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
    """Run the largest batch: as many requests as may be share out the most tokens, and all of them sample.

    The runner's rows are free again afterwards. All write the same blocks, which are never read, so the pool
    needs no more of them than one request of max_model_len tokens.
    """
    requests: list[NewRequest] = []
    num_reqs = min(max_num_seqs, max_num_batched_tokens)
    for row in range(num_reqs):
        length = max_num_batched_tokens // num_reqs + (row < max_num_batched_tokens % num_reqs)
        length = min(length, max(1, max_model_len - 1))  # the sampled token needs a place
        counts = [-(-length // group.block_size) for group in runner.tables.groups]
        blocks = int32(i for count in counts for i in range(count))
        spans = int32(n for count in counts for n in (0, count))
        new = NewRequest(row, int32([0]) * length, length, 0, blocks, temperature=1.0, top_p=0.9, block_spans=spans)
        requests.append(new)
    rows = int32(range(num_reqs))
    lengths = int32(len(r.token_ids) for r in requests)
    for out in (
        SchedulerOutput(0, new_requests=requests, req_idx=rows, num_scheduled_tokens=lengths),
        SchedulerOutput(0, removed=rows),
    ):
        runner.execute_model(out)
        answer = runner.sample_tokens(None).get()
        if answer.errors:
            raise torch.OutOfMemoryError(f"the largest batch does not fit: {answer.errors[0].message}")


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
