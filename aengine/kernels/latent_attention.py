"""Attention to latents: one vector a token is the key, and its end the value, of all query heads (DeepSeek-AI 2024,
arXiv:2405.04434).

    latent [ what turns | value ]      queries [ what turns | what the value's part of the key is multiplied by ]

The cache of a layer is [num_blocks, block_size, 2, 1, size] like that of keys and values, both of which are the same
memory. The output has the size of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .decode_attention import attend_on_cpu
from .decode_plan import DecodeWorkspace
from .dispatch import uses_triton
from .paged_attention import Scores
from .rotary import Rope
from .varlen_attention import facts_of, varlen_attention
from .write_qkv import turned


def write_latents(
    q: Tensor, latents: Tensor, positions: Tensor, slots: Tensor, rope: Rope | None, kv_cache: Tensor
) -> None:
    """Turn q [num_tokens, num_heads, size] in place, and ``latents`` [num_tokens, size] as they are written. positions,
    slots: int64 [num_tokens], of slot -1 nothing is written."""
    assert q.is_contiguous() and latents.is_contiguous() and latents.shape == (len(q), q.shape[2]), q.shape
    assert kv_cache.shape[3:] == (1, q.shape[2]) and kv_cache.stride(4) == 1
    if uses_triton(q):
        from .triton import latent_attention as triton_op

        triton_op.write_latents(q, latents, positions, slots, rope, kv_cache)
        return
    both = torch.cat((q, latents[:, None]), 1).float()
    if rope is not None:
        both = turned(both, positions, rope)
    q.copy_(both[:, :-1])
    known, block_size = slots >= 0, kv_cache.shape[1]
    at = slots[known]
    kv_cache[:, :, 0, 0][at // block_size, at % block_size] = both[known, -1].to(kv_cache.dtype)


def attend_to_decodes(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    scale: float,
    value_size: int,
    plan: Tensor,
    workspace: DecodeWorkspace,
    out: Tensor | None = None,
) -> Tensor:
    """Return [n, num_heads * value_size], of sequences with one new token each, whose latents are written.

    Args:
        q: [n, num_heads, size], turned
        block_table: int32 [max_num_seqs, width], by row
        plan: as of `decode_step_attention`, for a workspace of `decode_plan.lanes_of` key-value heads of ``value_size``
        out: where to put the rows that are not padding; None: a new tensor, zeros where they are
    """
    if uses_triton(q):
        from .triton import latent_attention as triton_op

        return triton_op.attend_to_decodes(q, kv_cache, block_table, scale, value_size, plan, workspace, out)
    if out is None:
        out = q.new_zeros((len(q), q.shape[1] * value_size))
    first = plan[(plan[:, 5] == torch.arange(len(plan))) & (plan[:, 2] > 0)]
    real, table = first[:, 0].long(), block_table[first[:, 1].long()].long()
    found = attend_on_cpu(q[real], kv_cache, table, first[:, 2].tolist(), Scores(scale))
    out[real] = values_of(found, q.shape[1], value_size)
    return out


def plan_prompts(
    rows: Tensor, query_start_loc: Tensor, seq_lens: Tensor, num_tokens: int, num_heads: int, dtype: torch.dtype
) -> Tensor:
    """Plan attention to latents of sequences with several new tokens, see `varlen_attention.plan_prompts`."""
    if uses_triton(rows):
        from .triton import latent_attention as triton_op

        return triton_op.plan_prompts(rows, query_start_loc, seq_lens, num_tokens, num_heads, dtype)
    return facts_of(rows, query_start_loc, seq_lens, skip_single=True)


def attend_to_prompts(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, plan: Tensor, scale: float, value_size: int
) -> Tensor:
    """Return [num_tokens, num_heads * value_size] for q [num_tokens, num_heads, size]; rows of other tokens than those
    of ``plan`` are not written."""
    if uses_triton(q):
        from .triton import latent_attention as triton_op

        return triton_op.attend_to_prompts(q, kv_cache, block_table, plan, scale, value_size)
    out = varlen_attention(q, kv_cache, block_table, plan, len(plan), Scores(scale))
    return values_of(out, q.shape[1], value_size)


def values_of(out: Tensor, num_heads: int, value_size: int) -> Tensor:
    """Return [n, num_heads * value_size] of ``out`` [n, num_heads * size], in which values are as wide as keys."""
    return out.unflatten(1, (num_heads, -1))[..., -value_size:].flatten(1)
