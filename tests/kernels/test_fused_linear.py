"""Fused products against their definition in float64, on the Triton kernels."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pairs import some

from aengine.kernels.activation import Activation, Gated, act_and_mul, computed
from aengine.kernels.dispatch import torch_reference
from aengine.kernels.expert_types import InputNorm
from aengine.kernels.grouped_codes import GroupedCodes
from aengine.kernels.linear import add_linear, norm_conv_linear, norm_gated_linear, norm_linear, plain_linear
from aengine.kernels.linear_tilings import StreamedTiling
from aengine.kernels.matrix import Matrix
from aengine.kernels.rms_norm import add_rms_norm, rms_norm
from aengine.kernels.short_conv import TokenConv, conv_of_tokens
from aengine.kernels.triton import linear_fp8, linear_streamed

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])
ACTIVATIONS: list[tuple[Activation, Callable[..., torch.Tensor]]] = [
    ("silu", F.silu),
    ("gelu", F.gelu),
    ("gelu_tanh", partial(F.gelu, approximate="tanh")),
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
ROWS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 70, 129]
# On a GPU each number of rows in each type; in Triton's interpreter in one of them, and in all by `make test-all`.
ROWS_AND_DTYPES = some(
    itertools.product(ROWS, DTYPES),
    *(case for i, case in enumerate(itertools.product(ROWS, DTYPES)) if torch.cuda.is_available() or i % 4 in (0, 3)),
)
# in_features, out_features: of SmolLM2, powers of two, and what only cuBLAS takes
SHAPES = [(576, 64), (256, 96), (1536, 16), (72, 50), (1024, 8), (256, 128)]


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x * weight / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.cpu().double() - reference).norm() / reference.norm())


def draw(gen: torch.Generator, rng: random.Random, rows: int, k: int, n: int, dtype: torch.dtype, biased: bool):
    """x, weight, bias and scale; of a weight of plain numbers there is none."""
    x = torch.randn(rows, k, generator=gen).mul(10 ** rng.uniform(-1, 1)).to(dtype)
    weight = torch.randn(n, k, generator=gen).mul(k**-0.5)
    bias = torch.randn(n, generator=gen).to(dtype) if biased else None
    codes = rng.choice([None, None, torch.float8_e4m3fn, torch.int8])
    if codes is None:
        return x, weight.to(dtype), bias, None
    scale = weight.abs().amax(1) / (448 if codes == torch.float8_e4m3fn else 127)
    return x, (weight / scale[:, None]).round().to(codes), bias, scale


def moved(device: torch.device, *tensors: torch.Tensor | None) -> list:
    return [None if t is None else t.to(device) for t in tensors]


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None
) -> torch.Tensor:
    out = F.linear(x.double(), weight.double()) * (1 if scale is None else scale.double())
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize(("rows", "dtype"), ROWS_AND_DTYPES, ids=str)
def test_norm_linear(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, dtype: torch.dtype, rows: int
) -> None:
    for k, n in rng.sample(SHAPES, 2):
        x, *matrix = draw(gen, rng, rows, k, n, dtype, rng.random() < 0.5)
        norm = (torch.rand(k, generator=gen) + 0.5).to(dtype)
        reference = product(normed(x, norm, 1e-5), *matrix)
        on = moved(triton_device, x, norm, *matrix)
        out_dtype = rng.choice([None, torch.float32])
        out = norm_linear(on[0], InputNorm(on[1], 1e-5), Matrix(*on[2:]), out_dtype)
        assert out.dtype == (out_dtype or dtype)
        assert relative_error(out, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize(("rows", "dtype"), ROWS_AND_DTYPES, ids=str)
def test_norm_gated_linear(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, dtype: torch.dtype, rows: int
) -> None:
    for k, n in rng.sample(SHAPES, 2):
        x, *matrix = draw(gen, rng, rows, k, 2 * n, dtype, rng.random() < 0.5)
        norm = (torch.rand(k, generator=gen) + 0.5).to(dtype)
        gate, up = product(normed(x, norm, 1e-6), *matrix).chunk(2, -1)
        on = moved(triton_device, x, norm, *matrix)
        activation, function = rng.choice(ACTIVATIONS)
        out = computed(norm_gated_linear(on[0], InputNorm(on[1], 1e-6), Matrix(*on[2:]), activation))
        assert out.shape == (rows, n) and out.dtype == dtype
        assert relative_error(out, function(gate) * up) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize(("rows", "dtype"), ROWS_AND_DTYPES, ids=str)
def test_plain_linear(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, dtype: torch.dtype, rows: int
) -> None:
    k, n = rng.choice(SHAPES)
    x, *matrix = draw(gen, rng, rows, k, n, dtype, rng.random() < 0.5)
    on = moved(triton_device, x, *matrix)
    out = plain_linear(on[0], Matrix(*on[1:]))
    assert out.shape == (rows, n) and out.dtype == dtype
    assert relative_error(out, product(x, *matrix)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("rows", "dtype"), ROWS_AND_DTYPES, ids=str)
def test_add_linear(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, dtype: torch.dtype, rows: int
) -> None:
    for k, n in rng.sample(SHAPES, 2):
        x, *matrix = draw(gen, rng, rows, k, n, dtype, rng.random() < 0.5)
        residual = torch.randn(rows, n, generator=gen).to(dtype)
        reference = residual.double() + product(x, *matrix)
        on = moved(triton_device, residual, x, *matrix)
        add_linear(on[0], on[1], Matrix(*on[2:]))
        assert relative_error(on[0], reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_norm_conv_linear(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, dtype: torch.dtype, rows: int
) -> None:
    """The states become those of the same convolution behind the product."""
    for k, n, width in ((576, 45, 3), (1024, 32, 4), (72, 50, 2)):
        x, *matrix = draw(gen, rng, rows, k, 3 * n, dtype, rng.random() < 0.5)
        norm, filters = (torch.rand(k, generator=gen) + 0.5).to(dtype), torch.randn(width, n, generator=gen)
        memory = torch.full((5, 8 + (width - 1) * n), torch.nan)[:, 8:].unflatten(1, (width - 1, n))
        pages, begins = torch.randperm(5, generator=gen)[:rows], torch.rand(rows, generator=gen) < 0.3
        memory[pages[~begins]] = torch.randn(int((~begins).sum()), width - 1, n, generator=gen)
        bias = torch.randn(n, generator=gen) if rng.random() < 0.5 else None
        states, own = memory.clone(), memory.to(triton_device, copy=True)
        with torch_reference():
            gates = product(normed(x, norm, 1e-5), *matrix).float()
            wanted = conv_of_tokens(gates, filters, bias, states, pages, begins)
        on = moved(triton_device, x, norm, *matrix)
        conv = TokenConv(*moved(triton_device, filters, bias), own, *moved(triton_device, pages, begins))
        out = norm_conv_linear(on[0], InputNorm(on[1], 1e-5), Matrix(*on[2:]), conv)
        assert out.shape == (rows, n) and out.dtype == dtype
        assert relative_error(out, wanted.double()) < 4 * TOLERANCE[dtype]
        close = 4 * TOLERANCE[dtype]
        torch.testing.assert_close(own.cpu(), states, rtol=close, atol=close, equal_nan=True)


def tiling_of(rng: random.Random) -> StreamedTiling:
    """On a GPU, W's rows fill the matrix instruction."""
    block_n = 64 if torch.cuda.is_available() else rng.choice([16, 32])
    return StreamedTiling(block_n, rng.choice([16, 32]), rng.choice([32, 64]), 4, 3)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kind", ["plain", "gated", "add"])
