"""States of fixed size: whatever the schedule, each request has the tokens that it has alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scheduler_invariants import check_scheduler
from torch import Tensor

from aengine.engine.pacing.multi_step import undo_steps
from aengine.engine.scheduler.prefixes import kept_states
from aengine.engine.scheduler.request import Request
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.ipc.messages import ModelRunnerOutput
from aengine.kernels.delta_memory import DeltaGates, DeltaInputs
from aengine.outputs import FinishReason
from aengine.params import SamplingParams
from aengine.runner.attention.kv_pages import KvCacheSpec
from aengine.runner.attention.torch_attention import KvCache
from aengine.runner.kv_spec import FullKV, LayerKV, StateKV, StateTensor
from aengine.runner.layers.states import LayerStates, StateRows, state_rows_of_batch, state_rows_of_decodes
from aengine.runner.model_runner import ModelRunner
from aengine.runner.models.transformers.mixers import mix_batch
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.speculation.states_ahead import RowsAhead

VOCAB, PRIME = 61, 1_000_003
CPU = torch.device("cpu")
MAX_SEQS, MAX_LEN, NUM_BLOCKS = 6, 64, 26
SMALL = StateKV((StateTensor("hash", (1,), torch.float64), StateTensor("count", (2, 1), torch.float32)))
FULL = FullKV(num_kv_heads=1, head_dim=4)
LAYERS: tuple[LayerKV, ...] = (SMALL, FULL, SMALL, StateKV((StateTensor("hash", (1,), torch.float64),)), FULL, SMALL)


def advance(state: Tensor, token_ids: Tensor, factor: int) -> Tensor:
    """A hash, exact in float64: it depends on all tokens before, and on their order."""
    for token_id in token_ids:
        state = (state * factor + token_id + 1) % PRIME
    return state


def expected(token_ids: list[int]) -> int:
    """What the model says after these tokens."""
    total = torch.zeros(1, dtype=torch.float64)
    for index, kv in enumerate(LAYERS):
        if isinstance(kv, StateKV):
            total += advance(torch.zeros(1, dtype=torch.float64), torch.tensor(token_ids), 3 + index)
    return int(total.item() % VOCAB)


class StateModel:
    """Its hidden value is the sum of the hashes that its layers keep."""

    def forward(self, input_ids: Tensor, positions: Tensor, attn: Any) -> Tensor:
        hidden = torch.zeros(len(input_ids), 1, dtype=torch.float64)
        for index, kv in enumerate(LAYERS):
            if isinstance(kv, StateKV):
                self.mix(attn.states(index), hidden, input_ids, positions, 3 + index)
        return hidden

    def mix(self, states: LayerStates, hidden: Tensor, input_ids: Tensor, positions: Tensor, factor: int) -> None:
        n = states.num_decodes
        hashes = (states.read("hash") * factor + input_ids[:n, None] + 1) % PRIME
        states.write("hash", hashes)
        hidden[:n] += hashes
        if "count" in states.tensors:
            count = states.read("count")
            assert torch.equal(count[:, 0, 0], positions[:n].float()), "a state is not of all tokens before"
            states.write("count", count + 1)
        for span in states.spans:
            state = {name: states.of(span, name) for name in states.tensors}
            for i in range(span.start, span.stop):
                state["hash"].copy_(advance(state["hash"], input_ids[i : i + 1], factor))
                hidden[i] += state["hash"]
            if "count" in state:
                assert float(state["count"][0, 0]) == float(positions[span.start])
                state["count"] += span.stop - span.start
            states.keep(span)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot((hidden[:, 0] % VOCAB).long(), VOCAB).float()


@dataclass
class Step:
    step_id: int
    message: Any
    answer: ModelRunnerOutput | None = None  # None: not begun


class Engine:
    """A host and its worker: steps ahead, leases taken back, deaths, requests that come and go."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        config = SimpleNamespace(kv_layers=LAYERS, ropes=(), num_layers=len(LAYERS))
        spec = KvCacheSpec(config, NUM_BLOCKS, 4, torch.float32, CPU, MAX_SEQS, MAX_LEN)  # type: ignore[arg-type]
        self.make_cache = lambda: KvCache(spec)
        self.groups = self.make_cache().layout.groups
        self.scheduler = Scheduler(
            num_blocks=NUM_BLOCKS,
            kv_groups=self.groups,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=16,
            max_model_len=MAX_LEN,
            max_in_flight_steps=4,
        )
        self.requests: list[Request] = []
        self.steps: list[Step] = []
        self.num_revoked = 0
        self.start_worker()

    def start_worker(self) -> None:
        self.runner = ModelRunner(
            StateModel(),
            self.make_cache(),
            vocab_size=VOCAB,
            max_num_seqs=MAX_SEQS,
            max_model_len=MAX_LEN,
            num_blocks=NUM_BLOCKS,
            kv_groups=self.groups,
            platform=CpuPlatform(),
        )

    def add(self) -> None:
        rng, n = self.rng, self.rng.choice([1, 1, 3])
        params = SamplingParams(temperature=0, n=n, max_tokens=rng.randint(1, 20), ignore_eos=True)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        if self.requests and rng.random() < 0.5:  # begins like another
            prompt = (rng.choice(self.requests).token_ids[:20] + prompt)[:30]
        for index in range(n):
            longest = len(prompt) + (params.max_tokens or 1)
            request = Request(
                str(len(self.requests) - index),
                prompt,
                params,
                seed=0,
                max_num_tokens=longest,
                index=index,
                stop_token_ids=frozenset(),
                priority=rng.randint(0, 1),
                arrival_time=len(self.requests),
            )
            self.requests.append(request)
            self.scheduler.add_request(request)

    def schedule(self, is_leased: bool) -> None:
        if len(self.steps) == 4 or (is_leased and not self.scheduler.is_steady):
            return
        message = self.scheduler.schedule(can_be_undone=is_leased)
        if message is not None:
            message.is_leased = is_leased
            self.steps.append(Step(message.step_id, message))

    def begin(self) -> None:
        """The worker computes its next step."""
        step = next((step for step in self.steps if step.answer is None), None)
        if step is not None:
            self.runner.execute_model(step.message)
            step.answer = self.runner.sample_tokens(None).get()

    def update(self) -> None:
        if self.steps and self.steps[0].answer is not None:
            assert not self.scheduler.update(self.steps.pop(0).answer).failed

    def revoke(self) -> None:
        """Two steps more are leased, of which the worker begins none or one, and all others are taken back."""
        self.schedule(is_leased=True)
        self.schedule(is_leased=True)
        if self.rng.random() < 0.5:
            self.begin()
        count = 0
        for step in reversed(self.steps):
            if step.answer is not None or not step.message.is_leased:
                break
            count += 1
        if count:
            self.num_revoked += count
            undo_steps(self.scheduler.rows, count)
            del self.steps[-count:]

    def die(self) -> None:
        for request in self.scheduler.preempt_all():
            self.scheduler.finish(request, FinishReason.ERROR)
        self.steps.clear()
        self.start_worker()

    def check(self) -> None:
        check_scheduler(self.scheduler)
        for request in self.requests:
            for i in range(request.num_prompt_tokens, len(request.token_ids)):
                assert request.token_ids[i] == expected(request.token_ids[:i]), (request, i)


