"""Drafts change how many steps a request takes, never its tokens: the scheduler and the runner, without a process."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from runner_fakes import POOLED, FakeModel, make_runner, request, step
from scheduler_invariants import check_scheduler

from aengine.engine.sampling_extras import extras_of
from aengine.engine.scheduler.request import Request
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.engine.scheduler.step import NOTHING_AHEAD, InFlightStep
from aengine.engine.speculation.drafts import Drafts
from aengine.errors import InternalError
from aengine.ipc.messages import DraftColumns, GrammarOutput, Kind, KVCacheGroup, SchedulerOutput, int32, pack, unpack
from aengine.params import SamplingParams
from aengine.runner.model_runner import ModelRunner
from aengine.runner.speculation.positions import Verification

VOCAB, BLOCK_SIZE, NUM_BLOCKS, ROWS, MAX_LEN, STOP_ID = 61, 4, 40, 6, 48, 7
GROUPS = [KVCacheGroup("full", BLOCK_SIZE)]
ROW_BYTES = 4 * ((VOCAB + 31) // 32)


@dataclass
class Outcome:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[tuple[float, list[int]]]] = field(default_factory=dict)
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_preemptions: int = 0
    num_hits: int = 0


def new_runner() -> ModelRunner:
    model = FakeModel(VOCAB, NUM_BLOCKS, BLOCK_SIZE)
    model.has_drafts = True
    sizes = {"max_num_seqs": ROWS, "max_model_len": MAX_LEN, "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    return make_runner(model, VOCAB, **sizes)


def make_requests(rng: random.Random) -> list[Request]:
    common = [rng.randrange(VOCAB) for _ in range(14)]
    requests = []
    for i in range(16):
        prompt = common[: rng.choice([0, 8, 14])] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        max_tokens = rng.randint(1, MAX_LEN - len(prompt))
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            top_k=rng.choice([0, 0, 9]),
            top_p=rng.choice([1.0, 0.8]),
            logit_bias=rng.choice([{}, {5: 2.0, 9: -3.0}]),
            logprobs=rng.choice([None, 0, 3]),
            min_tokens=rng.choice([0, 0, min(max_tokens, 5)]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
            allowed_token_ids=rng.choice([None, None, rng.sample(range(VOCAB), 20)]),
            presence_penalty=rng.choice([0.0, 0.0, -0.5]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            max_tokens=max_tokens,
        )
        how: dict[str, Any] = {"grammar": object()} if rng.random() < 0.4 else {}
        limits = {"max_num_tokens": len(prompt) + max_tokens, "stop_token_ids": frozenset({STOP_ID})}
        how["extras"] = extras_of(params, some_words(rng) if rng.random() < 0.5 else ())
        requests.append(
            Request(f"r{i}", prompt, params, seed=rng.getrandbits(40), arrival_time=float(i), **limits, **how)
        )
    return requests


def some_words(rng: random.Random) -> list[list[int]]:
    """Many, so that they forbid now and then what would be sampled; some of one token, some longer than a step."""
    words = [[token_id, following] for token_id in range(VOCAB) for following in rng.sample(range(VOCAB), 4)]
    return [*words, [rng.randrange(VOCAB)], [rng.randrange(VOCAB) for _ in range(9)]]


def mask_after(token_ids: list[int]) -> bytes:
    """A grammar: some ids, which depend on all before."""
    allowed = np.array([(token_id + sum(token_ids)) % 3 != 0 for token_id in range(ROW_BYTES * 8)])
    return np.packbits(allowed, bitorder="little").tobytes()


def masks_of(step: InFlightStep) -> GrammarOutput:
    positions, rows = int32(), []
    for batch_idx, each in step.constrained():
        if each.finish_reason is None:
            ahead = step.ahead.get(batch_idx, NOTHING_AHEAD)
            drafts = ahead.token_ids
            for k in range(len(drafts) + 1 - ahead.num_samples, len(drafts) + 1):
                positions.append(batch_idx)
                rows.append(mask_after(each.token_ids + drafts[:k]))
    return GrammarOutput(step.step_id, positions, b"".join(rows))


def run(seed: int, budget: int, expected: dict[str, list[int]] | None, *, death_rate: float = 0.0) -> Outcome:
    """``expected``: of which to make drafts, certain ones, right ones and wrong ones; None: none are made."""
    rng = random.Random(seed)
    requests = make_requests(rng)
    limits = {
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": budget,
        "max_model_len": MAX_LEN,
        "max_in_flight_steps": 3,
    }
    scheduler = Scheduler(num_blocks=NUM_BLOCKS, kv_groups=GROUPS, vocab_size=VOCAB, **limits)
    scheduler.rows.lookahead = Drafts(scheduler.rows)
    runner, outcome = new_runner(), Outcome()
    outcome.logprobs = {each.request_id: [] for each in requests}
    sent: deque[SchedulerOutput] = deque()
    waiting = deque(requests)
    while waiting or any(each.finish_reason is None for each in requests):
        if waiting and rng.random() < 0.4:
            scheduler.add_request(waiting.popleft())
        if death_rate and rng.random() < death_rate:
            scheduler.preempt_all()
            sent.clear()
            runner = new_runner()
        gated = scheduler.newest_step is not None and scheduler.newest_step.is_gated  # nothing comes before its mask
        if len(sent) < 3 and not gated and (rng.random() < 0.7 or not sent):
            out = scheduler.schedule()
            if out is not None:
                out = unpack(Kind.STEP, pack(out))
                sent.append(out)
                outcome.num_steps += 1
                outcome.num_drafted += 0 if out.drafts is None else len(out.drafts.token_ids)
                continue
        if sent:
            take_answer(scheduler, runner, sent.popleft(), outcome)
        for each in requests:
            if expected is not None and each.finish_reason is None and rng.random() < 0.5:
                are_certain = each.params.logprobs is None and rng.random() < 0.3
                token_ids = guess(rng, each, expected[each.request_id], 0.0 if are_certain else 0.2)
                if each.grammar is None and not are_certain and rng.random() < 0.4:
                    token_ids = [-1] * len(token_ids)  # the worker finds them
                scheduler.rows.lookahead.propose(each, token_ids, are_certain=are_certain)
        check_scheduler(scheduler)
    outcome.tokens = {each.request_id: each.output_token_ids for each in requests}
    outcome.num_preemptions, outcome.num_hits = scheduler.rows.num_preemptions, scheduler.prefix_cache_hits
    return outcome


def guess(rng: random.Random, each: Request, expected: list[int], error_rate: float) -> list[int]:
    begin = each.num_output_tokens + each.num_pending
    right = expected[begin : begin + rng.randint(1, 7)]
    return [token_id if rng.random() >= error_rate else rng.randrange(VOCAB) for token_id in right]


def take_answer(scheduler: Scheduler, runner: ModelRunner, out: SchedulerOutput, outcome: Outcome) -> None:
    step = scheduler.oldest_step
    assert step is not None and step.step_id == out.step_id
    runner.execute_model(out)
    grammar = masks_of(step) if step.is_gated else None
    answer = unpack(Kind.OUTPUT, pack(runner.sample_tokens(grammar).get()))
    sampled, failed, _, num_rows, _ = scheduler.update(answer)
    assert not failed
    outcome.num_accepted += len(sampled) - num_rows
    whose = {place: each for each, _, place in sampled}
    columns = answer.logprobs
    if columns is None:
        return
    start = 0
    for place, count, value in zip(columns.token_idx, columns.counts, columns.sampled, strict=True):
        likeliest = list(columns.token_ids[start : start + count])
        start += count
        if place in whose:
            outcome.logprobs[whose[place].request_id].append((value, likeliest))


@pytest.mark.parametrize("attempt", range(4))
def test_drafts_change_no_token(rng: random.Random, attempt: int) -> None:
    seed, budget = rng.getrandbits(30), rng.choice([9, 20, 60])
    plain = run(seed, budget, None)
    drafted = run(seed, budget, plain.tokens, death_rate=0.02 * (attempt % 2))
    assert drafted.tokens == plain.tokens
    assert 0 < drafted.num_accepted < drafted.num_drafted
    for name, entries in plain.logprobs.items():
        assert [ids for _, ids in entries] == [ids for _, ids in drafted.logprobs[name]]
        values = [value for value, _ in entries], [value for value, _ in drafted.logprobs[name]]
        assert values[0] == pytest.approx(values[1], abs=1e-5)


def test_right_drafts_save_steps() -> None:
    """Three a step, each made before the answer of the step before is known."""
    plain = run_one([])
    assert run_one([]) == (plain[0], 31)
    assert run_one(plain[0]) == (plain[0], 9)


def run_one(expected: list[int]) -> tuple[list[int], int]:
    """A request of 31 tokens: what it got, and in how many steps."""
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": MAX_LEN, "max_in_flight_steps": 2}
    scheduler = Scheduler(num_blocks=NUM_BLOCKS, kv_groups=GROUPS, vocab_size=VOCAB, **limits)
    scheduler.rows.lookahead = Drafts(scheduler.rows)
    runner, sent, num_steps = new_runner(), deque(), 0
    params = SamplingParams(temperature=1.0)
    one = Request("one", [1, 2, 3], params, seed=5, max_num_tokens=34, stop_token_ids=frozenset())
    scheduler.add_request(one)
    while one.finish_reason is None:
        while len(sent) < 2 and (out := scheduler.schedule()) is not None:
            sent.append(out)
            num_steps += 1
            begin = one.num_output_tokens + one.num_pending
            scheduler.rows.lookahead.propose(one, expected[begin : begin + 3])
        take_answer(scheduler, runner, sent.popleft(), Outcome(logprobs={"one": []}))
    return one.output_token_ids, num_steps


def test_what_a_verification_counts() -> None:
    """Up to the first draft that is not what was sampled; what agrees after it does not count."""
    requests = new_runner().requests
    token_ids, num_tokens = requests.token_ids, requests.scalars.num_tokens
    token_ids[4, 2:5], token_ids[0, 3:5] = torch.tensor([7, 8, 9]), torch.tensor([5, 6])
    num_tokens[:5] = torch.tensor([3, 0, 1, 0, 2], dtype=torch.int32)
    drafted = Verification.gather(np.array([4, 2, 0]), np.array([3, 0, 2]), requests)
    for sampled, counts in (([7, 8, 9, 1, 3, 5, 6, 1], [4, 1, 3]), ([7, 1, 9, 1, 3, 1, 6, 1], [2, 1, 1])):
        assert drafted.count_accepted(torch.tensor(sampled)).tolist() == counts


def ragged_step(
    runner: ModelRunner,
    batch: dict[int, int],
    drafts: dict[int, list[int]],
    is_certain: dict[int, int] | None = None,
    **more: Any,
) -> Any:
    columns = DraftColumns(
        int32(len(drafts.get(row, [])) for row in batch),
        int32(i for row in batch for i in drafts.get(row, [])),
        int32((is_certain or {}).get(row, 0) for row in batch),
    )
    out = SchedulerOutput(0, req_idx=int32(batch), num_scheduled_tokens=int32(batch.values()), drafts=columns, **more)
    runner.execute_model(out)
    return runner.sample_tokens(None).get()


def begun_runner() -> ModelRunner:
    """Three requests that decode, rows 0 to 2."""
    runner = new_runner()
    prompts = [[1, 2, 3], [5, 6], [8, 9]]
    new = [request(row, prompt, [3 * row, 3 * row + 1, 3 * row + 2]) for row, prompt in enumerate(prompts)]
    step(runner, {0: 3, 1: 2, 2: 2}, new=new)
    return runner


def test_certain_drafts_need_no_logits_of_their_own() -> None:
    """One row a request, whatever has drafts beside it; the answer has the drafts and what was sampled after them."""
    runner = begun_runner()
    following = [ragged_step(runner, {0: 1, 1: 1, 2: 1}, {}).token_ids[0] for _ in range(2)]
    asked: list[int] = []
    answers = []
    for is_certain in (0, 1):
        runner = begun_runner()
        compute_logits = runner.model.compute_logits
        runner.model.compute_logits = lambda hidden, of=compute_logits: asked.append(len(hidden)) or of(hidden)
        drafts = {0: following, 1: [60]}
        drafted = ragged_step(runner, {1: 2, 0: 3, 2: 1}, drafts, {0: is_certain})
        after = ragged_step(runner, {1: 1, 0: 1, 2: 1}, {})
        answers.append([(list(answer.counts), list(answer.token_ids)) for answer in (drafted, after)])
    assert asked == [6, 3, 4, 3]
    assert answers[0] == answers[1]
    assert [counts for counts, _ in answers[0]] == [[1, 3, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    ("batch", "drafts", "message"),
    [
        ({0: 2}, {0: [1]}, "does not sample"),  # a chunk
        ({0: 5}, {0: [1]}, "does not sample|not known yet"),
        ({0: 4}, {0: [VOCAB]}, "the model does not have"),
    ],
)
def test_drafts_that_do_not_fit_are_refused(batch: dict[int, int], drafts: dict[int, list[int]], message: str) -> None:
    runner = new_runner()
    with pytest.raises(InternalError, match=message):
        ragged_step(runner, batch, drafts, new_requests=[request(0, [1, 2, 3], [0, 1])])


def test_what_was_not_drafted_can_not_be_settled() -> None:
    with pytest.raises(InternalError, match="has no request"):
        step_out = SchedulerOutput(0, settled_rows=int32([3]), num_rejected=int32([1]))
        new_runner().execute_model(step_out)


def test_nan_after_a_rejected_draft_harms_nobody() -> None:
    """The draft's own logits are NaN: they are of no token that anybody gets. After an accepted one it is an error."""
    runner = new_runner()
    runner.model.nan_tokens = {9}
    step(runner, {0: 3, 1: 2}, new=[request(0, [1, 2, 3], [0, 1]), request(1, [5, 6], [2, 3])])
    answer = ragged_step(runner, {0: 3, 1: 1}, {0: [9, 9]})
    assert answer.errors == [] and list(answer.counts) == [1, 1] and len(answer.token_ids) == 2
    out = SchedulerOutput(0, removed=int32([0]), new_requests=[request(0, [1, 2, 3], [0, 1])])
    runner.execute_model(out)
    runner.sample_tokens(None).get()
    runner.model.nan_tokens = {3}
    answer = ragged_step(runner, {0: 5, 1: 1}, {0: [4, 4]})
    assert [(error.batch_idx, error.type) for error in answer.errors] == [(0, "InternalError")]
    assert list(answer.counts) == [0, 1]


