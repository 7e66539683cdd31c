"""`ModelProposer` as on a GPU: padded, over a GPU's pages and their attention."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_gpu_path import BLOCK_SIZE, MAX_LEN, MAX_SEQS, NUM_BLOCKS, TritonPrefill, make_model, triton, write_model

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
from draft_heads import DFlash, DraftHead, Eagle3, Mtp, PEagle
from test_draft_heads import (
    ANY_LAYERS,
    DFLASH,
    EAGLE3,
    MTP,
    PEAGLE,
    SIZES,
    check_near,
    randomise,
    read_head,
    source_of,
    write_head,
)
from tiny import load_reference, write_tiny_model

from aengine.ipc.messages import DraftColumns, ModelRunnerOutput, NewRequest, SchedulerOutput, int32
from aengine.runner.attention.kv_pages import KvCacheSpec
from aengine.runner.attention.torch_attention import KvCache
from aengine.runner.attention.triton_attention import GpuKvCache
from aengine.runner.distributed.group import ALONE
from aengine.runner.model_config import AttendingLayers
from aengine.runner.model_runner import ModelRunner
from aengine.runner.models.causal_lm import CausalLM
from aengine.runner.models.heads import OnePassHead, WholeModel
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.speculation.model_proposer import ModelProposer, ModelProposerSource
from aengine.runner.speculation.one_pass import OnePassSource
from aengine.runner.speculation.proposer import Proposer, RunnerParts

__all__ = ["triton"]  # a fixture
TOKENS = 3


SETTINGS: dict[type[DraftHead], dict[str, Any]] = {
    Eagle3: EAGLE3 | ANY_LAYERS,
    PEagle: PEAGLE | ANY_LAYERS,
    Mtp: MTP | {"attention_bias": False},
    DFlash: DFLASH,
}


class Padded(ModelProposerSource):
    """Has the proposer run as on an accelerator."""

    def make(self, parts: RunnerParts) -> Proposer:
        return super().make(parts._replace(platform=SimpleNamespace(is_accelerator=True)))  # type: ignore[arg-type]


class PaddedOnePass(Padded, OnePassSource):
    pass


def make_runner(
    folder: Path, head_of: Callable[[CausalLM], Any], *, is_padded: bool = True, kinds: Any = None
) -> ModelRunner:
    """``head_of``: what guesses for a model."""
    config, model = make_model(folder)
    how: dict[str, Any] = {"num_tokens": TOKENS, "max_num_seqs": MAX_SEQS, "num_bytes": 0, "described": {}}
    head = head_of(model)
    if kinds is None:
        kinds = (OnePassSource, PaddedOnePass) if isinstance(head, OnePassHead) else (ModelProposerSource, Padded)
    source = kinds[is_padded](head, model, ALONE, **how)
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


class Recorded(ModelProposer):
    """Its graphs compute their steps again, and say that they do."""

    def __init__(self, source: ModelProposerSource, parts: RunnerParts) -> None:
        self.captured: list[tuple[int, int]] = []  # in this order, while graphs are recorded
        self.replayed: list[tuple[int, int]] = []
        self.is_capturing = False
        platform = SimpleNamespace(is_accelerator=True, graph_pool=object, capture=self.capturing, synchronize=int)
        super().__init__(source, parts._replace(platform=platform, enforce_eager=False))  # type: ignore[arg-type]

    @contextmanager
    def capturing(self, pool: object) -> Iterator[Any]:
        self.is_capturing = True
        yield SimpleNamespace(replay=lambda place=len(self.captured): self.replay(*self.captured[place]))
        self.is_capturing = False

    def replay(self, size: int, most: int) -> None:
        self.replayed.append((size, most))
        self._step(size, most)

    def _step(self, size: int, most: int) -> None:
        if self.is_capturing:
            self.captured.append((size, most))
        if (self._columns(size)[0] >= 0).any():  # attention on a CPU has no batches of padding alone
            super()._step(size, most)


class WithGraphs(ModelProposerSource):
    def make(self, parts: RunnerParts) -> Proposer:
        return Recorded(self, parts)


def test_each_number_of_rows_and_guesses_has_a_graph(tmp_path: Path, rng: random.Random) -> None:
    folder = write_model(tmp_path, "llama")
    runner = make_runner(folder, lambda model: WholeModel(make_model(folder)[1]), kinds=(WithGraphs,) * 2)
    proposer: Any = runner.proposer
    told: list[tuple[int, int]] = []
    proposer.capture(lambda *progress: told.append(progress), largest_only=True)
    assert proposer.captured == [(MAX_SEQS, TOKENS)] and told == [(0, 1), (1, 1)]
    proposer.captured.clear()
    proposer.capture(lambda *progress: told.append(progress))
    sizes = [size for size in (1, 2, 4, 8) if size < MAX_SEQS] + [MAX_SEQS]
    assert proposer.captured == [(size, most) for size in sizes[::-1] for most in (3, 2, 1, 0)]
    assert told[2:] == [(done, len(sizes) * 4) for done in range(len(sizes) * 4 + 1)]
    steps = Steps(runner, [1, 2, 5], rng)
    for counts in ([1, 2, 3], [0, 0, 0], [0, 2, 0]):
        assert steps.run(counts) == [1 + count for count in counts], "all are accepted"
    assert proposer.replayed == [(4, 3), (1, 2)]


def make_head(tmp_path: Path, kind: type[DraftHead], rng: random.Random) -> tuple[Path, DraftHead, Any]:
    """The folder of a model, a head for it, and that head as a checkpoint."""
    heads = {name: SIZES[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    folder = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=3, **heads)
    model: Any = make_model(folder)[1]
    tables = model.embed.table, model.lm_head.weight.multiply(torch.eye(SIZES["hidden_size"])).T
    head = kind({**SIZES, **SETTINGS[kind]}, *tables)
    randomise(head, rng)
    head.requires_grad_(False)
    return folder, head, source_of(write_head(tmp_path / "head", head))


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_head_guesses_the_same_padded_and_not(tmp_path: Path, rng: random.Random, kind: type[DraftHead]) -> None:
    """Behind prompts, and behind steps with drafts, right or wrong, and without."""
    folder, _, source = make_head(tmp_path, kind, rng)
    lengths, seed, found = [1, 2, rng.randint(3, 12)], rng.getrandbits(30), []
    for is_padded in (False, True):
        runner = make_runner(folder, partial(read_head, source), is_padded=is_padded)
        steps = Steps(runner, lengths, random.Random(seed))
        counts = [steps.run(one) for one in ([1, 2, 3], [3, 3, 1], [0, 0, 0], [2, 0, 3], [0, 0, 0], [3, 2, 1])]
        found.append((counts, steps.drafts))
    assert found[0] == found[1] and len({tuple(drafts) for drafts in found[0][1]}) > 5


@pytest.mark.parametrize("kind", [PEagle, DFlash])
def test_a_pass_has_the_logits_of_its_reference(tmp_path: Path, rng: random.Random, kind: type[DraftHead]) -> None:
    """Those of all drafts of all rows, which have as many masks as drafts."""
    folder, judge, source = make_head(tmp_path, kind, rng)
    reference, logits = load_reference(folder, "llama"), list[Any]()

    def spied(target: CausalLM) -> Any:
        head = read_head(source, target)
        own = head.compute_logits
        head.compute_logits = lambda hidden: logits.append(own(hidden)) or logits[-1].clone()
        return head

    runner = make_runner(folder, spied, is_padded=False)
    steps = Steps(runner, [2, 1, rng.randint(3, 12)], rng)
    for counts in ([1, 2, 3], [3, 3, 1], [0, 0, 0], [2, 1, 3]):
        requests = runner.requests
        lengths = requests.scalars.num_tokens.tolist()
        texts = [requests.token_ids[row, : lengths[row]].long() for row in range(3)]
        steps.run(counts)
        for row, ids in enumerate(texts if any(counts) else ()):
            wanted, _ = judge.roll_out(streams_of(reference, kind, ids)[:-1], ids[1:], counts[row])
            found = logits[-1].unflatten(0, (3, -1))[row, : counts[row]]
            check_near(found, torch.stack([one[-1] for one in wanted]), f"{counts} {row}")


@torch.inference_mode()
def streams_of(reference: Any, kind: type[DraftHead], ids: Any) -> Any:
    """What a head reads of a text, [len(ids), size]."""
    last: list[Any] = []  # behind the last layer, which transformers does not return
    hook = reference.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0][0]))
    states = [one[0] for one in reference(ids[None], output_hidden_states=True).hidden_states]
    hook.remove()
    return torch.cat((states[1 if kind is DFlash else 0], states[2], last[0]), 1)
