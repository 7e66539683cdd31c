"""Matrices of a GGUF kept as codes on a GPU: products and a model against the dequantised numbers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gpu_models import DEVICE, MIB, Batch, make_runner
from test_gguf_codes import by_the_package, random_blocks
from test_gguf_weights import SIZES, write_gguf
from test_gpu_logits import relative_error
from tiny import VOCAB_SIZE, make_tiny_model

from aengine.runner.weights.quantised.gguf import CODED_TYPES, grouped_codes
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
    off = float((found - wanted).norm() / wanted.norm())
    print(f"{name}, {rows} rows: off by {off:.2e}")
    assert off < 4e-3  # bfloat16's rounding of the result, and of the weights for many rows


@pytest.mark.parametrize("kinds", [[Q.Q4_0, Q.Q8_0], [Q.Q5_0, Q.Q4_1]])
def test_a_model_kept_as_codes(tmp_path: Path, kinds: list[Q], rng: random.Random) -> None:
    reference = make_tiny_model("llama", seed=3, **SIZES)
    path = tmp_path / "tiny.gguf"
    with torch.no_grad():
        write_gguf(path, reference, "llama", kinds)
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
