"""Exchanges between ranks of any size, a block after the other by a program.

A program sends its blocks, then one signal to each rank, which is released when they have arrived: two ways between the
GPUs. It waits for the programs of its number alone, so not all programs need to run at once.

* In one shot each rank sends all it has to all others, and adds up everything. Bytes to each other rank: the sum's.
* In two shots it sends each rank one slice, adds up its own slice, and sends the result to all. Bytes to each other
  rank: 2 / ranks of the sum's. The residual, which is the same on all ranks, is added before the result is rounded, so
  the bits are those of one shot.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..exchange_buffers import MAX_PROGRAMS, ExchangeBuffers
from .exchange_parts import Phase, end_call, memories_of
from .launch import has_pdl, launch, launch_next, wait_for_previous


class BulkTiling(NamedTuple):
    """How a tensor is cut: many bytes a thread, so that many are on their way."""

    num_programs: int  # most programs that are launched
    block_bytes: int
    num_warps: int


_SMALL = BulkTiling(128, 16384, 16)
_LARGE = BulkTiling(256, 16384, 8)


def sum_in_bulk(
    out: Tensor,
    part: Tensor,
    buffers: ExchangeBuffers,
    *,
    add: bool,
    phases: int = Phase.ALL,
    tiling: BulkTiling = _SMALL,
) -> None:
    """Set out to the sum of all ranks' parts, or add it to out."""
    block = tiling.block_bytes // part.element_size()
    grid = min(tiling.num_programs, triton.cdiv(part.numel(), block))
    _launch(_sum_in_bulk, grid, out, part, buffers, phases, BLOCK=block, ADD_TO=add, num_warps=tiling.num_warps)


def sum_in_two_shots(
    out: Tensor,
    part: Tensor,
    buffers: ExchangeBuffers,
    *,
    add: bool,
    phases: int = Phase.ALL,
    tiling: BulkTiling = _LARGE,
) -> None:
    """Set out to the sum of all ranks' parts, or add it to out."""
    block = tiling.block_bytes // part.element_size()
    grid = min(tiling.num_programs, triton.cdiv(part.numel(), block * buffers.size))
    _launch(_sum_in_two_shots, grid, out, part, buffers, phases, BLOCK=block, ADD_TO=add, num_warps=tiling.num_warps)


def gather_in_bulk(out: Tensor, x: Tensor, buffers: ExchangeBuffers, *, phases: int = Phase.ALL) -> None:
    """Set out [size, n] to all ranks' x [n], a multiple of 16 bytes."""
    block = _SMALL.block_bytes // x.element_size()
    grid = min(_SMALL.num_programs, triton.cdiv(x.numel(), block))
    _launch(_gather_in_bulk, grid, out, x, buffers, phases, BLOCK=block, num_warps=_SMALL.num_warps)


def _launch(
    kernel: object, grid: int, out: Tensor, x: Tensor, buffers: ExchangeBuffers, phases: int, **options: int | bool
) -> None:
    two_shots = {"ADD": bool(phases & Phase.ADD)} if kernel is _sum_in_two_shots else {}
    launch(
        kernel,
        (grid,),
        x,
        out,
        buffers.addresses,
        buffers.calls,
        x.numel() * x.element_size() // 16,
        buffers.words_bytes,
        buffers.bulk_per_rank,
        buffers.words_bytes + buffers.bulk_bytes,
        RANK=buffers.rank,
        SIZE=buffers.size,
        COUNTERS=MAX_PROGRAMS,
        SEND=bool(phases & Phase.SEND),
        **two_shots,
        TAKE=bool(phases & Phase.TAKE),
        PDL=has_pdl(),
        **options,
    )


@triton.jit
def _from(memory, begin, sender, bulk_per_rank, TYPE: tl.constexpr):
    """Return a pointer, to elements of TYPE, to what ``sender`` has written into a rank's memory."""
    return (memory + tl.multiple_of(begin + sender * bulk_per_rank, 16)).to(tl.pointer_type(TYPE))


