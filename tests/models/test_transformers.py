"""Families without a file of ours, through transformers' modelling code, in every scenario of an engine."""

from __future__ import annotations

import inspect
import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import load, source_of
from pairs import some
from safetensors.torch import load_file, save_file
from scenarios import Engine, check_scenarios, reference_of
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import VOCAB_SIZE, write_zoo_model

from aengine.errors import ModelLoadError
from aengine.runner.layers.module_experts import run_experts
from aengine.runner.layers.norm import RMSNorm
from aengine.runner.models import read_config
from aengine.runner.models.transformers import TransformersModel
from aengine.runner.models.transformers.attention import listen
from aengine.runner.models.transformers.check import PlainAttention
from aengine.runner.models.transformers.fused import Unusual, read_gated, read_norm
from aengine.runner.models.transformers.mixers import wrap_mixers
from aengine.runner.models.transformers.survey import trunk_inputs

MODELS: dict[str, dict[str, Any]] = {
    "olmo3": {},  # windows beside full attention, norms after the layers
    "smollm3": {},  # layers without rotary embedding
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.7},
    "cohere2": {"tie_word_embeddings": True},  # a parallel layer, a scale of the logits
    "gpt_neox": {},  # an old decoder, with learned biases and another name for everything
    "gpt2": {},  # learned positions, transposed matrices
    "phi": {},  # biases everywhere, a partial rotary embedding
    "stablelm": {},  # parallel residuals
    "starcoder2": {},
    "olmo2": {},  # norms of the whole q and k
    "deepseek_v3": {},  # latent attention, expanded; experts in groups
    "minicpm3": {},  # latent attention, scaled residuals
    "qwen3_moe": {},  # experts
    "mixtral": {},
    "gpt_oss": {},  # experts with transposed matrices, biases and a gate of their own; sinks
    "glm4_moe": {},  # experts beside a shared one
    "phimoe": {},  # a window that only its masks have; experts that count by jumps
    "lfm2": {},  # short convolutions
    "qwen3_next": {},  # gated delta net, experts
    "nemotron_h": {},  # Mamba 2, experts
    "mamba": {},  # no attention at all, and states that take no chunks
}


