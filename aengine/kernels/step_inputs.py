"""The inputs of one step, as the kernels leave them for the model and the sampler."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ScalarColumns(NamedTuple):
    """Columns of the persistent rows, in words of 4 bytes (runner/request_state.py)."""

    seed: int  # the seed takes two of the row's words
    temperature: int
    num_tokens: int
    num_computed_tokens: int


class DecodeInputs(NamedTuple):
    """Inputs of a step in which every request computes its newest token; [n] each. Padding: id 0 at 0, greedy."""

    input_ids: Tensor  # int64: token that the row computes
    positions: Tensor  # int64
    seq_lens: Tensor  # int32, the new token included; 0 for padding
    temperature: Tensor  # float32
    seeds: Tensor  # int64
    sample_positions: Tensor  # int64: the position that the sampled token will have


class PreparedInputs(NamedTuple):
    """Inputs of the model and of attention; requests lie one after the other in the token dimension."""

    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens], counted from the begin of the request
    slot_mapping: Tensor  # int64 [num_groups, num_tokens]: block id * block_size + offset in the block; -1: padding
    query_start_loc: Tensor  # int32 [num_reqs + 1]: request i has the tokens query_start_loc[i] to [i + 1]
    seq_lens: Tensor  # int32 [num_reqs]: tokens of a request in the KV cache, this step's included
