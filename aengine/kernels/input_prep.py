"""Gathers the inputs of one step from the persistent rows, and writes sampled tokens back to them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .dispatch import uses_triton
from .step_inputs import DecodeInputs, PreparedInputs, ScalarColumns


def prepare_inputs(
    token_ids: Tensor,
    num_computed_tokens: Tensor,
    block_table: Tensor,
    idx_mapping: Tensor,
    num_scheduled_tokens: Tensor,
    block_sizes: Tensor,
    num_tokens: int,
) -> PreparedInputs:
    """Gather the batch: request i computes ``num_scheduled_tokens[i]`` tokens from where its row stands.

    Args:
        token_ids: int32 [max_num_seqs, max_model_len]
        num_computed_tokens: int32 [max_num_seqs]
        block_table: int32 [num_groups, max_num_seqs, max_blocks_per_seq], of each KV group
        idx_mapping: int64 [num_reqs], the row of each request
        num_scheduled_tokens: int64 [num_reqs], each >= 1
        block_sizes: int32 [num_groups], tokens in a block
        num_tokens: the sum of ``num_scheduled_tokens``, which the caller has without a read of the device

    The Triton kernel takes padded batches, so that many have one shape: requests of row -1 and no tokens, and a
    ``num_tokens`` larger than the sum; the tokens past it get id 0, position 0 and slot -1.
    """
    assert idx_mapping.dtype == num_scheduled_tokens.dtype == torch.int64
    assert idx_mapping.shape == num_scheduled_tokens.shape
    if uses_triton(token_ids):
        from .triton import input_prep as triton_op

        return triton_op.prepare_inputs(
            token_ids, num_computed_tokens, block_table, idx_mapping, num_scheduled_tokens, block_sizes, num_tokens
        )
    rows, counts = idx_mapping.numpy(), num_scheduled_tokens.numpy()  # torch's ops take twice as long
    first = num_computed_tokens.numpy()[rows].astype(np.int64)
    positions, ends = first, np.zeros(len(rows) + 1, np.int64)
    counts.cumsum(out=ends[1:])
    if num_tokens > len(rows):  # not a pure decode step
        # The token at place t of the batch is the (t - begin of its request)-th from where that request stands.
        positions = np.arange(num_tokens) + (first - ends[:-1]).repeat(counts)
        rows = rows.repeat(counts)
    sizes = block_sizes.numpy().astype(np.int64)[:, None]
    blocks, places = np.divmod(positions, sizes)
    slots = block_table.numpy()[np.arange(len(sizes))[:, None], rows, blocks] * sizes + places
    of_tokens = token_ids.numpy()[rows, positions].astype(np.int64), positions, slots
    of_requests = ends.astype(np.int32), (first + counts).astype(np.int32)
    return PreparedInputs(*map(torch.from_numpy, of_tokens + of_requests))


def gather_block_table(
    block_table: Tensor,
    idx_mapping: Tensor,
    seq_lens: Tensor,
    block_size: int,
    width: int,
    first: Tensor | None = None,
) -> Tensor:
    """Return int32 [num_reqs, width]: the blocks of each request, from the ``first`` on; past its own, that one again.

    What a row holds there belongs to others by now. Attention gathers it under a mask, but a NaN times the mask's zero
    is a NaN: another request's must not come near.

    Args:
        block_table: int32 [max_num_seqs, max_blocks_per_seq], of one KV group
        idx_mapping: int64 [num_reqs]
        seq_lens: int32 [num_reqs], at most (first + width) * block_size
        first: int64 [num_reqs], index of the first block that is wanted; None: all are
    """
    assert idx_mapping.dtype == torch.int64 and seq_lens.shape == idx_mapping.shape
    assert block_table.device.type == "cpu", "kernels on a GPU read the table itself"
    begins = torch.arange(0, width * block_size, block_size)  # the first position of each block
    if first is None:
        blocks = block_table[:, :width].index_select(0, idx_mapping)
    else:
        columns = torch.arange(width) + first[:, None]
        begins = columns * block_size
        blocks = block_table[idx_mapping[:, None], columns.clamp(max=block_table.shape[1] - 1)]
    return torch.where(begins < seq_lens[:, None], blocks, blocks[:, :1])


def state_pages(block_table: Tensor, rows: Tensor, seq_lens: Tensor, spare_page: int) -> tuple[Tensor, Tensor]:
    """Return where each row keeps its states, int64 [n], and whether it has none yet, bool [n], of a step of one token
    each.

    Args:
        block_table: int32 [max_num_seqs, width], of the states' KV group
        rows: int64 [n]; -1: padding, which has ``spare_page``
        seq_lens: int32 [n], this step's token included
    """
    assert rows.dtype == torch.int64 and seq_lens.shape == rows.shape
    if uses_triton(rows):
        from .triton import input_prep as triton_op

        return triton_op.state_pages(block_table, rows, seq_lens, spare_page)
    pages = block_table[:, 0].index_select(0, rows.clamp(min=0)).long()
    return torch.where(rows >= 0, pages, spare_page), seq_lens <= 1


def append_tokens(token_ids: Tensor, num_tokens: Tensor, rows: Tensor, sampled: Tensor) -> None:
    """Append ``sampled`` to the rows: ``token_ids[row, num_tokens[row]++] = sampled``. Rows are distinct.

    Args:
        token_ids: int32 [max_num_seqs, max_model_len]
        num_tokens: int32 [max_num_seqs]
        rows: int64 [n]
        sampled: int64 [n]
    """
    assert rows.dtype == sampled.dtype == torch.int64 and rows.shape == sampled.shape
    if uses_triton(token_ids):
        from .triton import input_prep as triton_op

        return triton_op.append_tokens(token_ids, num_tokens, rows, sampled)
    own, lengths = rows.numpy(), num_tokens.numpy()
    token_ids.numpy()[own, lengths[own]] = sampled.numpy()
    lengths[own] += 1
    return None


def advance_rows(num_computed_tokens: Tensor, rows: Tensor, seq_lens: Tensor) -> None:
    """Set ``num_computed_tokens[row] = seq_len`` for all rows, which are distinct.

    Args:
        num_computed_tokens: int32 [max_num_seqs]
        rows: int64 [n]; rows of -1 are left out
        seq_lens: int32 [n]
    """
    assert rows.dtype == torch.int64 and seq_lens.dtype == torch.int32 and rows.shape == seq_lens.shape
    if uses_triton(num_computed_tokens):
        from .triton import input_prep as triton_op

        return triton_op.advance_rows(num_computed_tokens, rows, seq_lens)
    real = rows >= 0
    num_computed_tokens[rows[real]] = seq_lens[real]
    return None


def prepare_decode(
    token_ids: Tensor,
    scalars: Tensor,
    columns: ScalarColumns,
    rows: Tensor,
    places: Tensor | None = None,
    drafts: Tensor | None = None,
) -> DecodeInputs:
    """Gather a batch of decodes.

    Args:
        token_ids: int32 [max_num_seqs, max_model_len]
        scalars: int32 [max_num_seqs, words], the persistent rows
        columns: where in a row the numbers are
        rows: int64 [n], the row of each request; -1: padding
        places: int64 [n], how many tokens of the row are before each in this step; None: each row is named once
        drafts: int64 [n], with ``places``: ids that are written into the rows; -1: none; None: none at all
    """
    assert rows.dtype == torch.int64 and rows.dim() == 1
    assert all(t is None or (t.dtype == torch.int64 and t.shape == rows.shape) for t in (places, drafts))
    if uses_triton(token_ids):
        from .triton import input_prep as triton_op

        return triton_op.prepare_decode(token_ids, scalars, columns, rows, places, drafts)
    real = rows >= 0
    words = scalars.index_select(0, rows.clamp(min=0)) * real[:, None]
    before = 0 if places is None else places * real
    positions = words[:, columns.num_computed_tokens].long() + before
    if drafts is not None:
        is_new = real & (drafts >= 0)
        token_ids[rows[is_new], positions[is_new]] = drafts[is_new].int()
    return DecodeInputs(
        input_ids=torch.where(real, token_ids[rows.clamp(min=0), positions].long(), 0),
        positions=positions,
        seq_lens=torch.where(real, positions + 1, 0).int(),
        temperature=words[:, columns.temperature].view(torch.float32),
        seeds=words[:, columns.seed : columns.seed + 2].contiguous().view(torch.int64)[:, 0],
        sample_positions=words[:, columns.num_tokens].long() + before,
    )


def commit_decode(
    token_ids: Tensor,
    scalars: Tensor,
    columns: ScalarColumns,
    rows: Tensor,
    sampled: Tensor,
    checks: Tensor,
    published: Tensor,
    cursor: Tensor,
) -> None:
    """Commit a decode step for the rows that sample: each has computed all tokens that it had, and got one more.

    Args:
        rows, sampled: int64 [n]; rows of -1 are left out
        checks: float32 [n]
        published: int32 [num_slots, 2, m], m >= n, memory that the host reads: of slot ``cursor`` the first half gets
            the sampled ids, the second the bits of the checks
        cursor: int32 [1], which then names the next slot
    """
    assert rows.shape == sampled.shape == checks.shape and published.shape[2] >= rows.shape[0]
    if uses_triton(token_ids):
        from .triton import input_prep as triton_op

        return triton_op.commit_decode(token_ids, scalars, columns, rows, sampled, checks, published, cursor)
    real = rows >= 0
    own = rows[real]
    scalars[own, columns.num_computed_tokens] = scalars[own, columns.num_tokens]
    append_tokens(token_ids, scalars[:, columns.num_tokens], own, sampled[real])
    slot, n = int(cursor), rows.shape[0]
    published[slot, 0, :n] = sampled.int()
    published[slot, 1, :n] = checks.view(torch.int32)
    cursor.copy_((cursor + 1) % published.shape[0])
    return None
