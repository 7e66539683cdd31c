"""What a layer launches in a decode step on a GPU, in which order: its speed at few rows is that of these launches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_gpu_path import MAX_LEN, NUM_LAYERS, SHAPES, Launches, make_runner, write_model

from aengine.ipc.messages import NewRequest, SchedulerOutput, int32
from aengine.kernels.dispatch import triton_everywhere

LAYER = ["_gemv", "_decode_attention", "_gemv", "_gemv", "_gemv"]
"""Norm and qkv; norm of q and k, rotary, KV and attention; o; norm, gate and up; down."""


@pytest.mark.slow
@pytest.mark.parametrize("arch", sorted(SHAPES.keys() - {"qwen3_moe", "deepseek_v3"}))
@pytest.mark.usefixtures("wide_programs")
def test_a_layer_of_one_stream_is_five_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels are recorded in Triton's interpreter")
    runner = make_runner(write_model(tmp_path, arch), like_gpu=True)
    request = NewRequest(0, int32([5, 6]), 2, 0, int32(range(MAX_LEN // 16)), temperature=0.0)
    prompt = SchedulerOutput(0, new_requests=[request], req_idx=int32([0]), num_scheduled_tokens=int32([2]))
    decode = SchedulerOutput(1, req_idx=int32([0]), num_scheduled_tokens=int32([1]))
    with triton_everywhere():
        for out in (prompt, decode):
            with monkeypatch.context() as patch, Launches(patch) as launches:
                runner.execute_model(out)
                runner.sample_tokens(None)
    names = [name for name, _ in launches.log]
    begin = names.index("aten.index_select.default") + 1  # the embeddings
    end = begin + NUM_LAYERS * len(LAYER) + 1
    assert names[begin:end] == [*LAYER * NUM_LAYERS, "_gemv"]
    assert all("PDL" in options for _, options in launches.log[begin:end])
