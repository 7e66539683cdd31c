"""What kernels make of words of codes and of pairs of 16-bit numbers, word by word. Products reach some of these with
bfloat16 alone, which Triton's interpreter does not have."""

from __future__ import annotations

import random

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from aengine.kernels.triton.grouped_parts import times_plus  # noqa: E402
from aengine.kernels.triton.grouped_tiles import _words_of_exact  # noqa: E402
from aengine.kernels.triton.linear_parts import numbers  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@triton.jit
def _exact(words_ptr, out_ptr, KIND: tl.constexpr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    a, b, c, d = _words_of_exact(tl.load(words_ptr + i), tl.float16, KIND)
    tl.store(out_ptr + i, a)
    tl.store(out_ptr + COUNT + i, b)
    tl.store(out_ptr + 2 * COUNT + i, c)
    tl.store(out_ptr + 3 * COUNT + i, d)


@triton.jit
def _sums(words_ptr, out_ptr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    w, factor, addend = (
        tl.load(words_ptr + i),
        tl.load(words_ptr + COUNT + i),
        tl.load(words_ptr + 2 * COUNT + i),
    )
    tl.store(out_ptr + i, times_plus(w, factor, addend, tl.float16))


@triton.jit
def _of_bytes(codes_ptr, like_ptr, out_ptr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out_ptr + i, numbers(tl.load(codes_ptr + i), tl.load(like_ptr + i), True))


@pytest.mark.parametrize("kind", ["uint4", "e2m1"])
def test_words_of_codes(kind: str, gen: torch.Generator, triton_device: torch.device) -> None:
    codes = torch.randint(0, 16, (64, 8), generator=gen)
    codes[:16] = torch.arange(16)[:, None]
    words = (codes << 4 * torch.arange(8)).sum(1)
    words = torch.where(words < 2**31, words, words - 2**32).int().to(triton_device)
    out = torch.empty(4, 64, dtype=torch.int32, device=triton_device)
    _exact[(1,)](words, out, kind, 64)
    found = out.cpu().view(torch.float16).view(4, 64, 2).float()
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    meant = e2m1[codes] / 2**14 if kind == "e2m1" else codes + 1024.0
    assert torch.equal(found, torch.stack([meant[:, :4], meant[:, 4:]], -1).transpose(0, 1))


def test_pairs_times_pairs_plus_pairs(gen: torch.Generator, triton_device: torch.device) -> None:
    pairs = torch.randn(3, 64, 2, generator=gen).half()
    out = torch.empty(64, dtype=torch.int32, device=triton_device)
    _sums[(1,)](pairs.view(torch.int32).to(triton_device), out, 64)
    first, factor, addend = pairs.double()
    assert torch.equal(out.cpu().view(torch.float16).view(64, 2), (first * factor + addend).half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bytes_of_fp8(dtype: torch.dtype, rng: random.Random, triton_device: torch.device) -> None:
    """All 254 that are numbers, on a GPU that does not know them."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255]] = rng.randrange(127)
    like, out = (torch.empty(256, dtype=dtype, device=triton_device) for _ in range(2))
    _of_bytes[(1,)](codes.view(torch.int8).to(triton_device), like, out, 256)
    assert torch.equal(out.cpu(), codes.view(torch.float8_e4m3fn).to(dtype))
