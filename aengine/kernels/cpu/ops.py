"""Compiled ops as functions of tensors, which run at once or are recorded (tape.py)."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..activation import Activation
from ..paged_attention import Scores
from ..rotary import HeadNorms, Rope
from .attention import COUNTER_BYTES, MOST_SPLIT_ROWS, ROWS_OF_CHUNK, SEGMENT, state_bytes
from .library import library
from .short_conv import CHANNELS
from .tape import Argument, empty, launch
from .team import aligned_words

_ENDLESS = 1 << 40
"""Beyond all positions, and all rows."""


def write_qkv(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    rope: Rope | None,
    norms: HeadNorms | None,
    num_heads: int,
    kv_cache: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Change q and k of ``qkv`` in place, head by head: the norms, if there are any, then rotary; write k and v.

    Args:
        qkv: float32 [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], head_dim a multiple of 16
        positions, slots: int64 [num_tokens]; slot -1: nothing is written
        rope: by ``positions``, which have the rows' shifts in them already; None: q and k are not rotated
        norms: float32 weights
        kv_cache: [num_blocks, block_size, 2, num_kv_heads, head_dim] of float32, float16 or bfloat16, or uint8 with
            scales, any strides but the last
        scales: see kernels/kv_codes.py
    """
    num_kv_heads, head_dim = kv_cache.shape[3:]
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim and qkv.is_contiguous() and head_dim % 16 == 0
    assert positions.is_contiguous() and slots.is_contiguous() and kv_cache.stride(4) == 1
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    table, interleaved, query_scale = (None, False, None) if rope is None else rope[:3]
    half = 0 if table is None else table.shape[1] // 2
    assert table is None or table.is_contiguous()
    size = kv_cache.element_size()
    strides = [stride * size for stride in kv_cache.stride()[:4]]
    tensors = qkv, positions, slots, num_heads, num_kv_heads, head_dim
    turns = table, half, query_scale, q_norm, k_norm, float(eps)
    launch(
        f"write_qkv.{'interleaved' if interleaved else 'halves'}.{_kept_as(kv_cache, scales)}",
        [*tensors, *turns, kv_cache, kv_cache.shape[1], *strides, scales],
        qkv.shape[0],
    )


