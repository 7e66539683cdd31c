"""Logits in bfloat16: as near to transformers in float32 as transformers' own bfloat16 is. And in float32: nearer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from gpu_models import DEVICE, MIB, Batch, Checkpoint, make_runner
from torch import Tensor

pytestmark = pytest.mark.gpu

MakeCheckpoint = Callable[..., Checkpoint]
NUM_DECODES = 8
WORST = 1.1  # ours to theirs
WORST_OF_EXPERTS = 1.4  # of random experts some are chosen by a hair


def relative_error(logits: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    off = sum(float((a - b).double().square().sum()) for a, b in zip(logits, wanted, strict=True))
    return (off / sum(float(b.double().square().sum()) for b in wanted)) ** 0.5


def compare(model: Checkpoint, dtype: str, prompts: list[list[int]], block_size: int) -> tuple[float, float]:
    """Relative errors of ours and of transformers' in ``dtype``, of the prompts' last positions and decodes after."""
    longest = max(map(len, prompts)) + NUM_DECODES + 1
    runner = make_runner(
        model.folder,
        dtype=dtype,
        max_model_len=longest,
        block_size=block_size,
        kv_cache_memory_bytes=1024 * MIB if longest > 200 else 16 * MIB,
        max_num_batched_tokens=4096,
    )
    tokens, logits = Batch(runner, longest).tokens_and_logits(prompts, NUM_DECODES)
    wanted = [model.logits(p, t) for p, t in zip(prompts, tokens, strict=True)]
    theirs = [model.logits(p, t, dtype) for p, t in zip(prompts, tokens, strict=True)]
    assert logits.dtype == torch.float32 and logits.isfinite().all()
    return relative_error(list(logits), wanted), relative_error(theirs, wanted)


def random_prompts(rng: random.Random, model: Checkpoint, lengths: Sequence[int]) -> list[list[int]]:
    return [[rng.randrange(model.vocab_size) for _ in range(n)] for n in lengths]


def test_bfloat16(checkpoint: MakeCheckpoint, arch: str, rng: random.Random) -> None:
    model = checkpoint(arch, "bfloat16")
    prompts = random_prompts(rng, model, [rng.randint(1, 80) for _ in range(48)])
    ours, theirs = compare(model, "bfloat16", prompts, 4)
    print(f"{arch}: relative error {ours:.2e}, of transformers {theirs:.2e}")
    assert ours <= (WORST_OF_EXPERTS if arch in ("qwen3_moe", "gpt_oss") else WORST) * theirs


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("size", ["a few", "many"])
def test_bfloat16_of_middling_models(checkpoint: MakeCheckpoint, arch: str, size: str, rng: random.Random) -> None:
    """Of eight layers; prompts long enough for a library, and batches on both sides of the kernels' choice."""
    model = checkpoint(arch, "bfloat16", "medium")
    lengths = [700, 3, 180] if size == "a few" else [1000, 600, 1, 15, *(rng.randint(1, 64) for _ in range(44))]
    ours, theirs = compare(model, "bfloat16", random_prompts(rng, model, lengths), 16)
    print(f"{arch}, {size}: relative error {ours:.2e}, of transformers {theirs:.2e}")
    assert ours <= WORST * theirs


def test_float16(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    model = checkpoint("qwen3", "bfloat16", "medium")
    ours, theirs = compare(model, "float16", random_prompts(rng, model, [200, 33, 5, 1, 90, 64, 17, 2]), 16)
    print(f"relative error {ours:.2e}, of transformers {theirs:.2e}")
    assert ours <= WORST * theirs


@pytest.mark.parametrize("size", ["tiny", "medium"])
def test_float32(checkpoint: MakeCheckpoint, arch: str, size: str, rng: random.Random) -> None:
    if size == "medium" and arch not in ("llama", "qwen3"):
        pytest.skip("the others differ in nothing that depends on size")
    model = checkpoint(arch, "float32", size)
    lengths = [rng.randint(1, 80) for _ in range(20)] if size == "tiny" else [300, 1, 64, 17, 100]
    ours, _ = compare(model, "float32", random_prompts(rng, model, lengths), 16)
    print(f"{arch}, {size}: relative error {ours:.2e}")
    assert ours < 2e-5 if DEVICE == "cuda" else ours < 1e-4
