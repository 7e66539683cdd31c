"""Every weight format that a CPU computes, divided among ranks, against the whole."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import source_of
from gguf import GGMLQuantizationType as Q
from pairs import some
from test_divided_models import EIGHT, EXPERTS, check
from test_expert_layers import mxfp4
from test_fp8_weights import write_quantised
from test_gguf_weights import SIZES, write_gguf
from test_group_weights import write as write_groups
from test_weight_formats import KINDS, quantise
from tiny import make_tiny_model

from aengine.errors import ModelLoadError
from aengine.runner.weights.float16_cpu import has_fbgemm

TinyModel = Callable[..., Path]
BIASES = {"attention_bias": True, "mlp_bias": True}
ROUTER = ("mlp.gate$",)  # is never quantised
GGUF_SIZES = {**SIZES, "num_key_value_heads": 4}


@pytest.fixture
def copied(tiny_model: TinyModel, tmp_path: Path) -> Callable[..., Path]:
    return lambda arch, **fields: Path(shutil.copytree(tiny_model(arch, seed=7, **fields), tmp_path / "model"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arch", "fields"),
    [("llama", BIASES), ("qwen3_moe", EXPERTS)],
    ids=["llama", "qwen3_moe"],
)
def test_int8(arch: str, fields: dict[str, Any], kind: str, copied: Callable[..., Path]) -> None:
    folder = copied(arch, **EIGHT, **fields)
    quantise(folder, kind, ROUTER)
    for size in (2, 4) if kind == "int-quantized" else (2,):  # of packed columns, a rank wants whole words
        check(source_of(folder), size)


def test_int8_divided_by_experts(copied: Callable[..., Path]) -> None:
    folder = copied("qwen3_moe", **EIGHT, **EXPERTS)
    quantise(folder, "int-quantized", ROUTER)
    check(source_of(folder), 4, divides_experts=True)


def test_fp8_in_blocks_that_a_matrix_does_not_fill(copied: Callable[..., Path]) -> None:
    """They are cut between blocks, and never within one, where a proportion would be a whole number, too."""
    sizes = {"hidden_size": 80, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    folder = copied("llama", **sizes, intermediate_size=192)
    write_quantised(folder, "parts of blocks")
    check(source_of(folder), 2)
    shutil.rmtree(folder)
    folder = copied("llama", **sizes, intermediate_size=48)
    write_quantised(folder, "parts of blocks")
    with pytest.raises(ModelLoadError, match=r"proj\.weight_scale_inv can't be divided so, .*number 24 is within one"):
        check(source_of(folder), 2)


@pytest.mark.parametrize("kind", ["channel", "tensor", "blocks"])
@pytest.mark.parametrize(("arch", "fields"), [("llama", BIASES), ("qwen3_moe", EXPERTS)], ids=["llama", "qwen3_moe"])
def test_fp8(arch: str, fields: dict[str, Any], kind: str, copied: Callable[..., Path]) -> None:
    """A scale of rows is divided with them, one of a matrix is everybody's; a block is not cut."""
    folder = copied(arch, **EIGHT, **fields)
    write_quantised(folder, kind)
    if kind == "blocks":
        with pytest.raises(
            ModelLoadError, match=r"tensor_parallel_size=2: .*_scale_inv can't be divided so, .*fewer ranks"
        ):
            check(source_of(folder), 2)
    else:
        check(source_of(folder), 2)


LARGER = {**EIGHT, "hidden_size": 64, "intermediate_size": 128}
GROUP_EXPERTS = {**LARGER, **EXPERTS, "moe_intermediate_size": 64}
GROUPS = [
    *(("llama", kind) for kind in ("awq", "gptq 8", "gptq, act-order", "int4, zeros", "int8, plain, zeros", "nvfp4")),
    *(("qwen3_moe", kind) for kind in ("awq", "gptq, act-order", "int4, act-order", "int8, tensor", "mxfp4")),
]


