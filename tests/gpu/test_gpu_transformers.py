"""Models of transformers' code on the GPU: in graphs, and in 16 bits as near to float32 as transformers alone is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import DEVICE, Batch, make_runner
from scenarios import check_scenarios, reference_of
from zoo import VOCAB_SIZE, write_zoo_model

pytestmark = pytest.mark.gpu

WORST = 1.4  # ours to theirs; of random experts some are chosen by a hair

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},  # whole layers are replaced
    "seed_oss": {},
    "olmo3": {},  # windows beside full attention
    "cohere2": {"tie_word_embeddings": True},  # parallel halves; layers without rotary embedding
    "exaone4": {},  # norms after the layers, and of each head
    "phi": {},  # parallel halves with biases, no gate
    "gpt2": {},  # learned positions
    "deepseek_v3": {},  # latent attention, expanded; experts in groups
    "qwen3_moe": {},  # experts
    "glm4_moe": {},
    "lfm2": {},  # short convolutions
}


@pytest.mark.parametrize("model_type", MODELS)
def test_every_scenario(model_type: str, tmp_path: Path) -> None:
    reference = write_zoo_model(tmp_path, model_type, **MODELS[model_type]).to(DEVICE)
    settings = {"model_impl": "transformers", "device": DEVICE, "max_num_batched_tokens": 256}
    engine = check_scenarios(tmp_path, reference, **settings)
    assert DEVICE == "cpu" or engine.runner.graphs is not None


def test_longrope(tmp_path: Path) -> None:
    """Prompts and completions on both sides of the border, and across it, in graphs."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.1, 1.2, 1.3, 1.4], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    model = write_zoo_model(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=32).to(DEVICE)
    logits = reference_of(model)

    def by_length(token_ids: torch.Tensor) -> torch.Tensor:
        return torch.cat((logits(token_ids[:32]), logits(token_ids)[32:]))

    settings = {"model_impl": "transformers", "device": DEVICE, "max_num_batched_tokens": 256}
    assert check_scenarios(tmp_path, by_length, **settings).offer["rope_border"] == 32


@pytest.mark.parametrize("model_type", ["llama", "olmo3", "deepseek_v3", "glm4_moe"])
def test_bfloat16(model_type: str, tmp_path: Path, rng: random.Random) -> None:
    reference = write_zoo_model(tmp_path, model_type, **MODELS[model_type]).to(DEVICE)
    runner = make_runner(tmp_path, dtype="bfloat16", model_impl="transformers")
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 80))] for _ in range(32)]
    tokens, ours = Batch(runner).tokens_and_logits(prompts, 8)

    @torch.inference_mode()
    def logits() -> torch.Tensor:
        found = []
        for prompt, output in zip(prompts, tokens, strict=True):
            ids = torch.tensor([[*prompt, *output]], device=DEVICE)
            found.append(reference(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float())
        return torch.stack(found)

    wanted = logits()
    reference.to(torch.bfloat16)
    # The median row: where rounding sends a token to another expert, the error says nothing of the arithmetic.
    lengths = wanted.norm(dim=-1)
    off, their_off = (float(((found - wanted).norm(dim=-1) / lengths).median()) for found in (ours, logits()))
    print(f"{model_type}: relative error {off:.2e}, of transformers {their_off:.2e}")
    assert off <= WORST * their_off
