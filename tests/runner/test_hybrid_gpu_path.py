"""Models with states on the GPU's path, kernels in Triton's interpreter: the same tokens as on the CPU's."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import some
from test_gpu_path import MAX_LEN, MAX_SEQS, NUM_BLOCKS, make_runner

from aengine.engine.scheduler.prefixes import kept_states
from aengine.engine.scheduler.request import Request
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.kernels.dispatch import triton_everywhere
from aengine.params import SamplingParams
from aengine.runner.model_runner import ModelRunner

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("wide_programs")]
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
SHAPES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "qwen3_5_text": {**DELTA, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
}


def generate(runner: ModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy completions: prompts in chunks beside decodes, fewer and fewer requests, two steps in flight; and again by
    what was kept of them."""
    scheduler = Scheduler(
        num_blocks=NUM_BLOCKS,
        kv_groups=runner.tables.groups,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=24,
        max_model_len=MAX_LEN,
    )
    outputs = complete(scheduler, runner, prompts)
    again = complete(scheduler, runner, prompts)
    assert again == outputs and scheduler.prefix_cache_hits > len(prompts[1]) // 2
    return outputs


def complete(scheduler: Scheduler, runner: ModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    requests = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=3 + i, ignore_eos=True)
        longest = len(prompt) + 3 + i
        requests.append(Request(str(i), prompt, params, seed=0, max_num_tokens=longest, stop_token_ids=frozenset()))
        scheduler.add_request(requests[-1])
    answers: list[Any] = []
    while True:
        step = scheduler.schedule() if len(answers) < 2 else None
        if step is not None:
            runner.execute_model(step)
            answers.append(runner.sample_tokens(None))
        elif answers:
            assert not scheduler.update(answers.pop(0).get()).failed
        else:
            return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("arch", some(SHAPES, "qwen3_5_text"))
def test_the_same_tokens(tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    monkeypatch.setattr(kept_states, "STATE_INTERVAL", 4)
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the same is tested on the GPU itself")
    from tiny import write_tiny_model

    folder = write_tiny_model(tmp_path, arch, num_hidden_layers=2, **SHAPES[arch])
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (1, 40, 7)]
    wanted = generate(make_runner(folder, like_gpu=False), prompts)
    with triton_everywhere():
        assert generate(make_runner(folder, like_gpu=True), prompts) == wanted
