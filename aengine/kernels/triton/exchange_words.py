"""Exchanges between ranks of some hundred KB, in one way between the GPUs.

What is sent is an entry of 8 bytes for each word of 4: the word, and the number of the call. Entries are written and
read as a whole, so one with this call's number has arrived, and there is no other signal to wait for.

Bytes to each other rank: twice those of the tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..exchange_buffers import MAX_PROGRAMS, ExchangeBuffers
from .exchange_parts import Phase, end_call, memories_of
from .launch import has_pdl, launch, launch_next, wait_for_previous


def sum_in_words(
    out: Tensor,
    part: Tensor,
    buffers: ExchangeBuffers,
    *,
    add: bool,
    phases: int = Phase.ALL,
    words_per_program: int = 512,
    num_warps: int = 4,
) -> None:
    """Set out to the sum of all ranks' parts, or add it to out."""
    num_words = part.numel() * part.element_size() // 4
    launch(
        _sum_in_words,
        (triton.cdiv(num_words, words_per_program),),
        part,
        out,
        buffers.addresses,
        buffers.calls,
        num_words // 4,
        buffers.words_per_rank,
        RANK=buffers.rank,
        SIZE=buffers.size,
        BLOCK=words_per_program,
        COUNTERS=MAX_PROGRAMS,
        ADD=add,
        SEND=bool(phases & Phase.SEND),
        TAKE=bool(phases & Phase.TAKE),
        PDL=has_pdl(),
        num_warps=num_warps,
    )


def gather_in_words(out: Tensor, x: Tensor, buffers: ExchangeBuffers, *, phases: int = Phase.ALL) -> None:
    """Set out [size, n] to all ranks' x [n], int32."""
    num_words = x.numel()
    words_per_program = 512
    launch(
        _gather_in_words,
        (triton.cdiv(num_words, words_per_program),),
        x,
        out,
        buffers.addresses,
        buffers.calls,
        num_words,
        buffers.words_per_rank,
        RANK=buffers.rank,
        SIZE=buffers.size,
        BLOCK=words_per_program,
        COUNTERS=MAX_PROGRAMS,
        SEND=bool(phases & Phase.SEND),
        TAKE=bool(phases & Phase.TAKE),
        PDL=has_pdl(),
        num_warps=4,
    )


@triton.jit
def _low_half(word, TYPE: tl.constexpr):
    """Return float32 of the first of the two elements in words of 4 bytes, or of the only one."""
    if tl.float32 == TYPE:
        value = word.to(tl.float32, bitcast=True)
    else:
        value = word.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _high_half(word, TYPE: tl.constexpr):
    """Return each word's second element in float32; zeros where a word holds one element of TYPE."""
    if tl.float32 == TYPE:
        value = tl.zeros(word.shape, tl.float32)
    else:
        value = (word >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _word_of(low, high, TYPE: tl.constexpr):
    if tl.float32 == TYPE:
        word = low.to(tl.int32, bitcast=True)
    else:
        first = low.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = first | (high.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return word


@triton.jit
def _send_words(memories, begin, words, i, is_inside, words_per_rank, call, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Write the words into the entries ``i`` of all other ranks' memory."""
    entry = (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    for r in tl.static_range(SIZE):
        if r != RANK:
            tl.store(memories[r] + (begin + RANK * words_per_rank) + i, entry, mask=is_inside)


@triton.jit
def _take_words(entries, is_inside, call):
    """Wait for the entries, and return the words that they hold."""
    entry = tl.load(entries, mask=is_inside, other=0, volatile=True)
    while tl.max(tl.where(is_inside & ((entry >> 32).to(tl.int32) != call), 1, 0), 0) > 0:
        entry = tl.load(entries, mask=is_inside, other=0, volatile=True)
    return entry.to(tl.int32)


@triton.jit(do_not_specialize=["num_pieces"])
def _sum_in_words(
    part_ptr,
    out_ptr,
    addresses_ptr,
    calls_ptr,
    num_pieces,
    words_per_rank,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTERS: tl.constexpr,
    ADD: tl.constexpr,
    SEND: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    launch_next(PDL)
    num_words = num_pieces * 4  # a product, so that the compiler knows a multiple of 4 and reads several words at once
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < num_words
    memories = memories_of(addresses_ptr, SIZE, tl.int64)
    wait_for_previous(PDL)
    own = tl.load(part_ptr.to(tl.pointer_type(tl.int32)) + i, mask=is_inside, other=0)
    out_words = out_ptr.to(tl.pointer_type(tl.int32)) + i
    if TAKE and ADD:
        residual = tl.load(out_words, mask=is_inside, other=0)
    call = tl.load(calls_ptr + tl.program_id(0)) + 1
    begin = (call & 1).to(tl.int64) * SIZE * words_per_rank
    if SEND:
        _send_words(memories, begin, own, i, is_inside, words_per_rank, call, RANK, SIZE)
    if TAKE:
        low = tl.zeros((BLOCK,), tl.float32)
        high = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(SIZE):
            if r == RANK:
                word = own
            else:
                word = _take_words(memories[RANK] + (begin + r * words_per_rank) + i, is_inside, call)
            if r == 0:  # the first is not added to zeros, which would change the sign of a zero
                low = _low_half(word, TYPE)
                high = _high_half(word, TYPE)
            else:
                low += _low_half(word, TYPE)
                high += _high_half(word, TYPE)
        if ADD:
            low += _low_half(residual, TYPE)
            high += _high_half(residual, TYPE)
        tl.store(out_words, _word_of(low, high, TYPE), mask=is_inside)
        end_call(calls_ptr, call, COUNTERS)


@triton.jit(do_not_specialize=["num_words"])
def _gather_in_words(
    x_ptr,
    out_ptr,
    addresses_ptr,
    calls_ptr,
    num_words,
    words_per_rank,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTERS: tl.constexpr,
    SEND: tl.constexpr,
    TAKE: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_next(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < num_words
    memories = memories_of(addresses_ptr, SIZE, tl.int64)
    wait_for_previous(PDL)
    own = tl.load(x_ptr + i, mask=is_inside, other=0)
    call = tl.load(calls_ptr + tl.program_id(0)) + 1
    begin = (call & 1).to(tl.int64) * SIZE * words_per_rank
    if SEND:
        _send_words(memories, begin, own, i, is_inside, words_per_rank, call, RANK, SIZE)
    if TAKE:
        for r in tl.static_range(SIZE):
            if r == RANK:
                words = own
            else:
                words = _take_words(memories[RANK] + (begin + r * words_per_rank) + i, is_inside, call)
            tl.store(out_ptr + r * num_words + i, words, mask=is_inside)
        end_call(calls_ptr, call, COUNTERS)
