"""Layers in FP8 on a GPU, made by the quantization_config of compressed-tensors: what a product is off by is what
rounding costs, to 16 bits of weights alone, to FP8 as the format defines it of rounded activations."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_models import DEVICE, MIB, SIZES, Batch, Checkpoint, make_runner
from safetensors.torch import load_file, save_file
from test_gpu_logits import random_prompts, relative_error
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aengine.kernels.activation import computed
from aengine.kernels.expert_plan import plan_experts
from aengine.kernels.expert_tilings import ExpertShape
from aengine.kernels.expert_types import ExpertGate, Routing
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.quantised.fp8 import Fp8Format, quantised
from aengine.runner.weights.weight import ExpertWeights

pytestmark = pytest.mark.gpu
BLOCK = 128
ROWS = (1, 3, 16, 100, 700)
KINDS = ("channel", "block")
RECIPES = [(kind, rounds) for kind in KINDS for rounds in (False, True)]
MOST_OF_16_BITS = 1.5
"""Times what rounding inputs and outputs to bfloat16 costs."""
MOST_OF_CORES = 4e-3
"""What the tensor cores' sums of few bits add, relative, beside x rounded by the definition; `linear_fp8`."""


def recipe(kind: str, rounds: bool) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": kind, "dynamic": False}
    x: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    if kind == "block":
        weights["block_structure"], x["strategy"], x["group_size"] = [BLOCK, BLOCK], "group", BLOCK
    group = {"targets": ["Linear"], "weights": weights, "input_activations": x if rounds else None}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return {**config, "ignore": ["lm_head", "re:.*mlp.gate$"]}


