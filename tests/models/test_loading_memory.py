"""Memory of loading: the weights and one tensor, whatever the source, the layout, the format and the division."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from counted_memory import META, CountedMemory, counted
from driver import load, no_progress, source_of
from test_expert_layers import mxfp4
from test_gguf_weights import write_gguf
from test_weight_formats import quantise
from tiny import make_tiny_model, write_tiny_model

from aengine.checkpoint.source import ModelSource
from aengine.errors import ModelLoadError
from aengine.runner.distributed.stage import WHOLE, PipelineStage
from aengine.runner.models import build_model, gguf_names, read_config
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.quantised import faults, fp8
from aengine.runner.weights.quantised import gguf as kept_gguf
from aengine.runner.weights.quantised.gguf import CODED_TYPES
from aengine.runner.weights.sources import random_source
from aengine.runner.weights.sources.gguf_source import GgufMatrices
from aengine.runner.weights.sources.loader import load_weights
from aengine.runner.weights.sources.safetensors_source import READERS

LARGE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 640, "num_hidden_layers": 3}
LARGE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
EXPERTS: dict[str, Any] = {**LARGE, "num_experts": 16, "moe_intermediate_size": 96, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder of a model, written once."""
    made: dict[str, Path] = {}

    def write(arch: str, **fields: Any) -> Path:
        key = f"{arch}{fields}"
        if key not in made:
            made[key] = write_tiny_model(tmp_path_factory.mktemp(arch), arch, max_shard_size="400KB", **fields)
        return made[key]

    return write


def load_counted(
    source: ModelSource,
    monkeypatch: pytest.MonkeyPatch,
    *,
    rank: int = 0,
    size: int = 1,
    divides_experts: bool = False,
    stage: PipelineStage = WHOLE,
    quantization: str = "auto",
) -> tuple[CountedMemory, int, int]:
    """(memory, bytes of the weights, of the largest tensor)."""
    stored = None if source.format == "dummy" else source.hf_config
    config = read_config(source.hf_config).of_rank(size, divides_experts=divides_experts)
    group: Any = SimpleNamespace(rank=rank, size=size)
    with counted(monkeypatch) as memory:
        packed = None
        if quantization == "gguf":
            packed = GgufMatrices.of_file(source.path, gguf_names(config), CODED_TYPES)
        formats = choose_formats("bfloat16", META, stored, packed=packed, quantization=quantization)
        model = build_model(config, formats, group, stage)
        load_weights(model, source, 0, no_progress)
        places = [first for first, *_ in model.weights.places.values()]
        now = memory.now
    sizes = [prod(place.own_shape) * (place.kept or place.dtype).itemsize for place in places]
    assert 0.99 * sum(sizes) <= now <= 1.03 * sum(sizes), f"{now} bytes of {sum(sizes)} are kept"
    return memory, now, max(prod(place.shape) * 2 for place in places)


def check(memory: CountedMemory, weights: int, largest: int) -> None:
    assert memory.most <= weights + largest, (
        f"{memory.most} bytes at most, for weights of {weights} and a largest tensor of {largest}"
    )


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe", "gpt_oss"])
def test_dummy(arch: str, written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_source, "CHUNK", 1000)
    fields = {"llama": {**LARGE, "intermediate_size": 1024}, "qwen3_moe": EXPERTS, "gpt_oss": {}}
    source = source_of(written(arch, **fields[arch]), "dummy")
    check(*load_counted(source, monkeypatch))


