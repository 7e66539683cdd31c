"""Decoders without an output matrix: with a head that classifies texts, or with nothing, against transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file, save_file
from test_gguf_weights import SIZES, write_gguf
from tiny import VOCAB_SIZE, make_tiny_model
from zoo import write_zoo_model

from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError
from aengine.ipc.messages import NewRequest, SchedulerOutput, int32
from aengine.runner.startup.load import LocalModel, load_model
from aengine.workers.rank import Rank


def load(folder: Path, **settings: Any) -> LocalModel:
    known = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 64, "block_size": 4}
    config = EngineConfig.create(str(folder), {**known, "kv_cache_memory_bytes": 1 << 22, **settings})
    model = load_model(config, resolve_model(config).to_wire(), Rank(0, device=config.device), lambda *report: None)
    assert isinstance(model, LocalModel)
    return model


def vectors(model: LocalModel, prompts: list[list[int]]) -> np.ndarray:
    """What the runner answers for the prompts of one step."""
    runner, _ = model.allocate({name: model.offer[name] for name in ("num_blocks", "max_model_len")})
    blocks = -(-max(map(len, prompts)) // 4)
    new = [
        NewRequest(
            i,
            int32(ids),
            len(ids),
            0,
            int32(range(1 + i * blocks, 1 + (i + 1) * blocks)),
            extras={"pooling": [b"", bytes(4)]},
        )
        for i, ids in enumerate(prompts)
    ]
    rows = int32(range(len(prompts)))
    runner.execute_model(
        SchedulerOutput(1, new_requests=new, req_idx=rows, num_scheduled_tokens=int32(map(len, prompts)))
    )
    output = runner.sample_tokens(None).get()
    assert not output.errors and output.results is not None
    found = dict(output.results.items())
    return np.array([found[i] for i in range(len(prompts))])


@pytest.fixture
def prompts() -> list[list[int]]:
    rng = random.Random(9)
    return [[rng.randrange(1, VOCAB_SIZE) for _ in range(length)] for length in (1, 7, 18)]


@pytest.mark.parametrize("key", [True, None])  # None: the class says that they are tied
@pytest.mark.parametrize("row", [0, VOCAB_SIZE - 1, None])
def test_an_output_matrix_with_values_of_its_own_is_taken(key: bool | None, row: int | None, tmp_path: Path) -> None:
    """Whatever config.json says, as transformers does; a copy of the embedding (``row`` None) is none."""
    write_zoo_model(tmp_path, "starcoder2", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if row is not None:
        tensors["lm_head.weight"][row] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    settings = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": key}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    model = load(tmp_path)
    reference = tf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    hidden = torch.eye(2, reference.config.hidden_size)
    with torch.no_grad():
        wanted = reference.lm_head(reference.model.norm(hidden))
    torch.testing.assert_close(model._setup.model.compute_logits(hidden), wanted)


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("arch", ["qwen3", "qwen2", "llama", "mistral", "gemma2"])
def test_a_head_on_the_last_token(arch: str, num_labels: int, prompts: list[list[int]], tmp_path: Path) -> None:
    base = make_tiny_model(arch, seed=4, tie_word_embeddings=False)
    name = type(base).__name__.replace("ForCausalLM", "ForSequenceClassification")
    config = base.config
    config.num_labels, config.pad_token_id, config.dtype = num_labels, 0, "float32"
    model = getattr(tf, name)(config).eval()
    model.model.load_state_dict(base.model.state_dict())
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = np.array([model(torch.tensor([ids])).logits[0].numpy() for ids in prompts])
    loaded = load(tmp_path)
    assert loaded.offer["tasks"] == ["classify"]
    assert loaded.offer["labels"] == [f"LABEL_{i}" for i in range(num_labels)]
    assert loaded.offer["asks_yes_no"] == (arch == "qwen3" and num_labels == 1)
    assert np.abs(vectors(loaded, prompts) - expected).max() < 1e-4


def test_a_checkpoint_of_the_model_below_the_head(prompts: list[list[int]], tmp_path: Path) -> None:
    """As sentence-transformers writes Qwen3-Embedding: no prefix "model.", no output matrix."""
    model = make_tiny_model("qwen3", seed=5, tie_word_embeddings=False)
    model.model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = np.array([model.model(torch.tensor([ids])).last_hidden_state[0, -1].numpy() for ids in prompts])
    loaded = load(tmp_path, pooling="last")
    assert loaded.offer["tasks"] == ["embed"]
    assert np.abs(vectors(loaded, prompts) - expected).max() < 1e-4
    assert load(tmp_path).offer["tasks"] == []


def test_a_tied_model_without_a_prefix_generates(tmp_path: Path) -> None:
    model = make_tiny_model("qwen3", seed=5, tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    assert load(tmp_path).offer["tasks"] == ["generate"]


def test_a_head_that_does_not_fit_is_named(tmp_path: Path) -> None:
    base = make_tiny_model("llama")
    base.config.num_labels, base.config.pad_token_id = 2, 0
    tf.LlamaForSequenceClassification(base.config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "score.weight": torch.zeros(3, base.config.hidden_size)}, path)
    with pytest.raises(ModelLoadError, match=r"score.weight is \[3, \d+\], and by config.json it is \[2, \d+\]"):
        load(tmp_path)
    del tensors["score.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelLoadError, match="lacks the tensor 'score.weight'"):
        load(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_reranker_has_the_rows_of_yes_and_no(tied: bool, prompts: list[list[int]], tmp_path: Path) -> None:
    """As llama.cpp's converter makes Qwen3-Reranker: without the output matrix, which is not the embeddings then."""
    model = make_tiny_model("qwen3", seed=5, tie_word_embeddings=tied, **SIZES)
    yes, no = 7, 9
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0, -1] for ids in prompts]
        expected = np.array([[float(found[yes] - found[no])] for found in logits])
        rows = model.lm_head.weight[[yes, no]].numpy()
    write_gguf(tmp_path / "m.gguf", model, "qwen3", [Q.F32], rerank_rows=rows)
    loaded = load(tmp_path / "m.gguf")
    assert loaded.offer["tasks"] == ["classify"] and loaded.offer["asks_yes_no"]
    assert np.abs(vectors(loaded, prompts) - expected).max() < 1e-4


def test_a_gguf_head_of_other_classes_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model("qwen3", seed=5, **SIZES)
    write_gguf(tmp_path / "m.gguf", model, "qwen3", [Q.F32], rerank_rows=np.zeros((3, 256), np.float32))
    with pytest.raises(ModelLoadError, match=r"has a head of the classes \['a', 'b', 'c'\].*hub id of the checkpoint"):
        load(tmp_path / "m.gguf")
