"""Compile the kernels that steps will launch, many at a time, before the first of them runs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import product

import torch

from ...kernels.decode_plan import BatchSize
from ...kernels.find_drafts import find_drafts
from ...kernels.gumbel import gumbel_sample
from ...kernels.input_prep import PreparedInputs, advance_rows, append_tokens, prepare_decode, prepare_inputs
from ...kernels.penalties import count_tokens
from ...kernels.staged_write import apply_staged_writes
from ..graphs.cuda_graphs import DecodeStep, HalfDone
from ..input_batch import NO_ROWS
from ..model_runner import ModelRunner
from ..request_state import COLUMNS
from ..sampling.sampler import Sampling

_DECODE_SIZES = (1, 2, 8, 16, 32, 64, 128, 256, 512)
NUM_TOKENS = (8, 16, 32, 64, 128, 256)
"""Between these the choice of kernels changes (kernels/triton/linear.py)."""
_MOST_OF_SMALL_TILES = 64  # tokens (kernels/triton/varlen_attention.py)


def compile_kernels(
    runner: ModelRunner,
    max_batched: int,
    kv_heads: Collection[int],
    num_threads: int,
    *,
    has_experts: bool,
    exchange: Callable[[], None] = lambda: None,
) -> None:
    """Walk through decode steps and prompts of every kind of size, launching nothing of ours. ``kv_heads``: key-value
    heads of the layers; ``has_experts``: whether some layers are mixtures of experts; ``exchange`` launches all that
    ranks exchange tensors by.

    What the walk misses is compiled when it is first launched, while all requests wait; what is in Triton's cache on
    disk takes no time.
    """
    from ...kernels.triton.launch import compiling

    max_num_seqs = len(runner.requests.in_use)
    with torch.inference_mode(), compiling(num_threads):
        for kind in runner.decode_kinds.kinds:
            with runner.decode_kinds.only(kind):
                _decodes(runner)
        runner.proposer.rehearse()
        shapes = {shape for heads in kv_heads for shape in _prompt_shapes(max_num_seqs, max_batched, heads)}
        if has_experts:
            shapes |= {(num_tokens, 1) for num_tokens in _sizes_for_experts(max_batched)}
        for (num_tokens, num_reqs), kind in product(sorted(shapes), runner.step_rows.kinds):
            with runner.step_rows.only(kind):
                _prompts(runner, num_tokens, num_reqs)
        if runner.samples:
            _sampling(runner)
        _rows(runner)
        exchange()


def _prompt_shapes(max_num_seqs: int, max_batched: int, num_kv_heads: int) -> set[tuple[int, int]]:
    """Return (tokens, requests) of steps with prompts, such that any other step launches what these do."""
    from ...kernels.triton.launch import bucket
    from ...kernels.triton.varlen_attention import MOST_PADDED

    def kernels_of(num_reqs: int) -> tuple[BatchSize, int]:
        return next(size for size in BatchSize if num_reqs * num_kv_heads <= size.value), bucket(num_reqs)

    counts = {kernels_of(num_reqs): num_reqs for num_reqs in range(max_num_seqs, 0, -1)}.values()  # the least of each
    shapes = {(num_tokens, 1) for num_tokens in NUM_TOKENS}
    shapes |= {(_MOST_OF_SMALL_TILES, count) for count in counts if count <= _MOST_OF_SMALL_TILES}
    shapes |= {(max(2 * _MOST_OF_SMALL_TILES, count), count) for count in counts}
    shapes = {(min(num_tokens, max_batched), count) for num_tokens, count in shapes}
    return shapes | {(MOST_PADDED + 1, count) for count in counts if max_batched > MOST_PADDED}


def _sizes_for_experts(max_batched: int) -> set[int]:
    """Return the tokens of steps between which the tiles of experts change, whatever their shape: a tiling holds from
    some number of tokens to twice that, or more (kernels/expert_tilings.py). From some number on x may be rounded."""
    from ...kernels.triton.expert_fp8_blocks import MOST_UNROUNDED

    return {1 << i for i in range(3, max_batched.bit_length())} | {max_batched, min(MOST_UNROUNDED + 1, max_batched)}


def _decodes(runner: ModelRunner) -> None:
    if runner.graphs is not None:
        for size in sorted({min(rows, runner.graphs.max_size) for rows in _DECODE_SIZES}):
            _decode(runner, runner.graphs.step, size)
    if runner.speculation.graphs is not None:
        for size in runner.speculation.graphs.sizes:
            _decode(runner, runner.speculation.graphs.step, size)


def _decode(runner: ModelRunner, step: DecodeStep, size: int) -> None:
    requests = runner.requests
    device = requests.token_ids.device
    rows = step.set_rows(NO_ROWS, size)
    zeros = torch.zeros(size, dtype=torch.int64, device=device)
    inputs = step.prepare(size)
    hidden = step.forward(inputs._replace(input_ids=zeros, positions=zeros, seq_lens=zeros.int()), size)
    if not runner.samples:
        advance_rows(requests.scalars.num_computed_tokens, rows, inputs.seq_lens)
        return
    logits = runner.compute_logits(hidden)
    ids, checks = step.draw(logits, inputs)
    step.commit(rows, ids, checks)


def _prompts(runner: ModelRunner, num_tokens: int, num_reqs: int) -> None:
    requests, tables = runner.requests, runner.tables
    device = requests.token_ids.device
    rows = torch.zeros(num_reqs, dtype=torch.int64, device=device)
    computed = requests.scalars.num_computed_tokens
    prepare_inputs(requests.token_ids, computed, tables.table, rows, rows, tables.block_sizes, num_tokens)
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    slots = torch.full((len(tables.groups), num_tokens), -1, dtype=torch.int64, device=device)
    lens = torch.zeros(num_reqs, dtype=torch.int32, device=device)
    starts = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
    runner.kv_memory.batch_states.send(None, num_tokens, num_reqs)
    runner.forward_batch(PreparedInputs(zeros, zeros, slots, starts, lens), rows)


def _sampling(runner: ModelRunner) -> None:
    requests = runner.requests
    device = requests.token_ids.device
    logits = torch.zeros((1, runner.vocab_size), device=device)
    row = requests.scalars.select(torch.zeros(1, dtype=torch.int64, device=device))
    gumbel_sample(logits, row.temperature, row.seed, row.num_tokens)
    if runner.graphs is not None:  # the kernels of all parameters, which steps with prompts launch one by one
        step = runner.graphs.step
        rows = torch.full((1,), -1, dtype=torch.int64, device=device)
        inputs = prepare_decode(requests.token_ids, requests.scalars.words, COLUMNS, rows)
        for sampling in Sampling:
            step.sample(HalfDone(torch.zeros((1, runner.num_logits), device=device), inputs), sampling)
    count_tokens(torch.zeros(runner.vocab_size, dtype=torch.int32, device=device), requests.token_ids[0, :2], 1)


def _rows(runner: ModelRunner) -> None:
    requests = runner.requests
    device = requests.token_ids.device
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    append_tokens(requests.token_ids, requests.scalars.num_tokens, starts, starts)
    if runner.speculation.graphs is not None:
        find_drafts(requests.token_ids, requests.scalars.num_tokens, starts, starts, 1)
    apply_staged_writes(torch.zeros(4, dtype=torch.int32, device=device), starts, starts, starts.int())