def test_dummy_on_a_cpu(written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are made ahead of the threads that put them away, a few each."""
    source, cpu = source_of(written("qwen3_moe", **EXPERTS), "dummy"), torch.device("cpu")
    with counted(monkeypatch, device=cpu) as memory:
        model = build_model(read_config(source.hf_config), choose_formats("float32", cpu))
        before = memory.now
        load_weights(model, source, 0, no_progress)
        sizes = [4 * prod(first.shape) for first, *_ in model.weights.places.values()]
        assert memory.now - before <= 1.01 * sum(sizes)
        expert = 4 * 96 * 128
        assert memory.most - before <= sum(sizes) + 2 * max(sizes) + 4 * torch.get_num_threads() * expert


def test_a_tied_table_is_in_memory_once_on_a_cpu(written: Callable[..., Path]) -> None:
    """Also where it is stored in another dtype than it is computed in."""
    folder = written("qwen3", dtype="float32", **LARGE, tie_word_embeddings=True)
    model: Any = load(source_of(folder), "bfloat16")[0]
    assert model.embed.table.dtype == torch.bfloat16
    assert model.embed.table.data_ptr() == model.lm_head.weight.weight.data_ptr()


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ("llama", LARGE),
        ("qwen3", {**LARGE, "tie_word_embeddings": True}),
        ("qwen3_moe", EXPERTS),
        ("qwen3_5_moe_text", {**EXPERTS, "num_hidden_layers": 4}),
        ("gpt_oss", {"num_local_experts": 16}),
    ],
)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_safetensors(
    arch: str, fields: dict[str, Any], stored: str, written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Separate experts, experts in one tensor, and in one that is transposed; several files are read at once."""
    folder = written(arch, dtype=stored, **fields)
    assert len(list(folder.glob("*.safetensors"))) > 2
    check(*load_counted(source_of(folder), monkeypatch))


@pytest.mark.parametrize("kind", ["int-quantized", "pack-quantized"])
@pytest.mark.parametrize(("arch", "fields"), [("llama", LARGE), ("qwen3_moe", EXPERTS)])
def test_int8(arch: str, fields: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "of_scale", lambda scale: "")  # there are no numbers
    folder = write_tiny_model(tmp_path, arch, **fields)
    quantise(folder, kind, ignored=("mlp.gate$",))
    check(*load_counted(source_of(folder), monkeypatch))


def test_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "of_exponents", lambda scale: "")  # there are no numbers
    folder = write_tiny_model(tmp_path, "gpt_oss", num_local_experts=16)
    mxfp4(folder)
    check(*load_counted(source_of(folder), monkeypatch))


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_gguf(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = dict(LARGE)
    if arch == "qwen3_moe":
        fields |= {"num_experts": 16, "moe_intermediate_size": 64, "norm_topk_prob": True}
    with torch.no_grad():
        write_gguf(tmp_path / "model.gguf", make_tiny_model(arch, **fields), arch, [gguf.GGMLQuantizationType.Q8_0])
    check(*load_counted(source_of(tmp_path / "model.gguf"), monkeypatch))


def test_gguf_as_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these types codes are as large as blocks."""
    monkeypatch.setattr(kept_gguf, "_CODES_AT_ONCE", 2000)
    monkeypatch.setattr(kept_gguf, "_are_numbers", lambda codes: True)  # there are none
    kinds = [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0]
    with torch.no_grad():
        write_gguf(tmp_path / "model.gguf", make_tiny_model("llama", **LARGE), "llama", kinds)
    check(*load_counted(source_of(tmp_path / "model.gguf"), monkeypatch, quantization="gguf"))


@pytest.mark.parametrize(("arch", "fields"), [("llama", LARGE), ("qwen3_moe", EXPERTS)])
def test_made_fp8(
    arch: str, fields: dict[str, Any], written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices that are multiplied together are in 16 bits until all of them have come, for each thread that reads."""
    monkeypatch.setattr(fp8, "_NUMBERS_AT_ONCE", 2000)
    memory, weights, largest = load_counted(source_of(written(arch, **fields)), monkeypatch, quantization="fp8")
    check(memory, weights, READERS * largest)


@pytest.mark.parametrize("divides_experts", [False, True])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_ranks(
    divides_experts: bool, load_format: str, written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes its share and one tensor, which for random weights is a whole one."""
    monkeypatch.setattr(random_source, "CHUNK", 1000)
    for rank in range(2):
        source = source_of(written("qwen3_moe", **EXPERTS), load_format)
        check(*load_counted(source, monkeypatch, rank=rank, size=2, divides_experts=divides_experts))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_stages(load_format: str, written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_source, "CHUNK", 1000)
    for index in range(2):
        stage = PipelineStage(index, 2)
        check(*load_counted(source_of(written("qwen3_moe", **EXPERTS), load_format), monkeypatch, stage=stage))


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_models_of_transformers(arch: str, written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second's experts are joined from matrices of their own in the checkpoint."""
    source = source_of(written(arch, **(EXPERTS if arch == "qwen3_moe" else LARGE)))
    config = read_config(source.hf_config, model_impl="transformers", folder=source.path)
    with counted(monkeypatch) as memory:
        before = memory.now
        model = build_model(config, choose_formats("bfloat16", META, source.hf_config))
        skeleton = memory.now - before  # transformers' own tensors without memory, which are replaced
        assert model.weights.names is not None
        monkeypatch.setattr(model.weights.names, "finish", lambda device: None)  # it computes
        memory.most = memory.now
        load_weights(model, source, 0, no_progress)
        sizes = [p.numel() * p.element_size() for p in dict(model.module.named_parameters()).values()]  # type: ignore[attr-defined]
        assert skeleton >= sum(sizes)
        check(memory, skeleton + sum(sizes), max(sizes))


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


@pytest.mark.extended  # eight seconds for the size alone; `test_safetensors` counts the same by the byte
def test_qwen3_30b_a3b_fits_80_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks as torch's allocator cuts them: its weights are 57 GiB."""
    source = ModelSource("dummy", "/nowhere", "dummy", QWEN3_30B_A3B)
    with counted(monkeypatch, limit=60 * 2**30) as memory:
        model = build_model(read_config(QWEN3_30B_A3B), choose_formats("bfloat16", META))
        load_weights(model, source, 0, no_progress)
        assert 56 * 2**30 < memory.now < memory.most < 57.5 * 2**30
        assert memory.allocator.peak < 58 * 2**30
    with counted(monkeypatch, limit=40 * 2**30), pytest.raises(ModelLoadError, match="do not fit"):
        load_weights(build_model(read_config(QWEN3_30B_A3B), choose_formats("bfloat16", META)), source, 0, no_progress)
