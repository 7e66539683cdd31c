"""Attention of sequences with one new token each, from the raw product of its q, k and v on, in one launch.

    qkv ─ (norm of q, k head by head) ─ rotary at position seq_len - 1 ─┬─ k, v into their slot of the cache
                                                                        └─ q over keys 0 .. seq_len - 1, softmax, v

Split KV: a sequence's keys are cut into chunks, each a program's, and the last program to end puts the parts together
(Dao et al. 2023, flash decoding, https://pytorch.org/blog/flash-decoding/), in the order of the chunks, so that the
same batch gives the same bits. How long a chunk is follows from all sequences together (`plan_decode`), on the device
and once for all layers: the chunks that there are then fill the GPU evenly, be the lengths alike or not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .decode_plan import GRAIN, PLAN_COLUMNS, DecodeWorkspace
from .dispatch import uses_triton
from .paged_attention import Scores
from .paged_attention import decode_attention as attend_on_cpu
from .rotary import HeadNorms, Rope
from .shared_prefix import SharedKeys


def plan_decode(
    rows: Tensor,
    seq_lens: Tensor,
    workspace: DecodeWorkspace,
    window: int | None = None,
    shared: SharedKeys | None = None,
) -> Tensor:
    """Plan how the keys of n sequences are split among programs: int32 [n + max_extra, PLAN_COLUMNS].

    rows: int64 [n]; seq_lens: int32 [n], those of length 0 get one item, which does nothing. With a ``window`` only the
    last so many keys of a sequence are shared out: no program looks at what is before. With ``shared``, which takes no
    window, the keys behind those that are read together with other sequences'. Between it and the attention
    there must be a kernel that is not launched ahead of its predecessor's end (in a step: the lookup of the
    embeddings), as the attention reads the plan before it waits (triton/launch.py).
    """
    assert seq_lens.dtype == torch.int32 and seq_lens.dim() == 1 and rows.shape == seq_lens.shape
    assert shared is None or (window is None and len(shared.of_seqs) == len(rows))
    if uses_triton(seq_lens):
        from .triton import decode_plan as triton_op

        return triton_op.plan_decode(rows, seq_lens, workspace, window, shared)
    least, extra, is_lenient = workspace.sharing(len(seq_lens))
    lens = seq_lens.long()
    num_keys = lens if window is None else lens.clamp(max=window)
    if shared is not None:
        num_keys = (lens - shared.of_seqs[:, 0]).clamp(min=0)
    share = max(least, -(-int(num_keys.sum()) // extra))
    counts = (-(((share // 4 if is_lenient else 0) - num_keys) // share)).clamp(min=1)
    chunks = -(-num_keys.clamp(min=1) // (counts * GRAIN)) * GRAIN  # equal parts, so that none is the last to end
    counts = (-(-num_keys // chunks)).clamp(min=1)
    seq = torch.arange(len(lens)).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[seq]
    begin = (lens - num_keys)[seq] + (torch.arange(len(seq)) - first) * chunks[seq]
    plan = torch.full((len(lens) + extra, PLAN_COLUMNS), -1, dtype=torch.int32)
    columns = (seq, rows[seq], lens[seq], begin, torch.minimum(begin + chunks[seq], lens[seq]), first, counts[seq])
    plan[: len(seq), :7] = torch.stack(columns, 1).int()
    return plan


def decode_step_attention(
    qkv: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    rope: Rope | None,
    norms: HeadNorms | None,
    num_heads: int,
    how: Scores,
    plan: Tensor,
    workspace: DecodeWorkspace,
    *,
    is_raw: bool = True,
    out: Tensor | None = None,
    kv_scales: Tensor | None = None,
    shared: SharedKeys | None = None,
) -> Tensor:
    """[n, num_heads * head_dim], in qkv's dtype.

    Args:
        qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim], contiguous rows; q heads, k heads, v heads.
        kv_cache: [num_blocks, block_size, 2, num_kv_heads, head_dim], any strides but the last.
        block_table: int32 [max_num_seqs, width], by row.
        rope: None: q and k are not rotated.
        how: with the window that the plan was made for.
        plan: of the sequences, lengths with the new token; of length 0 are those that pad: they get zeros, and write
            nothing.
        is_raw: False if q and k are rotated, and k and v in the cache, already.
        out: where to put the rows that are not padding, [>= n, num_heads * head_dim]; None: a new tensor.
        kv_scales: of a cache in FP8, see kv_codes.py.
        shared: which sequences read keys together, as the plan was made with; on a GPU that is another launch ahead.
    """
    n, width = qkv.shape
    num_kv_heads, head_dim = kv_cache.shape[3:]
    assert width == (num_heads + 2 * num_kv_heads) * head_dim and qkv.stride(1) == 1 and kv_cache.stride(4) == 1
    assert rope is None or rope.table.shape[1] <= head_dim
    if uses_triton(qkv):
        from .triton import decode_attention as triton_op

        return triton_op.decode_step_attention(
            qkv,
            kv_cache,
            block_table,
            rope,
            norms,
            num_heads,
            how,
            plan,
            workspace,
            is_raw,
            out,
            kv_scales,
            shared,
        )
    from .write_qkv import apply_rope_and_write_kv

    if out is None:
        out = torch.zeros((n, num_heads * head_dim), dtype=qkv.dtype)
    first = plan[(plan[:, 5] == torch.arange(len(plan))) & (plan[:, 2] > 0)]  # first item of each sequence, not padding
    real, lens = first[:, 0].long(), first[:, 2]
    own, table = qkv[real], block_table[first[:, 1].long()]
    if is_raw:
        positions = lens.long() - 1
        block_size = kv_cache.shape[1]
        blocks = table.gather(1, (positions // block_size)[:, None]).squeeze(1).long()
        slots = blocks * block_size + positions % block_size
        if rope is not None and rope.shifts is not None:
            positions = positions + rope.shifts[first[:, 1].long()]
        apply_rope_and_write_kv(own, positions, slots, rope, norms, num_heads, kv_cache, kv_scales)
    q = own[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
    out[real] = attend_on_cpu(q, kv_cache, table.long(), lens.tolist(), how, kv_scales)
    return out
