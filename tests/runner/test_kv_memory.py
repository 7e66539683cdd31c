"""Sizing of the KV cache, and the messages of a start that does not fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_fakes import FakeModel, expected_logits, make_runner, request, step

from aengine.checkpoint.early_checks import resolve_max_model_len
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError, NotEnoughMemoryError
from aengine.ipc.messages import KVCacheGroup
from aengine.limits.memory import free_memory
from aengine.runner.lazy_zeros import lazy_zeros
from aengine.runner.startup.kv_memory import (
    GIB,
    KvPlan,
    check_swap_space,
    cpu_budget,
    gpu_budget,
    plan_kv,
    profile_run,
)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig.create("m", settings)


FULL, WINDOW = KVCacheGroup("full", 16), KVCacheGroup("window", 16, 64)


def plan(wanted_len: int, budget: int, *, page_bytes: int = 1000, groups: Any = (FULL,), **settings: Any) -> KvPlan:
    sizes: dict[str, Any] = {"wanted_len": wanted_len, "groups": groups, "page_bytes": page_bytes, "budget": budget}
    return plan_kv(config(**settings), step_tokens=32, **sizes)


def test_a_few_blocks_of_a_large_pool_take_little_memory() -> None:
    """No page of 2 MiB for each layer, where the system does not give such pages to all."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if setting.exists() and "[always]" in setting.read_text():
        pytest.skip("each page is one of 2 MiB")
    slabs = [lazy_zeros((100, 2**18), torch.float32, torch.device("cpu")) for _ in range(8)]
    before = int(Path("/proc/self/statm").read_text().split()[1])
    for slab in slabs:
        slab[50, :1024] = 1.0
    assert int(Path("/proc/self/statm").read_text().split()[1]) - before < 1024  # pages of 4 KiB, of 4096


def test_a_budget_becomes_blocks() -> None:
    assert plan(4096, 1_000_999) == KvPlan(1000, 4096)


def test_no_more_blocks_than_requests_can_use() -> None:
    assert plan(33, 10**9, page_bytes=10, max_num_seqs=3) == KvPlan(9, 33)


def test_the_models_length_is_capped_to_the_pool_but_one_asked_for_is_not() -> None:
    assert plan(8192, 100_000).max_model_len == 1600
    with pytest.raises(
        ModelLoadError, match=r"room for 1600 tokens.*max_model_len=8192 are needed.*512000 or more.*low"
    ):
        plan(8192, 100_000, max_model_len=8192)
    assert plan(8192, 512_000, kv_cache_memory_bytes=512_000).max_model_len == 8192


def test_a_window_needs_no_more_than_itself_and_a_step() -> None:
    """64 tokens, and 32 of a step: seven pages, whatever the length."""
    assert plan(100_000, 7_000, groups=(WINDOW,)) == KvPlan(7, 100_000)
    assert plan(100_000, 6_999, groups=(WINDOW,)).max_model_len == 96
    assert plan(100_000, 10**9, groups=(WINDOW,), max_num_seqs=3).num_blocks == 21
    both = plan(100_000, 107_000, groups=(FULL, WINDOW))
    assert both == KvPlan(107, 1600)
    with pytest.raises(ModelLoadError, match="raise kv_cache_memory_bytes to 7000 or more"):
        plan(100_000, 6_000, groups=(WINDOW,), max_model_len=50_000)


def test_a_hopeless_budget_is_an_error() -> None:
    with pytest.raises(
        NotEnoughMemoryError, match=r"at least 16 are needed: raise kv_cache_memory_bytes to 1000 or more"
    ):
        plan(8192, 999)


def test_max_model_len_beyond_the_models() -> None:
    assert resolve_max_model_len(config(), 2048) == 2048
    assert resolve_max_model_len(config(max_model_len=100), 2048) == 100
    with pytest.raises(ModelLoadError, match="max_model_len=4096, but the model's context is 2048"):
        resolve_max_model_len(config(max_model_len=4096), 2048)


