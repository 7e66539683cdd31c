"""Guesses of tokens by lookup, and how they adapt to what is accepted."""

from __future__ import annotations

import random

import pytest

from aengine.engine.pacing.steps_in_flight import StepsInFlight
from aengine.engine.scheduler.request import Request, RequestStatus
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.engine.speculation import ngram
from aengine.engine.speculation.drafts import Drafts
from aengine.engine.speculation.ngram import NGramSpeculation, TokenHistory
from aengine.ipc.messages import KVCacheGroup, ModelRunnerOutput, int32
from aengine.params import SamplingParams


def new_request(prompt: list[int], num_more: int = 1000) -> Request:
    limits = {"max_num_tokens": len(prompt) + num_more, "stop_token_ids": frozenset[int]()}
    request = Request("a", prompt, SamplingParams(), seed=0, **limits)
    request.begin()
    request.num_computed_tokens = len(prompt)  # its first token is in flight
    return request


def add(request: Request, token_ids: list[int]) -> None:
    request.token_ids += token_ids
    request.num_computed_tokens += len(token_ids)


def occurrences(token_ids: list[int]) -> list[int]:
    """Positions at which the last three tokens end, but for the last."""
    tail = token_ids[-3:]
    return [end for end in range(2, len(token_ids) - 1) if token_ids[end - 2 : end + 1] == tail]


@pytest.mark.parametrize("vocab_size", [3, 9, 40])
def test_guesses_are_what_came_after_equal_tokens(rng: random.Random, vocab_size: int) -> None:
    request = new_request([rng.randrange(vocab_size) for _ in range(rng.randint(1, 200))])
    history = TokenHistory(request.max_num_tokens)
    num_guesses = 0
    for _ in range(200):
        add(request, [rng.randrange(vocab_size) for _ in range(rng.choice([1, 1, 1, 2, 5]))])
        history.take_in(request, rng.choice([10_000, 10_000, 7]))
        drafts = history.guess(request, 3)
        token_ids = request.token_ids
        possible = [(token_ids[end + 1 :] * 9)[1 : 1 + len(drafts)] for end in occurrences(token_ids)]
        assert not drafts or drafts in possible, "one token is in flight, and the drafts follow it"
        num_guesses += bool(drafts)
    assert num_guesses > 150 or vocab_size > 3


def test_all_of_a_prompt_is_found_by_and_by() -> None:
    """In parts of a size that costs the loop little; then the last occurrence counts."""
    prompt = [*range(1000, 6000), *range(1000, 1010), 7]
    request = new_request(prompt)
    history = TokenHistory(request.max_num_tokens)
    sizes = [history.take_in(request, 1200) for _ in range(6)]
    assert sizes == [1200, 1200, 1200, 1200, len(prompt) - 1 - 4802, 0]
    add(request, [4000, 4001, 4002])
    history.take_in(request, 1200)
    assert history.guess(request, 3) == [4004, 4005, 4006]
    add(request, [1007, 1008, 1009])
    history.take_in(request, 1200)
    assert history.guess(request, 2) == [4000, 4001], "where it was last: after 7, which is in flight"


def test_a_match_is_followed_past_other_occurrences() -> None:
    """A quotation is read on where it began, though its words were used elsewhere since."""
    quoted = list(range(100, 130))
    request = new_request([*quoted, 1, *quoted[8:11], 2, 3])
    history = TokenHistory(request.max_num_tokens)
    for token_id in quoted[:12]:
        add(request, [token_id])
        history.take_in(request, 100)
    assert history.guess(request, 4) == quoted[13:17]


def test_a_text_that_repeats_is_continued_beyond_its_end() -> None:
    request = new_request([5, 6, 5, 6, 5, 6])
    history = TokenHistory(request.max_num_tokens)
    history.take_in(request, 100)
    assert history.guess(request, 4) == [6, 5, 6, 5]


def test_the_number_of_drafts_follows_what_is_accepted() -> None:
    request = new_request(list(range(50, 58)) * 4)
    history = TokenHistory(request.max_num_tokens)
    sizes = []
    for outcome in [(4, 4), (8, 8), (8, 3), (4, 4)]:
        history.note_verified(*outcome)
        history.take_in(request, 100)
        sizes.append(len(history.guess(request, 100)))
        add(request, request.token_ids[-8:])  # the match grows with what it foretold
    assert sizes == [8, 16, 4, 8]
    history.note_verified(8, 0)
    history.take_in(request, 100)
    assert history.guess(request, 100) == [] and not history.is_sure
    add(request, request.token_ids[-8:])
    history.take_in(request, 100)
    assert len(history.guess(request, 100)) == 2, "after a while another try"


def test_who_is_never_right_is_asked_ever_less() -> None:
    request = new_request([1, 2, 3])
    history = TokenHistory(request.max_num_tokens)
    asked = []
    for place in range(600):
        add(request, [(1, 2, 3)[place % 3]])
        history.take_in(request, 100)
        drafts = history.guess(request, 100)
        if drafts:
            asked.append(place)
            history.note_verified(len(drafts), 0)
    assert len(asked) < 20 and asked[-1] - asked[-2] > ngram._MOST_WAIT // 2


class StepsAhead(StepsInFlight):
    """Some of them can be taken back, until that is asked for."""

    num_interrupts = 0

    @property
    def runs_ahead(self) -> bool:
        return not self.num_interrupts

    def interrupt(self) -> None:
        self.num_interrupts += 1


def test_steps_ahead_are_taken_back_for_drafts_and_not_for_nothing() -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    scheduler = Scheduler(num_blocks=64, kv_groups=[KVCacheGroup("full", 4)], **limits)
    scheduler.rows.lookahead = Drafts(scheduler.rows)
    in_flight = StepsAhead(2)
    speculation = NGramSpeculation(scheduler, in_flight, most_rows=16)
    limits = {"max_num_tokens": 40, "stop_token_ids": frozenset[int]()}
    request = Request("a", [5, 6, 7, 8, 9, 1], SamplingParams(), seed=0, **limits)
    scheduler.add_request(request)
    for token_id in (5, 6, 7):
        assert not in_flight.num_interrupts
        assert speculation.propose()
        out = scheduler.schedule()
        assert out is not None and out.drafts is None
        speculation.note_tokens(scheduler.update(ModelRunnerOutput(out.step_id, int32([token_id]))).sampled)
    assert not speculation.propose() and in_flight.num_interrupts == 1
    assert request.status is RequestStatus.DECODING, "it has no drafts"
    assert speculation.propose(), "they were taken back"
    out = scheduler.schedule()
    assert out is not None and out.drafts is not None and list(out.drafts.token_ids) == [8, 9, 1]
