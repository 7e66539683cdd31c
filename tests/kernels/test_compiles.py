"""What the interpreter accepts the compiler may refuse, or a GPU may have too little shared memory for; without one."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pairs import some

SCRIPT = Path(__file__).with_name("compile_everything.py")
HALF, FULL = torch.float16, torch.float32


def compiled(*args: str) -> str:
    """What the script prints. It fails if a kernel takes more shared memory than there is."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tiles", some(["few", "all"], "few"))
def test_every_kernel_compiles(tiles: str) -> None:
    """Where nothing is left from an earlier run, half a second each."""
    pytest.importorskip("triton")
    count = int(compiled("90", *["--sparse"] * (tiles == "few")).split()[0])
    sources = Path(__file__).parents[2] / "aengine/kernels/triton"
    defined = sum(path.read_text().count("@triton.jit") for path in sources.glob("*.py"))
    assert count >= defined / 2, f"{count} kernels were compiled, of {defined} functions"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capabilities", some(["75", "80 89 100 120"], "75"))
def test_the_largest_fit_other_gpus(capabilities: str) -> None:
    """Of Turing, which has the least shared memory; of Ampere, Ada and Blackwell. 8.6 has the limit and the
    instructions of 8.9."""
    pytest.importorskip("triton")
    compiled("--largest", *capabilities.split())


