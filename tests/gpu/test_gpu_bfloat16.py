"""Families in bfloat16, prompts and decodes in graphs: as near to float32 as transformers' own bfloat16 is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import DEVICE, MIB, Batch, make_runner
from test_hybrids import MODELS as HYBRIDS
from test_phi3 import BORDER, PHI4
from test_scenarios import MODELS
from tiny import ARCHITECTURES, VOCAB_SIZE, _quietly, write_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("reference_by_torch")]

WORST = 1.4  # ours to theirs; of random experts some are chosen by a hair


def with_large_heads(arch: str, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return arch, fields | {"linear_key_head_dim": 64, "linear_value_head_dim": 64}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: MODELS[name] for name in MODELS if name not in ("gemma2", "gpt-oss", "llama", "qwen2")},
    "lfm2": HYBRIDS["lfm2"],
    **{name: with_large_heads(*HYBRIDS[name]) for name in ("qwen3-next", "qwen3-next-experts", "qwen3.5")},
    "phi4": ("phi3", PHI4),
}
"""Beside those of `GPU_VARIANTS`, which test_gpu_logits.py has."""


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, tmp_path: Path, rng: random.Random) -> None:
    arch, fields = FAMILIES[name]
    folder = write_tiny_model(tmp_path, arch, seed=11, dtype="bfloat16", **fields)
    longest = 80 if name != "phi4" else BORDER - 10  # beyond it a prompt is computed anew, as the scheduler says
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(48)]
    tokens, logits = Batch(make_runner(folder, dtype="bfloat16", kv_cache_memory_bytes=64 * MIB)).tokens_and_logits(
        prompts, 8
    )

    @torch.inference_mode()
    def of_transformers(dtype: torch.dtype) -> torch.Tensor:
        how = {"dtype": dtype, "attn_implementation": "eager"}
        model = _quietly(lambda: ARCHITECTURES[arch][1].from_pretrained(folder, **how).eval()).to(DEVICE)
        found = []
        for prompt, output in zip(prompts, tokens, strict=True):
            ids = torch.tensor([[*prompt, *output]], device=DEVICE)
            found.append(model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float())
        return torch.stack(found)

    wanted = of_transformers(torch.float32)
    theirs = of_transformers(torch.bfloat16)
    ours, their_off = (float((found - wanted).norm() / wanted.norm()) for found in (logits, theirs))
    print(f"{name}: relative error {ours:.2e}, of transformers {their_off:.2e}")
    assert ours <= WORST * their_off
