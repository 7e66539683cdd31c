"""Codes with a scale a group: what they mean, and products by them, against their definition column by column."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from aengine.kernels.activation import act_and_mul, computed
from aengine.kernels.expert_types import InputNorm
from aengine.kernels.grouped_codes import CodeKind, GroupedCodes, numbers, pack, pack_halves, unpack, unpack_halves
from aengine.kernels.linear import add_linear, norm_gated_linear, norm_linear, plain_linear
from aengine.kernels.matrix import Matrix
from aengine.runner.weights.plain import PlainFormat
from aengine.runner.weights.quantised.grouped import GroupedWeight, fits, grouped_weight

KINDS: list[CodeKind] = ["int4", "uint4", "e2m1", "iq4_nl", "int8", "uint8", "e4m3"]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def draw_codes(
    gen: torch.Generator,
    rng: random.Random,
    kind: CodeKind,
    n: int,
    k: int,
    group: int,
    rows: int = 1,
    stack: tuple[int, ...] = (),
) -> GroupedCodes:
    """Random codes, with a zero, an offset or a scale a row where the kind is seen with one."""
    groups = (*stack, -(-n // rows), -(-k // group))
    many = torch.randint(0, 256, (*stack, n, k), generator=gen, dtype=torch.uint8)
    zero = offset = row_scale = None
    if kind in ("uint4", "uint8") and rng.random() < 0.5:
        zero = torch.randint(0, 16 if kind == "uint4" else 256, groups, generator=gen, dtype=torch.uint8)
    elif kind in ("uint4", "uint8"):
        offset = torch.randn(groups, generator=gen).to(rng.choice(FLOATS))
    scale = torch.rand(groups, generator=gen).add_(0.5).to(rng.choice(FLOATS))
    if kind == "e2m1":
        scale = scale.to(rng.choice([torch.float8_e4m3fn, torch.float8_e8m0fnu]))
        row_scale = torch.rand((*stack, n), generator=gen).add_(0.5)
    if kind == "int8":
        codes = many.view(torch.int8)
    elif kind == "e4m3":
        codes = torch.randn((*stack, n, k), generator=gen).to(torch.float8_e4m3fn)
    else:
        codes = many if kind == "uint8" else pack(many & 15)
    return GroupedCodes(kind, codes, scale, group, zero, offset, row_scale, rows)


def value_of(codes: GroupedCodes, n: int, k: int) -> float:
    """One number of a matrix, by the definition of its kind."""
    if codes.has_4_bits:
        byte = int(codes.codes[n, k // 32 * 16 + k % 8 * 2 + k % 32 // 16])
        code = byte >> 4 if k % 16 >= 8 else byte & 15
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        e2m1 = (-1) ** sign * (2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)
        iq4_nl = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113][code]
        value = {"int4": code - 8.0, "uint4": float(code), "e2m1": e2m1, "iq4_nl": float(iq4_nl)}[codes.kind]
    else:
        value = float(codes.codes[n, k])
    at = (n // codes.rows, k // codes.group)
    value = (value - (0 if codes.zero is None else int(codes.zero[at]))) * float(codes.scale[at])
    value += 0.0 if codes.offset is None else float(codes.offset[at])
    return value * (1.0 if codes.row_scale is None else float(codes.row_scale[n]))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_what_each_kind_means(kind: CodeKind, gen: torch.Generator, rng: random.Random) -> None:
    codes = draw_codes(gen, rng, kind, n=5, k=96, group=rng.choice([16, 32, 64, 96]), rows=rng.choice([1, 2]))
    meant = torch.tensor([[value_of(codes, n, k) for k in range(96)] for n in range(5)])
    torch.testing.assert_close(numbers(codes), meant)
    assert codes.shape == (5, 96)


def test_packed_codes_come_back(gen: torch.Generator) -> None:
    codes = torch.randint(0, 16, (3, 64), generator=gen, dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes)), codes)
    halves = torch.cat([half[:, :16] | half[:, 16:] << 4 for half in codes.split(32, 1)], 1)
    assert torch.equal(pack_halves(halves), pack(codes)) and torch.equal(unpack_halves(pack(codes)), halves)


def test_on_a_cpu_a_weight_is_the_plain_format_s(gen: torch.Generator, rng: random.Random) -> None:
    codes, x = draw_codes(gen, rng, "uint4", 24, 64, 32), torch.randn(3, 64, generator=gen)
    bias, order = torch.randn(24, generator=gen), torch.randperm(64, generator=gen)
    weight = grouped_weight(codes, bias, PlainFormat(torch.float32))
    assert not isinstance(weight, GroupedWeight)
    torch.testing.assert_close(weight.multiply(x), GroupedWeight(codes, bias).multiply(x))
    ordered = grouped_weight(codes, bias, PlainFormat(torch.float32), order)
    torch.testing.assert_close(ordered.multiply(x), weight.multiply(x[:, order]), rtol=1e-4, atol=1e-4)


def test_a_weight_loaded_again_keeps_its_memory(gen: torch.Generator) -> None:
    first, second = (draw_codes(gen, random.Random(1), "uint4", 8, 64, 32) for _ in range(2))
    weight, at = GroupedWeight(first, None), first.codes.data_ptr()
    weight.copy_from(GroupedWeight(second, None))
    assert weight.codes.codes.data_ptr() == at and torch.equal(numbers(weight.codes), numbers(second))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group": 48}, "power of two"),
        ({"group": 8}, "power of two"),
        ({"codes": torch.zeros(4, 24, dtype=torch.uint8)}, "multiple of 32"),
        ({"codes": torch.zeros(4, 32, dtype=torch.int8)}, "kind int4 in torch.int8"),
        ({"scale": torch.ones(4, 3)}, "a scale of"),
        ({"scale": torch.ones(4, 2, dtype=torch.float64)}, "a scale of"),
        ({"zero": torch.ones(4, 2)}, "a zero of"),
        ({"row_scale": torch.ones(4, 1)}, "a row_scale of"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict, says: str) -> None:
    fields = {"kind": "int4", "codes": torch.zeros(4, 32, dtype=torch.uint8), "scale": torch.ones(4, 2), "group": 32}
    GroupedCodes(**fields)
    with pytest.raises(ValueError, match=says):
        GroupedCodes(**{**fields, **change})


def test_what_fits() -> None:
    assert fits("int4", 64, 64) and fits("int8", 48, 48) and fits("int4", 96, 96) and fits("e4m3", 144, 128)
    assert not fits("int4", 48, 16) and not fits("int4", 96, 48) and not fits("int8", 40, 40)


TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
ROWS = [1, 1, 2, 5, 8, 17, 40, 75]


def drawn(gen: torch.Generator, rng: random.Random, kind: CodeKind, device: torch.device) -> dict[str, Any]:
    """A shape at some edge: N odd, K no multiple of what a program reads at once, groups of 16 to a whole row."""
    k, group = rng.choice([(64, 16), (96, 32), (576, 64), (608, 32), (1280, 128), (320, 320), (4128, 16)])
    n, rows_of_scale = rng.choice([(5, 1), (24, 1), (64, 32), (130, 1)])
    rows, dtype = rng.choice(ROWS), rng.choice([torch.float32, torch.float16])
    codes = draw_codes(gen, rng, kind, 2 * n, k, group, rows_of_scale)
    power = 2.0 ** -round(float(numbers(codes).norm(dim=1).mean().log2()))  # keeps products near 1
    smaller = {
        name: (t.float() * power).to(t.dtype) for name in ("scale", "offset") if (t := getattr(codes, name)) is not None
    }
    codes = replace(codes, **{name: smaller.get(name, t).to(device) for name, t in codes.tensors().items()})
    return {
        "codes": codes,
        "x": torch.randn(rows, k, generator=gen).to(dtype).to(device),
        "bias": torch.randn(2 * n, generator=gen).to(device) if rng.random() < 0.5 else None,
    }


def product(case: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    out = x.double().cpu() @ numbers(case["codes"]).double().cpu().t()
    return out if case["bias"] is None else out + case["bias"].double().cpu()


def check(out: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None) -> None:
    """Compare with the reference, relative to it or to a ``scale``."""
    error = (out.double().cpu() - reference).norm() / (reference if scale is None else scale).norm()
    assert out.isfinite().all() and float(error) < TOLERANCE[dtype]


def check_gated(out: torch.Tensor, case: dict[str, Any], x: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare silu(gate) * up with the reference, relative to what errors of gate and up are multiplied by.

    The terms of each product add up as a root of squares: a few gated products may all be small where their terms are
    not, so that the error relative to the products alone has no bound.
    """
    gate, up = product(case, x).chunk(2, dim=-1)
    squares = x.square() @ numbers(case["codes"]).double().cpu().square().t()
    gate_size, up_size = (squares + product(case, x).square()).sqrt().chunk(2, dim=-1)
    scale = 1.1 * up.abs() * gate_size + F.silu(gate).abs() * up_size
    assert out.isfinite().all()
    assert float((out.double().cpu() - F.silu(gate) * up).norm() / scale.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_definition(
    kind: CodeKind, gen: torch.Generator, rng: random.Random, triton_device: torch.device
) -> None:
    from aengine.kernels.triton.dequantise import dequantise_groups

    codes = drawn(gen, rng, kind, triton_device)["codes"]
    torch.testing.assert_close(dequantise_groups(codes, torch.float32), numbers(codes), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: CodeKind, gen: torch.Generator, rng: random.Random, triton_device: torch.device) -> None:
    case = drawn(gen, rng, kind, triton_device)
    x, codes, bias = case["x"], case["codes"], case["bias"]
    check(plain_linear(x, Matrix(codes, bias)), product(case, x), x.dtype)
    residual = torch.randn(len(x), codes.shape[0], generator=gen).to(x.dtype).to(triton_device)
    before = residual.double().cpu()
    add_linear(residual, x, Matrix(codes, bias))
    check(residual, before + product(case, x), x.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_in_each_number_of_bits(kind: CodeKind, gen: torch.Generator, triton_device: torch.device) -> None:
    """The kernel of a single row, whatever else is drawn: with groups of 16, which it halves its units for, and wider
    ones, whose codes it raises otherwise where x has 16 bits.

    Sums of raised codes are rounded as such. Where the sum of a group's x is large, that is most of the error in all
    outputs, and grows with the terms, not with the product."""
    for k, group in ((96, 16), (64, 32), (128, 64)):
        codes = draw_codes(gen, random.Random(k), kind, 24, k, group)
        codes = replace(codes, **{name: tensor.to(triton_device) for name, tensor in codes.tensors().items()})
        for dtype in (torch.float32, torch.float16):
            x = (torch.randn(1, k, generator=gen) / 64).to(dtype).to(triton_device)
            terms = x.abs().double().cpu() @ numbers(codes).abs().double().cpu().t() if dtype == torch.float32 else None
            check(plain_linear(x, Matrix(codes, None)), product({"codes": codes, "bias": None}, x), dtype, terms)


@pytest.mark.parametrize("kind", KINDS)
def test_products_by_a_norm(
    kind: CodeKind, gen: torch.Generator, rng: random.Random, triton_device: torch.device
) -> None:
    case = drawn(gen, rng, kind, triton_device)
    x, codes, bias = case["x"], case["codes"], case["bias"]
    weight = torch.rand(x.shape[1], generator=gen).add_(0.5).to(triton_device)
    normed = x.double().cpu() * weight.double().cpu()
    normed /= (x.double().cpu().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    check(norm_linear(x, InputNorm(weight, 1e-6), Matrix(codes, bias), torch.float32), product(case, normed), x.dtype)
    both = computed(norm_gated_linear(x, InputNorm(weight, 1e-6), Matrix(codes, bias)))
    check_gated(both, case, normed, x.dtype)


@pytest.mark.parametrize("kind", ["int4", "uint4"])
@pytest.mark.parametrize(("n", "k", "group"), [(32, 512, 32), (21, 608, 64), (9, 96, 128)])
def test_one_row_by_the_tensor_cores(
    kind: CodeKind, n: int, k: int, group: int, gen: torch.Generator, triton_device: torch.device
) -> None:
    """Whole tiles and tiles cut in both directions, also with a norm and a gate."""
    from aengine.kernels.triton.grouped_row import can_multiply_row

    codes = draw_codes(gen, random.Random(k), kind, 2 * n, k, group)
    codes = replace(codes, **{name: tensor.to(triton_device) for name, tensor in codes.tensors().items()})
    case = {"codes": codes, "bias": torch.randn(2 * n, generator=gen).to(triton_device)}
    for dtype in (torch.bfloat16, torch.float16):
        weight = torch.rand(k, generator=gen).add_(0.5).div_(8).to(dtype).to(triton_device)
        x = (torch.randn(1, k, generator=gen) / 8).to(dtype).to(triton_device)
        assert can_multiply_row(x, codes, InputNorm(weight, 1e-6))
        matrix, wanted = Matrix(codes, case["bias"]), product(case, x)
        check(plain_linear(x, matrix), wanted, dtype)
        normed = F.rms_norm(x.double().cpu(), (k,), weight.double().cpu(), 1e-6)
        both = computed(norm_gated_linear(x, InputNorm(weight, 1e-6), matrix))
        check_gated(both, case, normed, dtype)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_programs_that_share_out_k_add_up(
    activation: str | None, gen: torch.Generator, rng: random.Random, triton_device: torch.device
) -> None:
    """The last of them does, and leaves the counters as they were. Neither 352 columns nor a part of 96 are a multiple
    of a block; 72 rows are none, and 64 are."""
    from aengine.kernels.triton.grouped_tiles import GroupedTiling, multiply_tiles

    x = (torch.randn(19, 352, generator=gen) / 256).half().to(triton_device)
    for num_blocks, size in ((1, 72), (2, 64 if activation is None else 128)):
        codes = draw_codes(gen, rng, "uint4", size, 352, 32)
        codes = replace(codes, **{name: tensor.to(triton_device) for name, tensor in codes.tensors().items()})
        wanted = x.double() @ numbers(codes).double().t()
        wanted = wanted if activation is None else act_and_mul(wanted)
        out = torch.zeros(wanted.shape, dtype=torch.float32, device=triton_device)
        tiling = GroupedTiling(64, 16, 64, num_blocks, num_parts=3, num_warps=4, num_stages=3)
        multiply_tiles(x, codes, None, out, add=activation is None, activation=activation, tiling=tiling)
        check(out, wanted.cpu(), x.dtype)
