"""Models with states on the GPU: transformers' tokens in float32, through graphs; prompts by fla-core as torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_models import DEVICE
from scenarios import check_scenarios
from test_hybrids import MODELS
from tiny import load_reference, write_tiny_model

from aengine.kernels import gated_delta

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next", "qwen3.5-experts"])
def test_every_scenario(name: str, tmp_path: Path) -> None:
    arch, overrides = MODELS[name]
    folder = write_tiny_model(tmp_path, arch, seed=7, **overrides)
    engine = check_scenarios(folder, load_reference(folder, arch), device=DEVICE, max_num_batched_tokens=256)
    assert DEVICE == "cpu" or engine.runner.graphs is not None
    print(json.dumps([[group.kind, group.block_size] for group in engine.groups]))


@pytest.mark.parametrize("num_tokens", [1, 64, 700])
def test_prompts_by_fla(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fla")
    if DEVICE == "cpu":
        pytest.skip("fla-core's kernels run on a GPU")
    torch.manual_seed(0)
    q, k = torch.randn(2, num_tokens, 4, 128, device=DEVICE, dtype=torch.bfloat16)
    v = torch.randn(num_tokens, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    decay, beta = -torch.rand(num_tokens, 8, device=DEVICE), torch.rand(num_tokens, 8, device=DEVICE)
    first = torch.randn(8, 128, 128, device=DEVICE) / 8

    def outcome() -> tuple[torch.Tensor, torch.Tensor]:
        state = first.clone()
        return gated_delta.gated_delta_of_prompt(q, k, v, decay, beta, state), state

    assert gated_delta._fla() is not None
    ours, after = outcome()
    missing: Callable[[], None] = lambda: None  # noqa: E731
    monkeypatch.setattr(gated_delta, "_fla", missing)
    wanted, last = outcome()
    for name, got, right in (("output", ours, wanted), ("state", after, last)):
        off = float((got - right).norm() / right.norm())
        assert off < 0.02, f"{name}: off by {off:.2g}"
