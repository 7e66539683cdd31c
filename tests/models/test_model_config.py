"""config.json's content into a ModelConfig: what is missing or not supported is named."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any

import pytest
import torch

from aengine.errors import ModelLoadError
from aengine.runner.model_config import ModelConfig
from aengine.runner.models import FAMILIES, build_model, read_config
from aengine.runner.models.encoders import ENCODERS, read_encoder_config
from aengine.runner.weights import scope
from aengine.runner.weights.formats import choose_formats

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def config(**changes: Any) -> ModelConfig:
    return read_config({**BASE, **changes})


@pytest.mark.parametrize(
    "key",
    ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
)
def test_a_missing_key_is_named(key: str) -> None:
    settings = dict(BASE)
    del settings[key]
    with pytest.raises(ModelLoadError, match=key):
        read_config(settings)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "48"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": -6}, "num_attention_heads"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4 does not divide the 6"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"rope_scaling": {"type": "mrope"}}, "mrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.4}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4}}, "original_max_position_embeddings"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "original_max_position_embeddings": 64}},
            "4 numbers for 'short_factor'",
        ),
        ({"num_local_experts": 8}, "no mixtures of experts"),
    ],
)
def test_an_unsupported_value_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        config(**changes)


def test_an_unknown_architecture_lists_those_there_are() -> None:
    with pytest.raises(ModelLoadError, match=r"'gpt_neox' .*llama, .*mistral, .*qwen2, qwen3"):
        read_config({**BASE, "model_type": "gpt_neox"}, model_impl="native")


def test_what_is_derived() -> None:
    plain = config()
    assert (plain.head_dim, plain.q_size, plain.kv_size) == (8, 48, 16)
    assert not plain.tie_word_embeddings and plain.sliding_windows == (None, None, None)
    assert config(head_dim=12).q_size == 72
    settings = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert read_config(settings).num_kv_heads == 6
    assert config(torch_dtype="bfloat16").checkpoint_dtype == config(dtype="bfloat16").checkpoint_dtype == "bfloat16"


def tensors_of_a_layer(**changes: Any) -> set[str]:
    """Names of the tensors that layer 1 wants, the last two parts of each."""
    model = build_model(config(**changes), choose_formats("float32", torch.device("cpu")))
    return {".".join(name.split(".")[-2:]) for name in model.weights.places if ".layers.1." in name}


def test_biases_and_norms_of_each_architecture() -> None:
    facts = {
        name: (*(f"{part}.bias" in wanted for part in ("q_proj", "o_proj", "up_proj")), "q_norm.weight" in wanted)
        for name in ("llama", "mistral", "qwen2", "qwen3")
        for wanted in [tensors_of_a_layer(model_type=name)]
    }
    assert facts == {
        "llama": (False, False, False, False),
        "mistral": (False, False, False, False),
        "qwen2": (True, False, False, False),
        "qwen3": (False, False, False, True),
    }
    assert {"q_proj.bias", "o_proj.bias", "down_proj.bias"} <= tensors_of_a_layer(attention_bias=True, mlp_bias=True)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 9}, (None, None, None)),
        ({"model_type": "llama", "sliding_window": 9, "gguf_architecture": "llama"}, (9, 9, 9)),
        ({"model_type": "mistral", "sliding_window": 9}, (9, 9, 9)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 0}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True}, (None, None, None)),
        (
            {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
            (None, 9, 9),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 9, None),
        ),
    ],
)
def test_sliding_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert config(**changes).sliding_windows == windows


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        config().head_dim = 4  # type: ignore[misc]


# -- values as nobody's converter writes them

ODD = (
    "x",
    -5,
    0,
    1.5,
    10**400,
    float("nan"),
    float("inf"),
    True,
    [1],
    [[]],
    {"a": 1},
    {"a": {}},
    "\udcff",
    2**63,
    1e30,
)


_NAMED_ELSEWHERE = {"mimo": "qwen2", "kimi_k2": "deepseek_v3"}
"""Types whose class is no part of transformers, and the one that it is made of."""


def full_config(model_type: str) -> dict[str, Any]:
    """All that transformers writes of a model of this type, by the defaults of its class, some of which fit together
    in no model."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    own = {"glm4_moe": {"head_dim": 128}, "deepseek_v2": {"num_experts_per_tok": 6}}.get(model_type, {})
    config = auto.CONFIG_MAPPING[_NAMED_ELSEWHERE.get(model_type, model_type)](**own)
    return {**json.loads(config.to_json_string(use_diff=False)), "model_type": model_type}


def test_kimi_k2_is_deepseek_v3_by_another_name() -> None:
    full = full_config("deepseek_v3")
    configs = [read_config({**full, "model_type": kind}, model_impl="native") for kind in ("kimi_k2", "deepseek_v3")]
    assert replace(configs[0], model_type="deepseek_v3") == configs[1]