def test_drafts_are_found_where_the_last_tokens_came_before() -> None:
    """The step computes what followed them there."""
    runner, computed = new_runner(), []
    step(runner, {0: 9}, new=[request(0, [1, 2, 3] * 3, [0, 1, 2, 3])])
    runner.requests.token_ids[0, 9] = 1  # in place of what was sampled
    forward = runner.model.forward
    runner.model.forward = lambda ids, *args: computed.extend(ids.tolist()) or forward(ids, *args)
    found = DraftColumns(int32([2]), int32(), int32([0]), int32([1]))
    runner.execute_model(SchedulerOutput(0, req_idx=int32([0]), num_scheduled_tokens=int32([3]), drafts=found))
    assert computed == [1, 2, 3]


def test_a_vector_in_place_of_tokens() -> None:
    """In chunks, beside others; the last hidden state of the prompt."""
    runner = new_runner()
    new = [request(0, [1, 2, 3, 4, 5], [0, 1], extras=POOLED), request(1, [5, 6], [2, 3])]
    first = step(runner, {0: 3, 1: 2}, new=new)
    assert first.results is None and first.token_ids[0] == -1
    second = step(runner, {1: 1, 0: 2})
    assert list(second.results.batch_idx) == [1] and second.token_ids[1] == -1 and second.token_ids[0] >= 0
    alone = step(new_runner(), {0: 5}, new=[request(0, [1, 2, 3, 4, 5], [0, 1], extras=POOLED)])
    assert alone.results.items() == [(0, second.results.values)] and list(alone.token_ids) == [-1]


def test_what_may_not_end_yet_does_not_end_behind_rejected_drafts() -> None:
    """Until they are settled, the host counts them; the device knows that ``min_tokens`` is not reached."""
    runner = new_runner()
    ends = [token_id for token_id in range(VOCAB) if token_id != 0]
    step(runner, {0: 3}, new=[request(0, [1, 2, 3], [0, 1, 2, 3], min_tokens=6, stop_token_ids=ends)])
    wrong = ragged_step(runner, {0: 7}, {0: [60] * 6})
    assert list(wrong.token_ids) == [0], "of eleven tokens that the host counts five are there"
    assert list(ragged_step(runner, {0: 1}, {}).token_ids) == [0]
