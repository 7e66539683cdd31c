"""Encoders against transformers: hidden states, pooled vectors and heads, of texts of mixed lengths in one batch."""

from __future__ import annotations

import dataclasses
import json
import logging
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError
from aengine.ipc.messages import NewRequest, SchedulerOutput, int32
from aengine.kernels.cpu.compiler import target
from aengine.runner.pooling import encoder_runner
from aengine.runner.pooling.batch import EncoderBatch
from aengine.runner.startup.encoder import LoadedEncoder
from aengine.runner.startup.load import load_model
from aengine.workers.rank import Rank

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}
_BERT = {**_COMMON, "max_position_embeddings": 80}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", _BERT),
    "bert-tanh-gelu": ("Bert", {**_BERT, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "roberta": ("Roberta", {**_BERT, "type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {**_BERT, "type_vocab_size": 1, "pad_token_id": 5}),
    "distilbert": (
        "DistilBert",
        {
            "vocab_size": 96,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 3,
            "n_heads": 4,
            "initializer_range": 0.3,
            "max_position_embeddings": 80,
        },
    ),
    "mpnet": ("MPNet", {**_BERT, "max_position_embeddings": 300, "relative_attention_num_buckets": 32}),
    "nomic_bert": ("NomicBert", {**_COMMON, "max_position_embeddings": 80}),
    "modernbert": (
        "ModernBert",
        {**_COMMON, "local_attention": 16, "max_position_embeddings": 300, "pad_token_id": 0, "norm_bias": True},
    ),
    "modernbert-mean": (
        "ModernBert",
        {
            **_COMMON,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "max_position_embeddings": 300,
            "pad_token_id": 0,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_pooling": "mean",
            "classifier_bias": True,
        },
    ),
}


def write(folder: Path, variant: str, kind: str = "Model", **settings: Any) -> Any:
    """A tiny random model, in a folder."""
    family, values = VARIANTS[variant]
    torch.manual_seed(7)
    config = getattr(tf, f"{family}Config")(**{**values, **settings})
    config._attn_implementation = "eager"
    model = getattr(tf, f"{family}{kind}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def load(folder: Path, **settings: Any) -> LoadedEncoder:
    config = EngineConfig.create(str(folder), {"dtype": "float32", "device": "cpu", "num_threads": 1, **settings})
    rank = Rank(0, device=config.device)
    model = load_model(config, resolve_model(config).to_wire(), rank, lambda *report: None)
    assert isinstance(model, LoadedEncoder)
    return model


def vectors(model: LoadedEncoder, texts: list[list[int]], first: list[int] | None = None) -> np.ndarray:
    """What the runner answers for the texts of one step."""
    runner, _ = model.allocate(model.offer)
    new = [
        NewRequest(
            i,
            int32(ids),
            len(ids),
            0,
            int32(),
            extras={"pooling": [b"", int32([first[i] if first else 0]).tobytes()]},
        )
        for i, ids in enumerate(texts)
    ]
    rows = int32(range(len(texts)))
    runner.execute_model(
        SchedulerOutput(1, new_requests=new, req_idx=rows, num_scheduled_tokens=int32(map(len, texts)))
    )
    output = runner.sample_tokens(None).get()
    assert not output.errors and list(output.token_ids) == [-1] * len(texts)
    assert output.results is not None
    found = dict(output.results.items())
    return np.array([found[i] for i in range(len(texts))])


@pytest.mark.parametrize("size", [16, 8])
def test_embedding_gemma(tmp_path: Path, size: int) -> None:
    """Windows to both sides, two ropes, fewer heads of keys, and dense layers behind the mean."""
    torch.manual_seed(11)
    config = tf.Gemma3TextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=size, sliding_window=12, query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        use_bidirectional_attention=True, max_position_embeddings=128, attn_implementation="eager",
    )  # fmt: skip
    model = tf.Gemma3TextModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((0.3 if "norm" in name else 0.2) * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] == 12  # what it was made of
    texts = some_texts(70)
    expected = expected_mean(model, texts)
    assert np.abs(vectors(load(tmp_path), texts) - expected).max() < 2e-5

    sizes, weights = (32, 64, 24), []
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    for number, (inner, outer) in enumerate(zip(sizes, sizes[1:]), 2):
        folder = tmp_path / f"{number}_Dense"
        folder.mkdir()
        settings = {"in_features": inner, "out_features": outer, "bias": False}
        settings["activation_function"] = "torch.nn.modules.linear.Identity"
        (folder / "config.json").write_text(json.dumps(settings))
        weights.append(torch.randn(outer, inner))
        save_file({"linear.weight": weights[-1]}, folder / "model.safetensors")
        modules.append({"type": "sentence_transformers.models.Dense", "path": folder.name})
    modules.append({"type": "sentence_transformers.models.Normalize", "path": "4_Normalize"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    expected = expected @ weights[0].numpy().T @ weights[1].numpy().T
    found = vectors(load(tmp_path), texts)
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


def some_texts(longest: int = 40) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(6, 96) for _ in range(n)] for n in (3, longest, 17, 17, 1, 29, 17, longest)]


@torch.no_grad()
def expected_mean(model: Any, texts: list[list[int]]) -> np.ndarray:
    states = [model(torch.tensor([ids], device=model.device)).last_hidden_state[0] for ids in texts]
    return np.array([of_text.float().mean(0).cpu().numpy() for of_text in states])


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    texts = some_texts(140 if variant == "mpnet" else 70)  # also past the farthest distance that has its own bias
    expected = expected_mean(write(tmp_path, variant), texts)
    assert np.abs(vectors(load(tmp_path), texts) - expected).max() < 1e-5


@pytest.mark.parametrize("variant", ["bert", "bert-tanh-gelu", "nomic_bert", "modernbert"])
def test_a_text_has_the_same_bits_alone_and_in_a_batch(tmp_path: Path, variant: str) -> None:
    """Of compiled ops: attention has them for heads whose size 16 divides."""
    pytest.importorskip("llvmlite")
    texts = some_texts(70)
    expected = expected_mean(write(tmp_path, variant, num_attention_heads=2), texts)
    loaded = load(tmp_path)
    found = vectors(loaded, texts)
    assert np.abs(found - expected).max() < 1e-5
    for text, own in list(zip(texts, found, strict=True))[:4]:
        assert np.array_equal(vectors(loaded, [text])[0], own)


@pytest.mark.parametrize(
    ("variant", "heads", "logged"),
    [
        ("bert", 2, "the encoder runs as a tape of 21 ops"),
        ("bert", 4, "op by op: attention of heads whose size 16 does not divide"),
        ("mpnet", 2, "op by op: attention with biases of distances"),
    ],
)
def test_layers_are_a_tape(
    tmp_path: Path, variant: str, heads: int, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("llvmlite")
    caplog.set_level(logging.INFO, "aengine.runner")
    write(tmp_path, variant, num_attention_heads=heads)
    texts = some_texts(70)
    expected = vectors(load(tmp_path, enforce_eager=True), texts)
    assert "the encoder runs" not in caplog.text
    assert np.array_equal(vectors(load(tmp_path), texts), expected)
    assert logged in caplog.text


@pytest.mark.parametrize("has_vnni", [True, False])
def test_16_bits(tmp_path: Path, has_vnni: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers, where the processor multiplies them faster, of matrices whose columns 32 divides: not of "down"."""
    pytest.importorskip("llvmlite")
    own = dataclasses.replace(target.host(), has_vnni=has_vnni)
    monkeypatch.setattr(target, "host", lambda: own)
    texts = some_texts(70)
    expected = expected_mean(write(tmp_path, "bert"), texts)
    assert load(tmp_path, dtype="auto").offer["weight_format"] == "float32"
    loaded = load(tmp_path, dtype="float16")
    assert loaded.offer["weight_format"] == ("int16" if has_vnni else "float16")
    assert 1e-6 < np.abs(vectors(loaded, texts) - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_classifier(tmp_path: Path, variant: str) -> None:
    model = write(tmp_path, variant, "ForSequenceClassification", num_labels=3)
    texts = some_texts()
    with torch.no_grad():
        expected = np.array([model(torch.tensor([ids])).logits[0].numpy() for ids in texts])
    loaded = load(tmp_path)
    assert loaded.offer["tasks"] == ["classify"] and loaded.offer["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert np.abs(vectors(loaded, texts) - expected).max() < 2e-5


def test_types_tell_the_parts_of_a_pair(tmp_path: Path) -> None:
    model = write(tmp_path, "bert", "ForSequenceClassification", num_labels=1)
    texts, first = some_texts(), [1, 9, 0, 5, 0, 28, 16, 39]
    with torch.no_grad():
        expected = []
        for ids, n in zip(texts, first, strict=True):
            types = torch.arange(len(ids)) >= (n or len(ids))
            expected.append(model(torch.tensor([ids]), token_type_ids=types.long()[None]).logits[0].numpy())
    assert np.abs(vectors(load(tmp_path), texts, first) - np.array(expected)).max() < 2e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"model_impl": "transformers"},
        {"attention_backend": "triton"},
        {"quantization": "fp8"},
        {"cudagraph_mode": "NONE"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_decoders(tmp_path: Path, settings: dict[str, Any]) -> None:
    write(tmp_path, "bert")
    ((name, value),) = settings.items()
    with pytest.raises(ModelLoadError, match=f"{name}='{value}': it is for decoders: leave it out"):
        load(tmp_path, **settings)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_poolings(tmp_path: Path, pooling: str) -> None:
    model, texts = write(tmp_path, "bert"), some_texts()
    with torch.no_grad():
        states = [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in texts]
    take = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "last": lambda x: x[-1]}[pooling]
    expected = np.array(list(map(take, states)))
    of_no_use: dict[str, Any] = {"swap_space_bytes": 1 << 20, "speculation": "ngram_worker"}
    assert np.abs(vectors(load(tmp_path, pooling=pooling, **of_no_use), texts) - expected).max() < 1e-5


@pytest.mark.parametrize("variant", ["bert", "mpnet", "modernbert"])
def test_padding_within_a_group_changes_nothing(tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU texts of about one length are padded to it."""
    monkeypatch.setattr(encoder_runner, "EncoderBatch", lambda *args, **_: EncoderBatch(*args[:3], tolerance=0.2))
    texts = some_texts(70)
    expected = expected_mean(write(tmp_path, variant), texts)
    assert np.abs(vectors(load(tmp_path), texts) - expected).max() < 1e-5


def test_names_of_a_checkpoint_with_a_head_and_of_an_old_one(tmp_path: Path) -> None:
    model, texts = write(tmp_path, "bert"), some_texts()
    expected, path = expected_mean(model, texts), tmp_path / "model.safetensors"

    def renamed(name: str) -> str:
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return f"bert.{name}"

    save_file({renamed(name): tensor for name, tensor in load_file(path).items()}, path)
    assert np.abs(vectors(load(tmp_path), texts) - expected).max() < 1e-5


@pytest.mark.parametrize("variant", ["bert", "xlm-roberta", "nomic_bert"])
@pytest.mark.parametrize(("kind", "mode"), [(1, "mean"), (2, "cls")])
def test_a_gguf(tmp_path: Path, variant: str, kind: int, mode: str) -> None:
    """As llama.cpp's converter writes them, under the gguf package's own names."""
    model, texts, path = write(tmp_path, variant), some_texts(), tmp_path / "m.gguf"
    config, arch = model.config, gguf.MODEL_ARCH.NOMIC_BERT if variant == "nomic_bert" else gguf.MODEL_ARCH.BERT
    names, writer = gguf.get_tensor_name_map(arch, 3), gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(kind))
    if variant == "nomic_bert":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if name.startswith("pooler"):
            continue
        if name == "embeddings.position_embeddings.weight" and variant != "bert":
            tensor = tensor[1 + config.pad_token_id :]
        stored = names.get_name(name, (".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, tensor.numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with torch.no_grad():
        states = [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in texts]
    expected = np.array([of_text.mean(0) if mode == "mean" else of_text[0] for of_text in states])
    loaded = load(path)
    assert loaded.offer["pooling"] == mode and loaded.offer["is_encoder"]
    assert np.abs(vectors(loaded, texts) - expected).max() < 1e-5


def test_the_first_releases_name_their_settings_otherwise(tmp_path: Path) -> None:
    texts, path = some_texts(), tmp_path / "config.json"
    expected = expected_mean(
        write(tmp_path, "nomic_bert", rope_parameters={"rope_type": "default", "rope_theta": 50.0}), texts
    )
    new = json.loads(path.read_text())
    names = {"n_embd": "hidden_size", "n_inner": "intermediate_size", "n_layer": "num_hidden_layers"}
    names |= {"n_head": "num_attention_heads", "layer_norm_epsilon": "layer_norm_eps"}
    old = {name: new[key] for name, key in names.items()} | {"vocab_size": 96, "model_type": "nomic_bert"}
    old |= {"n_positions": 8192, "rotary_emb_base": 50.0, "activation_function": "swiglu", "prenorm": False}
    path.write_text(json.dumps(old))
    loaded = load(tmp_path)
    assert np.abs(vectors(loaded, texts) - expected).max() < 1e-5
    assert loaded.offer["max_model_len"] == 2048
    path.write_text(json.dumps(old | {"prenorm": True}))
    with pytest.raises(ModelLoadError, match="prenorm=True is not supported; False is"):
        load(tmp_path)
    path.write_text(json.dumps(old | {"hidden_act": "gelu"}))
    with pytest.raises(ModelLoadError, match="hidden_act='gelu' is not supported; 'silu' is"):
        load(tmp_path)


def test_an_unsupported_setting_is_named(tmp_path: Path) -> None:
    write(tmp_path, "bert")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "gelu"', '"hidden_act": "mish"'))
    with pytest.raises(ModelLoadError, match="hidden_act='mish' is not supported"):
        load(tmp_path)


def test_a_text_is_computed_in_one_step(tmp_path: Path) -> None:
    write(tmp_path, "bert")
    assert load(tmp_path, max_num_batched_tokens=32).offer["max_model_len"] == 32
    with pytest.raises(ModelLoadError, match="computes a text in one step"):
        load(tmp_path, max_num_batched_tokens=32, max_model_len=64)