def test_streamed_tiles(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, dtype: torch.dtype, kind: str
) -> None:
    """Of shapes, too, that tiles don't divide; what lies around the output stays as it is."""
    for _ in range(4):
        gates = 2 if kind == "gated" else 1
        rows, k, n, biased = (
            rng.randint(2, 70),
            rng.choice([72, 256, 576]),
            rng.choice([50, 64, 96]),
            rng.random() < 0.5,
        )
        x, *matrix = draw(gen, rng, rows, k, gates * n, dtype, biased)
        if matrix[0].dtype == torch.int8 or (matrix[2] is not None and k % 16):
            continue  # rows of what is copied are multiples of 16 bytes
        whole = torch.randn(rows + 2, n, generator=gen).to(dtype)
        reference = product(x, *matrix)
        if kind == "gated":
            gate, up = reference.chunk(2, -1)
            reference = F.silu(gate) * up
        elif kind == "add":
            reference = reference + whole[1:-1].double()
        on = moved(triton_device, x, *matrix)
        tiling, activation = tiling_of(rng), "silu" if kind == "gated" else None
        out = whole.to(triton_device, copy=True)
        how = {"add": kind == "add", "activation": activation}
        if on[3] is None:
            linear_streamed.stream(tiling, *on[:3], out[1:-1], **how)
        else:
            linear_fp8.stream(tiling, linear_fp8.split(on[0]), *on[1:], out[1:-1], **how)
        assert relative_error(out[1:-1], reference) < 2 * TOLERANCE[dtype], tiling
        assert torch.equal(out[[0, -1]].cpu(), whole[[0, -1]])


