"""Checkpoints in codes of 4 and 8 bits with scales of groups, on a GPU: the dequantised model in float32."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from gpu_models import DEVICE, MIB, Batch, make_runner
from safetensors.torch import save_file
from test_gpu_logits import relative_error
from test_group_weights import KINDS, MOE, SIZES, write
from tiny import VOCAB_SIZE, write_tiny_model

from aengine.errors import ModelLoadError

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


@pytest.mark.parametrize("kind", ["awq", "nvfp4", "gptq, act-order"])
def test_experts_that_become_numbers(kind: str, tmp_path: Path, rng: random.Random) -> None:
    own, plain = pair(tmp_path, "qwen3_moe", kind)
    check(own, plain, rng, on_unsupported_format="dequantise")


def test_what_is_not_multiplied(tmp_path: Path) -> None:
    """Groups of 24 columns."""
    if DEVICE == "cpu":
        pytest.skip("a CPU multiplies the numbers")
    sizes: dict[str, Any] = {**SIZES, "hidden_size": 96, "intermediate_size": 96}
    folder = write_tiny_model(tmp_path, "llama", **sizes)
    write(folder, "awq", config={**KINDS["awq"][1], "group_size": 24})
    with pytest.raises(ModelLoadError, match="on_unsupported_format='dequantise'"):
        make_runner(folder, **SETTINGS)
