"""`allowed_token_ids` and `bad_words` against plain Python, over many steps of random requests."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from runner_fakes import FakeModel, expected_logits, make_runner, request, step

from aengine.engine.sampling_extras import extras_of
from aengine.ipc.messages import SchedulerOutput, int32
from aengine.params import SamplingParams
from aengine.runner.model_runner import ModelRunner

VOCAB, NUM_STEPS = 23, 12


def fields_of(rng: random.Random) -> dict[str, Any]:
    """What a request asks for, at random; words of up to five tokens, of which many can come up."""
    fields: dict[str, Any] = {}
    if rng.random() < 0.7:
        words = [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 2, 2, 3, 5]))] for _ in range(120)]
        fields["bad_words"] = [word for word in words if len(word) > 1] + words[:3]
    if rng.random() < 0.6:
        fields["allowed_token_ids"] = rng.sample(range(VOCAB), rng.randint(8, 20))
    if rng.random() < 0.3:
        fields["logit_bias"] = {rng.randrange(VOCAB): 50.0}
    return fields


def next_token(prompt: list[int], completion: list[int], fields: dict[str, Any]) -> int:
    """The greedy choice, by the parameters' definition."""
    logits = expected_logits(prompt + completion, VOCAB).tolist()
    for token_id, value in fields.get("logit_bias", {}).items():
        logits[token_id] += value
    for *before, last in fields.get("bad_words", []):
        if completion[len(completion) - len(before) :] == before and len(completion) >= len(before):
            logits[last] = float("-inf")
    allowed = fields.get("allowed_token_ids", range(VOCAB))
    return max(allowed, key=lambda token_id: (logits[token_id], -token_id))


def new_runner() -> ModelRunner:
    return make_runner(FakeModel(VOCAB, 40, 4), VOCAB, num_blocks=40, block_size=4)


def test_random_requests(rng: random.Random) -> None:
    """Also one that comes again with what it had generated, as after a preemption; and rows that are taken anew."""
    runner, wanted = new_runner(), 0
    for _ in range(4):
        asked = [fields_of(rng) for _ in range(6)]
        prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 7))] for _ in asked]
        completions: list[list[int]] = [[] for _ in asked]
        blocks = [list(range(6 * row, 6 * row + 6)) for row in range(6)]
        new = [request(row, prompts[row], blocks[row], **asked[row]) for row in range(6)]
        batch = {row: len(prompts[row]) for row in range(6)}
        removed: list[int] = []
        for k in range(NUM_STEPS):
            got = step(runner, batch, new=new, removed=removed)
            assert got.errors == []
            for row, token_id in zip(batch, got.token_ids, strict=True):
                expected = next_token(prompts[row], completions[row], asked[row])
                assert token_id == expected, (asked[row], prompts[row], completions[row])
                wanted += expected != next_token(prompts[row], completions[row], {})
                completions[row].append(token_id)
            new, removed, batch = [], [], dict.fromkeys(range(6), 1)
            if k == 5:
                ids = prompts[2] + completions[2]
                again = request(2, ids, blocks[2], num_prompt_tokens=len(prompts[2]), **asked[2])
                new, removed, batch[2] = [again], [2], len(ids)
        step(runner, removed=range(6))
    assert wanted > 50  # it is not the same as without


def test_a_word_that_begins_in_the_prompt_is_not_forbidden() -> None:
    """Also after a preemption: the request comes with what it had generated."""
    for words, expected in ([[2, 4, 5, 12]], 12), ([[4, 5, 12]], 13), ([[2, 4, 5, 13], [5, 12]], 13):
        new = request(0, [1, 2, 4, 5], [0], num_prompt_tokens=2, bad_words=words, allowed_token_ids=[12, 13])
        new.extras |= extras_of(SamplingParams(logit_bias={12: 50.0}))
        assert list(step(new_runner(), {0: 4}, new=[new]).token_ids) == [expected]


def test_nothing_is_left_to_sample() -> None:
    runner = new_runner()
    new = [request(0, [1], [0], allowed_token_ids=[3], bad_words=[[3]]), request(1, [1], [1])]
    got = step(runner, {0: 1, 1: 1}, new=new)
    assert got.token_ids[1] == next_token([1], [], {})
    assert [(e.batch_idx, e.type) for e in got.errors] == [(0, "InvalidRequestError")]
    assert "allowed_token_ids, bad_words" in got.errors[0].message


@pytest.mark.parametrize("name", ["allowed_tokens", "bad_words"])
def test_without_memory_the_request_fails_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def no_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner = new_runner()
    monkeypatch.setattr(f"aengine.runner.sampling.features.{name}.to_device", no_memory)
    new = [request(0, [1], [0], allowed_token_ids=[3], bad_words=[[4]]), request(1, [1], [1])]
    got = step(runner, {0: 1, 1: 1}, new=new)
    assert [e.batch_idx for e in got.errors] == [0] and got.token_ids[1] == next_token([1], [], {})
    monkeypatch.undo()
    got = step(runner, {0: 1}, removed=[0], new=[request(0, [1], [0], allowed_token_ids=[3])])
    assert list(got.token_ids) == [3] and got.errors == []


def test_rows_without_such_features_are_sampled_as_before() -> None:
    """No feature is asked in a step of requests that ask for nothing of it."""
    runner = new_runner()
    step(runner, {0: 1, 1: 1}, new=[request(0, [1], [0], allowed_token_ids=[3]), request(1, [1], [1])])
    sampler = runner.sampler
    rows = runner.requests.in_use.nonzero()[0]
    assert sampler.is_op_by_op(rows) and not sampler.is_op_by_op(rows[1:])
    step(runner, removed=[0])
    assert not sampler.is_op_by_op(rows)
    for feature in sampler._features:
        feature.apply = feature.commit = lambda *args: pytest.fail("it is not asked for")
    out = SchedulerOutput(0, req_idx=int32([1]), num_scheduled_tokens=int32([1]))
    runner.execute_model(out)
    assert runner.sample_tokens(None).get().errors == []
