"""`ModelProposer` as on a GPU: padded, over a GPU's pages and their attention."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

from test_gpu_path import BLOCK_SIZE, MAX_LEN, MAX_SEQS, NUM_BLOCKS, TritonPrefill, make_model, triton, write_model

from aengine.ipc.messages import DraftColumns, ModelRunnerOutput, NewRequest, SchedulerOutput, int32
from aengine.runner.attention.kv_pages import KvCacheSpec
from aengine.runner.attention.triton_attention import GpuKvCache
from aengine.runner.distributed.group import ALONE
from aengine.runner.model_config import AttendingLayers
from aengine.runner.model_runner import ModelRunner
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.speculation.model_proposer import ModelProposerSource, WholeModel
from aengine.runner.speculation.proposer import Proposer, RunnerParts

__all__ = ["triton"]  # a fixture
TOKENS = 3


class Padded(ModelProposerSource):
    """Has the proposer run as on an accelerator."""

    def make(self, parts: RunnerParts) -> Proposer:
        return super().make(parts._replace(platform=SimpleNamespace(is_accelerator=True)))  # type: ignore[arg-type]


def make_runner(folder: Path) -> ModelRunner:
    config, model = make_model(folder)
    _, small = make_model(folder)
    how = {"num_tokens": TOKENS, "max_num_seqs": MAX_SEQS, "num_bytes": 0, "described": {}}
    source = Padded(WholeModel(small), model, ALONE, **how)  # type: ignore[arg-type]
    layers = AttendingLayers.of(config, *source.configs)
    spec = KvCacheSpec(layers, NUM_BLOCKS, BLOCK_SIZE, source.dtype, CpuPlatform.device, MAX_SEQS, MAX_LEN)
    cache = GpuKvCache(spec, TritonPrefill())
    return ModelRunner(
        model,
        cache,
        vocab_size=config.vocab_size,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        num_blocks=NUM_BLOCKS,
        kv_groups=cache.layout.groups,
        platform=CpuPlatform(),
        graph_sizes=[1, 2, 4],
        max_graph_tokens=64,
        position_sizes=(8, 16),
        enforce_eager=True,
        proposer=source,
    )


class Steps:
    """Steps of three greedy rows, in which each has as many guesses as it is told."""

    def __init__(self, runner: ModelRunner, lengths: list[int], rng: random.Random) -> None:
        self._runner, self._rows, self._num_steps = runner, int32(range(len(lengths))), 0
        self._settled = int32(), int32()
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
        answer = self._runner.sample_tokens(None).get()
        assert not answer.errors
        return answer


def test_guesses_of_the_model_itself_are_right(tmp_path: Path, rng: random.Random) -> None:
    """Of rows with prompts of any length, drafted in each step, or after more steps without drafts than the graph of
    drafts computes tokens of."""
    runner = make_runner(write_model(tmp_path, "llama"))
    steps = Steps(runner, [1, 2, rng.randint(3, 12)], rng)
    for counts in ([1, 2, 3], [3, 3, 1], [0, 0, 0], [2, 0, 3], *[[0, 0, 0]] * (TOKENS + 2), [3, 2, 1]):
        assert steps.run(counts) == [1 + count for count in counts], "all are accepted"
