"""Copy a few words of each selected row: it takes no longer than a launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import has_pdl, launch, launch_next_and_wait

_ROWS = 32  # rows that a program copies


def select_rows(table: Tensor, rows: Tensor) -> Tensor:
    n, words = rows.shape[0], table.shape[1]
    assert table.stride(1) == 1
    out = torch.empty(n, words, dtype=torch.int32, device=table.device)
    if n:
        constants = {"WORDS": triton.next_power_of_2(words), "ROWS": _ROWS, "PDL": has_pdl()}
        launch(_select_kernel, (triton.cdiv(n, _ROWS),), table, rows, out, n, words, table.stride(0), **constants)
    return out


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["table", "rows"])
def _select_kernel(
    table: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    words: tl.tensor,
    table_stride: tl.tensor,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_next_and_wait(PDL)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    row = tl.load(rows + i, mask=i < n, other=-1)
    is_word = (word < words)[None, :]
    found = tl.load(table + row[:, None] * table_stride + word[None, :], mask=(row >= 0)[:, None] & is_word, other=0)
    tl.store(out + i[:, None] * words + word[None, :], found, mask=(i < n)[:, None] & is_word)
