"""Experts in a model: formats of their weights, packed checkpoints, shared experts, transformers' own modules."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driver import CPU, Driver, build, check_near, load, source_of
from safetensors.torch import load_file, save_file
from test_weight_formats import quantise, set_quantization
from tiny import load_reference, make_tiny_model
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from aengine.errors import ModelLoadError
from aengine.kernels.dispatch import triton_everywhere
from aengine.kernels.expert_plan import plan_experts
from aengine.kernels.expert_tilings import ExpertShape
from aengine.kernels.expert_types import ExpertGate, RoutingRule
from aengine.kernels.routing import route
from aengine.runner.layers.linear import Linear
from aengine.runner.layers.mlp import GatedMLP
from aengine.runner.layers.module_experts import can_run_experts, run_experts
from aengine.runner.layers.moe import Experts, MoE, Router, SharedExpert
from aengine.runner.layers.norm import RMSNorm
from aengine.runner.weights.expert_weights import SeparateExperts, StackedExperts
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.packed_experts import Mxfp4Experts
from aengine.runner.weights.plain import plain_tensors
from aengine.runner.weights.quantised.int8 import Int8Experts, Int8Format
from aengine.runner.weights.scope import WeightScope

TinyModel = Callable[..., Path]
TOKENS = list(range(40, 70))


def logits(folder: Path, dtype: str = "float32") -> Tensor:
    driver = Driver(load(source_of(folder), dtype)[0], random.Random(0))
    return torch.cat([driver.step({"a": part})["a"] for part in (TOKENS[:20], TOKENS[20:21], TOKENS[21:])])


def relative_error(out: Tensor, wanted: Tensor) -> float:
    return float((out - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_formats_of_plain_weights(arch: str, tiny_model: TinyModel) -> None:
    """float16 on a CPU packs each expert; bfloat16 stacks them."""
    folder = tiny_model(arch, seed=3)
    wanted = logits(folder)
    assert relative_error(logits(folder, "bfloat16"), wanted) < 0.1
    model, _ = load(source_of(folder), "auto")
    experts: Any = model.layers[0].mlp.experts  # type: ignore[attr-defined]
    if model.weights.formats.name == "float16":
        assert isinstance(experts.gate_up.weights, SeparateExperts)
    assert relative_error(logits(folder, "auto"), wanted) < 5e-3


@pytest.mark.parametrize("kind", ["int-quantized", "pack-quantized"])
def test_int8_experts(kind: str, tmp_path: Path, tiny_model: TinyModel) -> None:
    folders = [Path(shutil.copytree(tiny_model("qwen3_moe", seed=7), tmp_path / name)) for name in ("codes", "plain")]
    exact = quantise(folders[0], kind, ignored=("mlp.gate$",))
    save_file(exact, folders[1] / "model.safetensors")
    check_near(logits(folders[0]), logits(folders[1]))
    assert load(source_of(folders[0]))[1].num_parameters == load(source_of(folders[1]))[1].num_parameters


@pytest.mark.parametrize("is_packed", [False, True])
def test_int8_stays_int8_in_a_stack(is_packed: bool) -> None:
    """What a GPU uses: the codes as they are stored, multiplied by the Triton kernels (here interpreted)."""
    pytest.importorskip("triton")
    stored, gen = Int8Format(is_packed), torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (4, 2, 16, 32), generator=gen, dtype=torch.int8)  # experts, parts
    scales = torch.rand(4, 2, 16, 1, generator=gen) / 100
    tensors = stored.tensors(32, 32, False)
    assert isinstance(stored.make_experts(4, tensors, torch.device("meta")), StackedExperts)
    assert isinstance(stored.make_experts(4, tensors, CPU), SeparateExperts)
    experts = Int8Experts(4, tensors, CPU)
    for expert in (2, 0, 1, 3):
        for i, (own, scale) in enumerate(zip(codes[expert], scales[expert], strict=True)):
            words = (own ^ -128).view(torch.int32) if is_packed else own
            rows = slice(16 * i, 16 * (i + 1))
            experts.room(expert, "weight_packed" if is_packed else "weight", rows).copy_(words)
            experts.room(expert, "weight_scale", rows).copy_(scale)
        experts.finish(expert)
    assert experts.matrices is not None and torch.equal(experts.matrices.weight, codes.flatten(1, 2))
    assert not experts.can_group
    x, norm = torch.randn(3, 32, generator=gen), SimpleNamespace(weight=torch.ones(32), eps=1e-6)
    wanted = StackedExperts(4, plain_tensors(32, 32, False, torch.float32), CPU)
    for expert, (own, scale) in enumerate(zip(codes, scales, strict=True)):
        wanted.room(expert, "weight", slice(None)).copy_((own * scale).flatten(0, 1))
        wanted.finish(expert)
    rule, shape = RoutingRule(2), ExpertShape(4, 32, 16, 2)
    routing = route(torch.randn(3, 4, generator=gen), rule)
    with triton_everywhere():
        out = experts.gated_after_norm(x, norm, plan_experts(routing, shape), ExpertGate())
    plain = wanted.gated_after_norm(x, norm, plan_experts(routing, shape), ExpertGate())
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-6)


def mxfp4(folder: Path) -> dict[str, Tensor]:
    """Write the folder's experts as random MXFP4; returns all tensors as transformers reads them, in float32."""
    path, gen = folder / "model.safetensors", torch.Generator().manual_seed(3)
    tensors, exact = load_file(path), {}
    for name, tensor in list(tensors.items()):
        exact[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            num_experts, columns, rows = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), generator=gen, dtype=torch.uint8)
            scales = torch.randint(119, 126, (num_experts, rows, columns // 32), generator=gen, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            exact[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, path)
    set_quantization(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return exact


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path, tiny_model: TinyModel) -> None:
    folders = [Path(shutil.copytree(tiny_model("gpt_oss", seed=7), tmp_path / name)) for name in ("codes", "plain")]
    exact = mxfp4(folders[0])
    save_file(exact, folders[1] / "model.safetensors")
    model, loaded = load(source_of(folders[0]))
    assert loaded.num_parameters == load(source_of(folders[1]))[1].num_parameters
    name = "model.layers.0.mlp.experts.down_proj"
    stack = model.layers[0].mlp.experts.down.weights.matrices.weight  # type: ignore[attr-defined]
    assert torch.equal(stack, exact[name].transpose(1, 2))
    check_near(logits(folders[0]), logits(folders[1]))
    with torch.inference_mode():
        wanted = load_reference(folders[1], "gpt_oss")(torch.tensor([TOKENS]), use_cache=False).logits[0]
    check_near(logits(folders[0]), wanted)


@pytest.mark.parametrize("codes", [0, 255])
def test_mxfp4_is_exact_in_bfloat16(codes: int) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16) ^ codes
    scales = torch.arange(112, 128, dtype=torch.uint8).view(1, 1, 16)
    parts = {"_blocks": blocks[0], "_scales": scales[0]}
    exact, coarse = (Mxfp4Experts().expert(parts, dtype)["weight"] for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(coarse.float(), exact) and exact.shape == (1, 512)


def test_other_quantised_experts_are_refused(tmp_path: Path, tiny_model: TinyModel) -> None:
    folder = Path(shutil.copytree(tiny_model("gpt_oss", seed=7), tmp_path / "odd"))
    set_quantization(folder, {"quant_method": "bitsandbytes"})
    with pytest.raises(ModelLoadError, match="bitsandbytes"):
        build(source_of(folder))
    folder = Path(shutil.copytree(tiny_model("qwen3_moe", seed=7), tmp_path / "mixed"))
    quantise(folder, "int-quantized", ignored=("up_proj",))
    with pytest.raises(ModelLoadError, match="multiplied together"):
        build(source_of(folder))


@pytest.mark.parametrize("gated", [True, False])
def test_a_shared_expert(gated: bool) -> None:
    """Both see the same norm of the residual stream, though both change it."""
    scope, gen = WeightScope(choose_formats("float32", CPU)), torch.Generator().manual_seed(1)
    router = Router(scope, 16, 4, RoutingRule(2, "sigmoid", scale=1.5), correction="bias")
    shared = SharedExpert(
        GatedMLP(scope.at("shared"), 16, 12, activation="silu"), Linear(scope, 16, {"g": 1}) if gated else None
    )
    moe, norm = (
        MoE(16, router, Experts(scope.at("experts"), 16, 8, 4, gate=ExpertGate()), shared),
        RMSNorm(scope.at("norm"), 16, 1e-6),
    )
    w: dict[str, Tensor] = {}
    for name, (place,) in scope.places.items():
        w[name] = torch.randn(place.shape, generator=gen)
        place.put(place.take(w[name], CPU))
    x = torch.randn(5, 16, generator=gen)
    y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w["norm.weight"]

    def mlp(row: Tensor, name: str) -> Tensor:
        gate, up = (w[f"{name}.{part}_proj.weight"] @ row for part in ("gate", "up"))
        return w[f"{name}.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)

    wanted = x.clone()
    for i, row in enumerate(y):
        scores = torch.sigmoid(w["gate.weight"] @ row)
        ids = (scores + w["bias"]).topk(2).indices
        for expert in ids.tolist():
            wanted[i] += 1.5 * scores[expert] / scores[ids].sum() * mlp(row, f"experts.{expert}")
        wanted[i] += mlp(row, "shared") * (torch.sigmoid(w["g.weight"] @ row) if gated else 1)
    moe(x, norm)
    torch.testing.assert_close(x, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("where", ["torch", "triton"])
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_modules_of_transformers(arch: str, where: str, rng: random.Random) -> None:
    """The second has transposed weights with biases, and a gate of its own that alternates."""
    module = make_tiny_model(arch, seed=3).model.layers[0].mlp.experts
    gen = torch.Generator().manual_seed(rng.getrandbits(60))
    size, num_experts = make_tiny_model(arch, seed=3).config.hidden_size, module.num_experts
    assert can_run_experts(module)
    for n in (1, 3, 9):
        x = torch.randn(n, size, generator=gen)
        ids = torch.stack([torch.randperm(num_experts, generator=gen)[:2] for _ in range(n)])
        weights = torch.rand(n, 2, generator=gen)
        if arch == "qwen3_moe":
            ids[0, 0] = num_experts  # none of them
        with torch.inference_mode():
            wanted = type(module).forward.__wrapped__(module, x, ids, weights)
            if where == "triton":
                pytest.importorskip("triton")
                with triton_everywhere():
                    out = run_experts(module, x, ids, weights)
            else:
                out = run_experts(module, x, ids, weights)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
