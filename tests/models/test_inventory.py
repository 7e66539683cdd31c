"""What a model's tensors became, as it is told, is what is in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import CPU, build, load, source_of
from gguf import GGMLQuantizationType as Q
from test_expert_layers import mxfp4
from test_fp8_weights import write_quantised
from test_gguf_weights import SIZES, write_gguf
from test_group_weights import KINDS
from test_group_weights import write as write_groups
from test_weight_formats import quantise
from tiny import make_tiny_model

from aengine.kernels.cpu.compiler.target import unavailable
from aengine.runner.startup.estimate import tensors_of
from aengine.runner.weights.float16_cpu import float16_plan, has_fbgemm
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.inventory import TensorsOfAKind, _bytes_of_codes, _tensors, line_of
from aengine.runner.weights.sources.gguf_source import GgufMatrices

TinyModel = Callable[..., Path]


def told(groups: list[TensorsOfAKind]) -> dict[str, str]:
    return {group.tensors: group.format for group in groups}


def check_bytes(model: Any, groups: list[TensorsOfAKind]) -> None:
    """They are told before anything is loaded, and are there afterwards."""
    parts = [vars(model)[name] for name in ("embed", "layers", "norm", "lm_head")]
    found = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(parts)}
    assert sum(group.bytes for group in groups) == pytest.approx(sum(found.values()), rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_plain_numbers(tied: bool, tiny_model: TinyModel) -> None:
    source = source_of(tiny_model("llama", **SIZES, tie_word_embeddings=tied))
    groups = tensors_of(build(source, "bfloat16"), source)
    head = {"embeddings and head": "bfloat16"} if tied else {"embeddings": "bfloat16", "head": "bfloat16"}
    assert told(groups) == {"attention and MLP": "bfloat16", "norms": "", **head}
    assert sum(group.bytes_per_step for group in groups) == sum(g.bytes for g in groups if g.tensors != "embeddings")
    check_bytes(load(source, "bfloat16")[0], groups)


@pytest.mark.skipif(not has_fbgemm(), reason="this CPU has no packed float16")
def test_float16_on_a_cpu(tiny_model: TinyModel) -> None:
    """The head is packed beside the table, and a step reads one of them."""
    source = source_of(tiny_model("llama", **SIZES, tie_word_embeddings=True))
    (table,) = (g for g in tensors_of(build(source, "auto"), source) if g.tensors == "embeddings and head")
    assert table.bytes == table.bytes_per_step * (2 if float16_plan().large is None else 3)


def quantised_int8(folder: Path) -> None:
    quantise(folder, "pack-quantized", ignored=("mlp.gate$",))


@pytest.mark.parametrize(
    ("arch", "write", "kind", "form"),
    [
        ("llama", quantised_int8, "attention and MLP", "int8 as codes"),
        ("qwen3_moe", quantised_int8, "experts", "int8 as codes"),
        ("llama", lambda folder: write_quantised(folder, "channel"), "attention and MLP", "fp8 -> float32"),
        ("gpt_oss", mxfp4, "experts", "mxfp4 -> float32"),
        ("llama", lambda folder: write_groups(folder, "gptq"), "attention and MLP", "gptq -> float32"),
        ("llama", lambda folder: write_groups(folder, "nvfp4"), "attention and MLP", "nvfp4 -> float32"),
    ],
    ids=["int8", "int8 experts", "fp8", "mxfp4", "gptq", "nvfp4"],
)
def test_quantised(
    arch: str, write: Callable[[Path], Any], kind: str, form: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    fields = SIZES if arch == "llama" else {}
    folder = Path(shutil.copytree(tiny_model(arch, **fields), tmp_path / "model"))
    write(folder)
    source = source_of(folder)
    groups = tensors_of(build(source), source)
    assert told(groups)[kind].startswith(form)
    experts = [group for group in groups if group.tensors == "experts"]
    assert all(0 < group.bytes_per_step < group.bytes for group in experts)
    if arch == "llama":
        check_bytes(load(source)[0], groups)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"quant_method": "gptq", "group_size": 24}, float("inf")),
        ({"quant_method": "fp8", "weight_block_size": [24, 24]}, 4.0),
    ],
    ids=["gptq", "fp8"],
)
def test_groups_that_divide_no_power_of_two(config: dict[str, Any], size: float) -> None:
    """They become float32; of FP8 a small matrix does, too, which does not fill its last blocks."""
    formats = choose_formats("float32", CPU, {"quantization_config": config}, stored=["a.qweight"])
    assert formats.of("a") != formats.plain
    assert _bytes_of_codes(formats.of("a"), False, formats) == size


@pytest.mark.skipif(unavailable() is not None, reason="no compiled kernels")
@pytest.mark.parametrize("kind", ["gptq", "gptq, symmetric", "gptq 8", "gptq 8, symmetric", "gptq_v2", "nvfp4", "awq"])
def test_codes_of_a_cpu_take_the_bytes_that_are_told(kind: str) -> None:
    """Those of a checkpoint, whose scales and order of columns are not zeros."""
    write, config = KINDS[kind]
    settings = {"quantization_config": config}
    formats = choose_formats("auto", CPU, settings, stored=["a.qweight"], is_compiled=True)
    form = formats.of("a")
    tensors, _ = write("a", torch.randn(256, 1024, generator=torch.Generator().manual_seed(0)))
    own = {}
    for one in form.tensors(256, 1024, False):
        tensor = tensors[f"a.{one.suffix}"]
        own[one.suffix] = tensor.expand(256, 1) if one.shape == () else tensor.t() if one.turned else tensor
    found = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(form.make(own))}
    assert _bytes_of_codes(form, False, formats) * 256 * 1024 == sum(found.values())


def test_a_gguf(tmp_path: Path) -> None:
    with torch.no_grad():
        write_gguf(tmp_path / "tiny.gguf", make_tiny_model("llama", **SIZES), "llama", [Q.Q4_0, Q.Q8_0])
    source = source_of(tmp_path / "tiny.gguf")
    plain = tensors_of(build(source), source)
    assert told(plain)["attention and MLP"] == "q8_0 -> float32, q4_0 -> float32"
    packed = GgufMatrices.of_file(source.path, build(source).gguf)
    kept = tensors_of(build(source, packed=packed), source)
    assert told(kept)["attention and MLP"] == "q8_0 as codes, q4_0 as codes"
    check_bytes(load(source, packed=packed)[0], kept)
    assert line_of(kept).count("MB") == len(kept) + 1