KEPT = ("gpt_neox", "gpt2", "deepseek_v3", "gpt_oss", "qwen3_next", "nemotron_h", "mamba")
"""One of each way to attend, to normalise, to choose experts and to keep states; phimoe is in `test_longrope`."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", some(MODELS, *KEPT))
def test_every_scenario(model_type: str, tmp_path: Path) -> None:
    reference = write_zoo_model(tmp_path, model_type, **MODELS[model_type])
    engine = check_scenarios(tmp_path, reference, model_impl="transformers")
    assert engine.offer["model_impl"] == "transformers" and engine.offer["why_not_native"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["phimoe", "llama"])  # the first in a way of its own
def test_longrope(model_type: str, tmp_path: Path) -> None:
    """Each request has the frequencies of its own length, whatever is beside it; test_phi3.py has more."""
    border = 32
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": border}
    rope |= {"short_factor": [1.1, 1.2, 1.3, 1.4], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    rope |= {"short_mscale": 1.2, "long_mscale": 1.4}
    logits = reference_of(write_zoo_model(tmp_path, model_type, rope_parameters=rope))

    def by_length(token_ids: torch.Tensor) -> torch.Tensor:
        return torch.cat((logits(token_ids[:border]), logits(token_ids)[border:]))

    engine = check_scenarios(tmp_path, by_length, model_impl="transformers")
    assert engine.offer["rope_border"] == border


FUSED = {
    "seed_oss": {"layers": 3, "feed_forward": 3},
    "smollm3": {"layers": 3, "feed_forward": 3},  # one of them without rotary embedding
    "qwen3_moe": {"layers": 3, "feed_forward": 0},  # norms of q and k; experts stay modules
    "minimax_m2": {"layers": 3, "feed_forward": 0},  # norms of the whole q and k
    "flex_olmo": {"layers": 3, "feed_forward": 0},  # norms after the layers
    "kolibri1": {"layers": 3, "feed_forward": 0},  # norms before and after
    "exaone_moe": {"layers": 3, "feed_forward": 1},  # layers without rotary embedding
    "jais2": {"layers": 3, "feed_forward": 0},  # layer norms, biases, no gate
    "glm": {"layers": 3, "feed_forward": 3},  # packed matrices; neighbours turn together, in a part of each head
    "helium": {"layers": 3, "feed_forward": 3},
    "phimoe": {"layers": 0, "feed_forward": 0},  # a rotary embedding of its own
    "nemotron": {"layers": 0, "feed_forward": 0},
    "gpt2": {"layers": 0, "feed_forward": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", some(FUSED, "smollm3", "qwen3_moe", "minimax_m2", "exaone_moe", "jais2", "glm", "phimoe", "gpt2")
)
def test_layers_of_the_usual_shape_are_ours(model_type: str, tmp_path: Path) -> None:
    """The scenarios compare their tokens; some of these models are in none of the other tests."""
    reference = write_zoo_model(
        tmp_path, model_type, **({"no_rope_layer_interval": 2} if model_type == "smollm3" else {})
    )
    assert Engine(tmp_path, model_impl="transformers").offer["fused"] == FUSED[model_type]
    if model_type not in MODELS:
        check_scenarios(tmp_path, reference, model_impl="transformers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "wanted"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")])
def test_activations_are_told_apart(dtype: torch.dtype, name: str, wanted: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

    def read(activation: str) -> Any:
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        return read_gated(LlamaMLP(LlamaConfig(**sizes, hidden_act=activation)).to(dtype))

    assert read(name).activation == wanted
    assert read("relu") is None


def test_norms_are_told_apart() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    assert isinstance(read_norm(torch.nn.LayerNorm(8)), torch.nn.LayerNorm)
    assert isinstance(read_norm(LlamaRMSNorm(8)), RMSNorm)
    for norm in (GemmaRMSNorm(8), torch.nn.GroupNorm(2, 8), torch.nn.Sequential()):
        with pytest.raises(Unusual):
            read_norm(norm)


@pytest.mark.parametrize(
    "name", ["SeedOssRMSNorm", "SeedOssRotaryEmbedding", "SeedOssAttention", "apply_rotary_pos_emb"]
)
def test_a_part_that_differs_for_numbers_that_nobody_tries_stays_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.seed_oss import modeling_seed_oss

    part = getattr(modeling_seed_oss, name)
    original = part.forward if isinstance(part, type) else part

    def clamped(*args: Any, **options: Any) -> Any:
        out = original(*args, **options)
        first = out[0] if isinstance(out, tuple) else out
        return (first.clamp(max=1e6), *out[1:]) if isinstance(out, tuple) else first.clamp(max=1e6)

    if isinstance(part, type):
        monkeypatch.setattr(part, "forward", clamped)
    else:
        monkeypatch.setattr(modeling_seed_oss, name, clamped)
    write_zoo_model(tmp_path, "seed_oss")
    assert Engine(tmp_path, model_impl="transformers").offer["fused"]["layers"] == 0


def test_a_rotary_embedding_of_other_frequencies_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.seed_oss.modeling_seed_oss import SeedOssRotaryEmbedding

    rope = SeedOssRotaryEmbedding.compute_default_rope_parameters
    other = staticmethod(lambda *args: (rope(*args)[0] * 1.001, 1.0))
    monkeypatch.setattr(SeedOssRotaryEmbedding, "compute_default_rope_parameters", other)
    write_zoo_model(tmp_path, "seed_oss")
    assert Engine(tmp_path, model_impl="transformers").offer["fused"]["layers"] == 0


def test_a_layer_that_does_more_than_its_parts_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules have the usual names and types, and its code multiplies the residual stream."""
    from transformers.models.seed_oss.modeling_seed_oss import SeedOssDecoderLayer

    forward = SeedOssDecoderLayer.forward
    monkeypatch.setattr(SeedOssDecoderLayer, "forward", lambda self, *a, **how: 1.1 * forward(self, *a, **how))
    reference = write_zoo_model(tmp_path, "seed_oss")
    engine = check_scenarios(tmp_path, reference, model_impl="transformers")
    assert engine.offer["fused"] == {"layers": 0, "feed_forward": 0}


