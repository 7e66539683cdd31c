"""From the persistent rows to the inputs of one step, and back: a sampled token into its row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .seat import no_body

__all__ = ["PreparedInputs", "append_tokens", "gather_block_table", "prepare_inputs"]


class PreparedInputs(NamedTuple):
    """What the model and the attention read; requests lie one after the other in the token dimension."""

    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens], counted from the begin of the request
    slot_mapping: Tensor  # int64 [num_tokens]: block id * block_size + offset in the block
    query_start_loc: Tensor  # int32 [num_reqs + 1]: request i has the tokens query_start_loc[i] to [i + 1]
    seq_lens: Tensor  # int32 [num_reqs]: tokens of a request in the KV cache, this step's included


def prepare_inputs(
    token_ids: Tensor,
    num_computed_tokens: Tensor,
    block_table: Tensor,
    idx_mapping: Tensor,
    num_scheduled_tokens: Tensor,
    block_size: int,
    num_tokens: int,
) -> PreparedInputs:
    """Gather the batch: request i computes ``num_scheduled_tokens[i]`` tokens from where its row stands.

    Args:
        token_ids: int32 [max_num_seqs, max_model_len]
        num_computed_tokens: int32 [max_num_seqs]
        block_table: int32 [max_num_seqs, max_blocks_per_seq]
        idx_mapping: int64 [num_reqs], the row of each request
        num_scheduled_tokens: int64 [num_reqs], each >= 1
        num_tokens: their sum, which the caller knows without asking the device
    """
    assert idx_mapping.dtype == num_scheduled_tokens.dtype == torch.int64
    assert idx_mapping.shape == num_scheduled_tokens.shape
    if token_ids.device.type != "cpu":
        raise no_body("prepare_inputs", token_ids)
    num_reqs = idx_mapping.shape[0]
    first = num_computed_tokens.index_select(0, idx_mapping).long()
    end = num_scheduled_tokens.cumsum(0)
    if num_tokens == num_reqs:  # one token each: a pure decode step
        positions, rows = first, idx_mapping
    else:
        request = torch.arange(num_reqs).repeat_interleave(num_scheduled_tokens, output_size=num_tokens)
        # The token at place t of the batch is the (t - begin of its request)-th from where that request stands.
        positions = torch.arange(num_tokens) + (first - end + num_scheduled_tokens).index_select(0, request)
        rows = idx_mapping.index_select(0, request)
    query_start_loc = torch.zeros(num_reqs + 1, dtype=torch.int32)
    query_start_loc[1:] = end
    return PreparedInputs(
        input_ids=token_ids[rows, positions].long(),
        positions=positions,
        slot_mapping=block_table[rows, positions // block_size].long() * block_size + positions % block_size,
        query_start_loc=query_start_loc,
        seq_lens=(first + num_scheduled_tokens).int(),
    )


def gather_block_table(
    block_table: Tensor, idx_mapping: Tensor, seq_lens: Tensor, block_size: int, width: int
) -> Tensor:
    """int32 [num_reqs, width]: the blocks of each request; past its own, its first one again.

    What a row holds there belongs to others by now. Attention gathers it under a mask, but a NaN times the mask's zero
    is a NaN: another request's must not come near.

    Args:
        block_table: int32 [max_num_seqs, max_blocks_per_seq]
        idx_mapping: int64 [num_reqs]
        seq_lens: int32 [num_reqs], at most width * block_size
    """
    assert idx_mapping.dtype == torch.int64 and seq_lens.shape == idx_mapping.shape
    if block_table.device.type != "cpu":
        raise no_body("gather_block_table", block_table)
    blocks = block_table[:, :width].index_select(0, idx_mapping)
    own = torch.arange(0, width * block_size, block_size) < seq_lens[:, None]
    return torch.where(own, blocks, blocks[:, :1])


def append_tokens(token_ids: Tensor, num_tokens: Tensor, rows: Tensor, sampled: Tensor) -> None:
    """``token_ids[row, num_tokens[row]++] = sampled``, for all rows, which are distinct.

    Args:
        token_ids: int32 [max_num_seqs, max_model_len]
        num_tokens: int32 [max_num_seqs]
        rows: int64 [n]
        sampled: int64 [n]
    """
    assert rows.dtype == sampled.dtype == torch.int64 and rows.shape == sampled.shape
    if token_ids.device.type != "cpu":
        raise no_body("append_tokens", token_ids)
    end = num_tokens.index_select(0, rows)
    token_ids[rows, end.long()] = sampled.int()
    num_tokens.index_copy_(0, rows, end + 1)
