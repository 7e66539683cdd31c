"""One row by codes of 4 bits with a scale a group of 32 columns or more, by the tensor cores: an instruction there
multiplies eight codes of each thread, and some 2 to 3 instructions a code are left of the 4.6 that it takes without.

A program has 16 rows of W (with a gate: 16 of each half), and each of its warps stretches of 256 columns, eight units.
Of such a stretch thread (g, t) of a warp, g below 8 and t below 4, has units t and 4 + t of rows g and 8 + g: a word
of them is what `mma.m16n8k16` wants of its left side, by the order of columns in grouped_codes.py. The right side's
eight columns are x of one unit each, and 0 elsewhere: so column u of the product has the sums of unit u, and thread
(g, t) those of units 2 t and 2 t + 1, which get their group's scale. Codes are multiplied as numbers of 16 bits that
are larger by 128 (1024 in float16); what that is too much is as many sums of x, which one more product by ones gives.

So what a thread has must be as said: [8 * WARPS, 16] words, of each thread four in a row. That is the layout in which
the compiler loads them; tests/kernels/compile_everything.py checks it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..grouped_codes import GroupedCodes
from ..rms_norm import Norm
from .activation import activate_and_multiply
from .grouped_parts import constants, halves, launch_row, no_number, times_plus
from .grouped_units import finished
from .launch import HAS_PTX, has_mma, launch_next, wait_for_previous
from .linear_parts import numbers

_STRETCH = 256


class RowTiling(NamedTuple):
    warps: int  # those of a program share out K
    held: int  # stretches whose codes a thread has at once, 16 registers each
    registers: int | None = None  # at most so many a thread


_RAISED_BY = {"int4": 8.0, "uint4": 0.0}


def can_multiply_row(x: Tensor, codes: GroupedCodes, norm: Norm | None) -> bool:
    """Return whether `multiply_row` takes these; memory that is not aligned would be loaded in another layout."""
    tensors = x, codes.codes, codes.scale, codes.zero, codes.offset
    return (
        codes.kind in _RAISED_BY
        and codes.group >= (64 if codes.shape[1] % 64 else 32)  # scales of 32 columns are read in pairs
        and x.dtype in (torch.float16, torch.bfloat16)
        and (norm is None or norm.weight.dtype == x.dtype)
        and has_mma()
        and all(t.data_ptr() % 16 == 0 for t in tensors if t is not None)
    )


def multiply_row(
    x: Tensor,
    codes: GroupedCodes,
    bias: Tensor | None,
    out: Tensor,
    norm: Norm | None = None,
    *,
    add: bool,
    activation: str | None = None,
    tiling: RowTiling | None = None,
) -> None:
    """Set out [1, N] to the product by x or, with ``norm``, by its norm, or add it to out. ``tiling``: to try one."""
    size, given = out.shape[1], constants(codes)
    k = given["K"]
    tiling = tiling or _tiling(size, k, activation is not None)
    turns = triton.cdiv(triton.cdiv(k, _STRETCH * tiling.warps), tiling.held) * tiling.held
    given["RAISED"] = _RAISED_BY[codes.kind] + (1024.0 if x.dtype == torch.float16 else 128.0)
    del given["UNIT"], given["KIND"]
    given |= {"WARPS": tiling.warps, "num_warps": tiling.warps, "HELD": tiling.held}
    given |= {"EVEN": size % 16 == 0 and k == _STRETCH * tiling.warps * turns}
    given |= {} if tiling.registers is None else {"maxnreg": tiling.registers}
    launch_row(_row_by_codes, 16, x, codes, bias, out, norm, turns, add=add, activation=activation, **given)


def _tiling(n: int, k: int, is_gated: bool) -> RowTiling:
    """Return what was the fastest, or nearly so, for Llama-3.1-8B's shapes on an H100: as many programs as can be at
    work at once, which registers limit."""
    stretches = triton.cdiv(k, _STRETCH)
    if is_gated:
        one = RowTiling(4, 1, 128)
    elif stretches > 16:
        one = RowTiling(8, 1, 128)
    else:
        one = RowTiling(8, 1, 96) if n <= 4096 else RowTiling(4, 2)
    warps = min(one.warps, triton.next_power_of_2(stretches))
    return one._replace(warps=warps, held=min(one.held, triton.cdiv(stretches, warps)))


def _asm(dtype: str, is_ones: bool) -> str:
    """Eight products by the codes of two times four words ($4, $8) or by ones, of x ($12 to $27, or $4 to $19), added
    to four sums."""
    of = "f16" if dtype == "fp16" else "bf16"
    base, one = ("0x64006400", "0x3C003C00") if dtype == "fp16" else ("0x43004300", "0x3F803F80")
    x = 4 if is_ones else 12
    lines = ["{ .reg .b32 a<2>, b<2>, s; .reg .f32 d<4>;"]
    lines += [f"mov.f32 d{i}, 0f00000000;" for i in range(4)]
    if is_ones:
        lines += [f"mov.b32 {name}{i}, {one};" for name in "ab" for i in range(2)]
    for word in (0, 2):  # its words of x lie side by side
        for q in range(4):
            for i, (name, first) in enumerate((("a", 4 + word), ("b", 8 + word), ("a", 5 + word), ("b", 9 + word))):
                if not is_ones:
                    lines += [f"shr.u32 s, ${first}, {4 * q};"] if q else []
                    lines.append(f"lop3.b32 {name}{i // 2}, {'s' if q else f'${first}'}, 0x000F000F, {base}, 0xea;")
            right = f"{{${x + 4 * q + word}, ${x + 4 * q + word + 1}}}"
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{of}.{of}.f32 {{d0, d1, d2, d3}}, {{a0, b0, a1, b1}}, {right}, "
                "{d0, d1, d2, d3};"
            )
    lines += [f"mov.f32 ${i}, d{i};" for i in range(4)]
    return "\n".join([*lines, "}"])


_CODES_BF16 = tl.constexpr(_asm("bf16", False))
_CODES_FP16 = tl.constexpr(_asm("fp16", False))
_ONES_BF16 = tl.constexpr(_asm("bf16", True))
_ONES_FP16 = tl.constexpr(_asm("fp16", True))
_CODES = tl.constexpr(",".join(["=f"] * 4 + ["r"] * 24))
_ONES = tl.constexpr(",".join(["=f"] * 4 + ["r"] * 16))


@triton.jit
def _load_unit(w_ptr, row, word, end, EVEN: tl.constexpr, WIDTH: tl.constexpr):
    ptrs = w_ptr + row.to(tl.int64) * WIDTH + word
    if EVEN:
        w = tl.load(ptrs)
    else:
        w = tl.load(ptrs, mask=(row < end) & (word < WIDTH), other=0)
    return w


@triton.jit
def _load_codes(w_ptr, row, word, end, EVEN: tl.constexpr, WIDTH: tl.constexpr):
    """The words of two times four units of rows ``row`` and row + 8, if they are before ``end``: [8 * WARPS, 16]."""
    return (
        _load_unit(w_ptr, row, word, end, EVEN, WIDTH),
        _load_unit(w_ptr, row + 8, word, end, EVEN, WIDTH),
        _load_unit(w_ptr, row, word + 16, end, EVEN, WIDTH),
        _load_unit(w_ptr, row + 8, word + 16, end, EVEN, WIDTH),
    )


@triton.jit
def _load_words(x_ptr, norm_ptr, at, mask, K: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr):
    """Words of two numbers of x, times the norm's weights; 0 without ``mask``."""
    if not EVEN:
        mask = mask & (at < K // 2)
    x = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
    if NORM:
        both = tl.load(norm_ptr.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
        x = times_plus(x, both, no_number((1, 1)), x_ptr.dtype.element_ty)
    return x


@triton.jit
def _by_row(w, xs, dtype: tl.constexpr, IS_ONES: tl.constexpr):
    """[8 * WARPS, 4]: the sums of codes, raised, of words ``w``, or of ones, times ``xs``, of each unit."""
    RAISED: tl.constexpr = 1024.0 if dtype == tl.float16 else 128.0
    y = tl.zeros(w.shape, tl.float32)
    for q in tl.static_range(4):
        low, high = halves(xs[q], dtype)
        if IS_ONES:
            y += low + high
        else:
            y += ((w >> 4 * q & 15).to(tl.float32) + RAISED) * low
            y += ((w >> 4 * q + 16 & 15).to(tl.float32) + RAISED) * high
    return tl.sum(tl.reshape(y, (w.shape[0], 4, 4)), 2)


@triton.jit
def _sums(w, w_8, v, v_8, xs, zs, dtype: tl.constexpr):
    """[8 * WARPS, 16]: element 4 t + 2 i + j has the sum of row g + 8 i and unit 2 t + j. ``w`` and ``v``: codes of the
    first four and the last four units of rows g, ``w_8`` and ``v_8`` of rows 8 + g; ``xs`` and ``zs`` are their x."""
    if HAS_PTX:
        ASM: tl.constexpr = _CODES_FP16 if dtype == tl.float16 else _CODES_BF16
        y = tl.inline_asm_elementwise(ASM, _CODES, [w, w_8, xs[0], xs[1], xs[2], xs[3]], tl.float32, True, 4)
        y += tl.inline_asm_elementwise(ASM, _CODES, [v, v_8, zs[0], zs[1], zs[2], zs[3]], tl.float32, True, 4)
    else:
        y = _in_lanes(
            _by_row(w, xs, dtype, False), _by_row(w_8, xs, dtype, False),
            _by_row(v, zs, dtype, False), _by_row(v_8, zs, dtype, False),
        )  # fmt: skip
    return y


@triton.jit
def _sums_of_x(xs, zs, dtype: tl.constexpr):
    """Return what `_sums` does of codes that are all 1."""
    if HAS_PTX:
        ASM: tl.constexpr = _ONES_FP16 if dtype == tl.float16 else _ONES_BF16
        y = tl.inline_asm_elementwise(ASM, _ONES, [xs[0], xs[1], xs[2], xs[3]], tl.float32, True, 4)
        y += tl.inline_asm_elementwise(ASM, _ONES, [zs[0], zs[1], zs[2], zs[3]], tl.float32, True, 4)
    else:
        first, last = _by_row(xs[0], xs, dtype, True), _by_row(xs[0], zs, dtype, True)
        y = _in_lanes(first, first, last, last)
    return y


@triton.jit
def _in_lanes(y, y_8, z, z_8):
    """[8 * WARPS, 16], in the order of `_sums`, of sums [8 * WARPS, 4]."""
    y = tl.join(tl.join(y, y_8), tl.join(z, z_8))  # [8 * WARPS, t, i, half]
    y = tl.reshape(tl.permute(y, (0, 2, 3, 1)), (y.shape[0], 2, 4, 2))  # i, t, j: unit 4 half + t is 2 t + j
    return tl.reshape(tl.permute(y, (0, 2, 1, 3)), (y.shape[0], 16))


@triton.jit
def _squares(x_ptr, K: tl.constexpr, WARPS: tl.constexpr):
    SIZE: tl.constexpr = 256 * WARPS
    y = tl.zeros((SIZE,), tl.float32)
    for k0 in tl.static_range(0, K, SIZE):
        at = k0 + tl.arange(0, SIZE)
        if K % SIZE == 0:
            x = tl.load(x_ptr + at).to(tl.float32)
        else:
            x = tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        y += x * x
    return y


@triton.jit
def _of_groups(ptr, at, IS_WIDE: tl.constexpr):
    """What ``ptr`` has at ``at`` [8 * WARPS, 16], a pair of which is one or lies side by side. As it is written here a
    thread reads what it multiplies; loads of the compiler's would go through shared memory."""
    SIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    if HAS_PTX:
        NAME: tl.constexpr = "u8" if SIZE == 8 else "u16" if SIZE == 16 else "b32"
        ONE: tl.constexpr = (
            f"ld.global.nc.{NAME} $0, [$4]; mov.b32 $1, $0; ld.global.nc.{NAME} $2, [$6]; mov.b32 $3, $2;"
        )
        TWO: tl.constexpr = f"ld.global.nc.v2.{NAME} {{$0, $1}}, [$4]; ld.global.nc.v2.{NAME} {{$2, $3}}, [$6];"
        y = tl.inline_asm_elementwise(
            ONE if IS_WIDE else TWO, "=r,=r,=r,=r,l,l,l,l", [(ptr + at).to(tl.int64, bitcast=True)], tl.int32, True, 4
        )
        if SIZE == 8:
            y = y.to(tl.int8)
        elif SIZE == 16:
            y = y.to(tl.int16)
        y = y.to(ptr.dtype.element_ty, bitcast=True)
    else:
        y = tl.load(ptr + at)
    return y


@triton.jit
def _scaled(
    y, total, scale_ptr, zero_ptr, offset_ptr, n, unit, ROWS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    RAISED: tl.constexpr,
):  # fmt: skip
    """Sums ``y`` of raised codes times x, of rows ``n`` and units ``unit``, whose x sums up to ``total``, scaled."""
    IS_WIDE: tl.constexpr = GROUP > 32
    at = (n // ROWS).to(tl.int64) * GROUPS + unit // (GROUP // 32)
    s = _of_groups(scale_ptr, at, IS_WIDE)
    if s.dtype == tl.uint8:  # a power of two
        scale = (s.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = numbers(s, y, True)
    zero = tl.full((1, 1), RAISED, tl.float32)
    if zero_ptr is not None:
        zero += _of_groups(zero_ptr, at, IS_WIDE).to(tl.float32)
    y = (y - zero * total) * scale
    if offset_ptr is not None:
        y += _of_groups(offset_ptr, at, IS_WIDE).to(tl.float32) * total
    return y


@triton.jit
def _of_rows(y):
    """[8, 2]: the sums of ``y`` over warps and units."""
    y = tl.sum(tl.sum(tl.reshape(y, (y.shape[0] // 8, 8, 4, 2, 2)), 4), 2)
    return tl.sum(y, 0)


@triton.jit
def _load_turn(
    w_ptr, row, word, turn, N: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr, COUNT: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """What `_load_codes` gives for each of COUNT matrices of N rows."""
    word = word + turn * (32 * WARPS)
    ws = _load_codes(w_ptr, row, word, N, EVEN, WIDTH)
    if COUNT > 1:
        ws = ws + _load_codes(w_ptr, row + N, word, 2 * N, EVEN, WIDTH)
    return ws


@triton.jit
def _add_turn(
    ys, ws, turn, x_ptr, norm_ptr, scale_ptr, zero_ptr, offset_ptr, n0, warp, g, e, K: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, RAISED: tl.constexpr, N: tl.constexpr,
    WARPS: tl.constexpr, COUNT: tl.constexpr, SLOT: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Sums ``ys`` and the products of each warp's ``turn``-th stretch, whose codes are ``ws`` from SLOT on."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first = (g == e // 4) if HAS_PTX else (g >= 0) & (e >= 0)
    last = (g == e // 4 + 4) if HAS_PTX else (g >= 0) & (e >= 0)
    place = e // 4 * 16 + e % 4 + (warp + turn * WARPS) * 128
    xs = ()
    zs = ()
    for q in tl.static_range(4):
        xs = xs + (_load_words(x_ptr, norm_ptr, place + q * 4 + g * 0, first, K, NORM, EVEN),)  # type: ignore[assignment]
        zs = zs + (_load_words(x_ptr, norm_ptr, place + (q * 4 + 64) + g * 0, last, K, NORM, EVEN),)  # type: ignore[assignment]
    total = _sums_of_x(xs, zs, dtype)
    unit = (warp + turn * WARPS) * 8 + e // 4 * 2 + e % 2
    unit = tl.where(unit < K // 32, unit, unit % 2)  # outside of K all codes and all of x are 0
    n = tl.minimum(n0 + g + e % 4 // 2 * 8, N - 1)
    new = ()
    for c in tl.static_range(COUNT):
        y = _sums(ws[SLOT + 4 * c], ws[SLOT + 4 * c + 1], ws[SLOT + 4 * c + 2], ws[SLOT + 4 * c + 3], xs, zs, dtype)
        y = _scaled(y, total, scale_ptr, zero_ptr, offset_ptr, n + c * N, unit, ROWS, GROUP, GROUPS, RAISED)
        new = new + (ys[c] + y,)  # type: ignore[assignment]
    return new


@triton.jit(do_not_specialize=["turns"])
def _row_by_codes(
    x_ptr, w_ptr, scale_ptr, zero_ptr, offset_ptr, row_scale_ptr, out_ptr, norm_ptr, bias_ptr, eps, turns,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, RAISED: tl.constexpr,
    N: tl.constexpr, WARPS: tl.constexpr, HELD: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    ADD: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``turns``: a multiple of HELD, so many that WARPS stretches each are all of K. Were it known to the compiler, it
    would write them all out and load all codes at once, into more registers than there are for several programs."""
    launch_next(PDL)
    WIDTH: tl.constexpr = K // 8  # words of a row
    COUNT: tl.constexpr = 2 if GATED else 1
    of_warp = tl.arange(0, 8 * WARPS)[:, None]
    warp, g = of_warp // 8, of_warp % 8
    e = tl.arange(0, 16)[None, :]
    n0 = tl.program_id(0) * 16
    row, word = n0 + g, warp * 32 + e
    ws = _load_turn(w_ptr, row, word, 0, N, WIDTH, WARPS, COUNT, EVEN)
    for i in tl.static_range(1, HELD):
        ws = ws + _load_turn(w_ptr, row, word, i, N, WIDTH, WARPS, COUNT, EVEN)
    wait_for_previous(PDL)
    squares = _squares(x_ptr, K, WARPS) if NORM else 0.0
    ys = (tl.zeros((8 * WARPS, 16), tl.float32),)
    if GATED:
        ys = ys + (tl.zeros((8 * WARPS, 16), tl.float32),)  # type: ignore[assignment]
    for turn in range(0, turns - HELD, HELD):
        new = ()
        for i in tl.static_range(HELD):
            ys = _add_turn(
                ys, ws, turn + i, x_ptr, norm_ptr, scale_ptr, zero_ptr, offset_ptr, n0, warp, g, e, K, GROUP, GROUPS,
                ROWS, RAISED, N, WARPS, COUNT, i * COUNT * 4, NORM, EVEN,
            )  # fmt: skip
            new = new + _load_turn(w_ptr, row, word, turn + HELD + i, N, WIDTH, WARPS, COUNT, EVEN)
        ws = new
    for i in tl.static_range(HELD):
        ys = _add_turn(
            ys, ws, turns - HELD + i, x_ptr, norm_ptr, scale_ptr, zero_ptr, offset_ptr, n0, warp, g, e, K, GROUP,
            GROUPS, ROWS, RAISED, N, WARPS, COUNT, i * COUNT * 4, NORM, EVEN,
        )  # fmt: skip
    n = n0 + tl.arange(0, 8)[:, None] + 8 * tl.arange(0, 2)[None, :]
    factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps) if NORM else 1.0
    y = finished(_of_rows(ys[0]) * factor, n, n < N, row_scale_ptr, bias_ptr, BIAS)
    if GATED:
        v = finished(_of_rows(ys[1]) * factor, N + n, n < N, row_scale_ptr, bias_ptr, BIAS)  # type: ignore[misc]
        y = activate_and_multiply(y, v, ACTIVATION)
    if ADD:
        y += tl.load(out_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)
