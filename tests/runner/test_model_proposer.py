"""`ModelProposer` as on a GPU: padded, over a GPU's pages and their attention."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_gpu_path import BLOCK_SIZE, MAX_LEN, MAX_SEQS, NUM_BLOCKS, TritonPrefill, make_model, triton, write_model

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
from draft_heads import DraftHead, Eagle3, Mtp
from test_draft_heads import ANY_LAYERS, EAGLE3, MTP, SIZES, randomise, read_head, source_of, write_head
from tiny import write_tiny_model

from aengine.ipc.messages import DraftColumns, ModelRunnerOutput, NewRequest, SchedulerOutput, int32
from aengine.runner.attention.kv_pages import KvCacheSpec
from aengine.runner.attention.torch_attention import KvCache
from aengine.runner.attention.triton_attention import GpuKvCache
from aengine.runner.distributed.group import ALONE
from aengine.runner.model_config import AttendingLayers
from aengine.runner.model_runner import ModelRunner
from aengine.runner.models.causal_lm import CausalLM
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.speculation.model_proposer import ModelProposerSource, WholeModel
from aengine.runner.speculation.proposer import Proposer, RunnerParts

__all__ = ["triton"]  # a fixture
TOKENS = 3


class Padded(ModelProposerSource):
    """Has the proposer run as on an accelerator."""

    def make(self, parts: RunnerParts) -> Proposer:
        return super().make(parts._replace(platform=SimpleNamespace(is_accelerator=True)))  # type: ignore[arg-type]


def make_runner(folder: Path, head_of: Callable[[CausalLM], Any], *, is_padded: bool = True) -> ModelRunner:
    """``head_of``: what guesses for a model."""
    config, model = make_model(folder)
    how: dict[str, Any] = {"num_tokens": TOKENS, "max_num_seqs": MAX_SEQS, "num_bytes": 0, "described": {}}
    source = (Padded if is_padded else ModelProposerSource)(head_of(model), model, ALONE, **how)
    layers = AttendingLayers.of(config, *source.configs)
    spec = KvCacheSpec(layers, NUM_BLOCKS, BLOCK_SIZE, source.dtype, CpuPlatform.device, MAX_SEQS, MAX_LEN)
    cache: Any = GpuKvCache(spec, TritonPrefill()) if is_padded else KvCache(spec)
    return ModelRunner(
        model,
        cache,
        vocab_size=config.vocab_size,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        num_blocks=NUM_BLOCKS,
        kv_groups=cache.layout.groups,
        platform=CpuPlatform(),
        graph_sizes=[1, 2, 4] if is_padded else None,
        max_graph_tokens=64,
        position_sizes=(8, 16) if is_padded else (),
        enforce_eager=True,
        proposer=source,
    )


class Steps:
    """Steps of three greedy rows, in which each has as many guesses as it is told."""

    def __init__(self, runner: ModelRunner, lengths: list[int], rng: random.Random) -> None:
        self._runner, self._rows, self._num_steps = runner, int32(range(len(lengths))), 0
        self._settled = int32(), int32()
        self.drafts: list[list[int]] = []  # those of each row in each step
        width = -(-MAX_LEN // BLOCK_SIZE)
        new = []
        for row, length in enumerate(lengths):
            ids, own = int32(rng.randrange(300) for _ in range(length)), int32(range(row * width, (row + 1) * width))
            new.append(NewRequest(row, ids, length, 0, own, temperature=0.0))
        self._answer(SchedulerOutput(0, new_requests=new, req_idx=self._rows, num_scheduled_tokens=int32(lengths)))

    def run(self, counts: list[int]) -> list[int]:
        """Return how many tokens each row got."""
        self._num_steps += 1
        rows, num_rejected = self._settled
        out = SchedulerOutput(self._num_steps, settled_rows=rows, num_rejected=num_rejected, req_idx=self._rows)
        out.num_scheduled_tokens = int32(1 + count for count in counts)
        is_found = int32(int(count > 0) for count in counts)
        if any(counts):
            out.drafts = DraftColumns(int32(counts), int32(), int32([0] * len(counts)), is_found)
        answer = self._answer(out)
        got = [1] * len(counts) if answer.counts is None else list(answer.counts)
        drafted = [row for row, count in enumerate(counts) if count]
        self._settled = int32(drafted), int32(1 + counts[row] - got[row] for row in drafted)
        return got

    def _answer(self, out: SchedulerOutput) -> ModelRunnerOutput:
        self._runner.execute_model(out)
        requests = self._runner.requests
        for row, count in enumerate(() if out.drafts is None else out.drafts.counts):
            end = int(requests.scalars.num_tokens[row])
            self.drafts.append(requests.token_ids[row, end : end + count].tolist())
        answer = self._runner.sample_tokens(None).get()
        assert not answer.errors
        return answer


def test_guesses_of_the_model_itself_are_right(tmp_path: Path, rng: random.Random) -> None:
    """Of rows with prompts of any length, drafted in each step, or after more steps without drafts than the graph of
    drafts computes tokens of."""
    folder = write_model(tmp_path, "llama")
    runner = make_runner(folder, lambda model: WholeModel(make_model(folder)[1]))
    steps = Steps(runner, [1, 2, rng.randint(3, 12)], rng)
    for counts in ([1, 2, 3], [3, 3, 1], [0, 0, 0], [2, 0, 3], *[[0, 0, 0]] * (TOKENS + 2), [3, 2, 1]):
        assert steps.run(counts) == [1 + count for count in counts], "all are accepted"


@pytest.mark.parametrize("kind", [Eagle3, Mtp])
def test_a_head_guesses_the_same_padded_and_not(tmp_path: Path, rng: random.Random, kind: type[DraftHead]) -> None:
    """Behind prompts, and behind steps with drafts, right or wrong, and without."""
    heads = {name: SIZES[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    folder = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=3, **heads)
    model: Any = make_model(folder)[1]
    settings = EAGLE3 | ANY_LAYERS if kind is Eagle3 else MTP | {"attention_bias": False}
    tables = model.embed.table, model.lm_head.weight.multiply(torch.eye(SIZES["hidden_size"])).T
    head = kind({**SIZES, **settings}, *tables)
    randomise(head, rng)
    source = source_of(write_head(tmp_path / "head", head))
    lengths, seed, found = [1, 2, rng.randint(3, 12)], rng.getrandbits(30), []
    for is_padded in (False, True):
        runner = make_runner(folder, partial(read_head, source), is_padded=is_padded)
        steps = Steps(runner, lengths, random.Random(seed))
        counts = [steps.run(one) for one in ([1, 2, 3], [3, 3, 1], [0, 0, 0], [2, 0, 3], [0, 0, 0], [3, 2, 1])]
        found.append((counts, steps.drafts))
    assert found[0] == found[1] and len({tuple(drafts) for drafts in found[0][1]}) > 5
