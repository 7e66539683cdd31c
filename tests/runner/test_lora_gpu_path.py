"""Adapters in the GPU's runner on the CPU, its kernels in Triton's interpreter: the tokens of merged models."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest
import torch
from test_gpu_path import MAX_SEQS, make_runner, write_model

from aengine.ipc.messages import DraftColumns, NewRequest, SchedulerOutput, int32
from aengine.kernels.dispatch import triton_everywhere
from aengine.runner.graphs.cuda_graphs import DecodeStep
from aengine.runner.lora.rows import LoraRows
from aengine.runner.model_runner import ModelRunner
from aengine.runner.platforms.cpu import CpuPlatform

pytestmark = [
    pytest.mark.usefixtures("wide_programs"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="its kernels run in Triton's interpreter"),
]
sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
PROMPTS = {0: 20, 1: 9, 2: 5}  # tokens of each row's


def tokens_of(runner: ModelRunner, prompts: dict[int, list[int]], slots: dict[int, int]) -> dict[int, list[int]]:
    """Prompts whole and cut, beside decodes; then decodes alone, the last ones beside drafts that are wrong."""
    new = {
        row: NewRequest(row, int32(ids), len(ids), 0, int32(range(6 * row, 6 * row + 6)))
        for row, ids in prompts.items()
    }
    for row, request in new.items():
        request.temperature = 0.0
        request.extras = {"lora": [int32([slots[row]]).tobytes()]} if row in slots else {}
    found: dict[int, list[int]] = {row: [] for row in prompts}
    steps = [{0: 20, 1: 4}, {0: 1, 1: 5, 2: 5}, {1: 1, 0: 1, 2: 1}, {2: 1}, {0: 1, 1: 3}]
    for step_id, counts in enumerate(steps):
        batch = {row: count for row, count in counts.items() if row in prompts}
        if not batch:
            continue
        out = SchedulerOutput(step_id, req_idx=int32(batch), num_scheduled_tokens=int32(batch.values()))
        out.new_requests = [new.pop(row) for row in batch if row in new]
        if step_id == 4:
            out.drafts = DraftColumns(
                int32(count - 1 for count in batch.values()), int32([5, 6] * (1 in batch)), int32([0] * len(batch))
            )
        runner.execute_model(out)
        answer = runner.sample_tokens(None).get()
        assert answer.errors == []
        ids = list(answer.token_ids)
        for row, count in zip(batch, answer.num_tokens(), strict=True):
            found[row] += ids[:count]
            del ids[: 1 if answer.counts is None else count]
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is computed with whatever lies in memory
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_the_tokens_of_merged_models(
    arch: str, tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without an adapter launches none of it, and is another graph."""
    from lora_files import merged, write_adapter

    folder = write_model(tmp_path / "model", arch)
    prompts = {row: [rng.randrange(300) for _ in range(length)] for row, length in PROMPTS.items()}
    rows = LoraRows(3, 8, MAX_SEQS, torch.float32, 2, CpuPlatform(), 8)
    runner = make_runner(folder, like_gpu=True, position_sizes=(4, 8), step_rows=rows)
    expected = {2: tokens_of(make_runner(folder, like_gpu=False), {2: prompts[2]}, {})[2]}
    for row, slot, rank in ((0, 2, 3), (1, 0, 8)):
        adapter = write_adapter(tmp_path / f"a{row}", folder, rng, rank)
        plain = make_runner(merged(tmp_path / f"m{row}", folder, adapter), like_gpu=False)
        expected[row] = tokens_of(plain, {row: prompts[row]}, {})[row]
        while (state := rows.load(slot, str(adapter)).get()) == "loading":
            time.sleep(0.001)
        assert state == "ready"
    kinds = []
    run = DecodeStep.run
    monkeypatch.setattr(DecodeStep, "run", lambda own, size: (kinds.append(rows.kind), run(own, size))[1])
    with triton_everywhere():
        assert tokens_of(runner, prompts, {0: 2, 1: 0}) == expected
    assert kinds == [1, 0, 1]
