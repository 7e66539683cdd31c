"""Compile the kernels that steps will launch, many at a time, before the first of them runs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.gumbel import gumbel_sample
from ..kernels.input_prep import commit_decode, prepare_decode, prepare_inputs
from .model_runner import ModelRunner
from .request_state import COLUMNS

__all__ = ["compile_kernels"]

_DECODE_SIZES = (1, 2, 8, 16, 32, 64, 256)
"""Batches between which the choice of kernels changes (kernels/bodies/linear.py)."""


def compile_kernels(runner: ModelRunner, max_batched: int, num_threads: int) -> None:
    """Walk through decode steps of every kind of size, and one prompt, launching nothing of ours.

    What the walk misses is compiled when it is first launched; what is in Triton's cache on disk takes no time.
    """
    from ..kernels.bodies.launch import compiling

    with torch.inference_mode(), compiling(num_threads):
        for size in _DECODE_SIZES:
            if runner.graphs is not None and size <= runner.graphs.max_size:
                _decode(runner, size)
        _prompt(runner, min(64, max_batched))


def _decode(runner: ModelRunner, size: int) -> None:
    requests = runner.requests
    device = requests.token_ids.device
    rows = torch.full((size,), -1, dtype=torch.int64, device=device)
    zeros = torch.zeros(size, dtype=torch.int64, device=device)
    inputs = prepare_decode(requests.token_ids, requests.scalars.words, COLUMNS, rows)
    logits = runner.decode(zeros, zeros, rows, zeros.int())
    ids, checks = gumbel_sample(logits, inputs.temperature, inputs.seeds, inputs.sample_positions)
    published = torch.zeros((1, 2, size), dtype=torch.int32, device=device)
    cursor = torch.zeros(1, dtype=torch.int32, device=device)
    commit_decode(requests.token_ids, requests.scalars.words, COLUMNS, rows, ids, checks, published, cursor)


def _prompt(runner: ModelRunner, num_tokens: int) -> None:
    requests, tables = runner.requests, runner.tables
    device = requests.token_ids.device
    one = torch.zeros(1, dtype=torch.int64, device=device)
    count: Tensor = one + num_tokens
    computed = requests.scalars.num_computed_tokens
    prepare_inputs(requests.token_ids, computed, tables.table, one, count, tables.block_size, num_tokens)
