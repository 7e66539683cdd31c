"""Ranks whose steps are graphs on one and run op by op on another: what they exchange follows from the steps alone; of
replicas that share experts, from the rounds."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ranks_as_threads import ThreadGroup, run_ranks
from runner_fakes import request
from torch import Tensor

from aengine.ipc.messages import KVCacheGroup, SchedulerOutput, int32
from aengine.kernels.dispatch import triton_everywhere
from aengine.runner.distributed.experts_group import ExpertsGroup
from aengine.runner.distributed.shares import VocabularyShare
from aengine.runner.exchange.expert_rounds import ExpertRounds
from aengine.runner.exchange.step_exchange import StepExchange
from aengine.runner.graphs import batch_graphs, cuda_graphs
from aengine.runner.graphs.batch_states import NO_STATES
from aengine.runner.model_runner import ModelRunner
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.sampling.sampler import Sampling
from aengine.runner.sampling.vocabulary import Vocabulary

VOCAB_SIZE, MAX_LEN, MAX_SEQS = 300, 48, 6


class Chain:
    """A model in whose sums all ranks have a part, and its KV memory: the next token follows from the last one and its
    position."""

    clears_blocks = False
    batch_states = NO_STATES

    def __init__(self, group: ThreadGroup) -> None:
        generator = torch.Generator().manual_seed(5)
        parts = torch.randn(group.size, VOCAB_SIZE + MAX_LEN, 16, generator=generator)
        self._whole, self._part = parts.sum(0), parts[group.rank]
        self._head = torch.randn(VOCAB_SIZE, 16, generator=generator)
        self._group = group
        self.vocabulary = VocabularyShare.of(VOCAB_SIZE, group.rank, group.size)

    def forward(self, input_ids: Tensor, positions: Tensor, attn: None, received: None = None) -> Tensor:
        hidden = self._group.sum(self._part[input_ids])
        self._group.add_sum(hidden, self._part[VOCAB_SIZE + positions])
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = torch.full((len(hidden), self.vocabulary.size), -torch.inf)
        own = self._head[self.vocabulary.start : self.vocabulary.start + self.vocabulary.size]
        logits[:, : len(own)] = hidden @ own.T
        return logits

    def next_token(self, last: int, position: int) -> int:
        return int((self._head @ (self._whole[last] + self._whole[VOCAB_SIZE + position])).argmax())

    def bind(self, *args: Any) -> None:
        return None

    bind_decode = bind_batch = watch_rows = bind

    def decode_kinds(self, requests: Any, tables: Any, step_rows: Any) -> Any:
        return step_rows

    def preparations(self) -> list[Any]:
        return []


class Again:
    """In place of a graph: the step once more, its outputs where those of the first are."""

    def __init__(self, step: Callable[[], Any], outputs: Any) -> None:
        self._step = step
        self._outputs = outputs

    def replay(self) -> None:
        for old, new in zip(_tensors(self._outputs), _tensors(self._step()), strict=True):
            old.copy_(new)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, tuple) else []


def capture_batch(graphs: Any, shape: Any) -> None:
    """`BatchGraphs.capture`. To have the outputs' memory, padding alone is computed."""
    graphs._send(None, shape)
    with graphs._group.rehearsal():
        outputs = graphs._step(shape)
    graphs._graphs[shape] = (Again(lambda: graphs._step(shape), outputs), outputs)


def capture_decode(graphs: Any, group: ThreadGroup, size: int) -> None:
    """`CudaGraphManager.capture`."""
    step = graphs.step
    step.set_rows(torch.empty(0, dtype=torch.int64).numpy(), size)
    with group.rehearsal():
        half = step.run(size)
    second = {kind: Again(lambda kind=kind: step.sample(half, kind) or (), ()) for kind in Sampling}
    first: Any = Again(lambda: step.run(size), half)
    graphs._graphs[size] = cuda_graphs._Graphs(first, second, half)  # type: ignore[arg-type]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs of a kind, for which the second rank often has no memory; kernels are interpreted one at a time."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    lock, run, tries = threading.RLock(), interpreter.GridExecutor.__call__, iter(range(10**6))

    def run_alone(self: Any, *args: Any, **how: Any) -> Any:
        with lock:
            return run(self, *args, **how)

    def sometimes(capture: Callable[..., None]) -> Callable[..., None]:
        def attempt(self: Any, shape: Any) -> None:
            if self._group.rank == 1 and next(tries) % 5 < 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            capture(self, shape)

        return attempt

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_alone)
    monkeypatch.setattr(batch_graphs.BatchGraphs, "capture", sometimes(capture_batch))
    with triton_everywhere():
        yield