def attend(
    qkv: Tensor,
    positions: Tensor,
    table_rows: Tensor,
    block_table: Tensor,
    kv_cache: Tensor,
    how: Scores,
    scales: Tensor | None = None,
) -> Tensor:
    """Return float32 [num_tokens, num_heads * head_dim]: what each token finds in its request's tokens up to itself.

    Args:
        qkv: float32 [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], of which q is read; head_dim a multiple
            of 16, at most 16 query heads a KV head
        positions: int64 [num_tokens]
        table_rows: int64 [num_tokens]: the row of each token's request in the block table
        block_table: int32 [max_num_seqs, width]
        kv_cache, scales: as of `write_qkv`; the tokens' own keys and values are in it
        how: sinks in float32
    """
    num_kv_heads, head_dim = kv_cache.shape[3:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    group = num_heads // num_kv_heads
    assert qkv.is_contiguous() and head_dim % 16 == 0 and num_heads == group * num_kv_heads and group <= 16
    assert positions.is_contiguous() and table_rows.is_contiguous() and block_table.stride(1) == kv_cache.stride(4) == 1
    out = empty(qkv.shape[0], num_heads * head_dim, qkv.dtype)
    strides = [stride * kv_cache.element_size() for stride in kv_cache.stride()[:4]]
    scale, window, softcap, sinks = how
    parts, segments = _parts(num_kv_heads), -(-block_table.shape[1] * kv_cache.shape[1] // SEGMENT)
    states = _split_states(num_kv_heads, segments * group * state_bytes(head_dim))
    tensors = qkv, qkv.shape[1] * 4, out, positions, table_rows, block_table, block_table.stride(0) * 4
    cache: list[Argument] = [kv_cache, kv_cache.shape[1], *strides, num_kv_heads]
    scores: list[Argument] = [_ENDLESS if window is None else window, float(scale), float(softcap), sinks]
    launch(
        f"attend.{head_dim}.{group}.{_kept_as(kv_cache, scales)}",
        [*tensors, *cache, *scores, parts, states.ctypes.data, segments, scales],
        qkv.shape[0],
        num_kv_heads * parts,
        ROWS_OF_CHUNK,
    )
    return out


def attend_both_sides(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    texts: Tensor,
    begins: Tensor,
    lengths: Tensor,
    reach: int | None,
) -> Tensor:
    """Return float32 [num_tokens, num_heads * head_dim]: what each token finds in its text, scaled by head_dim ** -0.5.

    Args:
        q: float32 [num_tokens, num_heads, head_dim], head_dim a multiple of 16; the heads of a token lie side by side
        k, v: float32 [num_tokens, num_kv_heads, head_dim] of the same strides, at most 16 query heads a KV head
        positions, texts: int64 [num_tokens]: the place in its text, and which text that is
        begins: int32 [num_texts, 1]: a text's first token; lengths: int64 [num_texts]
        reach: how many tokens to either side one sees; None: all
    """
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    group = num_heads // num_kv_heads
    assert q.dtype == k.dtype == v.dtype == torch.float32 and head_dim % 16 == 0
    assert num_heads == group * num_kv_heads and group <= 16
    assert q.stride()[1:] == (head_dim, 1) and k.stride() == v.stride() and k.stride(2) == 1
    out = empty(num_tokens, num_heads * head_dim, torch.float32)
    token, head = k.stride(0) * 4, k.stride(1) * 4
    tensors = q, q.stride(0) * 4, out, positions, texts, begins, begins.stride(0) * 4
    cache = k, _ENDLESS, token, token, v.data_ptr() - k.data_ptr(), head, num_kv_heads  # a text is a page
    scores = _ENDLESS if reach is None else reach + 1, float(head_dim**-0.5), 0.0, None
    words: list[Argument] = [*tensors, *cache, *scores, 1, None, 0, lengths]
    launch(f"attend_both_sides.{head_dim}.{group}", words, num_tokens, num_kv_heads, ROWS_OF_CHUNK)
    return out


def _parts(num_kv_heads: int) -> int:
    """Chunks that share the keys of a KV head, where a step has few tokens: all threads shall have as much to do."""
    num_threads = library().team.num_threads
    return 1 if num_kv_heads % num_threads == 0 else -(-2 * num_threads // num_kv_heads)


@functools.cache
def _split_states(num_kv_heads: int, num_bytes: int) -> NDArray[np.int64]:
    """What the chunks of a token share: for each KV head counters, which all ops leave at zero, then ``num_bytes`` of
    states. Ops use it one after another, where they have as many heads: else counters would lie where states have lain.
    """
    return aligned_words(MOST_SPLIT_ROWS * num_kv_heads * (COUNTER_BYTES + num_bytes) // 8)


def add_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """Add rms_norm(x) * weight to ``residual``, float32 [n, size] as ``x``, for float32 [size] weights."""
    rows, size = x.shape
    assert residual.is_contiguous() and x.is_contiguous() and residual.shape == x.shape and size % 16 == 0
    launch("add_norm", [residual, x, size, weight, float(eps)], rows)


def copied(x: Tensor) -> Tensor:
    """Return a copy of float32 [n, size]."""
    rows, size = x.shape
    assert x.is_contiguous() and size % 16 == 0
    out = empty(rows, size, torch.float32)
    launch("copy_rows", [x, out, size], rows)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias, float32 [n, size] as x, for float32 [size] weights."""
    rows, size = x.shape
    assert x.is_contiguous() and size % 16 == 0
    out = empty(rows, size, torch.float32)
    launch("layer_norm", [x, out, size, weight, bias, float(eps)], rows)
    return out


def act_and_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return activation(gate) * up, float32 [n, size], for float32 [n, 2 * size]: the gate's half comes first."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous() and size % 16 == 0
    out = empty(rows, size, torch.float32)
    launch(f"act_and_mul.{activation}", [gate_up, out, size], rows)
    return out


def gated_conv(
    gates: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    memory: Tensor,
    positions: Tensor,
    table_rows: Tensor,
    block_table: Tensor,
    kept_pages: Tensor,
) -> Tensor:
    """Return c * convolution(b * x), float32 [num_tokens, channels]; the states of the tokens' requests move on.

    Args:
        gates: float32 [num_tokens, 3 * channels], of b, c and x
        weight, bias: float32 [width, channels], [channels]
        memory: float32 [num_pages, width - 1, channels], any strides but the last; with more inputs it is a ring (see
            kernels/drafted_states.py)
        positions, table_rows: as of `attend`; a request has no state yet at position 0
        block_table: int32 [max_num_seqs, width]: the first of a row is the page of its state
        kept_pages: int64 [num_tokens]: 1 + the page that gets a copy of the state behind the token; 0: none
    """
    width, channels = weight.shape
    assert gates.is_contiguous() and gates.shape[1] == 3 * channels and weight.is_contiguous()
    assert memory.dtype == torch.float32 and memory.shape[1] >= width - 1 and memory.shape[2:] == (channels,)
    assert memory.stride(2) == 1
    ring_length = memory.shape[1] if memory.shape[1] >= width else 0
    out = empty(len(gates), channels, torch.float32)
    state = memory, memory.stride(0) * 4, memory.stride(1) * 4
    where = positions, table_rows, block_table, block_table.stride(0) * 4
    words: list[Argument] = [gates, out, channels, weight, bias, *state, *where, ring_length, kept_pages]
    launch(f"gated_conv.{width}", words, len(gates), -(-channels // CHANNELS), _ENDLESS)
    return out


def _kept_as(kv_cache: Tensor, scales: Tensor | None) -> str:
    """The name of a cache's dtype."""
    assert (kv_cache.dtype == torch.uint8) == (scales is not None)
    assert scales is None or (scales.dtype == torch.float32 and scales.is_contiguous())
    return str(kv_cache.dtype).removeprefix("torch.") if scales is None else "float8_e4m3fn"
