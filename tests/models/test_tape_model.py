"""A decoder that runs as a tape of compiled ops, over a GGUF's own codes, on a CPU."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file, save_file
from scenarios import PROMPTS, Engine, check_exactly, check_scenarios
from test_gguf_weights import SIZES, write_gguf
from tiny import load_reference, make_tiny_model, write_tiny_model

from aengine.runner.graphs.tape_model import TapeModel
from aengine.runner.models.llama import Llama
from aengine.runner.speculation.model_proposer import KeepingLayer
from aengine.runner.startup import load, setup
from aengine.runner.startup.estimate import estimate
from aengine.telemetry.summary import summary_of

pytest.importorskip("llvmlite")

SIZES_OF_HEADS = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}


@pytest.fixture(scope="module")
def engine(short_model: str) -> Iterator[Engine]:
    yield Engine(Path(short_model), dtype="auto")


def test_a_gguf_runs_as_a_tape(engine: Engine) -> None:
    engine.begin()
    assert isinstance(engine.runner.model, TapeModel)
    assert engine.model.offer["weight_format"] == "q4_1, q8_0"
    assert engine.model.offer["activations"] == "int16 beside codes, else float32"
    assert "dtype=float32 activations=int16 weights=q4_1,q8_0 " in summary_of(engine.model.offer)


def test_tokens_are_the_same_alone_batched_in_chunks_and_after_a_preemption(engine: Engine) -> None:
    engine.begin()
    check_exactly(engine)


def test_logits_are_near_those_of_the_numbers(engine: Engine, short_model: str) -> None:
    """Activations have 16 bits, with a scale for each 32."""
    exact = Engine(Path(short_model), dtype="float32", enforce_eager=True)
    assert exact.model.offer["activations"] == "float32"
    found = []
    for one in (exact, engine):
        one.begin()
        one.generate([PROMPTS[-1]], max_tokens=1)
        hidden = torch.randn(8, 576, generator=torch.Generator().manual_seed(1))
        found.append(one.runner.model.compute_logits(hidden))
    error = (found[0] - found[1]).norm() / found[0].norm()
    assert error < 0.01


def test_the_head_is_on_a_tape_and_has_the_same_bits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.begin()
    model = engine.runner.model
    hidden = torch.randn(engine.config.max_num_seqs + 1, 576)
    more = model.compute_logits(hidden)  # than a step without drafts has: op by op
    monkeypatch.setattr(Llama, "compute_logits", None)
    for n in (3, 1):
        assert torch.equal(model.compute_logits(hidden[:n]), more[:n])


def test_blocks_are_not_cleared_since_nothing_unwritten_is_looked_at(engine: Engine) -> None:
    engine.begin()
    expected = engine.generate(PROMPTS)
    engine.begin()
    cache: Any = engine.runner.kv_memory
    for layer in cache.layers.values():
        layer.cache.fill_(torch.nan)
    assert engine.generate(PROMPTS) == expected
    assert not cache.clears_blocks


def test_why_a_model_runs_op_by_op_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aengine.runner")
    engine = Engine(write_tiny_model(tmp_path, "llama", head_dim=8), dtype="auto")
    engine.begin()
    assert not isinstance(engine.runner.model, TapeModel)
    assert "the model runs op by op: attention of 6 heads over 2 of 8" in caplog.text
    assert len(engine.generate(PROMPTS[:2])[0]) > 0


HEADS = {"num_key_value_heads": 2, **SIZES_OF_HEADS}


@pytest.mark.parametrize(
    ("arch", "fields"),
    [("llama", HEADS), ("llama", {"head_dim": 8}), ("olmo2", HEADS), ("lfm2", HEADS), ("qwen3_next", {"head_dim": 16})],
    ids=["llama", "small heads", "olmo2", "lfm2", "qwen3_next"],
)
def test_what_is_estimated_of_a_model_that_is_not_loaded(arch: str, fields: dict[str, Any], tmp_path: Path) -> None:
    engine = Engine(write_tiny_model(tmp_path, arch, **fields), dtype="auto")
    engine.begin()
    told = estimate(engine.config)["formats"]["attention"]
    assert told == ("compiled kernels" if isinstance(engine.runner.model, TapeModel) else "torch")


def test_keys_and_values_in_fp8_are_the_tapes_too(short_model: str) -> None:
    """A step of torch's would attend to a prompt's own keys before they are rounded, and so by how it is cut."""
    engine = Engine(Path(short_model), dtype="auto", kv_cache_dtype="fp8")
    engine.begin()
    assert isinstance(engine.runner.model, TapeModel) and engine.offer["kv_cache_scales"] == "calibrated"
    check_exactly(engine)


def test_streams_that_a_head_reads_are_kept_by_the_tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path, "llama", num_key_value_heads=2, **SIZES_OF_HEADS)
    kept, build_model = dict[int, torch.Tensor](), load.build_model

    def built(*args: Any) -> Any:
        model: Any = build_model(*args)
        model.layers[2] = KeepingLayer(model, 2, kept)
        return model

    monkeypatch.setattr(load, "build_model", built)
    engine = Engine(folder, dtype="auto")
    engine.begin()
    assert isinstance(engine.runner.model, TapeModel)
    prompt = PROMPTS[-1]
    engine.generate([prompt], max_tokens=1)
    wanted = load_reference(folder, "llama")(torch.tensor([prompt]), output_hidden_states=True).hidden_states[2][0]
    torch.testing.assert_close(kept[2][: len(prompt)], wanted, rtol=0, atol=0.01 * float(wanted.abs().max()))


def test_matrices_of_several_types_that_are_multiplied_together_are_on_the_tape(tmp_path: Path) -> None:
    """As in most files: v in more bits than q and k."""
    path, model = tmp_path / "model.gguf", make_tiny_model("qwen2", num_key_value_heads=2, **SIZES_OF_HEADS)
    write_gguf(path, model, "qwen2", [Q.Q4_0, Q.Q8_0, Q.F16])
    engine = check_scenarios(path, model.float())
    assert isinstance(engine.runner.model, TapeModel)
    engine = check_scenarios(path, model.float(), quantization="gguf")
    assert isinstance(engine.runner.model, TapeModel)


@pytest.mark.parametrize(
    ("arch", "sizes"),
    [("phi", {"hidden_size": 96}), ("cohere2", {"head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2})],
)
def test_layers_with_norms_that_have_a_mean_are_on_the_tape(arch: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    write_tiny_model(tmp_path, arch, seed=7, **sizes)
    engine = check_scenarios(tmp_path, load_reference(tmp_path, arch))
    assert isinstance(engine.runner.model, TapeModel)


@pytest.mark.parametrize("fields", [{"layer_types": ["conv", "full_attention", "conv"]}, {"conv_bias": True}])
def test_short_convolutions_are_on_the_tape(fields: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 1, "block_multiple_of": 16, "full_attn_idxs": [1]}
    write_tiny_model(tmp_path, "lfm2", seed=7, **sizes, **fields)
    engine = check_scenarios(tmp_path, load_reference(tmp_path, "lfm2"))
    assert isinstance(engine.runner.model, TapeModel)


def test_weights_of_other_numbers_are_loaded_again_into_what_the_tape_reads(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    first = write_tiny_model(tmp_path / "first", "llama", dtype="bfloat16", **sizes)
    second = write_tiny_model(tmp_path / "second", "llama", seed=1, dtype="bfloat16", **sizes)
    same_in_float32 = Path(shutil.copytree(second, tmp_path / "float32")) / "model.safetensors"
    save_file({name: tensor.float() for name, tensor in load_file(same_in_float32).items()}, same_in_float32)
    wanted = Engine(second, dtype="auto")
    wanted.begin()
    engine = Engine(first, dtype="auto")
    engine.begin()
    assert isinstance(engine.runner.model, TapeModel)
    engine.model.reload_weights(str(same_in_float32.parent))
    assert engine.generate(PROMPTS) == wanted.generate(PROMPTS)


def test_the_largest_steps_are_the_tapes_too(short_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Op by op attention has other bits: a request's tokens would follow from how its prompt is cut."""
    monkeypatch.setattr(setup, "MAX_GRAPH_TOKENS", 16)
    engine = Engine(Path(short_model), dtype="auto", max_num_batched_tokens=64)
    engine.begin(max_num_batched_tokens=64)
    monkeypatch.setattr(Llama, "forward", None)
    assert len(engine.generate(PROMPTS[-1:])[0]) > 0