@triton.jit
def _signal(memories, arrived_begin, call, RANK: tl.constexpr, SIZE: tl.constexpr, COUNTERS: tl.constexpr):
    """Signal to the same program on all other ranks that what this one sent has arrived."""
    tl.debug_barrier()  # the signal is of all threads' bytes
    for r in tl.static_range(SIZE):
        if r != RANK:
            arrived = (memories[r] + arrived_begin).to(tl.pointer_type(tl.int32)) + tl.program_id(0) * SIZE + RANK
            tl.atomic_xchg(arrived, call, sem="release", scope="sys")


@triton.jit
def _wait(memories, arrived_begin, call, RANK: tl.constexpr, SIZE: tl.constexpr, COUNTERS: tl.constexpr):
    """Wait until all other ranks have signalled this call, or the next one: in one shot a rank may go on to that while
    another has not looked for this one's signal yet. Numbers of calls wrap around."""
    for r in tl.static_range(SIZE):
        if r != RANK:
            arrived = (memories[RANK] + arrived_begin).to(tl.pointer_type(tl.int32)) + tl.program_id(0) * SIZE + r
            while tl.atomic_add(arrived, 0, sem="acquire", scope="sys") - call < 0:
                pass


@triton.jit
def _send_all(
    x_ptr, memories, begin, count, bulk_per_rank, RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write this program's blocks of x into all other ranks' memory."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < count)
        for r in tl.static_range(SIZE):
            if r != RANK:
                tl.store(_from(memories[r], begin, RANK, bulk_per_rank, TYPE) + i, x, mask=i < count)


@triton.jit
def _total_of(
    part_ptr,
    out_ptr,
    memory,
    begin,
    i,
    count,
    bulk_per_rank,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ADD_TO: tl.constexpr,
):
    """Return the elements ``i`` of the sum over the ranks; with ADD_TO what ``out`` holds is added."""
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros(i.shape, tl.float32)
    for r in tl.static_range(SIZE):
        if r == RANK:
            part = tl.load(part_ptr + i, mask=i < count, other=0.0)
        else:
            at = _from(memory, begin, r, bulk_per_rank, TYPE) + i
            part = tl.load(at, mask=i < count, other=0.0, cache_modifier=".cg")
        total = part.to(tl.float32) if r == 0 else total + part.to(tl.float32)
    if ADD_TO:
        total += tl.load(out_ptr + i, mask=i < count, other=0.0).to(tl.float32)
    return total.to(TYPE)


@triton.jit(do_not_specialize=["num_pieces"])
def _sum_in_bulk(
    part_ptr,
    out_ptr,
    addresses_ptr,
    calls_ptr,
    num_pieces,
    bulk_begin,
    bulk_per_rank,
    arrived_begin,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTERS: tl.constexpr,
    ADD_TO: tl.constexpr,
    SEND: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next(PDL)
    count = num_pieces * (128 // out_ptr.dtype.element_ty.primitive_bitwidth)
    memories = memories_of(addresses_ptr, SIZE, tl.int8)
    wait_for_previous(PDL)
    call = tl.load(calls_ptr + tl.program_id(0)) + 1
    begin = bulk_begin + (call & 1).to(tl.int64) * SIZE * bulk_per_rank
    if SEND:
        _send_all(part_ptr, memories, begin, count, bulk_per_rank, RANK, SIZE, BLOCK)
        _signal(memories, arrived_begin, call, RANK, SIZE, COUNTERS)
    if TAKE:
        _wait(memories, arrived_begin, call, RANK, SIZE, COUNTERS)
        for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            i = start + tl.arange(0, BLOCK)
            total = _total_of(part_ptr, out_ptr, memories[RANK], begin, i, count, bulk_per_rank, RANK, SIZE, ADD_TO)
            tl.store(out_ptr + i, total, mask=i < count)
        end_call(calls_ptr, call, COUNTERS)


@triton.jit(do_not_specialize=["num_pieces"])
def _gather_in_bulk(
    x_ptr,
    out_ptr,
    addresses_ptr,
    calls_ptr,
    num_pieces,
    bulk_begin,
    bulk_per_rank,
    arrived_begin,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTERS: tl.constexpr,
    SEND: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    launch_next(PDL)
    count = num_pieces * (128 // TYPE.primitive_bitwidth)
    memories = memories_of(addresses_ptr, SIZE, tl.int8)
    wait_for_previous(PDL)
    call = tl.load(calls_ptr + tl.program_id(0)) + 1
    begin = bulk_begin + (call & 1).to(tl.int64) * SIZE * bulk_per_rank
    if SEND:
        _send_all(x_ptr, memories, begin, count, bulk_per_rank, RANK, SIZE, BLOCK)
        _signal(memories, arrived_begin, call, RANK, SIZE, COUNTERS)
    if TAKE:
        _wait(memories, arrived_begin, call, RANK, SIZE, COUNTERS)
        for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            i = start + tl.arange(0, BLOCK)
            for r in tl.static_range(SIZE):
                if r == RANK:
                    x = tl.load(x_ptr + i, mask=i < count)
                else:
                    at = _from(memories[RANK], begin, r, bulk_per_rank, TYPE) + i
                    x = tl.load(at, mask=i < count, cache_modifier=".cg")
                tl.store(out_ptr + tl.cast(r, tl.int64) * count + i, x, mask=i < count)
        end_call(calls_ptr, call, COUNTERS)


@triton.jit(do_not_specialize=["num_pieces"])
def _sum_in_two_shots(
    part_ptr,
    out_ptr,
    addresses_ptr,
    calls_ptr,
    num_pieces,
    bulk_begin,
    bulk_per_rank,
    arrived_begin,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTERS: tl.constexpr,
    ADD_TO: tl.constexpr,
    SEND: tl.constexpr,
    ADD: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program's stretch is a block for each rank, whose slice that is. What rank r is sent lies in its own slice of
    the sender's memory, what it sends in the second shot in its slice of its memory at the others."""
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    launch_next(PDL)
    count = num_pieces * (128 // TYPE.primitive_bitwidth)
    first, step = tl.program_id(0) * (BLOCK * SIZE), tl.num_programs(0) * (BLOCK * SIZE)
    memories = memories_of(addresses_ptr, SIZE, tl.int8)
    added_begin = arrived_begin + 4 * COUNTERS * SIZE
    wait_for_previous(PDL)
    call = tl.load(calls_ptr + tl.program_id(0)) + 1
    begin = bulk_begin + (call & 1).to(tl.int64) * SIZE * bulk_per_rank
    if SEND:
        for start in range(first, count, step):
            for r in tl.static_range(SIZE):
                if r != RANK:
                    i = start + r * BLOCK + tl.arange(0, BLOCK)
                    x = tl.load(part_ptr + i, mask=i < count)
                    tl.store(_from(memories[r], begin, RANK, bulk_per_rank, TYPE) + i, x, mask=i < count)
        _signal(memories, arrived_begin, call, RANK, SIZE, COUNTERS)
    if ADD:
        _wait(memories, arrived_begin, call, RANK, SIZE, COUNTERS)
        for start in range(first, count, step):
            i = start + RANK * BLOCK + tl.arange(0, BLOCK)
            total = _total_of(part_ptr, out_ptr, memories[RANK], begin, i, count, bulk_per_rank, RANK, SIZE, ADD_TO)
            for r in tl.static_range(SIZE):
                if r != RANK:
                    tl.store(_from(memories[r], begin, RANK, bulk_per_rank, TYPE) + i, total, mask=i < count)
            tl.store(out_ptr + i, total, mask=i < count)
        _signal(memories, added_begin, call, RANK, SIZE, COUNTERS)
    if TAKE:
        _wait(memories, added_begin, call, RANK, SIZE, COUNTERS)
        for start in range(first, count, step):
            for r in tl.static_range(SIZE):
                if r != RANK:
                    i = start + r * BLOCK + tl.arange(0, BLOCK)
                    at = _from(memories[RANK], begin, r, bulk_per_rank, TYPE) + i
                    tl.store(out_ptr + i, tl.load(at, mask=i < count, cache_modifier=".cg"), mask=i < count)
        end_call(calls_ptr, call, COUNTERS)
