"""Matrices of a GGUF kept as codes on a GPU: products and a model against the dequantised numbers."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gpu_models import DEVICE, MIB, Batch, make_runner
from test_gguf_codes import by_the_package, random_blocks, random_quantised
from test_gguf_weights import SIZES, write_gguf
from test_gpu_fp8_layers import by_experts, gated, normed, off
from test_gpu_logits import relative_error
from tiny import VOCAB_SIZE, make_tiny_model

from aengine.kernels.expert_plan import plan_experts
from aengine.kernels.expert_tilings import ExpertShape
from aengine.kernels.expert_types import ExpertGate, Routing
from aengine.runner.weights.quantised.gguf import CODED_TYPES, GgufFormat, grouped_codes
from aengine.runner.weights.quantised.grouped import GroupedWeight

pytestmark = pytest.mark.gpu
NUM_DECODES = 4


@pytest.mark.parametrize("rows", [1, 2, 9, 64, 300])
@pytest.mark.parametrize("name", CODED_TYPES)
def test_products_of_each_type(name: str, rows: int) -> None:
    """Codes are made on the device."""
    blocks = random_blocks(name, 96)
    numbers = by_the_package(blocks, name)
    size = numbers.abs().amax()
    x = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = GroupedWeight(grouped_codes(blocks.to(DEVICE), int(Q[name])), None)
    found = weight.multiply((x / size).bfloat16().to(DEVICE)).float().cpu()
    wanted = (x / size).bfloat16().double() @ numbers.double().t()
    error = float((found - wanted).norm() / wanted.norm())
    print(f"{name}, {rows} rows: off by {error:.2e}")
    assert error < 4e-3  # bfloat16's rounding of the result, and of the weights for many rows


@pytest.mark.parametrize("name", CODED_TYPES)
def test_experts_of_each_type(name: str) -> None:
    shape, form = ExpertShape(4, 1024, 1024, 2), GgufFormat(int(Q[name]))
    gen = torch.Generator(DEVICE).manual_seed(1)
    made, numbers = [], []
    for seed, rows in ((2, 2048), (3, 1024)):
        made.append(form.make_experts(4, form.tensors(rows, 1024, False), torch.device(DEVICE)))
        blocks = random_blocks(name, 4 * rows, seed)
        numbers.append(list(by_the_package(blocks, name).to(DEVICE).split(rows)))
        for expert, own in enumerate(blocks.split(rows)):
            made[-1].room(expert, "weight", slice(None)).copy_(own)
            made[-1].finish(expert)
    first, second = made
    size = torch.cat(numbers[0]).square().mean().sqrt() * 32
    norm = SimpleNamespace(weight=torch.full((1024,), float(1 / size), device=DEVICE), eps=1e-6)
    for rows in (1, 3, 16, 100, 700):
        x = torch.randn(rows, 1024, device=DEVICE, generator=gen).bfloat16()
        ids = torch.rand(rows, 4, device=DEVICE, generator=gen).topk(2, 1).indices.int()
        routing = Routing(ids, torch.rand(rows, 2, device=DEVICE, generator=gen))
        plan = plan_experts(routing, shape, can_group=first.can_group, kind=first.kind)
        hidden, residual = first.gated_after_norm(x, norm, plan, ExpertGate()), torch.zeros_like(x)
        second.add_to(residual, hidden, plan)
        wanted = gated(by_experts(normed(x, norm), routing, numbers[0]))
        sums = by_experts(hidden, routing, numbers[1]).view(rows, 2, -1) * routing.weights[..., None]
        errors = off(hidden, wanted), off(residual, sums.sum(1))
        print(f"{name}, {rows} rows: gate and up off by {errors[0]:.2e}, down by {errors[1]:.2e}")
        assert errors[0] < 1e-2 and errors[1] < 6e-3  # bfloat16's rounding; a gate's is of two products


@pytest.mark.parametrize(
    ("arch", "kinds"),
    [
        ("llama", [Q.Q4_0, Q.Q8_0]),
        ("llama", [Q.Q5_0, Q.Q4_1]),
        ("qwen3_moe", [Q.Q4_K, Q.Q6_K, Q.Q4_K]),
        ("qwen3_moe", [Q.IQ4_NL]),
        ("gpt_oss", [Q.MXFP4]),
    ],
)
def test_a_model_kept_as_codes(
    tmp_path: Path, arch: str, kinds: list[Q], rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf.quants, "quantize", random_quantised)
    all_experts = {"qwen3_moe": 6, "gpt_oss": 5}  # which of some a token had would depend on the last bit
    fields = {"num_experts_per_tok": all_experts[arch]} if arch in all_experts else {}
    fields |= {"moe_intermediate_size": 256} if arch == "qwen3_moe" else {}
    reference = make_tiny_model(arch, seed=3, **SIZES, **fields)
    path = tmp_path / "tiny.gguf"
    with torch.no_grad():
        for weight in reference.parameters():
            if weight.dim() == 3:  # the experts', whose output passes two matrices
                weight.mul_(0.3)
        write_gguf(path, reference, arch, kinds)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (30, 1, 7, 64, 12)]
    settings = {"dtype": "bfloat16", "quantization": "gguf", "max_model_len": 96, "block_size": 16}
    settings |= {"kv_cache_memory_bytes": 64 * MIB, "max_num_batched_tokens": 512, "skip_tokenizer": True}
    runner = make_runner(path, **settings)
    tokens, logits = Batch(runner, 96).tokens_and_logits(prompts, NUM_DECODES)
    pairs = list(zip(prompts, tokens, strict=True))
    by_dtype = []
    for dtype in (torch.float32, torch.bfloat16):
        model = reference.to(DEVICE, dtype)
        with torch.inference_mode():
            ids = [(len(p), torch.tensor([[*p, *t]], device=DEVICE)) for p, t in pairs]
            by_dtype.append([model(row).logits[0, length - 1 : -1].float() for length, row in ids])
    wanted, rounded = by_dtype
    ours, theirs = relative_error(list(logits), wanted), relative_error(rounded, wanted)
    print(f"{kinds}: relative error {ours:.2e}, of transformers {theirs:.2e}")
    assert ours <= 1.4 * theirs
