"""One request's own state, and what a worker is told of it."""

from __future__ import annotations

from array import array

import pytest

from aengine.engine.sampling_extras import extras_of
from aengine.engine.scheduler.block_pool import BlockTable
from aengine.engine.scheduler.decode_batches import DecodeBatches
from aengine.engine.scheduler.request import PromptTokens, Request, RequestStatus
from aengine.ipc.messages import Kind, SchedulerOutput, float32, int32, pack, unpack
from aengine.params import SamplingParams


def make(prompt: list[int], params: SamplingParams | None = None, **more: object) -> Request:
    settings = {"seed": 7, "max_num_tokens": len(prompt) + 8, "stop_token_ids": frozenset({9, 2})} | more
    return Request("r", prompt, params or SamplingParams(), **settings)


def test_the_prompt_is_copied() -> None:
    prompt = [5, 6, 7]
    first, second = make(prompt), make(prompt)
    first.token_ids.append(8)
    assert prompt == [5, 6, 7] == second.token_ids
    assert first.output_token_ids == [8] and first.num_prompt_tokens == 3
    assert first.status is RequestStatus.NEW and first.finish_reason is None and first.req_idx == -1


def test_completions_of_a_call_share_its_prompt() -> None:
    """Until they begin, and after their end; it is packed once for all of them."""
    prompt = PromptTokens([5, 6, 7])
    first, second = (
        Request("r", prompt, SamplingParams(), seed=7, max_num_tokens=9, stop_token_ids=frozenset()) for _ in "ab"
    )
    assert first.token_ids is second.token_ids and prompt.packed is prompt.packed
    first.begin()
    first.token_ids.append(8)
    assert second.token_ids == [5, 6, 7] and second.output_token_ids == []
    assert first.to_message().token_ids == array("i", [5, 6, 7, 8])
    assert second.to_message().token_ids == array("i", [5, 6, 7])
    first.end()
    assert first.token_ids is second.token_ids


@pytest.mark.parametrize(("computed", "pending"), [(0, 0), (2, 0), (3, 1), (5, 3)])
def test_pending_tokens_follow_from_the_computed_ones(computed: int, pending: int) -> None:
    request = make([1, 2, 3])
    request.num_computed_tokens = computed
    assert request.num_pending == pending


def test_every_parameter_reaches_the_worker() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=40,
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logprobs=0,
        min_tokens=3,
        logit_bias={11: -1.5, 4: 2.0},
    )
    request = make([1, 2, 3], params, seed=-(2**63), extras=extras_of(params))
    request.begin()
    request.token_ids.append(50)  # generated before a preemption
    request.req_idx, request.block_tables, request.num_computed_tokens = 3, [BlockTable(1, 0, [8, 1])], 2
    (message,) = unpack(Kind.STEP, pack(SchedulerOutput(0, new_requests=[request.to_message()]))).new_requests
    assert message.req_idx == 3 and message.seed == -(2**63)
    assert message.token_ids == array("i", [1, 2, 3, 50]) and message.num_prompt_tokens == 3
    assert message.block_ids == array("i", [8, 1]) and message.num_computed_tokens == 2
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"):
        assert getattr(message, name) == getattr(params, name), name
    assert (message.repetition_penalty, message.logprobs, message.min_tokens) == (1.25, 0, 3)
    assert message.max_num_tokens == 11
    assert message.stop_token_ids == array("i", [2, 9])
    assert message.extras == {"logit_bias": [int32([11, 4]).tobytes(), float32([-1.5, 2.0]).tobytes()]}


def test_no_logprobs_is_minus_one() -> None:
    assert make([1]).to_message().logprobs == -1


@pytest.mark.invariant
def test_a_request_without_room_for_a_token_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        make([1, 2], max_num_tokens=2)
    with pytest.raises(AssertionError):
        make([])


def test_who_decodes_in_another_batch_is_in_that_one_alone() -> None:
    """It was preempted, and got a row with another batch before its former one had a turn."""
    batches = DecodeBatches(2)
    first, second = batches
    request = Request("a", [1, 2], SamplingParams(), seed=0, max_num_tokens=9, stop_token_ids=frozenset())
    for batch in first, second:
        request.status, request.batch_index = RequestStatus.DECODING, batch.index
        batch.join([request])
        first.leave()
    assert first.refresh() == [] and second.refresh() == [request]