class TestChoices:
    """On an H100 and an H200 they are what was measured there; elsewhere the kernel's need decides, and no other."""

    @pytest.fixture(autouse=True)
    def shared_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        self.limit = 232_448
        from aengine.kernels.triton import (
            decode_attention,
            linear_skinny,
            linear_streamed,
            linear_tiled,
            varlen_attention,
        )

        for module in (decode_attention, linear_skinny, linear_streamed, linear_tiled, varlen_attention):
            monkeypatch.setattr(module, "max_shared_memory", lambda: self.limit)

    def test_products_on_hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from aengine.kernels.linear_tilings import StreamedTiling as S
        from aengine.kernels.linear_tilings import measured_tilings
        from aengine.kernels.matrix import Matrix
        from aengine.kernels.triton import linear, linear_streamed
        from aengine.kernels.triton.linear_skinny import SkinnyTiling

        def choice(rows: int, n: int, k: int, kind: str) -> object:
            x, weight = torch.empty(rows, k, dtype=HALF), torch.empty(1, dtype=HALF).expand(n, k)
            return linear._tiling(x, Matrix(weight), gated=kind == "gated", add=kind == "add")

        for device in ("NVIDIA H200", "another"):  # measured there, by arithmetic here
            monkeypatch.setattr(linear, "device_name", lambda device=device: device)
            assert choice(64, 1024, 2048, "add") == S(64, 16, 256, 4, 5)
            assert choice(16, 28672, 4096, "gated") == S(64, 16, 256, 4, 3)
            assert choice(64, 28672, 4096, "gated") == S(64, 64, 128, 4, 4)
            assert choice(512, 4096, 4096, "add") is None
        assert choice(64, 1000, 2052, "add") is None, "rows that are no multiple of 16 bytes"
        assert choice(16, 576, 576, "add") == SkinnyTiling(16, 16, 2, 32, 2, 4), "too few programs"
        self.limit = 101_376
        for shape, _, tiling in measured_tilings():
            what = shape.kind == "gated", shape.weight_bytes, shape.x_bytes
            assert tiling.shared_bytes(*what) <= 232_448
            assert linear_streamed.fit(tiling, *what).shared_bytes(*what) <= 101_376

    def test_products_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from aengine.kernels.matrix import Matrix
        from aengine.kernels.triton import linear
        from aengine.kernels.triton.linear import _tiling
        from aengine.kernels.triton.linear_skinny import SkinnyTiling as S
        from aengine.kernels.triton.linear_tiled import TiledTiling as T

        def choice(rows: int, n: int, kind: str, k: int = 2048) -> S | T | None:
            x, weight = torch.empty(rows, k, dtype=HALF), torch.empty(1, dtype=HALF).expand(n, k)
            return _tiling(x, Matrix(weight), gated=kind == "gated", add=kind == "add")

        monkeypatch.setattr(linear, "is_hopper", lambda: False)
        for rows, plain, gated in (
            (2, S(8, 16, 2, 256, 2, 4), S(8, 16, 4, 64, 4, 4)),
            (16, S(16, 16, 2, 256, 4, 4), S(16, 16, 4, 64, 4, 4)),
            (17, T(64, 32, 4, 5), T(64, 32, 8, 4)),
            (64, T(64, 32, 4, 5), T(64, 32, 8, 4)),
            (128, T(64, 64, 4, 5), T(64, 64, 4, 3)),
            (129, None, None),
        ):
            assert choice(rows, 1024, "") == plain and choice(rows, 1024, "gated") == gated
            assert choice(rows, 8192, "") is None
        for rows, narrow, wide in (
            (8, S(8, 16, 4, 256, 4, 4), S(8, 32, 2, 256, 2, 4)),
            (16, S(16, 16, 2, 256, 2, 4), S(16, 32, 2, 128, 2, 4)),
            (32, S(32, 16, 2, 256, 2, 4), None),
            (33, None, None),
        ):
            assert choice(rows, 1024, "add") == narrow and choice(rows, 4096, "add") == wide
        assert choice(8, 1024, "add", k=576) == S(8, 16, 2, 32, 4, 4)
        assert choice(64, 1024, "", k=576) is None and choice(64, 1008, "") is None

    def test_attention_on_hopper(self) -> None:
        from aengine.kernels.decode_plan import BatchSize
        from aengine.kernels.paged_attention import PromptLayers
        from aengine.kernels.triton import decode_attention, varlen_attention

        for head_bytes in (32, 64, 128, 256, 512, 1024):
            for rows in (16, 32):
                sizes = [tuple(decode_attention._tiling(size, rows, head_bytes, False, False)) for size in BatchSize]
                keys = 64 if head_bytes == 1024 else 128
                assert sizes == [(keys, 4, 1), (64, 4, 2), (32, 2, 3), (32, 1, 2)]
                keys = {32: 256, 64: 256, 128: 256, 256: 256, 512: 128, 1024: 64}[head_bytes]
                assert tuple(decode_attention._tiling(BatchSize.SMALL, rows, head_bytes, True, False)) == (keys, 8, 1)
        for head_dim in (16, 64, 80, 128, 256):
            layers = PromptLayers(16, 8, head_dim, HALF)
            usual = (64, 32, 4, 2, 2, 2, None) if head_dim > 128 else (64, 64, 4, 3, 4, 2, None)
            short = usual if head_dim > 128 else (64, 32, 4, 3, 4, 3, 168)
            sizes = ((64, 1), (2304, 256), (2305, 3), (8192, 8), (8191, 8))
            of_16_bit = [tuple(varlen_attention._tiling(layers, *size)) for size in sizes]
            assert of_16_bit == [usual, usual, short, usual, short]
            assert varlen_attention._tiling(layers._replace(dtype=FULL), 3072, 1)[:4] == (32, 32, 4, 2)

    @pytest.mark.parametrize("limit", [65_536, 101_376, 166_912])
    def test_smaller_gpus_get_smaller_tiles(self, limit: int) -> None:
        from aengine.kernels.decode_plan import BatchSize
        from aengine.kernels.paged_attention import PromptLayers
        from aengine.kernels.triton import decode_attention, varlen_attention

        self.limit = limit
        for head_bytes in (32, 128, 256, 512):
            for size, is_narrow in itertools.product(BatchSize, (False, True)):
                tiling = decode_attention._tiling(size, 16, head_bytes, is_narrow, False)
                assert tiling.shared_bytes(16, head_bytes) <= limit and tiling.block_n in (16, 32, 64, 128, 256)
        for head_dim in (64, 128, 256):
            for num_seqs, is_fp8, num_heads in itertools.product((1, 64), (False, True), (16, 32)):
                layers = PromptLayers(num_heads, 8, head_dim, HALF, None, is_fp8)
                attention = varlen_attention._tiling(layers, 3072, num_seqs)
                assert attention.shared_bytes(2 * head_dim) <= limit
                assert attention.block_m % attention.max_pack == 0
