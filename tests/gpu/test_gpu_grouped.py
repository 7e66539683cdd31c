"""Products by codes with a scale a group of columns, on a GPU: each kernel against what the codes mean, in float64.

Without a GPU a few run in Triton's interpreter: TRITON_INTERPRET=1 pytest -m gpu tests/gpu/test_gpu_grouped.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from gpu_models import DEVICE

from aengine.kernels.activation import computed
from aengine.kernels.dispatch import triton_everywhere
from aengine.kernels.expert_types import InputNorm
from aengine.kernels.grouped_codes import CodeKind, GroupedCodes, numbers
from aengine.kernels.linear import add_linear, norm_gated_linear, norm_linear, plain_linear
from aengine.kernels.matrix import Matrix

pytestmark = pytest.mark.gpu
EPS = 1e-6
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


class Kind(NamedTuple):
    codes: CodeKind
    group: int  # -1: a whole row
    scale: torch.dtype = torch.float16
    zero: bool = False
    offset: bool = False
    row_scale: bool = False
    rows: int = 1


KINDS: dict[str, Kind] = {
    "int4, 128": Kind("int4", 128),
    "int4, 32": Kind("int4", 32, torch.bfloat16),
    "int4, a row": Kind("int4", -1, torch.float32),
    "uint4 and zero, 128": Kind("uint4", 128, zero=True),
    "uint4 and zero, 64": Kind("uint4", 64, zero=True),
    "uint4 and offset, 32": Kind("uint4", 32, offset=True, row_scale=True),
    "e2m1, 16": Kind("e2m1", 16, torch.float8_e4m3fn, row_scale=True),
    "e2m1, 32": Kind("e2m1", 32, torch.float8_e8m0fnu),
    "iq4_nl, 32": Kind("iq4_nl", 32),
    "int8, 16": Kind("int8", 16, torch.float32, row_scale=True),
    "int8, 32": Kind("int8", 32),
    "int8, 128": Kind("int8", 128),
    "uint8 and zero, 128": Kind("uint8", 128, zero=True),
    "uint8 and offset, 32": Kind("uint8", 32, offset=True, row_scale=True),
    "e4m3, 128 x 128": Kind("e4m3", 128, torch.float32, rows=128),
}
"""Those of all formats that are read."""
ON_GPU = DEVICE == "cuda"
ROWS = (1, 3, 16, 64, 200, 600) if ON_GPU else (1, 3, 16)
SHAPES = ((512, 4096), (1536, 1024), (322, 1152)) if ON_GPU else ((66, 384),)
"""N, an even number, and K, a multiple of 128. The last has tiles that reach beyond N."""


@pytest.fixture(autouse=True)
def triton_kernels() -> Iterator[None]:
    if not ON_GPU:
        pytest.importorskip("triton")
    with nullcontext() if ON_GPU else triton_everywhere():
        yield


def make(kind: Kind, n: int, k: int, gen: torch.Generator) -> GroupedCodes:
    """Codes of all values, with rows of a norm near 1."""
    has_4_bits, group = kind.codes in ("int4", "uint4", "e2m1", "iq4_nl"), k if kind.group < 0 else kind.group
    groups = (-(-n // kind.rows), -(-k // group))
    if kind.codes == "e4m3":
        codes = torch.empty(n, k).uniform_(-448, 448, generator=gen).to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(0, 256, (n, k // 2 if has_4_bits else k), generator=gen, dtype=torch.uint8)
        codes = codes.view(torch.int8) if kind.codes == "int8" else codes
    largest = {"int4": 8, "uint4": 15, "e2m1": 6, "iq4_nl": 127, "int8": 128, "uint8": 255, "e4m3": 448}[kind.codes]
    size = 2 * k**-0.5 / largest
    row_scale = torch.rand(n, generator=gen).add_(0.5).mul_(size) if kind.row_scale else None
    scale = torch.rand(groups, generator=gen).add_(0.5).mul_(1.0 if kind.row_scale else size)
    zero = torch.randint(0, largest + 1, groups, generator=gen, dtype=torch.uint8) if kind.zero else None
    offset = (scale * -largest / 2 * torch.rand(groups, generator=gen)).half() if kind.offset else None
    parts = {"zero": zero, "offset": offset, "row_scale": row_scale}
    own: dict[str, Any] = {name: None if part is None else part.to(DEVICE) for name, part in parts.items()}
    return GroupedCodes(kind.codes, codes.to(DEVICE), scale.to(kind.scale).to(DEVICE), group, rows=kind.rows, **own)


def errors_of(codes: GroupedCodes, rows: int, dtype: torch.dtype, gen: torch.Generator) -> dict[str, float]:
    """Relative error of each verb, with a bias and without."""
    n, k = codes.shape
    x, residual = (torch.randn(rows, width, generator=gen).to(dtype).to(DEVICE) for width in (k, n))
    norm = InputNorm(torch.rand(k, generator=gen).add_(0.5).to(DEVICE), EPS)
    bias = torch.randn(n, generator=gen).to(DEVICE)
    matrix = numbers(codes).double()
    of_x, before = x.double() @ matrix.t(), residual.double()
    of_norm = F.rms_norm(x.double(), (k,), norm.weight.double(), EPS) @ matrix.t()
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, own in (("", None), (" and bias", bias)):
        more = 0.0 if own is None else own.double()
        found[f"product{name}"] = plain_linear(x, Matrix(codes, own)), of_x + more
        found[f"of norm{name}"] = norm_linear(x, norm, Matrix(codes, own)), of_norm + more
        found[f"of norm in float32{name}"] = norm_linear(x, norm, Matrix(codes, own), torch.float32), of_norm + more
        gate, up = (of_norm + more).chunk(2, -1)
        found[f"gated{name}"] = computed(norm_gated_linear(x, norm, Matrix(codes, own))), F.silu(gate) * up
        changed = residual.clone()
        add_linear(changed, x, Matrix(codes, own))
        found[f"into residual{name}"] = changed, before + of_x + more
    return {
        name: float((made.double() - wanted).norm() / wanted.norm()) if made.isfinite().all() else float("inf")
        for name, (made, wanted) in found.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: str, dtype: torch.dtype) -> None:
    """All that is wrong with a kind is told at once."""
    if dtype == torch.bfloat16 and not ON_GPU:
        pytest.skip("the interpreter computes in float16 and float32")
    gen, wrong, worst = torch.Generator().manual_seed(11), [], 0.0
    for n, k in SHAPES:
        codes = make(KINDS[kind], n, k, gen)
        for rows in ROWS:
            try:
                errors = errors_of(codes, rows, dtype, gen)
            except Exception as error:  # a kernel that can't be compiled; the other sizes are looked at all the same
                wrong.append(f"{n} x {k}, {rows} rows: {type(error).__name__}: {str(error)[-400:]}")
                continue
            worst = max(worst, *errors.values())
            wrong += [f"{n} x {k}, {rows} rows, {verb}: {e:.1e}" for verb, e in errors.items() if e > TOLERANCE[dtype]]
    print(f"{kind}, {dtype}: off by {worst:.1e} at most")
    assert not wrong, "\n".join(wrong)


def test_rows_are_alike_alone_and_among_others() -> None:
    """No kernel reads beyond its rows: what x has there is not a number."""
    gen = torch.Generator().manual_seed(12)
    for kind in ("int4, 128", "e2m1, 16", "e4m3, 128 x 128"):
        codes = make(KINDS[kind], *SHAPES[-1], gen)
        for rows in (1, 3):
            whole = torch.full((rows + 13, codes.shape[1]), float("nan"), dtype=torch.float16, device=DEVICE)
            whole[:rows] = torch.randn(rows, codes.shape[1], generator=gen).half().to(DEVICE)
            assert plain_linear(whole[:rows], Matrix(codes)).isfinite().all(), kind
