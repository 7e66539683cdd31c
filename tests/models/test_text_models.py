"""Text models of checkpoints that transformers writes for images and text, and settings as first releases have them."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from driver import Driver, check_near, load, source_of
from pairs import some
from scenarios import check_scenarios
from tiny import SIZES, randomise, write_tiny_tokenizer

from aengine.runner.models import read_config

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA3 = {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 20}
POSITION_SCALED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", GEMMA3, {**VISION, "image_size": 28, "patch_size": 14}),
}
WITHOUT_IMAGES = {
    "Ministral3": {"head_dim": 16, "rope_parameters": POSITION_SCALED},
}
TOKENS = [random.Random(3).randrange(3, 256) for _ in range(40)]


def check_logits(model: Any, folder: Path) -> None:
    """With random weights, written to the folder, it has the same logits here as in transformers."""
    randomise(model)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    ours = Driver(load(source_of(folder))[0], random.Random(0)).step({"a": TOKENS})["a"]
    check_near(ours, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_the_text_model_is_loaded(name: str, tmp_path: Path) -> None:
    family, text, vision = MODELS[name]
    config = getattr(transformers, f"{family}Config")(text_config={**SIZES, **text}, vision_config=vision)
    torch.manual_seed(5)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    check_logits(model, tmp_path)


MISTRAL3 = {
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    "ministral3": {"model_type": "ministral3", "head_dim": 16, "rope_parameters": POSITION_SCALED},
}


@pytest.mark.parametrize(
    ("name", "tied"), some(itertools.product(MISTRAL3, [True, False]), ("mistral", True), ("ministral3", False))
)
def test_the_text_of_mistral3(name: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its config.json does not say whether embeddings are tied, as those of its releases; the weights do."""
    config = transformers.Mistral3Config(
        text_config={**SIZES, **MISTRAL3[name]}, vision_config=VISION, tie_word_embeddings=tied
    )
    torch.manual_seed(5)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path, max_shard_size="40KB" if tied else "1GB")
    assert (tmp_path / "model.safetensors.index.json").is_file() == tied
    write_tiny_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for level in (settings, settings["text_config"]):
        level.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    engine = check_scenarios(tmp_path, model)
    assert engine.offer["model_impl"] == "native" and engine.offer["model_type"] == name
    assert not [record for record in caplog.records if "does not use" in record.message]


@pytest.mark.parametrize("name", WITHOUT_IMAGES)
def test_text_alone(name: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **WITHOUT_IMAGES[name]})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    check_logits(model, tmp_path)


RELEASED = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}
"""All that the text part of google/gemma-3-4b-it's config.json says."""


def test_the_config_of_a_first_release() -> None:
    """It leaves out what was a default, and has one rope's settings beside the other's."""
    ours = read_config(RELEASED)
    theirs = transformers.Gemma3TextConfig(**{k: v for k, v in RELEASED.items() if k != "model_type"})
    assert (ours.num_heads, ours.num_kv_heads, ours.head_dim) == (8, 4, 256)
    assert ours.vocab_size == theirs.vocab_size and ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.tie_word_embeddings and ours.activation == "gelu_tanh"
    assert [window is not None for window in ours.sliding_windows] == [
        kind == "sliding_attention" for kind in theirs.layer_types
    ]
    for layer in (0, 5):
        rope = ours.ropes[ours.rope_of_layers[layer]]  # type: ignore[attr-defined]
        wanted = theirs.rope_parameters[theirs.layer_types[layer]]
        assert rope.theta == wanted["rope_theta"] and rope.rope_type == wanted["rope_type"]
        assert rope.scaling.get("factor") == wanted.get("factor")
    # As transformers writes it again.
    assert read_config(json.loads(theirs.to_json_string())).ropes == ours.ropes


def test_bfloat16_rounds_as_transformers_does(tiny_model: Any) -> None:
    """The factor of the embeddings is rounded before it multiplies; norms' weights are not, though near one."""
    folder = tiny_model("gemma3", seed=7, dtype="bfloat16", head_dim=16)
    model, _ = load(source_of(folder), "bfloat16")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor(TOKENS)
    with torch.inference_mode():
        assert torch.equal(model.embed(ids), reference.model.embed_tokens(ids))  # type: ignore[attr-defined]
    weight = model.norm.weight  # type: ignore[attr-defined]
    assert weight.dtype == torch.float32 and torch.equal(weight, 1 + reference.model.norm.weight.float())