@pytest.mark.parametrize(
    ("model_type", "dtype", "fields", "layers"),
    [
        ("olmoe", "float32", {"clip_qkv": 8.0}, 0),  # which none of the tokens reaches on which layers are compared
        ("olmoe", "float32", {"clip_qkv": None}, 3),
        ("granite", "bfloat16", {"residual_multiplier": 0.96}, 0),  # less than bfloat16 rounds a layer's output
        ("flex_olmo", "bfloat16", {}, 3),  # its cosines and sines are in float32
    ],
)
def test_a_layer_that_differs_for_some_values_or_by_a_little_stays_as_it_is(
    model_type: str, dtype: str, fields: dict[str, Any], layers: int, tmp_path: Path
) -> None:
    write_zoo_model(tmp_path, model_type, **fields)
    assert Engine(tmp_path, model_impl="transformers", dtype=dtype).offer["fused"]["layers"] == layers


def test_a_native_family_too_when_asked_for(tmp_path: Path) -> None:
    reference = write_zoo_model(tmp_path, "qwen3", tie_word_embeddings=True)
    engine = check_scenarios(tmp_path, reference, model_impl="transformers")
    assert engine.offer["why_not_native"] == "model_impl='transformers' was asked for"


@pytest.mark.parametrize(
    ("model_type", "key"), [("phi", "qk_layernorm"), ("phi", "tie_word_embeddings"), ("stablelm", "qk_layernorm")]
)
def test_a_setting_that_only_transformers_has(model_type: str, key: str, tmp_path: Path) -> None:
    write_zoo_model(tmp_path, model_type, **{key: True})
    settings = json.loads((tmp_path / "config.json").read_text())
    config = read_config(settings)
    assert config.implementation == "transformers" and key in config.why_not_native
    with pytest.raises(ModelLoadError, match=f"{key}: .* computed by transformers' code only"):
        read_config(settings, model_impl="native")


def test_a_model_that_does_more_between_tokens_is_refused(tmp_path: Path) -> None:
    """MiniMax's linear attention keeps its state in a cache of its own."""
    write_zoo_model(tmp_path, "minimax")
    with pytest.raises(ModelLoadError, match="in a batch its logits are others than those of each sequence alone"):
        check_scenarios(tmp_path, lambda ids: ids)


class NoReads(TorchDispatchMode):
    """Fails on every op that needs a tensor's values on the host: a CUDA graph can't have one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model_type", ["olmo", "gpt2"])
def test_a_decode_reads_nothing_from_the_device(model_type: str, tmp_path: Path) -> None:
    write_zoo_model(tmp_path, model_type)
    model, _ = load(source_of(tmp_path))
    assert isinstance(model, TransformersModel)
    ids, positions = torch.tensor([5, 7]), torch.zeros(2, dtype=torch.int64)
    listen(model.module, PlainAttention(model._layers, positions, ropes=model.config.ropes))
    with NoReads(), torch.inference_mode():
        hidden = model._trunk(**trunk_inputs(model._trunk, ids[None], positions[None])).last_hidden_state[0]
        assert model.compute_logits(hidden).shape == (2, VOCAB_SIZE)


def test_a_tensor_is_missing(tmp_path: Path) -> None:
    write_zoo_model(tmp_path, "smollm3")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"lacks a tensor of the model: model\.layers\.1\.mlp\.up_proj\.weight"):
        check_scenarios(tmp_path, lambda ids: ids)


def test_tensors_of_another_config(tmp_path: Path) -> None:
    write_zoo_model(tmp_path, "smollm3")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 64}))
    with pytest.raises(ModelLoadError, match=r"has the shape \[48, 80\], but by the config it is \[48, 64\]"):
        check_scenarios(tmp_path, lambda ids: ids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "no_such_model"}, "transformers .* does not know it either"),
        ({"model_type": "no_such_model", "auto_map": {"AutoConfig": "a.B"}}, "trust_remote_code=True"),
        ({"model_type": "t5"}, "has no causal language model"),
        ({"model_type": "bert", "num_hidden_layers": 1}, "attends to later tokens"),
        ({"model_type": "bloom", "n_layer": 1}, "does not go through AttentionInterface"),
        ({"model_type": "olmo", "gguf_architecture": "olmo"}, "'olmo' are not read: .*give the folder or hub id"),
        ({"model_type": 3}, "must be a string"),
    ],
    ids=["unknown", "remote", "encoder-decoder", "encoder", "alibi", "gguf", "number"],
)
def test_what_neither_path_has(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_config(settings)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"])
def test_experts_go_through_our_products(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(module: Any, *args: Any) -> Any:
        calls.append(type(module).__name__)
        return run_experts(module, *args)

    monkeypatch.setattr("aengine.runner.models.transformers.attention.run_experts", counted)
    write_zoo_model(tmp_path, model_type)
    Engine(tmp_path, model_impl="transformers")  # compares logits with those of transformers
    assert calls


MODELLING = """
from transformers import LlamaConfig, LlamaForCausalLM