@pytest.mark.parametrize(("arch", "kind"), GROUPS)
def test_groups(arch: str, kind: str, copied: Callable[..., Path]) -> None:
    """Scales of groups are divided with the columns; those of columns in another order are everybody's."""
    folder = copied(arch, **({**LARGER, **BIASES} if arch == "llama" else GROUP_EXPERTS))
    write_groups(folder, kind)
    check(source_of(folder), 2)


def test_a_group_is_not_cut(copied: Callable[..., Path]) -> None:
    folder = copied("llama", **LARGER)
    write_groups(folder, "int4")
    with pytest.raises(
        ModelLoadError, match=r"tensor_parallel_size=8: .*can't be divided so, .*is within one.*fewer ranks"
    ):
        check(source_of(folder), 8)


@pytest.mark.parametrize(("size", "divides_experts"), [(2, False), (2, True), (4, True)])
def test_mxfp4(size: int, divides_experts: bool, tiny_model: TinyModel, tmp_path: Path) -> None:
    sizes = {"num_local_experts": 8, "intermediate_size": 128, "hidden_size": 64}
    folder = shutil.copytree(tiny_model("gpt_oss", seed=7, **EIGHT, **sizes), tmp_path / "model")
    mxfp4(folder)
    check(source_of(folder), size, divides_experts=divides_experts)


def test_bfloat16(tiny_model: TinyModel) -> None:
    check(source_of(tiny_model("llama", seed=7, **EIGHT, **BIASES)), 4, "bfloat16", 0.03)


@pytest.mark.skipif(not has_fbgemm(), reason="needs FBGEMM")
@pytest.mark.parametrize(("arch", "fields"), [("llama", BIASES), ("qwen3_moe", EXPERTS)], ids=["llama", "qwen3_moe"])
def test_float16(arch: str, fields: dict[str, Any], tiny_model: TinyModel) -> None:
    """Its activations have 32 bits, so that no expert is chosen otherwise."""
    check(source_of(tiny_model(arch, seed=7, **EIGHT, **fields)), 4, "float16", 4e-3)


GGUF: dict[str, tuple[dict[str, Any], list[Q]]] = {
    "llama": ({"attention_bias": True}, [Q.Q4_1, Q.Q8_0]),
    "mistral": ({"sliding_window": 6}, [Q.Q5_0, Q.Q5_1, Q.Q4_0]),
    "qwen3": ({"tie_word_embeddings": True}, [Q.Q4_0, Q.F16, Q.TQ2_0]),
    "qwen3_moe": ({"norm_topk_prob": True, "moe_intermediate_size": 64}, [Q.Q8_0, Q.BF16, Q.Q4_0]),
    "gpt_oss": ({"sliding_window": 7}, [Q.F32, Q.Q8_0]),
    "lfm2": ({"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}, [Q.Q8_0]),
}


@pytest.mark.parametrize(
    ("arch", "size"),
    some(
        itertools.product(GGUF, (2, 4)),
        *(("llama", 4), ("mistral", 2), ("qwen3", 4), ("qwen3_moe", 2), ("gpt_oss", 4), ("lfm2", 2)),
    ),
)
def test_gguf(arch: str, size: int, tmp_path: Path) -> None:
    overrides, kinds = GGUF[arch]
    path = tmp_path / "tiny.gguf"
    with torch.no_grad():
        write_gguf(path, make_tiny_model(arch, seed=7, **GGUF_SIZES, **overrides), arch, kinds)
    check(source_of(path), size)


def test_packed_codes_are_not_cut(copied: Callable[..., Path]) -> None:
    """A word has four codes, and a quarter of the 40 features inside an expert is not a multiple of that."""
    folder = copied("qwen3_moe", **EIGHT, **EXPERTS)
    quantise(folder, "pack-quantized", ROUTER)
    with pytest.raises(ModelLoadError, match=r"tensor_parallel_size=4: .*down_proj.weight_packed can't .*fewer ranks"):
        check(source_of(folder), 4)