def rounded(x: torch.Tensor, *, in_groups: bool = False) -> torch.Tensor:
    """x [rows, k] as the kernels round it to FP8, float64, with a scale a row or 128 columns of one: each number to the
    nearest code. Of two that are as near either is right: of numbers in 16 bits, one in thousands is halfway."""
    codes, scale, _ = linear_fp8.split(x, None, 1, in_groups=in_groups)
    exact, factor = x.cpu().double(), scale[: len(x)].cpu().double()
    factor = factor.repeat_interleave(128, 1)[:, : x.shape[1]] if in_groups else factor
    size = (exact / factor).abs()
    step = torch.exp2(size.clamp(min=2**-6).log2().floor() - 3)
    # Below 2^-6, the least normal number of FP8, Triton's interpreter cuts off what it should round.
    error = step * torch.where(size < 2**-6, 1.0, 0.5001)
    made = codes[: len(x)].cpu().double() * factor
    assert ((made - exact).abs() <= error * factor).all()
    return made


@pytest.mark.parametrize(("rows", "quantises_x"), [(1, True), (5, True), (9, True), (70, False), (70, True)])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_weights_in_fp8(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, in_blocks: bool, rows: int, quantises_x: bool
) -> None:
    """With a scale a row, or a block of 128 x 128; activations are rounded of many rows, and where they may be."""
    k, n = rng.choice([256, 320] if in_blocks else [272, 320]), rng.choice([256, 192])  # the last block may be smaller
    codes = torch.randn(n, k, generator=gen).to(torch.float8_e4m3fn)
    if in_blocks:
        scale = (torch.rand(-(-n // 128), -(-k // 128), generator=gen) + 0.5) / 16
        numbers = codes.double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
        on_device = moved(triton_device, codes, scale)
        matrix: list = [GroupedCodes("e4m3", *on_device, 128, rows=128), None, None]
    else:
        scale = (torch.rand(n, generator=gen) + 0.5) / 16
        numbers = codes.double() * scale.double()[:, None]
        matrix = [codes.to(triton_device), None, scale.to(triton_device)]
    x, residual = torch.randn(rows, k, generator=gen).half(), torch.randn(rows, n, generator=gen).half()
    x[rows // 2, 7] *= 30
    norm, bias = torch.rand(k, generator=gen) + 0.5, torch.randn(n, generator=gen)
    takes = rounded if quantises_x and rows > linear_fp8.MOST_UNROUNDED else torch.Tensor.double
    on = moved(triton_device, x, norm, residual, bias)
    of_norm = takes(normed(x, norm, 1e-6).to(triton_device)).cpu() @ numbers.t()
    of_x = takes(on[0]).cpu() @ numbers.t()
    weight, _, scales = matrix
    gate, up = of_norm.chunk(2, -1)
    added = on[2].clone()
    plain, own_norm = Matrix(weight, None, scales, quantises_x), InputNorm(on[1], 1e-6)
    biased = plain._replace(bias=on[3])
    add_linear(added, on[0], biased)
    made = {
        "plain": (plain_linear(on[0], plain), of_x),
        "norm": (norm_linear(on[0], own_norm, biased), of_norm + bias),
        "gated": (computed(norm_gated_linear(on[0], own_norm, plain)), F.silu(gate) * up),
        "add": (added, residual + of_x + bias),
    }
    if in_blocks and n == 192 and takes is rounded:  # by one of two kernels, of which one rounds
        del made["gated"]
    for verb, (out, wanted) in made.items():
        assert relative_error(out, wanted) < 2e-3, verb


@pytest.mark.parametrize("in_groups", [False, True])
def test_activations_are_rounded_as_they_are_made(
    rng: random.Random, gen: torch.Generator, triton_device: torch.device, in_groups: bool
) -> None:
    """The gated activation in the pass that makes FP8 of it: as if computed first."""
    rows, size = rng.randint(1, 9), rng.choice([128, 384, 640])
    gate_up = torch.randn(rows, 2 * size, generator=gen).half().to(triton_device)
    activation, _ = rng.choice(ACTIVATIONS)
    made = linear_fp8.split(Gated(gate_up, activation), None, 1, in_groups=in_groups)
    apart = linear_fp8.split(act_and_mul(gate_up.float(), activation), None, 1, in_groups=in_groups)
    for one, other in zip(made[:2], apart[:2], strict=True):
        assert torch.equal(one[:rows].float(), other[:rows].float())


def test_a_row_depends_on_no_other(gen: torch.Generator, triton_device: torch.device) -> None:
    x = torch.randn(5, 256, generator=gen)
    weight = torch.randn(48, 256, generator=gen)
    ones = torch.ones(256)
    x, weight, ones = moved(triton_device, x, weight, ones)
    plain = norm_linear(x, InputNorm(ones, 1e-6), Matrix(weight))
    x[3] = torch.nan
    spoilt = norm_linear(x, InputNorm(ones, 1e-6), Matrix(weight))
    assert spoilt[3].isnan().all() and torch.equal(spoilt[[0, 1, 2, 4]], plain[[0, 1, 2, 4]])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("bits", [0x7FFF, 0x7E00, -0x200, 0x7C00], ids=hex)
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_what_is_no_number_stays_none_beside_codes(
    gen: torch.Generator, triton_device: torch.device, rows: int, bits: int
) -> None:
    """NaN, with whatever bits, or infinity: of its own row, with a norm or without."""
    x = torch.randn(rows, 256, generator=gen).half()
    x.view(torch.int16)[rows // 2, 3] = bits
    codes, scale = torch.randn(64, 256, generator=gen).to(torch.float8_e4m3fn), torch.rand(64, generator=gen)
    on = moved(triton_device, x, torch.ones(256), codes, scale)
    matrix = Matrix(on[2], None, on[3])
    for out in (plain_linear(on[0], matrix), norm_linear(on[0], InputNorm(on[1], 1e-6), matrix)):
        good = out.isfinite().all(1).cpu()
        assert good.tolist() == [row != rows // 2 for row in range(rows)]


def test_norm_and_activation(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    for dtype in DTYPES:
        rows, size = rng.randint(1, 9), rng.choice([1, 48, 576, 1030, 2050])
        x = torch.randn(rows, size, generator=gen).to(dtype)
        weight = torch.randn(size, generator=gen).to(dtype)
        out = rms_norm(*moved(triton_device, x, weight), 1e-5)
        assert relative_error(out, normed(x, weight, 1e-5)) < TOLERANCE[dtype]
        gate_up = torch.randn(rows, 2 * size, generator=gen).to(dtype)
        gate, up = gate_up.double().chunk(2, -1)
        out = act_and_mul(gate_up.to(triton_device))
        assert relative_error(out, F.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("on_triton", [False, True])
def test_a_norm_of_other_precision_and_its_sum(
    rng: random.Random, gen: torch.Generator, on_triton: bool, request: pytest.FixtureRequest
) -> None:
    """The weight in float32, x in 16 bits."""
    device = request.getfixturevalue("triton_device") if on_triton else torch.device("cpu")
    for dtype in (torch.float32, torch.float16):
        rows, size = rng.randint(1, 9), rng.choice([1, 48, 576, 1030, 2050])
        x, residual = (torch.randn(rows, size, generator=gen).to(dtype) for _ in range(2))
        weight = torch.randn(size, generator=gen)
        on = moved(device, residual.clone(), x, weight)
        out = rms_norm(on[1], on[2], 1e-5)
        assert out.dtype == dtype and relative_error(out, normed(x, weight, 1e-5)) < TOLERANCE[dtype]
        add_rms_norm(*on, 1e-5)
        added = normed(x, weight, 1e-5)
        error = (on[0].cpu().double() - residual.double() - added).norm()
        assert error / (residual.norm() + added.norm()) < TOLERANCE[dtype], "of the addends: a sum may cancel"


def test_large_rows_in_float16(gen: torch.Generator, triton_device: torch.device) -> None:
    """A residual stream of some thousands, times a norm's weight, is beyond float16 before it is normalised."""
    x, norm, weight = (torch.randn(shape, generator=gen) for shape in ((1, 256), (256,), (64, 256)))
    x, norm = (5000 * x).half(), (norm.abs() + 20).half()
    wanted = torch.rms_norm(x.double(), (256,), norm.double(), 1e-6) @ weight.half().double().t()
    on = moved(triton_device, x, norm, weight.half())
    got = norm_linear(on[0], InputNorm(on[1], 1e-6), Matrix(on[2])).cpu()
    torch.testing.assert_close(got.double(), wanted, rtol=5e-3, atol=5e-3 * float(wanted.abs().max()))


@pytest.mark.invariant
def test_shapes_are_checked() -> None:
    ones = InputNorm(torch.ones(8), 1e-6)
    with pytest.raises(AssertionError):
        norm_linear(torch.zeros(2, 8), ones, Matrix(torch.zeros(4, 7)))
    with pytest.raises(AssertionError):
        add_linear(torch.zeros(2, 5), torch.zeros(2, 8), Matrix(torch.zeros(4, 8)))
    with pytest.raises(AssertionError):
        norm_linear(torch.zeros(2, 8), ones, Matrix(torch.zeros(4, 8), torch.zeros(5)))