def test_cpu_budget() -> None:
    sizes = {"weights": GIB, "num_processes": 1}
    assert cpu_budget(config(), free=8 * GIB, **sizes) == 2 * GIB
    assert cpu_budget(config(), free=80 * GIB, **sizes) == 4 * GIB
    assert cpu_budget(config(), free=80 * GIB, weights=GIB, num_processes=4) == GIB
    assert cpu_budget(config(kv_cache_memory_bytes=7 * GIB), free=8 * GIB, **sizes) == 7 * GIB
    with pytest.raises(NotEnoughMemoryError, match=r"9 GiB.*only 8 GiB is free after 1 GiB of weights: lower kv_cache"):
        cpu_budget(config(kv_cache_memory_bytes=9 * GIB), free=8 * GIB, **sizes)


def test_swap_space_that_holds_nothing_or_is_not_there() -> None:
    for asked in (0, 1000, 2 * GIB):
        check_swap_space(asked, page_bytes=1000, free=2 * GIB)
    with pytest.raises(ModelLoadError, match=r"swap_space_bytes=999 holds no page, which has 1000 bytes: raise it"):
        check_swap_space(999, page_bytes=1000, free=2 * GIB)
    with pytest.raises(
        NotEnoughMemoryError,
        match=r"3 GiB\) on each rank.*only 2 GiB of the host's memory is left: lower swap_space_bytes",
    ):
        check_swap_space(3 * GIB, page_bytes=1000, free=2 * GIB)


def test_gpu_budget() -> None:
    sizes = {"total": 100 * GIB, "peak": 30 * GIB, "others": 10 * GIB, "weights": 20 * GIB}
    assert gpu_budget(config(), **sizes) == 50 * GIB
    assert gpu_budget(config(kv_cache_memory_bytes=5), **sizes) == 5
    message = r"weights take 20 GiB, the largest batch 10 GiB, other processes 10 GiB: raise gpu_memory_utilization"
    with pytest.raises(ModelLoadError, match=message):
        gpu_budget(config(gpu_memory_utilization=0.4), **sizes)


@pytest.mark.parametrize("max_num_seqs, tokens", [(3, 20), (8, 5), (1, 64), (2, 1000)])
def test_profile_runs_the_largest_batch_and_leaves_no_trace(max_num_seqs: int, tokens: int) -> None:
    model = FakeModel(50, 16, 4)
    model.check_tails = lambda attn: None  # all share their blocks, and look at nothing
    shapes: list[tuple[int, int]] = []
    forward, compute_logits = model.forward, model.compute_logits
    model.forward = lambda ids, *rest: shapes.append((len(ids), 0)) or forward(ids, *rest)
    model.compute_logits = lambda hidden: shapes.append((0, len(hidden))) or compute_logits(hidden)
    runner = make_runner(model, 50, max_num_seqs=max_num_seqs, num_blocks=16)
    profile_run(runner, max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens, max_model_len=64)
    assert shapes == [(min(tokens, 63 * max_num_seqs), 0), (0, min(max_num_seqs, tokens))]
    out = step(runner, {0: 2}, new=[request(0, [4, 5], [3])])
    assert out.token_ids[0] == int(expected_logits([4, 5], 50).argmax())


def test_free_memory_respects_a_container(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    assert free_memory(tmp_path) == 0
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert free_memory(tmp_path) == 5000 * 1024
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "proc/self/mountinfo").write_text("31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.current").write_text("700000\n")
    assert free_memory(tmp_path) == 5000 * 1024
    (folder / "memory.max").write_text("1000000\n")
    (folder / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    assert free_memory(tmp_path) == 500_000


def test_this_machine() -> None:
    assert free_memory() > 0


def test_rows_cost_no_memory_until_used() -> None:
    """A table for 256 requests of 128k tokens is 134 MB, but only of address space."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    runner = make_runner(FakeModel(50, 16, 4), 50, max_num_seqs=256, max_model_len=131_072)
    step(runner, {255: 2}, new=[request(255, [4, 5], [3])])
    assert resident() - before < 50e6