class HomeMadeConfig(LlamaConfig):
    model_type = "home_made"


class HomeMadeForCausalLM(LlamaForCausalLM):
    config_class = HomeMadeConfig
"""


@pytest.fixture
def remote_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """A model whose modelling code lies beside its weights, and transformers' reading of the same weights."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    folder = tmp_path / "home-made"
    reference = write_zoo_model(folder, "llama")
    path = folder / "config.json"
    names = {"AutoConfig": "modelling.HomeMadeConfig", "AutoModelForCausalLM": "modelling.HomeMadeForCausalLM"}
    settings = {"model_type": "home_made", "architectures": ["HomeMadeForCausalLM"], "auto_map": names}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    (folder / "modelling.py").write_text(MODELLING)
    return folder, reference


def test_code_beside_the_weights_runs_when_asked_for(remote_model: tuple[Path, Any]) -> None:
    engine = check_scenarios(*remote_model, trust_remote_code=True)
    assert engine.offer["model_impl"] == "transformers"  # which alone knows neither the config nor the class


def test_code_beside_the_weights_does_not_run_else(remote_model: tuple[Path, Any]) -> None:
    folder, reference = remote_model
    (folder / "modelling.py").write_text("raise AssertionError('this ran')")
    with pytest.raises(ModelLoadError, match="give trust_remote_code=True"):
        check_scenarios(folder, reference)


@pytest.mark.parametrize("kind", ["AutoConfig", "AutoModelForCausalLM"])
def test_code_of_another_repository_does_not_run(remote_model: tuple[Path, Any], kind: str) -> None:
    folder, reference = remote_model
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    settings["auto_map"][kind] = f"somebody/else--{settings['auto_map'][kind]}"
    path.write_text(json.dumps(settings))
    with pytest.raises(ModelLoadError, match="code of another repository .'somebody/else--modelling"):
        check_scenarios(folder, reference, trust_remote_code=True)


def test_transformers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("aengine.runner.models.transformers.library.version", missing)
    with pytest.raises(ModelLoadError, match=r"transformers is not installed: pip install 'transformers>=5\.17'"):
        read_config({"model_type": "olmo"})


def test_transformers_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.runner.models.transformers.library.version", lambda name: "5.9.1")
    with pytest.raises(ModelLoadError, match=r"transformers 5\.9\.1 is too old, 5\.17 is needed"):
        read_config({"model_type": "olmo"})


def test_nothing_of_torch_is_changed(tmp_path: Path) -> None:
    before = torch.nn.Module.register_parameter, torch.get_default_dtype()
    write_zoo_model(tmp_path, "smollm3")
    read_config(json.loads((tmp_path / "config.json").read_text()))
    assert (torch.nn.Module.register_parameter, torch.get_default_dtype()) == before


def test_the_text_of_a_class_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each of its modules, as `inspect` parses the whole file for it."""

    class Layer(torch.nn.Linear):
        pass

    read: list[Any] = []
    monkeypatch.setattr(inspect, "getsource", lambda code: read.append(code) or "")
    for _ in range(2):
        wrap_mixers(torch.nn.Sequential(Layer(1, 1), Layer(1, 1)))
    assert read == [Layer]
