"""Which way a product goes: the library's, by the copy engine or by threads; and that each gives the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl

from aengine.kernels.activation import computed
from aengine.kernels.expert_types import InputNorm
from aengine.kernels.grouped_codes import CodeKind, GroupedCodes, numbers, pack
from aengine.kernels.linear import add_linear, norm_gated_linear, norm_linear, plain_linear
from aengine.kernels.linear_tilings import LinearShape, StreamedTiling
from aengine.kernels.matrix import Matrix
from aengine.kernels.triton import grouped_tiles, linear, linear_fp8
from aengine.kernels.triton.grouped_tiles import way_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there each is taken as it is")


def fp8(n: int, k: int, gen: torch.Generator) -> Matrix:
    codes = torch.randn(n, k, generator=gen).to(torch.float8_e4m3fn)
    return Matrix(codes, None, torch.rand(n, generator=gen) / 16 + 1 / 32, quantises_x=True)


def in_blocks(n: int, k: int, gen: torch.Generator, **other: Any) -> Matrix:
    codes = torch.randn(n, k, generator=gen).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-n // 128), -(-k // 128), generator=gen) / 16 + 1 / 32
    given = {"scale": scale, "group": 128, "rows": 128, **other}
    return Matrix(GroupedCodes("e4m3", codes, **given), quantises_x=True)


def of_library(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scale: torch.Tensor,
    scale: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """`torch._scaled_mm` as it is on a GPU: with a scale a row, or one for 128 columns and blocks of 128 x 128."""
    (m, k), n = x.shape, weight.shape[1]
    assert weight.shape == (k, n) and n % 16 == k % 16 == 0
    if x_scale.shape != (m, 1):
        assert m % 4 == 0 and not use_fast_accum and x_scale.stride(0) == 1
        assert x_scale.shape == (m, k // 128) and scale.shape == (k // 128, n // 128) and k % 512 == 0
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (x.float() * x_scale.repeat_interleave(128, 1) @ (weight.float() * scale)).to(out_dtype)
    assert scale.shape == (1, n) and use_fast_accum
    return ((x.float() * x_scale) @ (weight.float() * scale)).to(out_dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A library of scaled products, and the rows of those that it has made."""
    made: list[int] = []

    def multiply(x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        made.append(len(x))
        return of_library(x, *others, **options)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    monkeypatch.setattr(linear_fp8, "_library_has_scales", lambda: True)
    monkeypatch.setattr(linear_fp8, "MOST_OF_STREAM", 16)
    return made


@pytest.mark.parametrize("has_blocks", [False, True])
def test_rounded_rows_by_the_library(
    gen: torch.Generator, triton_device: torch.device, library: list[int], has_blocks: bool
) -> None:
    rows, n, k = 17, 256, 512
    matrix = (in_blocks if has_blocks else fp8)(n, k, gen)
    own = linear_fp8.unwrapped(torch.empty(rows, k, dtype=torch.half), matrix)
    assert own.scale is not None
    factor = own.scale.repeat_interleave(128, 0).repeat_interleave(128, 1) if has_blocks else own.scale[:, None]
    plain = own.weight.double() * factor  # type: ignore[union-attr]
    biased = matrix._replace(bias=torch.randn(n, generator=gen).half())
    x = torch.randn(rows, k, generator=gen).half()
    weight, residual = torch.rand(k, generator=gen) + 0.5, torch.randn(rows, n, generator=gen).half()
    norm = InputNorm(weight, 1e-6)
    of_x = x.double() @ plain.t()
    of_norm = torch.rms_norm(x.double(), (k,), weight.double(), 1e-6) @ plain.t()
    added = residual.clone()
    add_linear(added, x, biased)
    made = {
        "plain": (plain_linear(x, matrix), of_x),
        "biased": (plain_linear(x, biased), of_x + biased.bias),
        "norm": (norm_linear(x, norm, matrix, torch.float32), of_norm),
        "gated": (computed(norm_gated_linear(x, norm, matrix)), F.silu(of_norm[:, :128]) * of_norm[:, 128:]),
        "add": (added, residual + of_x + biased.bias),
    }
    assert library == [20 if has_blocks else rows] * 5, "a group of rows has four"
    for verb, (out, wanted) in made.items():
        assert float((out.double() - wanted).norm() / wanted.norm()) < 0.06, verb
    assert made["norm"][0].dtype == torch.float32 and made["plain"][0].dtype == torch.half


def test_our_kernel_adds_many_rows(
    gen: torch.Generator, triton_device: torch.device, library: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever order its programs take the tiles, the last of which are not as many."""
    for name, value in {"_FEWEST_LAST": 10, "_ADDING": StreamedTiling(64, 16, 128, 4, 3)}.items():
        monkeypatch.setattr(linear_fp8, name, value)
    monkeypatch.setattr(linear_fp8, "_TOGETHER", tl.constexpr(2))
    matrix = fp8(208, 256, gen)._replace(bias=torch.randn(208, generator=gen).half())
    x, residual = torch.randn(70, 256, generator=gen).half(), torch.randn(70, 208, generator=gen).half()
    assert matrix.scale is not None
    wanted = residual + x.double() @ (matrix.weight.double() * matrix.scale[:, None]).t() + matrix.bias  # type: ignore
    add_linear(residual, x, matrix)
    assert not library and float((residual.double() - wanted).norm() / wanted.norm()) < 0.06


def test_what_the_library_multiplies(gen: torch.Generator, library: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def by_library(rows: int, matrix: Matrix, dtype: torch.dtype = torch.half) -> bool:
        return linear_fp8.by_library(torch.empty(rows, matrix.shape[1], dtype=dtype), matrix)

    def unwrapped(n: int, k: int) -> Matrix:
        return linear_fp8.unwrapped(torch.empty(9, k, dtype=torch.half), in_blocks(n, k, gen))

    own, blocks = fp8(32, 48, gen), unwrapped(128, 512)
    assert blocks.scale is not None and blocks.scale.shape == (1, 4)
    assert [by_library(rows, own) for rows in (16, 17)] == [False, True]
    assert [by_library(rows, blocks) for rows in (16, 17)] == [False, True]  # few tiles: half as many rows, of more
    assert not by_library(17, own, torch.float32) and not by_library(17, own._replace(quantises_x=False))
    assert not by_library(17, own._replace(weight=torch.zeros(32, 48, dtype=torch.int8)))
    assert not by_library(17, Matrix(torch.zeros(32, 48), None, None, True)) and not by_library(
        17, in_blocks(128, 512, gen)
    )
    for shape in ((24, 48), (32, 40)):
        assert not by_library(17, fp8(*shape, gen))
    for shape in ((128, 256), (192, 512)):
        assert not by_library(17, unwrapped(*shape))
    monkeypatch.setattr(linear_fp8, "is_hopper", lambda: False)
    assert not by_library(17, own)


def test_which_blocks_are_multiplied_as_fp8(gen: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_unwrapped(matrix: Matrix, rows: int = 5, dtype: torch.dtype = torch.half, **options: Any) -> bool:
        x = torch.empty(rows, matrix.shape[1], dtype=dtype)
        own = linear_fp8.unwrapped(x, matrix, **options)
        assert own is matrix or (isinstance(own.weight, torch.Tensor) and own.scale is matrix.weight.scale)
        return own is not matrix

    good = in_blocks(128, 128, gen)
    assert is_unwrapped(good) and is_unwrapped(good, 1, torch.float32) and not is_unwrapped(good, 2, torch.float32)
    assert is_unwrapped(good, 513) and is_unwrapped(good._replace(quantises_x=False), 512)
    assert not is_unwrapped(good._replace(quantises_x=False), 513)
    assert not is_unwrapped(in_blocks(128, 96, gen)) and is_unwrapped(in_blocks(192, 160, gen))
    assert is_unwrapped(in_blocks(256, 128, gen), gated=True) and not is_unwrapped(good, gated=True)
    assert not is_unwrapped(fp8(128, 128, gen)) and not is_unwrapped(
        in_blocks(128, 128, gen, scale=torch.ones(1, 1).half())
    )
    assert not is_unwrapped(in_blocks(128, 128, gen, group=64, scale=torch.ones(1, 2)))
    assert not is_unwrapped(in_blocks(128, 128, gen, rows=1, scale=torch.ones(128, 1)))
    eight = GroupedCodes("int8", torch.zeros(128, 128, dtype=torch.int8), torch.ones(1, 1), 128, rows=128)
    assert not is_unwrapped(Matrix(eight, quantises_x=True))
    monkeypatch.setattr(linear_fp8, "is_hopper", lambda: False)
    assert is_unwrapped(good, 1) and not is_unwrapped(good)


def codes_of(kind: CodeKind, group: int, scale: torch.dtype = torch.float32, **others: Any) -> GroupedCodes:
    codes = pack(torch.arange(512, dtype=torch.uint8).view(4, 128) & 15)
    return GroupedCodes(kind, codes, torch.ones(4, 128 // group).to(scale), group, **others)


def test_what_scales_are_applied_to() -> None:
    half, wide = torch.float16, torch.bfloat16
    power, few = torch.float8_e8m0fnu, torch.float8_e4m3fn
    assert [way_of(codes_of("int4", group), half) for group in (32, 64, 128)] == ["numbers", "sums", "sums"]
    assert way_of(codes_of("uint4", 64, offset=torch.ones(4, 2)), half) == "numbers"
    assert [way_of(codes_of("e2m1", group, power), half) for group in (16, 32)] == ["numbers", "sums"]
    assert [way_of(codes_of("e2m1", 32, kind), wide) for kind in (power, few, half)] == ["exact", "exact", "numbers"]
    assert way_of(codes_of("e2m1", 32, few), half) == way_of(codes_of("int4", 32, few), wide) == "numbers"
    narrow = GroupedCodes("int4", pack(torch.zeros(4, 32, dtype=torch.uint8)), torch.ones(4, 1), 64)
    assert way_of(narrow, half) == "numbers", "a row is narrower than its group"


@pytest.mark.parametrize("kind", ["int4", "uint4", "e2m1", "int8"])
@pytest.mark.parametrize(("rows", "n", "k"), [(3, 80, 288), (17, 64, 512)])
def test_products_without_a_copy_engine(
    gen: torch.Generator,
    rng: random.Random,
    triton_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    kind: CodeKind,
    rows: int,
    n: int,
    k: int,
) -> None:
    """As on GPUs before Hopper: of shapes that tiles divide, and of others."""
    monkeypatch.setattr(grouped_tiles, "is_hopper", lambda: False)
    many, group = torch.randint(0, 256, (2 * n, k), generator=gen, dtype=torch.uint8), rng.choice([32, 288])
    group = group if k == 288 else 128
    codes = GroupedCodes(
        kind,
        many.view(torch.int8) if kind == "int8" else pack(many & 15),
        (torch.rand(2 * n, k // group, generator=gen) + 1) / (1024 if kind == "int8" else 64),
        group,
    )
    x, bias = torch.randn(rows, k, generator=gen).half(), torch.randn(2 * n, generator=gen)
    wanted = x.double() @ numbers(codes).double().t() + bias
    norm = InputNorm(torch.ones(k), 1e-6)
    gated = torch.rms_norm(x.double(), (k,), eps=1e-6) @ numbers(codes).double().t()
    gated = F.silu(gated[:, :n]) * gated[:, n:]
    made = plain_linear(x, Matrix(codes, bias)), computed(norm_gated_linear(x, norm, Matrix(codes)))
    for out, right in zip(made, (wanted, gated)):
        assert float((out.double() - right).norm() / right.norm()) < 4e-3


@pytest.mark.parametrize("rows", [2, 17, 40, 65])
def test_products_before_hopper(
    gen: torch.Generator, triton_device: torch.device, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Of plain numbers and of FP8 with a scale a row, by tiles of theirs."""
    for module in (linear, linear_fp8):
        monkeypatch.setattr(module, "is_hopper", lambda: False)
    n, k = 128, 256
    x, residual = torch.randn(rows, k, generator=gen).half(), torch.randn(rows, n, generator=gen).half()
    norm = InputNorm(torch.ones(k), 1e-6)
    for matrix in (Matrix(torch.randn(n, k, generator=gen).half() / 16), fp8(n, k, gen)):
        matrix = matrix._replace(bias=torch.randn(n, generator=gen).half())
        assert isinstance(matrix.weight, torch.Tensor)
        plain = matrix.weight.double() * (1 if matrix.scale is None else matrix.scale.double()[:, None])
        of_x = x.double() @ plain.t() + matrix.bias
        of_norm = torch.rms_norm(x.double(), (k,), eps=1e-6) @ plain.t() + matrix.bias
        added = residual.clone()
        add_linear(added, x, matrix)
        made = {
            "plain": (plain_linear(x, matrix), of_x),
            "norm": (norm_linear(x, norm, matrix), of_norm),
            "gated": (computed(norm_gated_linear(x, norm, matrix)), F.silu(of_norm[:, :64]) * of_norm[:, 64:]),
            "add": (added, residual + of_x),
        }
        for verb, (out, wanted) in made.items():
            assert float((out.double() - wanted).norm() / wanted.norm()) < 4e-3, verb


def test_halves_of_four_bits_go_to_the_even_one(triton_device: torch.device) -> None:
    """Of 1.0625 and 1.1875, as near to two numbers of four bits each; 448 makes the scale 1."""
    x = torch.tensor([[448.0, 1.0625, 1.1875, -1.0625, -1.1875, 1.0703125, 0.0, 3.0]]).half()
    codes, scale, _ = linear_fp8.split(x, None, 1)
    assert scale.tolist() == [[1.0]]
    assert codes[0].float().tolist() == [448.0, 1.0, 1.25, -1.0, -1.25, 1.125, 0.0, 3.0]


def test_a_shape_has_the_name_that_measurements_go_by() -> None:
    assert str(LinearShape("add", 96, 64)) == "add 96x64"
    assert str(LinearShape("gated", 96, 64, 1)) == "gated fp8 96x64"
    assert str(LinearShape("plain", 96, 64, 1, 1, in_blocks=True)) == "plain fp8 rounded blocks 96x64"


@pytest.mark.parametrize("kind", ["plain", "int8", "grouped"])
def test_products_by_torch(gen: torch.Generator, kind: str) -> None:
    """As on a CPU without compiled kernels."""
    weight, bias = torch.randn(64, 64, generator=gen) / 8, torch.randn(64, generator=gen)
    matrix = Matrix(weight, bias)
    if kind == "int8":
        matrix = Matrix((weight * 64).round().to(torch.int8), bias, torch.rand(64, generator=gen) / 64)
        weight = matrix.weight.float() * matrix.scale[:, None]  # type: ignore[union-attr,index]
    elif kind == "grouped":
        codes = torch.randint(0, 16, (64, 64), generator=gen, dtype=torch.uint8)
        matrix = Matrix(GroupedCodes("int4", pack(codes), torch.rand(64, 2, generator=gen) / 16, 32), bias)
        weight = numbers(matrix.weight)  # type: ignore[arg-type]
    x, residual = torch.randn(5, 64, generator=gen), torch.randn(5, 64, generator=gen)
    norm = InputNorm(torch.rand(64, generator=gen) + 0.5, 1e-6)
    of_x = x @ weight.t() + bias
    of_norm = torch.rms_norm(x, (64,), norm.weight, 1e-6) @ weight.t() + bias
    added = residual.clone()
    add_linear(added, x, matrix)
    gated = computed(norm_gated_linear(x, norm, matrix))
    assert norm_linear(x, norm, matrix, torch.float64).dtype == torch.float64
    for out, wanted in (
        (plain_linear(x, matrix), of_x),
        (norm_linear(x, norm, matrix), of_norm),
        (gated, F.silu(of_norm[:, :32]) * of_norm[:, 32:]),
        (added, residual + of_x),
    ):
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