TYPES = sorted(FAMILIES.keys() - {"gemma3"})  # of gemma3 the text part is gemma3_text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model_type", [*TYPES, *ENCODERS])
def test_an_odd_value_is_an_error_that_names_its_key(model_type: str) -> None:
    """Every key of a config, with each odd value: a config or a ModelLoadError with the key, and nothing else."""
    full = full_config(model_type)
    is_encoder = model_type in ENCODERS and model_type != "gemma3_text"
    read = read_encoder_config if is_encoder else partial(read_config, model_impl="native")
    for key in [*(full.keys() - {"model_type"}), "rope_scaling", "rope_theta", "partial_rotary_factor", "layer_types"]:
        values = (
            [*ODD, *({**full[key], inner: odd} for inner in full[key] for odd in ODD)] if is_object(full, key) else ODD
        )
        for value in values:
            try:
                read({**full, key: value})
            except ModelLoadError as error:
                assert len(str(error)) < 700
                named = (OTHER_NAMES.get(key, key), "heads", "rot", "rope", "experts")
                assert any(word in str(error) for word in named), error


OTHER_NAMES = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "activation": "hidden_act",
}
"""DistilBERT's names of its sizes, and those in errors."""


def is_object(full: dict[str, Any], key: str) -> bool:
    return key.startswith("rope") and isinstance(full.get(key), dict)


@pytest.mark.parametrize("model_type", [*TYPES, *(name for name in ENCODERS if name != "gemma3_text")])
def test_a_key_that_is_left_out_has_transformers_default(model_type: str) -> None:
    read = read_encoder_config if model_type in ENCODERS and model_type != "gemma3_text" else read_config
    full = full_config(model_type)
    whole = read(full)
    for key in full.keys() - {"model_type", "dtype"}:
        try:
            without = read({name: value for name, value in full.items() if name != key})
        except ModelLoadError as error:
            named = OTHER_NAMES.get(key, key)
            assert named in str(error)  # what it can't know
            continue
        if key == "original_max_position_embeddings":  # of longrope alone
            continue
        assert without == whole, key


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 2**31}, "num_hidden_layers=2147483648 is more than any model has"),
        ({"num_attention_heads": 2**31}, "num_attention_heads=2147483648 is more than any model has"),
        ({"hidden_size": 2**30}, "heads of 178956970 elements"),
        ({"num_hidden_layers": 10**5}, "num_hidden_layers"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok=3 is more than the 2 experts",
        ),
        ({"rope_theta": float("nan")}, "rope_theta=nan must be a finite number above 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf must be a finite number"),
        ({"rope_scaling": [1]}, "rope_scaling=.1. must be an object"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}, "rope_theta": 1.0}, "no rotary embedding of rope_theta=1"),
        ({"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": -1}}, "beta_fast=-1 must be"),
        ({"rope_scaling": {"llama_4_scaling_beta": 0.1}}, "original_max_position_embeddings"),
        ({"model_type": "mistral", "sliding_window": -5}, "sliding_window=-5 must be an integer >= 0"),
        ({"model_type": "mistral", "layer_types": ["full_attention"], "sliding_window": 8}, "each of 3 layers"),
        ({"model_type": "mistral", "layer_types": ["chunked"] * 3, "sliding_window": 8}, "layer_types"),
    ],
)
def test_a_value_that_can_not_be_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        config(**changes)


def test_more_tensors_than_any_model_has() -> None:
    """Layers and experts are within their bounds, and their product is not."""
    many = {"num_hidden_layers": 4096, "num_local_experts": 16384, "num_experts_per_tok": 2}
    with pytest.raises(ModelLoadError, match="more than 8 tensors"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(scope, "_MOST_TENSORS", 8)
        build_model(config(model_type="mixtral", **many), choose_formats("float32", torch.device("cpu")))


def test_gemma_3_caps_no_scores() -> None:
    """Nor does transformers' class, which keeps the number."""
    capped = read_config({**full_config("gemma3_text"), "attn_logit_softcapping": 5.0})
    assert capped.attention_softcap == 0.0  # type: ignore[attr-defined]
    gemma2 = read_config({**full_config("gemma2"), "attn_logit_softcapping": 5.0})
    assert gemma2.attention_softcap == 5.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(("model_type", "is_read"), [("qwen3_next", True), ("qwen3_5_moe_text", False)])
def test_qwen_3_5_always_renormalises(model_type: str, is_read: bool) -> None:
    found = read_config({**full_config(model_type), "norm_topk_prob": False})
    assert found.routing.renormalise is not is_read  # type: ignore[attr-defined]


def test_olmo3_in_the_older_spelling() -> None:
    """A scaling is that of full attention alone; every fourth layer has it."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    config = read_config({**full_config("olmo3"), "rope_parameters": None, "layer_types": None, "rope_scaling": yarn})
    kinds = [config.ropes[index].rope_type for index in config.rope_of_layers]
    assert kinds == ["default", "default", "default", "yarn"] * 8
    assert {rope.theta for rope in config.ropes} == {500_000.0}