EXTRAS: list[dict[str, list[bytes]]] = [{}, {}, {}, {"allowed_token_ids": [int32(range(VOCAB_SIZE)).tobytes()]}]


def steps(rng: random.Random, count: int) -> Iterator[SchedulerOutput]:
    """Prompts beside decodes and decodes alone; a row is taken again when its request has ended. Some ask for what is
    sampled op by op, and forbids nothing."""
    left: dict[int, int] = {}  # by row, the tokens that it still gets
    for step_id in range(count):
        ended = [row for row, tokens in left.items() if tokens == 0]
        for row in ended:
            del left[row]
        new = []
        for row in rng.sample(range(MAX_SEQS), rng.choice((0, 0, 1, 4))):
            if row not in left:
                ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
                new.append(request(row, ids, [row], logprobs=rng.choice((-1, -1, 2)), extras=rng.choice(EXTRAS)))
        rows = [*left, *(one.req_idx for one in new)]
        counts = [*(1 for _ in left), *(len(one.token_ids) for one in new)]
        left |= {one.req_idx: rng.randint(1, 12) for one in new}
        left = {row: tokens - 1 for row, tokens in left.items()}
        yield SchedulerOutput(
            step_id, removed=int32(ended), new_requests=new, req_idx=int32(rows), num_scheduled_tokens=int32(counts)
        )


@pytest.mark.slow
@pytest.mark.usefixtures("captures")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is computed with whatever lies in memory
def test_each_rank_captures_when_it_can(rng: random.Random) -> None:
    seed = rng.getrandbits(32)

    def of_rank(group: ThreadGroup) -> Any:
        model, idle = Chain(group), random.Random(group.rank)
        groups = [KVCacheGroup("full", MAX_LEN)]
        limits = {"max_num_seqs": MAX_SEQS, "max_model_len": MAX_LEN, "num_blocks": MAX_SEQS, "max_graph_tokens": 64}
        parts: dict[str, Any] = {"graph_sizes": [1, 2, 4, 6], "exchange": StepExchange(group)}
        parts["vocabulary"] = Vocabulary(model.vocabulary, group)
        runner = ModelRunner(
            model, model, vocab_size=VOCAB_SIZE, kv_groups=groups, platform=CpuPlatform(), **limits, **parts
        )
        assert runner.graphs is not None and runner.batch_graphs is not None
        for size in (1, 4) if group.rank else ():
            capture_decode(runner.graphs, group, size)
        last: dict[int, tuple[int, int]] = {}  # by row, the last token and its position
        for out in steps(random.Random(seed), 60):
            for _ in range(idle.choice((0, 0, 2)) * (2 - group.rank)):
                if runner.prepares_after is not None:
                    runner.prepare_more()
            last |= {r.req_idx: (r.token_ids[-1], len(r.token_ids) - 1) for r in out.new_requests}
            runner.execute_model(out)
            answer = runner.sample_tokens(None).get()
            assert len(answer.token_ids) == len(out.req_idx) and not answer.errors
            for row, token in zip(out.req_idx, answer.token_ids, strict=True):
                assert token == model.next_token(*last[row])
                last[row] = token, last[row][1] + 1
        return group.calls, set(runner.batch_graphs._graphs), runner.batch_graphs._too_large

    (calls, graphs, _), (calls_of_second, graphs_of_second, too_large) = run_ranks(2, of_rank)
    assert calls == calls_of_second
    assert graphs != graphs_of_second and graphs and graphs_of_second and too_large


class ChainOfExperts:
    """A model of two layers, in each of which every rank has an expert that all tokens take, and its KV memory."""

    clears_blocks = False
    batch_states = NO_STATES

    def __init__(self, spread: ExpertsGroup) -> None:
        generator = torch.Generator().manual_seed(6)
        self._table = torch.randn(VOCAB_SIZE + MAX_LEN, 16, generator=generator)
        self._experts = 0.3 * torch.randn(2, spread.size, 16, 16, generator=generator)
        self._head = torch.randn(16, VOCAB_SIZE, generator=generator)
        self._spread = spread

    def forward(self, input_ids: Tensor, positions: Tensor, attn: None, received: None = None) -> Tensor:
        hidden = self._table[input_ids] + self._table[VOCAB_SIZE + positions]
        self._add_layers(hidden)
        return hidden

    def join(self) -> None:
        self._add_layers(torch.empty(0, 16))

    def _add_layers(self, hidden: Tensor) -> None:
        for experts in self._experts:
            rows = self._spread.gather(hidden)
            self._spread.add_sum(hidden, rows, torch.tanh(rows @ experts[self._spread.rank]))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._head

    def next_token(self, last: int, position: int) -> int:
        hidden = self._table[last] + self._table[VOCAB_SIZE + position]
        for experts in self._experts:
            hidden = hidden + torch.tanh(hidden @ experts).sum(0)
        return int((hidden @ self._head).argmax())

    def bind(self, *args: Any) -> None:
        return None

    bind_decode = bind_batch = watch_rows = bind

    def decode_kinds(self, requests: Any, tables: Any, step_rows: Any) -> Any:
        return step_rows

    def preparations(self) -> list[Any]:
        return []