def test_every_token_is_that_of_the_request_alone(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [live(rng, monkeypatch) for _ in range(3)]
    requests = [request for engine in engines for request in engine.requests]
    assert sum(engine.num_revoked for engine in engines)
    assert FinishReason.LENGTH in {request.finish_reason for request in requests}
    assert sum(request.num_output_tokens for request in requests) > 100  # some 650


def live(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Requests come, end and are preempted at random; the model checks each state, the engine each token."""
    monkeypatch.setattr(kept_states, "STATE_INTERVAL", rng.choice([1, 8, 13]))
    engine = Engine(rng)
    for _ in range(400):
        fate = rng.random()
        if fate < 0.04 and sum(r.finish_reason is None for r in engine.requests) < 8:
            engine.add()
        elif fate < 0.08 and engine.requests:
            engine.scheduler.finish(rng.choice(engine.requests), FinishReason.ABORT)
        elif fate < 0.09:
            engine.die()
        elif fate < 0.25:
            engine.revoke()
        else:
            engine.schedule(is_leased=rng.random() < 0.5)
            for action in rng.sample([engine.begin, engine.update, engine.begin, engine.update], 3):
                action()
    engine.check()
    while engine.steps or engine.scheduler.num_running or engine.scheduler.num_waiting:
        engine.schedule(is_leased=False)
        engine.begin()
        engine.update()
    engine.check()
    return engine


def test_padding_writes_no_request_s_state() -> None:
    memory = torch.full((4, 2), 7.0)
    memory[2] = torch.nan  # left by the page's last owner
    table = torch.tensor([[1, 0], [2, 0], [0, 0]], dtype=torch.int32)
    rows, seq_lens = torch.tensor([1, 0, -1, -1]), torch.tensor([1, 9, 0, 0], dtype=torch.int32)
    states = LayerStates({"state": memory}, state_rows_of_decodes(table, rows, seq_lens, spare_page=3))
    assert states.read("state").tolist()[:2] == [[0, 0], [7, 7]], "the first begins, the second goes on"
    states.write("state", torch.arange(8.0).view(4, 2))
    assert memory[:3].tolist() == [[7, 7], [2, 3], [0, 1]]


def test_a_request_that_begins_has_a_zero_state() -> None:
    memory = torch.full((2, 3), torch.nan)
    nobody = StateRows(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))
    states = LayerStates({"state": memory}, state_rows_of_batch(nobody, [5, 2], [5, 9], [1, 0], {}))
    first, second = states.spans
    assert (first.start, first.stop, second.start, second.stop) == (0, 5, 5, 7)
    states.of(first, "state").add_(1)
    assert memory[1].tolist() == [1, 1, 1] and states.of(second, "state").isnan().all()


@pytest.mark.parametrize("most", [0, 4], ids=["plain", "with drafts"])
def test_states_kept_within_a_step_are_those_of_steps_that_end_there(most: int, rng: random.Random) -> None:
    """Three requests at once, the first of which begins; then some tokens more from each page."""
    torch.manual_seed(rng.randrange(1 << 30))
    lens, pages, positions = [150, 9, 200], [3, 0, 5], [0, 40, 70]
    kept = {0: [(64, 1), (100, 7)], 2: [(5, 2)]}
    memory = delta_memory(8, most)
    pieces = {name: tensor.clone() for name, tensor in memory.items()}
    inputs = [torch.randn(sum(lens), size) for size in SIZES]
    weight = torch.randn(3, SIZES[0])
    got = mix(memory, inputs, weight, lens, pages, positions, most, kept)
    parts, start = [], 0
    for i, length in enumerate(lens):
        begin = 0
        for end, page in (*kept.get(i, ()), (length, -1)):
            own = [x[start + begin : start + end] for x in inputs]
            where = [end - begin], [pages[i]], [positions[i] + begin]
            parts.append(mix(pieces, own, weight, *where, most, {}))
            if page >= 0:
                for tensor in pieces.values():
                    tensor[page] = tensor[pages[i]]
            begin = end
        start += length
    torch.testing.assert_close(got, torch.cat(parts))
    more = [torch.randn(6 * 3, size) for size in SIZES]
    ends = [64, 100, 75, 150, 49, 270]
    where = [3] * 6, [1, 7, 2, 3, 0, 5], ends
    after = [mix(states, more, weight, *where, most, {}) for states in (memory, pieces)]
    torch.testing.assert_close(*after)


SIZES = 2 * 2 * 8 + 4 * 6, 24, 4, 4
"""Of a token: channels of q, k and v (2 heads of 8, 4 of 6), gates of the output, b and a."""
GATES = DeltaGates(-torch.ones(4), torch.zeros(4), torch.ones(6), 1e-6)


def delta_memory(num_pages: int, most: int) -> dict[str, Tensor]:
    """What earlier owners may have left there."""
    shapes = {"conv": (2 + most, SIZES[0]), "state": (4, 8, 6), "pending": (2 * most, 16 + 24 + 8)}
    memory = {name: torch.randn(num_pages, *shape) for name, shape in shapes.items()}
    return memory | {"tags": torch.full((num_pages, 2 * most), -1, dtype=torch.int32)}


def mix(
    memory: dict[str, Tensor],
    inputs: list[Tensor],
    weight: Tensor,
    lens: list[int],
    pages: list[int],
    positions: list[int],
    most: int,
    kept: dict[int, list[tuple[int, int]]],
) -> Tensor:
    """A convolution and a gated delta rule of one step."""
    rows: StateRows | RowsAhead
    if most:
        at = torch.cat([torch.arange(first, first + count) for first, count in zip(positions, lens, strict=True)])
        of_tokens = torch.tensor(pages).repeat_interleave(torch.tensor(lens))
        rows = RowsAhead.of_batch(of_tokens, at, lens, pages, most, kept)
    else:
        nobody = StateRows(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))
        seq_lens = [first + count for first, count in zip(positions, lens, strict=True)]
        rows = state_rows_of_batch(nobody, lens, seq_lens, pages, kept)
    states = rows.of_layer(memory)
    x, *others = inputs
    own = DeltaInputs(states.conv("conv", x, weight, None), *others, 2)
    return states.gated_delta("state", own, GATES)


def test_tokens_of_nobody_are_computed_by_a_mixer_of_transformers() -> None:
    """The walk that compiles kernels on a GPU runs steps of padding alone."""
    nobody = StateRows(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))
    memory = torch.full((2, 3), 7.0)
    out = mix_batch(
        lambda begin, end, are_apart, cache: torch.ones(1, end - begin, 4),
        5,
        LayerStates({"state": memory}, nobody),
        (StateTensor("state", (3,), torch.float32),),
        (torch.float32,),
        takes_chunks=True,
    )
    assert out.shape == (1, 5, 4) and (memory == 7).all()
