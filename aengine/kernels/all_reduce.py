"""What ranks that share each layer (tensor parallel) exchange: sums of their parts, and each other's tensors.

    add_all_reduced     residual += part of rank 0 + part of rank 1 + ...
    all_reduced         part of rank 0 + part of rank 1 + ...
    all_gathered        [x of rank 0, x of rank 1, ...]

Every rank calls the op at the same time with a tensor of the same shape. Sums are made in float32, in the order of the
ranks, and rounded once: all ranks get the same bits, and a row's do not depend on the others'. Ranks write what they
have into each other's `ExchangeBuffers`; nothing goes through the host, and a graph of such calls may be captured.

On the CPU ranks exchange tensors by gloo (runner/distributed/gloo_group.py); `sum_of` is what the ops compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .exchange_buffers import ExchangeBuffers

EACH_WAY = (1, 2**19, 2**23)
"""Bytes of tensors that are exchanged in different ways (kernels/triton/all_reduce.py)."""


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the parts in float32, added in the order given: the reference of the ops."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


def add_all_reduced(residual: Tensor, part: Tensor, buffers: ExchangeBuffers) -> None:
    """Add all ranks' ``part`` to ``residual``, in place; both [n, hidden_size], contiguous, of one dtype.

    A row has a multiple of 16 bytes, and no more than ``buffers.bulk_per_rank``.
    """
    assert residual.shape == part.shape and residual.dtype == part.dtype, f"{residual.shape} gets {part.shape}"
    _sum(residual, part, buffers, add=True)


def all_reduced(part: Tensor, buffers: ExchangeBuffers) -> Tensor:
    """Return the sum of all ranks' ``part`` [n, hidden_size], in its dtype; its rows as of `add_all_reduced`."""
    out = part.new_empty(part.shape)
    _sum(out, part, buffers, add=False)
    return out


def all_gathered(x: Tensor, buffers: ExchangeBuffers) -> Tensor:
    """Return [size, *x.shape]: all ranks' ``x``, contiguous, of any dtype."""
    assert x.is_contiguous(), "what is gathered is contiguous"
    from .triton import all_reduce as triton_op

    return triton_op.all_gather(x, buffers)


def _sum(out: Tensor, part: Tensor, buffers: ExchangeBuffers, *, add: bool) -> None:
    assert out.is_contiguous() and part.is_contiguous() and part.dim() == 2, "parts of sums are contiguous matrices"
    row_bytes = part.shape[1] * part.element_size()
    assert row_bytes % 16 == 0 and row_bytes <= buffers.bulk_per_rank, f"rows of {row_bytes} bytes"
    from .triton import all_reduce as triton_op

    triton_op.all_reduce(out, part, buffers, add=add)
