"""Checkpoints in codes of 4 and 8 bits with scales of groups, on a GPU: the dequantised model in float32."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import DEVICE, MIB, Batch, make_runner
from safetensors.torch import save_file
from test_expert_layers import mxfp4
from test_fp8_weights import write_quantised
from test_gpu_logits import relative_error
from test_group_weights import KINDS, MOE, SIZES, write
from tiny import VOCAB_SIZE, write_tiny_model

from aengine.errors import ModelLoadError
from aengine.kernels.expert_gate import gate_experts
from aengine.kernels.expert_plan import plan_experts
from aengine.kernels.expert_tilings import ExpertShape
from aengine.kernels.expert_types import ExpertCodes, ExpertGate, InputNorm, RoutingRule
from aengine.kernels.experts import add_experts, expert_product
from aengine.kernels.grouped_codes import GroupedCodes, numbers
from aengine.kernels.rms_norm import rms_norm
from aengine.kernels.routing import route

pytestmark = pytest.mark.gpu
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "block_size": 16,
    "kv_cache_memory_bytes": 64 * MIB,
}


def pair(folder: Path, arch: str, kind: str) -> tuple[Path, Path]:
    """The quantised model, and the dequantised one."""
    sizes: dict[str, Any] = MOE if arch == "qwen3_moe" else SIZES
    own = write_tiny_model(folder / "own", arch, seed=3, **sizes)
    plain = Path(shutil.copytree(own, folder / "plain"))
    save_file(write(own, kind), plain / "model.safetensors")
    return own, plain


def check(own: Path, plain: Path, rng: random.Random, **settings: Any) -> None:
    for lengths in ([1], [30, 1, 7, 64, 12]):
        prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]
        found, wanted = (
            Batch(make_runner(path, **SETTINGS, **how), 96).tokens_and_logits(prompts, 0)[1]
            for path, how in ((own, settings), (plain, dict[str, Any]()))
        )
        assert relative_error(list(found), list(wanted)) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_dequantised_model(kind: str, tmp_path: Path, rng: random.Random) -> None:
    check(*pair(tmp_path, "llama", kind), rng)


@pytest.mark.parametrize("kind", ["awq", "nvfp4", "int4"])
def test_codes_of_experts(kind: str, tmp_path: Path, rng: random.Random) -> None:
    check(*pair(tmp_path, "qwen3_moe", kind), rng)


@pytest.mark.parametrize("arch", ["gpt_oss", "qwen3_moe"])
def test_mxfp4_and_blocks_of_fp8(arch: str, tmp_path: Path, rng: random.Random) -> None:
    """Of gpt-oss' release, and of Qwen3's."""
    own = write_tiny_model(tmp_path / "own", arch, seed=3, **(MOE if arch == "qwen3_moe" else {}))
    plain = Path(shutil.copytree(own, tmp_path / "plain"))
    exact = mxfp4(own) if arch == "gpt_oss" else write_quantised(own, "blocks")
    save_file(exact, plain / "model.safetensors")
    check(own, plain, rng)


def test_experts_that_become_numbers(tmp_path: Path, rng: random.Random) -> None:
    own, plain = pair(tmp_path, "qwen3_moe", "gptq, act-order")
    check(own, plain, rng, on_unsupported_format="dequantise")


def random_codes(kind: str, experts: int, n: int, k: int) -> ExpertCodes:
    """On the GPU, of numbers of about k^-0.5."""
    rows, group, bits = {"e4m3": (128, 128, 8), "e2m1": (1, 32, 4), "int4": (1, 128, 4)}[kind]
    codes = torch.randint(0, 256, (experts * n, k * bits // 8), dtype=torch.uint8, device=DEVICE)
    scale = torch.rand(experts * n // rows, k // group, device=DEVICE).add_(0.5).mul_(0.25 * k**-0.5)
    if kind == "e4m3":
        codes = codes.bitwise_and_(0xBF).view(torch.float8_e4m3fn)  # below 2
    dtype = {"e2m1": torch.float8_e8m0fnu, "int4": torch.float16}.get(kind, torch.float32)
    bias = torch.randn(experts, n, device=DEVICE) if kind == "e2m1" else None
    own: Any = kind
    return ExpertCodes(GroupedCodes(own, codes, scale.to(dtype), group, rows=rows), experts, bias)


@pytest.mark.parametrize("num_tokens", [1, 3, 40, 300, 1500])
@pytest.mark.parametrize("kind", ["e2m1", "e4m3", "int4"])
def test_a_layer_of_experts(kind: Any, num_tokens: int) -> None:
    """In bfloat16, of gpt-oss-20b's sizes and gate, or of Qwen3-30B-A3B's, by the tilings that are chosen there."""
    is_gpt = kind == "e2m1"
    shape = ExpertShape(32, 2880, 2880, 4) if is_gpt else ExpertShape(128, 2048, 768, 8)
    gate = ExpertGate("clamped_swiglu", is_interleaved=True) if is_gpt else ExpertGate()
    size, inner = shape.hidden_size, shape.intermediate_size
    first, second = (random_codes(kind, shape.num_experts, *sizes) for sizes in ((2 * inner, size), (size, inner)))
    x, norm = torch.randn(num_tokens, size, device=DEVICE).bfloat16(), torch.ones(size, device=DEVICE).bfloat16()
    routing = route(torch.randn(num_tokens, shape.num_experts, device=DEVICE), RoutingRule(shape.top_k))
    plan, found = plan_experts(routing, shape, kind=kind), torch.zeros_like(x)
    add_experts(found, expert_product(x, first, plan, gate, InputNorm(norm, 1e-6)), second, plan)
    normed, wanted = rms_norm(x.float(), norm.float(), 1e-6), torch.zeros_like(x, dtype=torch.float64)
    for expert in routing.expert_ids.unique().tolist():
        tokens, ranks = (routing.expert_ids == expert).nonzero(as_tuple=True)
        hidden = gate_experts(plain(normed[tokens], first, expert), gate)
        out = plain(hidden, second, expert) * routing.weights[tokens, ranks][:, None]
        wanted.index_add_(0, tokens, out.double())
    assert float((found.double() - wanted).norm() / wanted.norm()) < 6e-3


def plain(x: torch.Tensor, matrices: ExpertCodes, expert: int) -> torch.Tensor:
    out = x @ numbers(matrices.of(expert)).T
    return out if matrices.bias is None else out + matrices.bias[expert]


def test_what_is_not_multiplied(tmp_path: Path) -> None:
    """Groups of 24 columns."""
    if DEVICE == "cpu":
        pytest.skip("a CPU multiplies the numbers")
    sizes: dict[str, Any] = {**SIZES, "hidden_size": 96, "intermediate_size": 96}
    folder = write_tiny_model(tmp_path, "llama", **sizes)
    write(folder, "awq", config={**KINDS["awq"][1], "group_size": 24})
    with pytest.raises(ModelLoadError, match="on_unsupported_format='dequantise'"):
        make_runner(folder, **SETTINGS)
