"""Rows that begin with the same blocks, in graphs and op by op: as rows whose equal blocks are their own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from gpu_models import DEVICE, MIB, Batch, Checkpoint, make_runner
from runner_fakes import request
from test_gpu_graphs import random_prompts

from aengine.runner.attention import shared_prefixes
from aengine.runner.model_runner import ModelRunner

pytestmark = pytest.mark.gpu
MakeCheckpoint = Callable[..., Checkpoint]


@pytest.fixture(autouse=True)
def _always_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 8)
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 1)


class Sharing(Batch):
    """Rows whose first prompts were computed by one of them. ``first_tokens``: what each one's prompt gave."""

    def __init__(self, runner: ModelRunner, max_len: int = 96) -> None:
        super().__init__(runner, max_len)
        self.first_tokens: list[int] = []

    def begin(self, prefixes: list[list[int]], rests: list[list[list[int]]], *, shares: bool) -> list[int]:
        """Start rows of several groups, of a prefix each; without ``shares`` each has blocks of its own."""
        (size,) = {group.block_size for group in self._runner.tables.groups}
        rows, row = [], 0
        for prefix, own in zip(prefixes, rests, strict=True):
            assert len(prefix) % size == 0
            first = row * sum(self._widths)
            for rest in own:
                fields = {"temperature": 0.0, "seed": 5}
                blocks = list(range(row * sum(self._widths), (row + 1) * sum(self._widths)))
                known = 0
                if shares and rests and row * sum(self._widths) != first:
                    known = len(prefix)
                    for i in range(len(self._widths)):
                        at = sum(self._widths[:i])
                        blocks[at : at + known // size] = range(first + at, first + at + known // size)
                spans = tuple(number for width in self._widths for number in (0, width))
                new = request(row, [*prefix, *rest], blocks, num_computed_tokens=known, block_spans=spans, **fields)
                answer, _ = self._step([row], [len(prefix) + len(rest) - known], new_requests=[new])
                self.first_tokens += answer.token_ids
                rows.append(row)
                row += 1
        return rows


def kind_of(runner: ModelRunner) -> int:
    return runner.decode_kinds.kind


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_the_same_tokens(checkpoint: MakeCheckpoint, arch: str, dtype: str, rng: random.Random) -> None:
    """In float32 they are those of rows with blocks of their own; by graphs they are to the bit those without graphs.
    Where layers have windows, these read as ever."""
    sizes = [rng.randint(4, 30), rng.randint(4, 12)]
    prefixes = [[rng.randrange(3, 90) for _ in range(4 * length)] for length in (rng.randint(4, 12), 3)]
    rests = [random_prompts(rng, size, 20) for size in sizes]
    rests.append(random_prompts(rng, 3, 20))
    prefixes.append([])
    answers = {}
    for how in ("graphs", "eager", "apart"):
        runner = make_runner(
            checkpoint(arch).folder,
            dtype=dtype,
            enforce_eager=how == "eager",
            kv_cache_memory_bytes=32 * MIB,
            max_num_seqs=64,
        )
        runner.batch_graphs = None
        batch = Sharing(runner)
        rows = batch.begin(prefixes, rests, shares=how != "apart")
        given = []
        for order in (rows, rows[::-1], rows[: sizes[0]], *[rows] * 4):
            given.append(batch.decode(order)[0])
            if DEVICE != "cpu":
                assert kind_of(runner) == (how != "apart")
        answers[how] = [(answer.token_ids, answer.errors) for answer in given]
        batch.end(rows)
        del runner, batch
    assert answers["graphs"] == answers["eager"]
    if dtype == "float32":
        assert answers["graphs"] == answers["apart"]


def test_logits_are_near(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    """In bfloat16, of a model of a real size, they differ by no more than other orders of a sum make. Rows whose first
    tokens were near-ties that fell apart in the prompts' steps go on with other tokens, and are left out."""
    prefix, rest = [rng.randrange(3, 4000) for _ in range(600)], [[rng.randrange(3, 4000)] for _ in range(40)]
    logits, first_tokens = [], []
    for shares in (True, False):
        runner = make_runner(
            checkpoint("llama", "bfloat16", "medium").folder,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_batched_tokens=1024,
            kv_cache_memory_bytes=1024 * MIB,
        )
        batch = Sharing(runner, 640)
        rows = batch.begin([prefix], [rest], shares=shares)
        found = batch.decode(rows)[1]
        assert found is not None and kind_of(runner) == (shares and DEVICE != "cpu")
        logits.append(found.double().cpu())
        first_tokens.append(batch.first_tokens)
        del runner, batch
    alike = [row for row, (one, other) in enumerate(zip(*first_tokens, strict=True)) if one == other]
    assert len(alike) >= 36
    together, apart = (found[alike] for found in logits)
    off = float((together - apart).norm() / apart.norm())
    print(f"relative difference {off:.2e} of {len(alike)} rows")
    assert off < 0.02 and not torch.isnan(together).any()
