"""Weights in FP8 on a GPU: as near to the dequantised model in float32 as transformers' bfloat16 of that is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from gpu_models import DEVICE, MIB, Batch, Checkpoint, make_runner
from test_gpu_logits import random_prompts, relative_error

from aengine.runner.weights.quantised.fp8 import quantised

pytestmark = pytest.mark.gpu
NUM_DECODES = 8


def dequantise(model: torch.nn.Module) -> None:
    """Give the model what its 16-bit weights are worth in FP8; experts' are stacked."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() < 2 or name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
                continue
            codes, scale = quantised(weight.bfloat16().flatten(0, -2))
            weight.copy_((codes.float() * scale[:, None]).view(weight.shape))


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
        wanted, theirs = ([model.logits(p, t, dtype) for p, t in pairs] for dtype in ("float32", "bfloat16"))
        ours, theirs_off = relative_error(list(logits), wanted), relative_error(theirs, wanted)
        print(f"{arch} {size}, {count} requests: relative error {ours:.2e}, of transformers {theirs_off:.2e}")
        assert ours <= 1.4 * theirs_off
        del runner


@pytest.mark.parametrize("rows", [1, 2, 9, 64, 200, 1025])
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8])
def test_products_of_large_matrices(rows: int, codes: torch.dtype) -> None:
    """Sums of thousands of numbers, of which the tensor cores add up few bits; and of rows with one large number."""
    from aengine.runner.weights.quantised.scaled import ScaledWeight

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