def codes_of(weight: Tensor, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """What a checkpoint has for a matrix, by suffix; and the numbers, float32."""
    if kind == "channel":
        codes, scale = quantised(weight)
        return {"weight": codes, "weight_scale": scale[:, None]}, codes.float() * scale[:, None]
    rows, columns = weight.shape
    whole = F.pad(weight.float().abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    scale = whole.view(-(-rows // BLOCK), BLOCK, -1, BLOCK).amax((1, 3)) / 448
    factor = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    codes = (weight.float() / factor).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * factor


def random_matrix(n: int, k: int) -> Tensor:
    """Whose rows and columns differ in size, so that a scale at a wrong place shows."""
    sizes = torch.exp(torch.randn(n, 1, device=DEVICE) * 0.3), torch.exp(torch.randn(1, k, device=DEVICE) * 0.3)
    return torch.randn(n, k, device=DEVICE) * sizes[0] * sizes[1] * k**-0.5


def rounded(x: Tensor, group: int) -> Tensor:
    """x, float64, in FP8 with a scale of the largest number of each row's group of columns, as float64."""
    padded = F.pad(x, (0, -x.shape[1] % group)).view(len(x), -1, group)
    scale = padded.abs().amax(2, keepdim=True).clamp_(min=1e-12) / 448
    return ((padded / scale).to(torch.float8_e4m3fn).double() * scale).view(len(x), -1)[:, : x.shape[1]]


def roundings(x: Tensor) -> dict[str, Tensor]:
    """What a kernel may make of x: nothing, FP8 a token, FP8 in groups of a token."""
    x = x.double()
    return {"exact": x, "token": rounded(x, x.shape[1]), "group": rounded(x, BLOCK)}


def normed(x: Tensor, norm: SimpleNamespace) -> Tensor:
    return torch.rms_norm(x.double(), (x.shape[1],), norm.weight.double(), norm.eps)


def off(out: Tensor, wanted: Tensor) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())


def check(what: str, out: Tensor, by: dict[str, Tensor], of_16_bits: Tensor, rounds: bool) -> str:
    """``out`` is one of ``by``, as near as 16 bits allow, or the tensor cores; returns which."""
    errors = {how: off(out, wanted) for how, wanted in by.items()}
    nearest = min(errors, key=errors.__getitem__)
    least = off(of_16_bits, by["exact"])
    most = MOST_OF_16_BITS * least + (0 if nearest == "exact" else MOST_OF_CORES)
    said = ", ".join(f"{how} {error:.2e}" for how, error in errors.items())
    print(f"  {what}: off from {said}; 16 bits cost {least:.2e}")
    assert errors[nearest] <= most, f"{what}: off from {said}; 16 bits cost {least:.2e}"
    assert rounds or nearest == "exact", f"{what}: x was rounded without being asked"
    return nearest


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def format_of(kind: str, rounds: bool) -> Fp8Format:
    form = choose_formats("bfloat16", torch.device(DEVICE), {"quantization_config": recipe(kind, rounds)}).of("a")
    assert isinstance(form, Fp8Format) and form.quantises_x == rounds
    return form


def experts_of(form: Fp8Format, kind: str, num_experts: int, n: int, k: int) -> tuple[ExpertWeights, list[Tensor]]:
    """As they are loaded; and the numbers of each."""
    made = form.make_experts(num_experts, form.tensors(n, k, False), torch.device(DEVICE))
    numbers = []
    for expert in range(num_experts):
        tensors, matrix = codes_of(random_matrix(n, k), kind)
        for suffix, tensor in tensors.items():
            made.room(expert, suffix, slice(None)).copy_(tensor)
        made.finish(expert)
        numbers.append(matrix)
    return made, numbers


def by_experts(x: Tensor, routing: Routing, numbers: list[Tensor]) -> Tensor:
    """float64 [pairs, n] of x with a row a token, or a pair."""
    ids = routing.expert_ids.flatten().long()
    pairs = torch.arange(len(ids), device=DEVICE)
    rows = pairs // routing.expert_ids.shape[1] if len(x) < len(ids) else pairs
    out = torch.empty(len(ids), len(numbers[0]), dtype=torch.float64, device=DEVICE)
    for expert in ids.unique().tolist():
        own = pairs[ids == expert]
        out[own] = x[rows[own]].double() @ numbers[expert].double().t()
    return out


SHAPES = {
    "channel": [(8, 256, 128, 2), (16, 208, 48, 4), (60, 1408, 352, 6), (128, 2048, 768, 8)],
    "block": [(8, 320, 128, 2), (32, 640, 384, 5), (128, 2048, 768, 8)],
}


@pytest.mark.parametrize(
    ("kind", "rounds", "shape"), [(*how, ExpertShape(*shape)) for how in RECIPES for shape in SHAPES[how[0]]], ids=str
)
def test_experts(kind: str, rounds: bool, shape: ExpertShape, rng: random.Random) -> None:
    """Each product by what it was given, and both together."""
    if DEVICE == "cpu":
        pytest.skip("the kernels are compared with a reference in tests/kernels")
    torch.manual_seed(rng.getrandbits(60))
    form, (experts, size, inner, top_k) = format_of(kind, rounds), shape
    first, numbers = experts_of(form, kind, experts, 2 * inner, size)
    second, numbers_of_down = experts_of(form, kind, experts, size, inner)
    in_16_bits, down_in_16_bits = ([matrix.bfloat16() for matrix in own] for own in (numbers, numbers_of_down))
    norm = SimpleNamespace(weight=torch.rand(size, device=DEVICE) + 0.5, eps=1e-6)
    for rows in ROWS:
        x = torch.randn(rows, size, device=DEVICE, dtype=torch.bfloat16)
        x[1:, 7] *= 30  # of one row alone, how this number is rounded would be all that is off
        ids = torch.rand(rows, experts, device=DEVICE).topk(top_k, 1).indices.int()
        routing = Routing(ids, torch.rand(rows, top_k, device=DEVICE))
        plan = plan_experts(routing, shape, can_group=first.can_group, kind=first.kind)
        hidden = first.gated_after_norm(x, norm, plan, ExpertGate())
        residual = torch.zeros_like(x)
        second.add_to(residual, hidden, plan)

        def added(h: Tensor, numbers: list[Tensor] = numbers_of_down, routing: Routing = routing) -> Tensor:
            pairs = by_experts(h, routing, numbers)
            pairs = pairs if numbers is numbers_of_down else pairs.bfloat16().double()
            return (pairs.view(*routing.weights.shape, -1) * routing.weights[..., None]).sum(1)

        exact = normed(x, norm)
        of_gate = {how: gated(by_experts(given, routing, numbers)) for how, given in roundings(exact).items()}
        of_down = {how: added(given) for how, given in roundings(hidden).items()}
        in_16 = gated(by_experts(exact.bfloat16(), routing, in_16_bits)).bfloat16()
        down_in_16, both_in_16 = (added(h, down_in_16_bits).bfloat16() for h in (hidden, in_16))
        how = check(f"{rows} rows, gate and up", hidden, of_gate, in_16, rounds)
        then = check(f"{rows} rows, down", residual, of_down, down_in_16, rounds)
        together, wanted = added(roundings(of_gate[how])[then]), added(of_gate["exact"])
        costs, whole = off(together, wanted), off(residual, wanted)
        print(f"  {rows} rows, {how} and {then}: off by {whole:.2e}, rounding by the definition {costs:.2e}")
        assert whole <= MOST_OF_16_BITS * max(costs, off(both_in_16, wanted)) + (MOST_OF_CORES if rounds else 0)


MATRICES = {"channel": [(144, 48), (1152, 656), (4096, 2048)], "block": [(256, 128), (1280, 640), (320, 1008)]}


@pytest.mark.parametrize(
    ("kind", "rounds", "shape"), [(*how, shape) for how in RECIPES for shape in MATRICES[how[0]]], ids=str
)
def test_dense(kind: str, rounds: bool, shape: tuple[int, int], rng: random.Random) -> None:
    if DEVICE == "cpu":
        pytest.skip("the kernels are compared with a reference in tests/kernels")
    torch.manual_seed(rng.getrandbits(60))
    form, (n, k) = format_of(kind, rounds), shape
    tensors, numbers = codes_of(random_matrix(n, k), kind)
    made, matrix, matrix_in_16 = form.make(tensors), numbers.double().t(), numbers.bfloat16().double().t()
    norm = SimpleNamespace(weight=torch.rand(k, device=DEVICE) + 0.5, eps=1e-6)
    for rows in ROWS:
        x = torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16)
        x[1:, 7] *= 30  # of one row alone, how this number is rounded would be all that is off
        residual = torch.zeros(rows, n, device=DEVICE, dtype=torch.bfloat16)
        made.add_to(residual, x)
        of_x, of_norm = ({h: given @ matrix for h, given in roundings(v).items()} for v in (x, normed(x, norm)))
        x_in_16, norm_in_16 = (h.double() @ matrix_in_16 for h in (x, normed(x, norm).bfloat16()))
        check(f"{rows} rows, product", made.multiply(x), of_x, x_in_16.bfloat16(), rounds)
        check(f"{rows} rows, into residual", residual, of_x, x_in_16.bfloat16(), rounds)
        check(f"{rows} rows, of norm", made.after_norm(x, norm), of_norm, norm_in_16.bfloat16(), rounds)
        out, wanted = computed(made.gated_after_norm(x, norm)), {how: gated(value) for how, value in of_norm.items()}
        check(f"{rows} rows, gated", out, wanted, gated(norm_in_16.bfloat16().double()).bfloat16(), rounds)


SIZES["of blocks"] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
}
NUM_ROUTES = SIZES["of blocks"]["num_experts"]


class RoundedInputs(TorchFunctionMode):
    """Rounds what matrices are given as kernels do of many rows: float64 would cost as much time as the rest."""

    def __init__(self, kind: str, plain_rows: set[int]) -> None:
        super().__init__()
        self._kind, self._plain_rows = kind, plain_rows  # the heights of matrices that are not quantised

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[1].shape[0] not in self._plain_rows:
            x = args[0].flatten(0, -2)
            is_expert = args[0].dim() == 2
            if not is_expert or self._kind == "block":
                group = BLOCK if is_expert else x.shape[1]
                args = (rounded(x.double(), group).to(x.dtype).view(args[0].shape), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def rounding(kind: str, vocab_size: int, rounds: bool) -> Iterator[None]:
    if not rounds:
        yield
        return
    with RoundedInputs(kind, {vocab_size, NUM_ROUTES}):
        yield


def write_checkpoint(folder: Path, kind: str, rounds: bool) -> Checkpoint:
    """Into ``folder`` as a recipe has it; returns the model of the same numbers."""
    plain = Checkpoint(folder.with_name(f"{folder.name}-plain"), "qwen3_moe", "float32", "of blocks")
    shutil.copytree(plain.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    numbers = dict(tensors)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        parts, numbers[name] = codes_of(tensors[name], kind)
        stem = name.removesuffix("weight")
        tensors |= {stem + suffix: tensor.contiguous() for suffix, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, plain.folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": recipe(kind, rounds)}))
    for dtype in ("float32", "bfloat16"):
        plain.reference(dtype).set_experts_implementation("eager")
    return plain


@pytest.mark.parametrize(("kind", "rounds"), RECIPES)
def test_models(kind: str, rounds: bool, tmp_path: Path, rng: random.Random) -> None:
    """Logits are as near to float32 by the dequantised weights as transformers' in bfloat16 are, its activations
    rounded where ours are; and about as many tokens are others."""
    plain = write_checkpoint(tmp_path / "model", kind, rounds)
    # None of the steps is of so few rows that it rounds none.
    prompts = random_prompts(rng, plain, [rng.randint(4, 40) for _ in range(96)])
    settings = {"max_num_seqs": 128, "kv_cache_memory_bytes": 256 * MIB, "max_num_batched_tokens": 4096}
    runner = make_runner(tmp_path / "model", dtype="bfloat16", **settings)
    tokens, logits = Batch(runner).tokens_and_logits(prompts, 16)
    pairs = list(zip(prompts, tokens, strict=True))
    exact = [plain.logits(*pair) for pair in pairs]
    with rounding(kind, plain.vocab_size, rounds):
        emulated, theirs = [plain.logits(*pair) for pair in pairs], [plain.logits(*pair, "bfloat16") for pair in pairs]
    off_by = {"ours": list(logits), "transformers' in bfloat16": theirs, "rounding alone": emulated}
    errors = {name: relative_error(found, exact) for name, found in off_by.items()}
    others = {name: num_others(found, exact) for name, found in off_by.items()}
    print(f"{kind}, rounds {rounds}, of {len(pairs) * 17} tokens: off from float32, and other tokens:")
    for name, error in errors.items():
        print(f"  {name}: {error:.2e}, {others[name]}")
    ours, least = errors["ours"], errors["transformers' in bfloat16"]
    assert ours <= 1.4 * least
    assert others["ours"] <= 1.5 * others["transformers' in bfloat16"] + 10


def num_others(found: list[Tensor], wanted: list[Tensor]) -> int:
    """How many tokens that are the likeliest of ``found`` are not in ``wanted``."""
    return sum(int((a.argmax(-1) != b.argmax(-1)).sum()) for a, b in zip(found, wanted, strict=True))
