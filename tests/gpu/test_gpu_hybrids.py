"""Models with states on the GPU: transformers' tokens in float32, through graphs; prompts in 16 bits as torch's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gpu_models import DEVICE
from scenarios import Engine, check_scenarios, reference_of, settings_of_torch_kept, some_prompts
from test_hybrids import MODELS
from tiny import load_reference, write_tiny_model

from aengine.kernels import gated_delta
from aengine.kernels.delta_memory import DeltaGates, DeltaInputs
from aengine.kernels.sequences import Cut
from aengine.runner.state_tables import sequences_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("reference_by_torch")]


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next", "qwen3.5-experts"])
def test_every_scenario(name: str, tmp_path: Path) -> None:
    arch, overrides = MODELS[name]
    folder = write_tiny_model(tmp_path, arch, seed=7, **overrides)
    engine = check_scenarios(folder, load_reference(folder, arch), device=DEVICE, max_num_batched_tokens=256)
    assert DEVICE == "cpu" or (engine.runner.graphs is not None and engine.runner.batch_graphs.num_tokens)
    print(json.dumps([[group.kind, group.block_size] for group in engine.groups]))


@pytest.mark.parametrize("lens", [[1], [64], [700], [1, 1, 3, 700, 64, 129]])
def test_prompts_in_chunks(lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All sequences at once in 16 bits, against torch, sequence by sequence, in float32; every other one begins,
    whatever its page holds, and the states of the longest are kept on its way."""
    torch.manual_seed(0)
    num_tokens, m, heads = sum(lens), len(lens), (4, 8)
    sizes = (2 * heads[0] + heads[1]) * 128, heads[1] * 128, heads[1], heads[1]
    inputs = DeltaInputs(*(torch.randn(num_tokens, size, device=DEVICE) for size in sizes), heads[0])
    gates = DeltaGates(*(x.to(DEVICE) for x in (-torch.rand(8), torch.randn(8), torch.rand(128))), 1e-6)
    first = torch.randn(m + 4, 4 + 8 * 128 * 128, device=DEVICE)[:, 4:].unflatten(1, (8, 128, 128)) / 8
    begins = [i % 2 == 1 for i in range(m)]
    kept, *pages = torch.randperm(m + 4)[: m + 1].tolist()
    longest = lens.index(max(lens))
    cuts = [Cut(longest, lens[longest] // 3, kept)] if max(lens) > 64 else []
    for page, begins_here in zip(pages, begins, strict=True):
        if begins_here:
            first[page] = torch.nan
    sequences = sequences_of(lens, lens.count(1), pages, begins, cuts, torch.device(DEVICE))

    def outcome(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        memory = first.clone()
        own = DeltaInputs(*(x.to(dtype) for x in inputs.tensors), heads[0])
        return gated_delta.gated_delta_of_prompts(own, gates, memory, sequences), memory[[*pages, kept]]

    ours, after = outcome(torch.bfloat16)
    monkeypatch.setattr(gated_delta, "uses_triton", lambda x: False)
    wanted, last = outcome(torch.float32)
    for name, got, right in (("output", ours, wanted), ("state", after, last)):
        off = float((got - right).norm() / right.norm())
        assert off < 0.02, f"{name}: off by {off:.2g}"


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
@pytest.mark.parametrize("budget", [512, 24])
def test_prompts_in_16_bits(name: str, budget: int, tmp_path: Path) -> None:
    """Whole prompts in one call, and chunks beside decodes: nearly all tokens are the likeliest in float32
    too. On a CPU, in bfloat16, 0 to 2% were less likely by more than 0.5."""
    arch, overrides = MODELS[name]
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    folder = write_tiny_model(tmp_path, arch, seed=7, **overrides | sizes)
    reference = reference_of(load_reference(folder, arch))
    with settings_of_torch_kept():
        engine = Engine(folder, device=DEVICE, dtype="bfloat16")
        engine.begin(max_num_batched_tokens=budget)
        prompts = some_prompts(engine.offer["vocab_size"])
        outputs = engine.generate(prompts)
    gaps = []
    for prompt, output in zip(prompts, outputs, strict=True):
        logprobs = reference(torch.tensor([*prompt, *output]))[len(prompt) - 1 : -1].log_softmax(-1)
        gaps += [float(row.max() - row[token_id]) for row, token_id in zip(logprobs, output, strict=True)]
    assert sum(gap > 0.5 for gap in gaps) < 0.1 * len(gaps), sorted(gaps)[-20:]