def rounds_of(rng: random.Random, num_replicas: int) -> list[list[SchedulerOutput | None]]:
    """Steps of each replica, side by side; in some rounds a replica has none."""
    left = [list(steps(rng, 40)) for _ in range(num_replicas)]
    rounds: list[list[SchedulerOutput | None]] = []
    while any(left):
        outs = [own.pop(0) if own and rng.random() < 0.7 else None for own in left]
        if not any(outs):
            continue
        given = [out for out in outs if out is not None]
        sizes = int32(0 if out is None else sum(out.num_scheduled_tokens) for out in outs)
        for out in given:
            out.round_sizes, out.round_has_prompts = sizes, sum(sizes) > sum(len(out.req_idx) for out in given)
        rounds.append(outs)
    return rounds


@pytest.mark.slow
@pytest.mark.usefixtures("captures")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("has_graphs", [True, False])
def test_replicas_that_share_experts(rng: random.Random, has_graphs: bool) -> None:
    """Rounds of decodes, with prompts, and of more than any graph holds; a replica without a step is told of a round
    while it has one that is not sampled yet."""
    rounds = rounds_of(rng, 2)

    def of_rank(group: ThreadGroup) -> Any:
        spread, chance = ExpertsGroup(group, group.rank, 2), random.Random(group.rank)
        model = ChainOfExperts(spread)
        limits = {"max_num_seqs": MAX_SEQS, "max_model_len": MAX_LEN, "num_blocks": MAX_SEQS, "max_graph_tokens": 32}
        parts: dict[str, Any] = {"exchange": ExpertRounds(spread, model.join)}
        if has_graphs:
            parts["graph_sizes"] = [1, 2, 4, 5]  # and not as many as there are rows
        runner = ModelRunner(
            model,
            model,
            vocab_size=VOCAB_SIZE,
            kv_groups=[KVCacheGroup("full", MAX_LEN)],
            platform=CpuPlatform(),
            **limits,
            **parts,
        )
        if runner.graphs is not None:
            for size in (1, 4) if group.rank else ():
                capture_decode(runner.graphs, group, size)
        last: dict[int, tuple[int, int]] = {}
        waits: SchedulerOutput | None = None

        def sample(out: SchedulerOutput) -> None:
            answer = runner.sample_tokens(None).get()
            assert len(answer.token_ids) == len(out.req_idx) and not answer.errors
            for row, token in zip(out.req_idx, answer.token_ids, strict=True):
                assert token == model.next_token(*last[row])
                last[row] = token, last[row][1] + 1

        for outs in rounds:
            out = outs[group.rank]
            if out is None:
                other = next(one for one in outs if one is not None)
                runner.join(list(other.round_sizes), other.round_has_prompts)
            if waits is not None:
                sample(waits)
            waits = out
            if out is None:
                continue
            last |= {r.req_idx: (r.token_ids[-1], len(r.token_ids) - 1) for r in out.new_requests}
            runner.execute_model(out)
            if chance.random() < 0.5:
                sample(out)
                waits = None
                if chance.random() < 0.3 and runner.prepares_after is not None:
                    runner.prepare_more()
        if waits is not None:
            sample(waits)
        return group.calls, runner.batch_graphs and set(runner.batch_graphs._graphs)

    def rows_of(outs: list[SchedulerOutput | None]) -> int:
        """That each replica exchanges: as many as the graph has that holds the most, if there is one."""
        out = next(one for one in outs if one is not None)
        sizes = ((16, 32) if out.round_has_prompts else (1, 2, 4, 5)) if has_graphs else ()
        most = max(out.round_sizes)
        return next((size for size in sizes if size >= most), most) if most else 0

    (calls, graphs), (calls_of_second, graphs_of_second) = run_ranks(2, of_rank)
    assert calls == calls_of_second
    exchanged = [shape[0] for op, shape in calls if op == "gather" and len(shape) == 2]  # not which rows are padding
    assert exchanged == [rows for rows in map(rows_of, rounds) if rows for _ in range(2)]  # in each of two layers
    assert not has_graphs or (graphs and graphs_of_second and graphs != graphs_of_second)
