"""Families whose layers keep a state of fixed size, in every scenario of an engine, against transformers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import some
from safetensors.torch import load_file, save_file
from scenarios import Engine, check_scenarios, settings_of_torch_kept
from tiny import SIZES, load_reference, randomise, write_tiny_tokenizer
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from aengine.engine.scheduler.prefixes import kept_states

TinyModel = Callable[..., Path]
DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
NO_EXPERTS = {"num_experts": 0}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}),
    "lfm2-biases": (
        "lfm2",
        {"full_attn_idxs": [1], "conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False},
    ),
    "qwen3-next": ("qwen3_next", {**DELTA, **NO_EXPERTS}),
    "qwen3-next-experts": ("qwen3_next", {**DELTA, **EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen3.5-experts": ("qwen3_5_moe_text", {**DELTA, **EXPERTS}),
    "qwen3.5": ("qwen3_5_text", {**DELTA, "attention_bias": True, "linear_conv_kernel_dim": 3}),
    "qwen3.5-every-fourth": ("qwen3_5_text", {**DELTA, "layer_types": None, "tie_word_embeddings": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(MODELS, "lfm2-biases", "qwen3-next-experts", "qwen3.5"))
def test_every_scenario(name: str, tiny_model: TinyModel) -> None:
    arch, overrides = MODELS[name]
    folder = tiny_model(arch, seed=7, **overrides)
    check_scenarios(folder, load_reference(folder, arch))


def test_experts_in_one_tensor(tiny_model: TinyModel, tmp_path: Path) -> None:
    """As the releases of Qwen3.5 have them."""
    folder = tiny_model("qwen3_5_moe_text", seed=7, **DELTA, **EXPERTS)
    tensors = load_file(folder / "model.safetensors")
    for index in range(DELTA["num_hidden_layers"]):
        scope = f"model.layers.{index}.mlp.experts"
        own = [
            {part: tensors.pop(f"{scope}.{i}.{part}.weight") for part in ("gate_proj", "up_proj", "down_proj")}
            for i in range(EXPERTS["num_experts"])
        ]
        gate_up = [torch.cat((expert["gate_proj"], expert["up_proj"])) for expert in own]
        tensors[f"{scope}.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{scope}.down_proj"] = torch.stack([expert["down_proj"] for expert in own])
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    save_file(tensors, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    check_scenarios(tmp_path, load_reference(folder, "qwen3_5_moe_text"))


def test_the_text_model_of_one_for_images(tmp_path: Path) -> None:
    """Its rope has a section for each axis of an image; of text all are the same."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    text = {**SIZES, **DELTA, "rope_parameters": {**rope, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48}
    config = Qwen3_5Config(text_config=text, vision_config={**vision, "num_position_embeddings": 16})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = Qwen3_5ForConditionalGeneration(config).eval()
        randomise(model)
    model.save_pretrained(tmp_path)
    write_tiny_tokenizer(tmp_path)
    check_scenarios(tmp_path, model)


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next"])
@pytest.mark.parametrize("budget", [512, 50])
def test_questions_behind_one_instruction(
    name: str, budget: int, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    """From the second on nearly all of it is found, and the tokens are those that each question has by itself; then all
    at once, and in chunks."""
    monkeypatch.setattr(kept_states, "STATE_INTERVAL", 16)
    arch, overrides = MODELS[name]
    folder = tiny_model(arch, seed=7, **overrides)
    with settings_of_torch_kept():
        engine = Engine(folder, max_model_len=256)
        instruction = [rng.randrange(3, engine.offer["vocab_size"]) for _ in range(200)]
        questions = [[rng.randrange(3, 100) for _ in range(rng.randint(3, 28))] for _ in range(12)]
        prompts = [instruction + question for question in questions]
        alone = []
        for prompt in prompts:
            engine.begin()
            alone += engine.generate([prompt])
        engine.begin(max_num_batched_tokens=budget)
        found = []
        for prompt, output in zip(prompts, alone, strict=True):
            (request,) = engine.add([prompt])
            engine.run()
            assert request.output_token_ids == output
            found.append(request.num_cached_tokens)
        unit = engine.scheduler.rows.kv.prefix_unit
        assert found[0] == 0 and min(found[1:]) >= 200 - len(questions[0]) - 2 * unit - 16, found
        engine.begin(max_num_batched_tokens=budget)
        assert engine.generate(prompts) == alone
        assert engine.scheduler.prefix_cache_hits >= 11 * 150
