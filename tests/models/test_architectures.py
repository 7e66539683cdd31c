"""Every architecture against transformers, which wrote the checkpoints: logits within 1e-4 in float32.

Whole prompts, chunks and single tokens through scattered KV blocks, prefills and decodes in one batch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, check_near, load, source_of
from test_scenarios import KEPT, MODELS
from tiny import VOCAB_SIZE, load_reference, tokens_and_logits
from torch import Tensor

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
# The ramp runs over some ten of 32 frequencies: a head of a few would not show where it begins and ends.
YARN_SIZES = {"head_dim": 64, "max_position_embeddings": 8192}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 9}
GEMMA_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0}),
    "gemma3": ("gemma3", {**GEMMA, "layer_types": LAYER_TYPES, "rope_parameters": GEMMA_ROPES}),
    "gemma3-untied": ("gemma3", {**GEMMA, "tie_word_embeddings": False, "attention_bias": True}),
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 6}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 12, "num_attention_heads": 4}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.3}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {**YARN_SIZES, "rope_parameters": YARN}),
    "llama-yarn-ramp": (
        "llama",
        {**YARN_SIZES, "rope_parameters": {**YARN, "beta_fast": 8, "beta_slow": 2, "truncate": False}},
    ),
    "llama-yarn-mscale": (
        "llama",
        {**YARN_SIZES, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "llama-yarn-factor": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.7}}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 10}),
    "mistral-window-of-one": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window-unused": ("qwen2", {"sliding_window": 5, "use_sliding_window": False, "max_window_layers": 0}),
    "qwen2-window": ("qwen2", {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 7, "swiglu_limit": 1.0}),
    "gpt-oss-all": ("gpt_oss", {"layer_types": LAYER_TYPES[::-1], "sliding_window": 5, "swiglu_alpha": 0.9}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-moe-dense-layers": ("qwen3_moe", {"mlp_only_layers": [0], "num_experts_per_tok": 1}),
    "qwen3-moe-sparse-step": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "tie_word_embeddings": True, "sliding_window": 9, "use_sliding_window": True},
    ),
    "qwen3-window": ("qwen3", {"sliding_window": 9, "use_sliding_window": True, "layer_types": LAYER_TYPES}),
    **{f"{name}-of-scenarios": MODELS[name] for name in MODELS if name not in KEPT},
}

TinyModel = Callable[..., Path]


def some_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


@torch.inference_mode()
def expected(folder: Path, arch: str, tokens: list[int]) -> Tensor:
    """float32 [len(tokens), vocab_size]."""
    return load_reference(folder, arch)(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_chunked_and_decoded(variant: str, tiny_model: TinyModel, rng: random.Random) -> None:
    arch, overrides = VARIANTS[variant]
    folder = tiny_model(arch, seed=7, **overrides)
    model, _ = load(source_of(folder))
    tokens, wanted = tokens_and_logits(load_reference(folder, arch), rng, 45)
    driver = Driver(model, rng)
    check_near(driver.step({"whole": tokens})["whole"], wanted, "the whole prompt")
    parts, done = [], 0
    while done < len(tokens):  # chunks of any size, then one at a time
        size = rng.randint(1, 13) if done < 30 else 1
        parts.append(driver.step({"chunked": tokens[done : done + size]})["chunked"])
        done += size
    check_near(torch.cat(parts)[: len(tokens)], wanted, "chunks and decodes")


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_mixed_batches(arch: str, tiny_model: TinyModel, rng: random.Random) -> None:
    """Five sequences of unlike lengths advance by unlike amounts, in any order within a step, some not at all."""
    window = {"mistral": {"sliding_window": 11}}.get(arch, {})
    folder = tiny_model(arch, seed=8, **window)
    model, _ = load(source_of(folder))
    reference = load_reference(folder, arch)
    driver = Driver(model, rng)
    texts = {f"request {i}": some_tokens(rng, rng.randint(2, 40)) for i in range(5)}
    done = dict.fromkeys(texts, 0)
    seen: dict[str, list[Tensor]] = {name: [] for name in texts}
    while unfinished := [name for name in texts if done[name] < len(texts[name])]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        # In the runner decodes lead the batch. Here they don't always: the outcome may not depend on it.
        sizes = {name: rng.choice((1, 1, 1, rng.randint(1, 9))) for name in chosen}
        out = driver.step({name: texts[name][done[name] : done[name] + size] for name, size in sizes.items()})
        for name, logits in out.items():
            seen[name].append(logits)
            done[name] += len(logits)
    for name, tokens in texts.items():
        with torch.inference_mode():
            wanted = reference(torch.tensor([tokens]), use_cache=False).logits[0]
        check_near(torch.cat(seen[name]), wanted, name)


@pytest.mark.parametrize(("dtype", "tolerance"), [("auto", 0.01), ("bfloat16", 0.1)])
def test_other_formats_stay_near(dtype: str, tolerance: float, tiny_model: TinyModel, rng: random.Random) -> None:
    folder = tiny_model("qwen2", seed=7)
    model, _ = load(source_of(folder), dtype)
    tokens = some_tokens(rng, 30)
    driver = Driver(model, rng)
    logits = torch.cat([driver.step({"a": part})["a"] for part in (tokens[:20], tokens[20:29], tokens[29:])])
    wanted = expected(folder, "qwen2", tokens)
    assert logits.dtype == torch.float32
    assert 0 < float((logits - wanted).norm() / wanted.norm()) < tolerance


def test_prefix_hit(tiny_model: TinyModel, rng: random.Random) -> None:
    """Two requests read the blocks that a third has written."""
    folder = tiny_model("llama", seed=7)
    model, _ = load(source_of(folder))
    driver = Driver(model, rng, block_size=4)
    first = some_tokens(rng, 21)
    driver.step({"owner": first})
    tails = {"guest": some_tokens(rng, 9), "other guest": some_tokens(rng, 1)}
    for name, num_shared in (("guest", 20), ("other guest", 8)):
        driver.share_prefix(name, "owner", num_shared)
    out = driver.step(tails)
    check_near(out["guest"], expected(folder, "llama", first[:20] + tails["guest"])[20:], "a hit of 20 tokens")
    check_near(out["other guest"], expected(folder, "llama", first[:8] + tails["other guest"])[8:], "a hit of 8 tokens")


@pytest.mark.parametrize("variant", ["llama-linear", "llama-llama3", "llama-yarn", "llama-theta"])
def test_older_layout_of_rope(variant: str, tiny_model: TinyModel, rng: random.Random) -> None:
    """``rope_scaling`` and ``rope_theta`` side by side, as transformers 4 wrote them, say the same."""
    arch, overrides = VARIANTS[variant]
    source = source_of(tiny_model(arch, seed=7, **overrides))
    tokens = some_tokens(rng, 30)
    wanted = Driver(load(source)[0], rng).step({"a": tokens})["a"]
    scaling = source.hf_config.pop("rope_parameters")
    source.hf_config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    source.hf_config["rope_scaling"] = None if scaling["type"] == "default" else scaling
    assert torch.equal(Driver(load(source)[0], rng).step({"a": tokens})["a"], wanted)


def test_the_test_can_fail(tiny_model: TinyModel, rng: random.Random) -> None:
    """One norm weight changed by 1% moves the logits far past the tolerance."""
    folder = tiny_model("llama", seed=7)
    model, _ = load(source_of(folder))
    reference = load_reference(folder, "llama")
    tokens = some_tokens(rng, 20)
    with torch.inference_mode():
        reference.model.layers[1].input_layernorm.weight.mul_(1.01)
        wanted = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    logits = Driver(model, rng).step({"a": tokens})["a"]
    with pytest.raises(AssertionError, match="off by"):
        check_near(logits, wanted)
    assert float((logits - wanted).abs().max()) > 5e-4 * float(wanted.abs().max())


def test_config_written_by_transformers_5_has_rope_parameters(tiny_model: TinyModel) -> None:
    """Else the tests above would try the older layout only."""
    settings = json.loads((tiny_model("llama", seed=7) / "config.json").read_text())
    assert "rope_parameters" in settings and "rope_theta" not in settings
