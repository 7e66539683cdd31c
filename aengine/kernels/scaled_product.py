"""torch's product by a weight of plain numbers, or of codes with scales, which become numbers first."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import uses_triton
from .grouped_codes import GroupedCodes, numbers
from .matrix import Matrix


def product(x: Tensor, matrix: Matrix, out_dtype: torch.dtype | None = None) -> Tensor:
    """[n, out_features] in x's dtype or ``out_dtype``."""
    weight, bias, scale, _ = matrix
    if isinstance(weight, GroupedCodes):
        weight = _of_groups(weight, x)
        bias = None if bias is None else bias.to(out_dtype or x.dtype)
    elif scale is not None and not uses_triton(x):
        return _scaled(x, weight, bias, scale).to(out_dtype or x.dtype)
    elif scale is not None:  # so that its rows are read once, and the outputs are not read again
        from .triton.dequantise import dequantise

        weight = dequantise(weight, scale, x.dtype)
        bias = None if bias is None else bias.to(out_dtype or x.dtype)
    if out_dtype in (None, x.dtype):
        return F.linear(x, weight, bias)
    if x.is_cuda and out_dtype == torch.float32:
        out = torch.mm(x, weight.t(), out_dtype=out_dtype)  # the product is not rounded to x's dtype in between
    else:
        out = torch.mm(x, weight.t()).to(out_dtype)
    return out if bias is None else out.add_(bias)


def _of_groups(codes: GroupedCodes, x: Tensor) -> Tensor:
    if not uses_triton(x):
        return numbers(codes).to(x.dtype)
    from .triton.dequantise import dequantise_groups

    return dequantise_groups(codes, x.dtype)


def _scaled(x: Tensor, codes: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    """The product by the codes, which are exact in 16 bits, times the scale.

    A sum over codes alone may pass float16's range where the output does not: there they are first multiplied by the
    largest power of two in their row's scale, which is exact, and the sum by the rest, a number from 1 to 2 where the
    power is not out of range itself.
    """
    numbers = codes.to(x.dtype)
    if x.dtype == torch.float16:
        least, most = (-15, 7) if codes.dtype.is_floating_point else (-24, 8)  # times any code: in its range
        power = scale.abs().log2_().floor_().clamp_(least, most).exp2_()
        numbers, scale = numbers * power.half()[:, None], scale / power
    out = F.linear(x, numbers).mul_(scale)
    return out if bias is None else out.add_(bias)
