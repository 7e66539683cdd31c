"""Weights in FP8 on a GPU: as near to the dequantised model in float32 as transformers' bfloat16 of that is, with
activations rounded to FP8 where ours are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gpu_models import DEVICE, MIB, Batch, Checkpoint, make_runner
from test_gpu_logits import random_prompts, relative_error

from aengine.kernels.activation import computed
from aengine.kernels.grouped_codes import GroupedCodes, numbers
from aengine.runner.weights.quantised.fp8 import quantised
from aengine.runner.weights.quantised.grouped import GroupedWeight
from aengine.runner.weights.quantised.scaled import ScaledWeight

pytestmark = pytest.mark.gpu
NUM_DECODES = 8
MOST_UNROUNDED = 8
"""Most rows whose activations are not rounded."""


def dequantise(model: torch.nn.Module) -> None:
    """Give the model what its 16-bit weights are worth in FP8; experts' are stacked."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2 or name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
                continue
            codes, scale = quantised(weight.bfloat16().flatten(0, -2))
            weight.copy_((codes.float() * scale[:, None]).view(weight.shape))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x in FP8 with a scale a row of its largest number, as recipes have activations; in x's dtype."""
    numbers = x.flatten(0, -2).double()
    scale = numbers.abs().amax(1, keepdim=True).clamp_(min=1e-12) / 448
    return ((numbers / scale).to(torch.float8_e4m3fn).double() * scale).to(x.dtype).view(x.shape)


@contextmanager
def rounded_activations(model: torch.nn.Module, rounds: bool) -> Iterator[None]:
    """Each quantised matrix is given rounded activations, if ``rounds``."""
    matrices = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    hooks = [m.register_forward_pre_hook(lambda _, x: (rounded(x[0]),)) for m in matrices if rounds]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("size", ["tiny", "medium"])
def test_fp8_made_as_it_is_loaded(tmp_path: Path, arch: str, size: str, rng: random.Random) -> None:
    """Of batches on all sides of the kernels' choice, and prompts for which torch writes the codes as numbers."""
    if arch == "qwen3_moe" and size == "medium":
        pytest.skip("its experts are no larger than in a tiny one")
    model = Checkpoint(tmp_path, arch, "bfloat16", size)
    lengths = [1300, 600, 1, 15, *(rng.randint(1, 64) for _ in range(28))] if size == "medium" else [30, 1, 7, 64, 12]
    prompts = random_prompts(rng, model, lengths)
    longest = max(map(len, prompts)) + NUM_DECODES + 1
    settings = {"dtype": "bfloat16", "quantization": "fp8", "max_model_len": longest, "block_size": 16}
    settings |= {"kv_cache_memory_bytes": 1024 * MIB, "max_num_batched_tokens": 4096}
    for count in (len(prompts), 2, 1):
        runner = make_runner(model.folder, **settings)
        tokens, logits = Batch(runner, longest).tokens_and_logits(prompts[-count:], NUM_DECODES)
        for dtype in ("float32", "bfloat16"):
            dequantise(model.reference(dtype))
        pairs = list(zip(prompts[-count:], tokens, strict=True))
        wanted = [model.logits(p, t) for p, t in pairs]
        with rounded_activations(model.reference("bfloat16"), sum(map(len, prompts[-count:])) > MOST_UNROUNDED):
            theirs = [model.logits(p, t, "bfloat16") for p, t in pairs]
        ours, theirs_off = relative_error(list(logits), wanted), relative_error(theirs, wanted)
        print(f"{arch} {size}, {count} requests: relative error {ours:.2e}, of transformers {theirs_off:.2e}")
        assert ours <= 1.4 * theirs_off
        del runner


@pytest.mark.parametrize("rows", [1, 2, 9, 64, 200, 1025])
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8])
def test_products_of_large_matrices(rows: int, codes: torch.dtype) -> None:
    """Sums of thousands of numbers, of which the tensor cores add up few bits; and of rows with one large number."""
    if DEVICE == "cpu":
        pytest.skip("the kernels are compared with a reference in tests/kernels")
    weight = torch.randn(4096, 14336, device=DEVICE) * 14336**-0.5
    scale = weight.abs().amax(1) / (448 if codes == torch.float8_e4m3fn else 127)
    stored = weight / scale[:, None]
    made = ScaledWeight((stored if codes.is_floating_point else stored.round()).to(codes), scale, None)
    x = torch.randn(rows, 14336, device=DEVICE, dtype=torch.bfloat16)
    x[:, 77] *= 1000
    exact = (x.double() @ made.codes.double().t()) * scale.double()
    assert float((made.multiply(x).double() - exact).norm() / exact.norm()) < 4e-3
    residual = torch.randn(rows, 4096, device=DEVICE, dtype=torch.bfloat16)
    exact += residual.double()
    made.add_to(residual, x)
    assert float((residual.double() - exact).norm() / exact.norm()) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 33, 64, 65, 128, 129, 256, 257, 2051])
def test_products_with_rounded_activations(rows: int, in_blocks: bool, dtype: torch.dtype) -> None:
    """As exact as x is for few rows; for many off by what rounding each row of x costs, and by little more. Of rows
    with one large number, and of all verbs."""
    if DEVICE == "cpu":
        pytest.skip("the kernels are compared with a reference in tests/kernels")
    n, k = 4096, 14336
    codes, scale = quantised(torch.randn(n, k, device=DEVICE) * k**-0.5)
    bias, norm = torch.randn(n, device=DEVICE), SimpleNamespace(weight=torch.rand(k, device=DEVICE) + 0.5, eps=1e-6)
    made: ScaledWeight | GroupedWeight = ScaledWeight(codes, scale, bias, quantises_x=True)
    matrix = codes.double() * scale.double()[:, None]
    if in_blocks:
        blocks = (torch.rand(n // 128, k // 128, device=DEVICE) + 0.5) * scale.mean()
        made = GroupedWeight(GroupedCodes("e4m3", codes, blocks, 128, rows=128), bias, quantises_x=True)
        matrix = numbers(made.codes).double()
    x, residual = (torch.randn(rows, width, device=DEVICE, dtype=dtype) for width in (k, n))
    x[:, 77] *= 300
    exact_norm = torch.rms_norm(x.double(), (k,), norm.weight.double(), norm.eps)
    of_x, of_norm, before = x.double() @ matrix.t() + bias, exact_norm @ matrix.t() + bias, residual.double()
    added = residual.clone()
    made.add_to(added, x)
    gate, up = of_norm.chunk(2, 1)
    rounds = rows > MOST_UNROUNDED
    least = rounded(exact_norm) @ matrix.t() + bias
    of_rounding = float((least - of_norm).norm() / of_norm.norm()) if rounds else 0.0
    for verb, out, wanted in (
        ("product", made.multiply(x), of_x),
        ("into residual", added, before + of_x),
        ("of norm", made.after_norm(x, norm, torch.float32), of_norm),
        ("gated", computed(made.gated_after_norm(x, norm)), torch.nn.functional.silu(gate) * up),
    ):
        off = float((out.double() - wanted).norm() / wanted.norm())
        most = 1.3 * of_rounding + 4e-3
        assert off < most * (1.6 if verb == "gated" else 1), f"{verb}: off by {off:.2e}, {of_rounding:.2e} of rounding"
