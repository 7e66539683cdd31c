"""Guesses of tokens, how likely they are held to be, and which of them are drafted."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aengine.engine.pacing.steps_in_flight import StepsInFlight
from aengine.engine.scheduler.request import CacheKey, Request, RequestStatus
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.engine.scheduler.step import AheadTokens, InFlightStep
from aengine.engine.speculation import proposer, proposing
from aengine.engine.speculation.budget import CostBudget, DraftBudget
from aengine.engine.speculation.drafts import Drafts
from aengine.engine.speculation.history import MOST_DRAFTS, Chances, DraftHistory
from aengine.engine.speculation.proposer import GuardedProposer, ProposedHistory
from aengine.engine.speculation.proposing import Proposing
from aengine.engine.speculation.suffix import PastTexts, SuffixHistory, TokenIndex
from aengine.errors import ModelLoadError
from aengine.ipc.messages import KVCacheGroup, ModelRunnerOutput, int32
from aengine.outputs import FinishReason
from aengine.params import SamplingParams
from aengine.testing import FakeAsyncLLM


def new_request(prompt: list[int], num_more: int = 1000, salt: bytes = b"") -> Request:
    limits = {"max_num_tokens": len(prompt) + num_more, "stop_token_ids": frozenset[int]()}
    request = Request("a", prompt, SamplingParams(), seed=0, cache_key=CacheKey(salt), **limits)
    request.begin()
    request.num_computed_tokens = len(prompt)  # its first token is in flight
    return request


def add(request: Request, token_ids: list[int]) -> None:
    request.token_ids += token_ids
    request.num_computed_tokens += len(token_ids)


def longest_match(text: list[int], token_ids: list[int]) -> int:
    """How many tokens of the end of ``text`` occur somewhere in ``token_ids``, before its end where it is the same."""
    last = len(token_ids) - (token_ids is text)
    return max(
        (
            next((n for n in range(min(end, len(text))) if token_ids[end - 1 - n] != text[-1 - n]), min(end, len(text)))
            for end in range(1, last + 1)
        ),
        default=0,
    )


@pytest.mark.parametrize("vocab_size", [2, 5, 40])
def test_the_longest_match_is_found(rng: random.Random, vocab_size: int) -> None:
    """As far as a look at all places finds it, if there are no more of these than are compared."""
    num_found = 0
    for _ in range(60):
        token_ids = [rng.randrange(vocab_size) for _ in range(rng.randint(3, 60))]
        index = TokenIndex(token_ids, 200)
        while index.num_indexed < len(token_ids) - 1:
            index.add(min(len(token_ids) - 1, index.num_indexed + rng.choice([1, 5, 50])))
        place, length = index.find(token_ids)
        wanted = longest_match(token_ids, token_ids)
        assert (length >= 3) == (place >= 0) == (wanted >= 3), "three tokens are always compared with the newest place"
        if length:
            assert token_ids[place - length + 1 : place + 1] == token_ids[-length:]
            occurs = sum(token_ids[end - 3 : end] == token_ids[-3:] for end in range(3, len(token_ids)))
            assert length == wanted or occurs > 8
            num_found += 1
    assert num_found > 5 or vocab_size == 40


def test_a_text_longer_than_the_table_is_found_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.engine.speculation.suffix._MOST_PLACES", 64)
    token_ids = list(range(1000))
    index = TokenIndex(token_ids, 5000)
    for end in range(0, 1000, 7):
        index.add(end)
    assert index.size == 64
    assert index.find([980, 981, 982]) == (982, 3)
    assert index.find([500, 501, 502]) == (-1, 0)


def test_of_several_places_the_one_counts_after_which_most_came() -> None:
    token_ids = [1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3]
    index = TokenIndex(token_ids, 100)
    index.add(len(token_ids) - 1)
    assert index.find(token_ids) == (7, 3), "after 4 came different tokens: the newer place"


def test_all_of_a_prompt_is_found_by_and_by() -> None:
    """In parts of a size that costs the loop little."""
    prompt = [*range(1000, 6000), 7]
    request = new_request(prompt)
    history = SuffixHistory(request, Chances())
    assert [history.take_in(request, 1200) for _ in range(6)] == [1200, 1200, 1200, 1200, len(prompt) - 1 - 4802, 0]
    add(request, [4000, 4001, 4002])
    history.take_in(request, 1200)
    assert history.guess(request, 3).token_ids == [4004, 4005, 4006], "one token is in flight"


def test_a_match_is_followed_past_other_occurrences() -> None:
    """A quotation is read on where it began, though its words were used elsewhere since."""
    quoted = list(range(100, 130))
    request = new_request([*quoted, 1, *quoted[8:11], 2, 3])
    history = SuffixHistory(request, Chances())
    for token_id in quoted[:12]:
        add(request, [token_id])
        history.take_in(request, 100)
    assert history.guess(request, 4).token_ids == quoted[13:17]


def test_a_text_that_repeats_is_continued_beyond_its_end() -> None:
    request = new_request([5, 6, 5, 6, 5, 6])
    history = SuffixHistory(request, Chances())
    history.take_in(request, 100)
    assert history.guess(request, 4).token_ids == [6, 5, 6, 5]


@pytest.mark.parametrize(
    ("changed", "following"),
    [
        ([500], [111, 112]),  # one token in place of another
        ([112], [113, 114]),  # tokens were left out
        ([500, 110], [111, 112]),  # a token was put in
    ],
)
def test_a_match_goes_on_behind_a_change(changed: list[int], following: list[int]) -> None:
    request = new_request(list(range(100, 130)))
    history = SuffixHistory(request, Chances())
    for token_id in (*range(100, 110), *changed):
        add(request, [token_id])
        request.num_computed_tokens = len(request.token_ids) - 1  # nothing is in flight
        history.take_in(request, 100)
    assert history.guess(request, 16).token_ids[:2] == following
    for token_id in range(800, 900):
        add(request, [token_id])
        history.take_in(request, 100)
    assert not history.guess(request, 16).token_ids, "it is given up"


def test_guesses_that_were_right_make_others_likelier() -> None:
    """Of the request, and of others; also if none was drafted."""
    of_all = Chances()
    request = new_request([*range(40), 99, 0, 1, 2])
    history = SuffixHistory(request, Chances(of_all))
    history.take_in(request, 100)
    before = history.guess(request, 8).chances
    for token_id in range(3, 20):
        add(request, [token_id])
        history.take_in(request, 100)
    after = history.guess(request, 8).chances
    assert after[0] > before[0] and before == sorted(before), "the longer the match, the likelier"
    assert Chances(of_all).of(4) > Chances().of(4)
    for token_id in range(200, 280):
        add(request, [token_id % 7 + 200] if token_id % 4 else [0])
        history.take_in(request, 100)
    assert Chances(of_all).of(1) < Chances().of(2)


def test_the_first_guess_is_right_if_those_in_flight_are() -> None:
    request = new_request([*range(40), 99, 0, 1, 2])
    history = SuffixHistory(request, Chances())
    history.take_in(request, 100)
    request.num_computed_tokens = len(request.token_ids) - 1
    known = history.guess(request, 8)
    request.num_computed_tokens += 2
    behind = history.guess(request, 6)
    assert known.token_ids == list(range(3, 11)) and behind.token_ids == known.token_ids[2:]
    first, second, third, *others = known.chances
    assert behind.chances == [first * second * third, *others]


def test_chances_of_several_guesses_are_those_of_each() -> None:
    chances = Chances()
    for match in (0, 1, 2, 3, 5, 9):
        chances.note(match, match, True)
    for match in range(40):
        assert chances.of_each(match, 16) == [chances.of(match + i) for i in range(16)]


def test_chances_follow_what_happens_now() -> None:
    chances = Chances()
    for _ in range(500):
        chances.note(MOST_DRAFTS, 0, True)
    assert chances.of(MOST_DRAFTS) < 0.15
    for _ in range(60):
        chances.note(MOST_DRAFTS, 1, False)
    assert chances.of(MOST_DRAFTS) > 0.7


def test_past_outputs_are_found_by_requests_of_the_same_salt_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.engine.speculation.suffix._MOST_PAST", 64)
    past = PastTexts()

    def guess(salt: bytes, prompt: list[int]) -> list[int]:
        request = new_request(prompt, salt=salt)
        history = SuffixHistory(request, Chances(), past)
        history.take_in(request, 1000)
        return history.guess(request, 4).token_ids

    first = new_request([1, 2, 3], salt=b"a")
    first.history = SuffixHistory(first, Chances(), past)
    first.token_ids += range(100, 110)
    first.end()
    assert guess(b"a", [7, 100, 101, 102]) == [104, 105, 106, 107], "one token is in flight"
    assert guess(b"b", [7, 100, 101, 102]) == guess(b"a", [7, 1, 2, 3]) == []
    past.add(b"a", [200, 201, 202, 203])
    assert guess(b"a", [7, 106, 107, 108]) == guess(b"a", [7, 107, 108, 109]) == [], "the output ends there"
    for begin in range(1000, 3000, 20):
        past.add(b"a", list(range(begin, begin + 20)))
    assert sum(len(index.token_ids) for index in past.of(b"a")) <= 2 * 64
    assert guess(b"a", [7, 100, 101, 102]) == []
    assert guess(b"a", [2980, 2981, 2982]) == [2984, 2985, 2986, 2987]
    for number in range(100):
        past.add(b"%d" % number, [1])
    assert not past.of(b"a") and past.of(b"99")


def test_who_is_never_right_is_asked_ever_less() -> None:
    """Where the worker finds the drafts: the host knows only of those that were verified."""
    request = new_request([1, 2, 3])
    history = DraftHistory(request, Chances())
    asked = []
    for place in range(600):
        add(request, [place % 3])
        guess = history.guess(request, 100)
        if guess.token_ids:
            asked.append(place)
            history.note_verified(request, len(guess.token_ids), 0)
    assert len(asked) < 20 and asked[-1] - asked[-2] >= 64


def test_drafts_of_the_worker_are_tried_again() -> None:
    """They pay from a chance of a fifth on. After many wrong ones a request has none; but another one is tried, and
    so is the same one later: what is not drafted is not verified, and its chance would never rise."""
    everybody = Chances()

    def tried(request: Request, history: DraftHistory, num_tokens: int, num_right: int) -> list[int]:
        found = []
        for place in range(num_tokens):
            guess = history.guess(request, 100)
            if guess.token_ids and guess.chances[0] > 0.2:
                found.append(place)
                history.note_verified(request, len(guess.token_ids), num_right)
            add(request, [place])
        return found

    requests = [new_request([1, 2, 3]) for _ in range(12)]
    histories = [DraftHistory(request, Chances(everybody)) for request in requests]
    for request, history in zip(requests[:-1], histories, strict=False):
        first = tried(request, history, 60, 0)
        assert 1 <= len(first) < 12
    later = tried(requests[0], histories[0], 600, 0)
    assert 2 <= len(later) < 12
    assert len(tried(requests[-1], histories[-1], 60, 4)) > 50, "it is another text"


def step_of(num_rows: int, num_drafts: int = 0, **changes: Any) -> InFlightStep:
    batch: Any = [object()] * num_rows
    ahead = {0: AheadTokens([1] * num_drafts)} if num_drafts else {}
    step = InFlightStep(0, batch, {}, ahead, num_rows + num_drafts, 0)
    for name, value in changes.items():
        setattr(step, name, value)
    return step


def taught(seconds: Any, sizes: Sequence[tuple[int, int]]) -> CostBudget:
    budget = CostBudget(64, 0.05)
    for num_rows, num_drafts in [*sizes] * 10:
        budget.learn(step_of(num_rows, num_drafts), seconds(num_rows, num_drafts))
    return budget


def test_the_likeliest_drafts_are_granted_up_to_the_room() -> None:
    assert DraftBudget(6).grant(3, [[0.5, 0.9], [0.9, 0.9, 0.1], []]) == [1, 2, 0]
    assert DraftBudget(6).grant(6, [[1.0]]) == DraftBudget(2).grant(3, [[1.0]]) == [0]


def test_drafts_are_granted_where_they_pay() -> None:
    """A step of one row takes as long as one of eight; from there on each position takes its time."""
    sizes = [(8, 0), (1, 0), (8, 0), (1, 3), (1, 7), (1, 11), (1, 15), (8, 8)]
    budget = taught(lambda rows, drafts: max(8, rows + drafts) / 100, sizes)
    assert budget.grant(1, [[0.9] * 16]) == [7]
    assert budget.grant(2, [[0.3] * 16, [0.9] * 16])[1] > 3
    assert budget.grant(8, [[0.9] * 16] * 8) == [0] * 8
    assert budget.grant(1, [[0.01] * 16]) == [0]


def test_what_was_dear_once_is_tried_again() -> None:
    """After steps in which nothing was drafted: something else may have run beside that step."""
    budget = CostBudget(64, 0.05)
    budget.learn(step_of(1), 0.01)
    assert budget.grant(1, [[0.8] * 4]) == [4]
    for _ in range(3):
        for num_drafts in range(1, 17):
            budget.learn(step_of(1, num_drafts), 0.5)
    assert budget.grant(1, [[0.8] * 4]) == [0]
    for _ in range(12_000):
        budget.learn(step_of(1), 0.01)
    assert budget.grant(1, [[0.8] * 4]) == [3]


def test_the_first_step_of_a_size_teaches_nothing() -> None:
    """It may have captured a graph."""
    budget = CostBudget(64, 0.05)
    budget.learn(step_of(1), 0.01)
    for num_drafts in (1, 2, 3, 5, 7):
        budget.learn(step_of(1, num_drafts), 0.5)
    assert budget.grant(1, [[0.8] * 4]) == [4]


def test_what_steps_of_one_size_take_longer_is_expected_of_others() -> None:
    """As what the host does for a step with drafts does not hang on their number."""
    budget = CostBudget(64, 0.05)
    for _ in range(8):
        budget.learn(step_of(1), 0.01)
        budget.learn(step_of(1, 15), 0.03)
    assert budget.grant(1, [[0.7] * 2]) == [0] and budget.grant(1, [[0.95] * 16])[0] > 8


def test_a_plain_step_behind_drafts_counts_as_theirs() -> None:
    """It waits for the drafts to be answered, so what it takes longer than others is their price."""
    for behind, granted in ((0.01, 3), (0.04, 0)):
        budget = CostBudget(64, 0.05)
        for _ in range(20):
            for num_drafts, seconds in ((0, 0.01), (0, 0.01), (3, 0.015), (0, behind)):
                budget.learn(step_of(1, num_drafts), seconds)
        assert budget.grant(1, [[0.8] * 3]) == [granted]


def test_steps_of_another_kind_teach_nothing() -> None:
    budget = CostBudget(64, 0.05)
    budget.learn(step_of(2), 0.0)
    budget.learn(step_of(2), -1.0)
    budget.learn(step_of(2, is_gated=True), 1.0)
    budget.learn(step_of(2, num_tokens=300), 1.0)
    assert not budget.waits_for_answers(2)
    budget.learn(step_of(2), 0.02)
    assert budget.waits_for_answers(1) and budget.waits_for_answers(64)
    assert not taught(lambda rows, drafts: 0.001, [(1, 0)]).waits_for_answers(1)


def test_what_plain_steps_take_is_remembered_while_all_have_drafts() -> None:
    budget = taught(lambda rows, drafts: 0.01, [(1, 0)])
    for _ in range(5000):
        budget.learn(step_of(1, 1), 0.03)
    assert budget.grant(1, [[0.9]]) == [0], "three times as long, and not twice as many tokens"


def test_a_plain_step_behind_drafts_is_not_what_plain_steps_take() -> None:
    """It was made when the drafts were answered: the worker has waited for it."""
    budget = CostBudget(64, 0.05)
    for _ in range(20):
        for num_drafts, seconds in ((0, 0.01), (0, 0.01), (3, 0.015), (0, 0.05)):
            budget.learn(step_of(1, num_drafts), seconds)
    assert budget._costs[False].known_seconds(1) == pytest.approx(0.01)


class Odd:
    """A proposer of another package, which answers as it is told."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[int], int]] = []

    def begin(self, token_ids: list[int]) -> str:
        return f"of {token_ids}"

    def propose(self, kept: str, new_token_ids: list[int], most: int) -> Any:
        assert kept == "of [1, 2, 3]"
        self.asked.append((new_token_ids, most))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def test_a_proposer_is_asked_with_what_is_new() -> None:
    odd = Odd([11, 12, 13], [13, 14], [])
    request = new_request([1, 2, 3])
    history = ProposedHistory(request, Chances(), GuardedProposer("odd", 50, odd))
    assert history.guess(request, 4).token_ids == [12, 13], "the first is in flight"
    add(request, [11, 12])
    guess = history.guess(request, 40)
    assert guess.token_ids == [14] and guess.chances[0] < 1
    add(request, [20])
    assert history.guess(request, 4).token_ids == []
    assert odd.asked == [([], 5), ([11, 12], 1 + MOST_DRAFTS), ([20], 5)]


@pytest.mark.parametrize(
    "answer",
    [
        *([5, -1], [50], [1] * 6, ["a"], [1.0], [True], "12", {5: 1}, 7, None, ValueError("x" * 1000)),
        *(SystemExit(2), asyncio.CancelledError()),
        *(np.array([5, -1]), np.array([1.0]), np.array([True]), np.array([[5, 6]]), np.zeros(6, int), np.array(5)),
    ],
    ids=lambda answer: f"{answer!r:.9}",
)
def test_a_proposer_that_errs_is_not_asked_again(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    odd = Odd([11, 12], answer)
    request = new_request([1, 2, 3])
    guard = GuardedProposer("odd", 50, odd)
    history = ProposedHistory(request, Chances(), guard)
    with caplog.at_level(logging.WARNING, "aengine"):
        assert history.guess(request, 4).token_ids == [12]
        for _ in range(5):
            assert history.guess(request, 4).token_ids == []
            assert ProposedHistory(request, Chances(), guard).guess(request, 4).token_ids == []
    assert len(odd.asked) == 2
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'odd'" in line and len(line) < 400


@pytest.mark.parametrize(
    "answer",
    [np.array([11, 12]), np.array([11, 12], np.uint8), [np.int64(11), np.int32(12)], (11, 12), range(11, 13)],
    ids=lambda answer: f"{answer!r:.30}",
)
def test_a_proposer_may_return_integers_of_numpy(answer: Any) -> None:
    guess = GuardedProposer("odd", 50, Odd(answer)).propose("of [1, 2, 3]", [], 2)
    assert guess == [11, 12] and {type(token_id) for token_id in guess} == {int}


def test_an_interrupt_while_a_proposer_runs_is_not_its_fault() -> None:
    guard = GuardedProposer("odd", 50, Odd(KeyboardInterrupt(), [11]))
    with pytest.raises(KeyboardInterrupt):
        guard.propose("of [1, 2, 3]", [], 2)
    assert guard.propose("of [1, 2, 3]", [], 2) == [11]


@pytest.mark.parametrize(
    "target",
    [
        *("no_such_module:X", "builtins:NoSuchThing", "builtins:len", f"{__name__}:too_long"),
        *("sys:exit", "module_that_exits:X"),
    ],
)
async def test_a_proposer_that_can_not_be_made_is_an_error_of_the_start(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "module_that_exits.py").write_text("raise SystemExit(2)")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("aengine.config", "aengine.engine.speculation.proposer"):
        monkeypatch.setattr(f"{module}.target_of", lambda group, name: target)
    with pytest.raises(ModelLoadError, match="the proposer of drafts 'odd' can't be made: ") as caught:
        async with FakeAsyncLLM("x", speculation="odd"):
            pass
    assert len(str(caught.value)) < 400


def too_long(vocab_size: int) -> Any:
    raise ValueError("x" * 10_000)


@pytest.mark.parametrize("period", [1, 10], ids=["each call", "one of ten"])
def test_a_proposer_that_takes_long_is_not_asked_again(
    period: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If most calls do, not for one in which the machine did something else."""
    looks = count()

    def clock() -> float:
        look = next(looks)  # two a call
        return (look + 1) // 2 // period * 0.04

    monkeypatch.setattr(proposer, "perf_counter", clock)
    odd = Odd(*[[11, 12]] * 100)
    request = new_request([1, 2, 3])
    history = ProposedHistory(request, Chances(), GuardedProposer("odd", 50, odd))
    for _ in range(100):
        history.guess(request, 4)
    if period == 1:
        assert 1 < len(odd.asked) < 20
        assert len(caplog.records) == 1 and "ms a call" in caplog.text
    else:
        assert len(odd.asked) == 100 and not caplog.records


class StepsAhead(StepsInFlight):
    """Some of them can be taken back, until that is asked for."""

    num_interrupts = 0
    num_leased = 1
    next_is_cancellable = False

    @property
    def num_cancellable(self) -> int:
        return 0 if self.num_interrupts else self.num_leased

    def cancel_queued(self) -> None:
        self.num_interrupts += 1


class Loop:
    """A scheduler and one request, with what drafts for it; its steps are answered with these tokens."""

    def __init__(self, in_flight: StepsInFlight, budget: DraftBudget, num_blocks: int = 64) -> None:
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "max_in_flight_steps": 8}
        self.scheduler = Scheduler(num_blocks=num_blocks, kv_groups=[KVCacheGroup("full", 4)], **limits)
        self.scheduler.rows.lookahead = Drafts(self.scheduler.rows)
        self.speculation = Proposing(self.scheduler, in_flight, budget, "suffix", SuffixHistory)
        self.now = 0.0
        self.request = self.new_request("a")
        self.scheduler.add_request(self.request)

    def new_request(self, name: str, prompt: Sequence[int] = (5, 6, 7, 8, 9, 1), most: int = 40) -> Request:
        how: Any = {"max_num_tokens": most, "stop_token_ids": frozenset[int]()}
        return Request(name, prompt, SamplingParams(), seed=0, **how)

    def answer(self, out: Any, token_id: int, seconds: float = 0.0) -> None:
        self.answers(out, [token_id], seconds)

    def answers(
        self, out: Any, token_ids: Sequence[int], seconds: float = 0.0, counts: Sequence[int] | None = None
    ) -> None:
        self.now += seconds
        step = self.scheduler.oldest_step
        assert step is not None
        answer = ModelRunnerOutput(out.step_id, int32(token_ids), counts=None if counts is None else int32(counts))
        sampled = self.scheduler.update(answer).sampled
        self.speculation.note_answer(step, self.now, sampled)


def test_steps_ahead_are_taken_back_for_drafts_and_not_for_nothing() -> None:
    in_flight = StepsAhead(2)
    loop = Loop(in_flight, DraftBudget(16))
    for token_id in (5, 6, 7):
        assert not in_flight.num_interrupts
        assert loop.speculation.propose()
        out = loop.scheduler.schedule()
        assert out is not None and out.drafts is None
        loop.answer(out, token_id)
    assert not loop.speculation.propose() and in_flight.num_interrupts == 1
    assert loop.request.status is RequestStatus.DECODING, "it has no drafts"
    assert loop.speculation.propose(), "they were taken back"
    out = loop.scheduler.schedule()
    assert out is not None and out.drafts is not None and list(out.drafts.token_ids)[:3] == [8, 9, 1]


def test_steps_far_ahead_are_taken_back_for_drafts() -> None:
    """What may follow is guessed behind those alone that stay: a guess of the ninth token from here is never likely."""
    in_flight = StepsAhead(8)
    in_flight.num_leased = 7
    loop = Loop(in_flight, DraftBudget(16))
    for token_id in (5, 6, 7):
        assert loop.speculation.propose()
        loop.answer(loop.scheduler.schedule(), token_id)
    oldest = [loop.scheduler.schedule() for _ in range(8)][0]
    loop.answer(oldest, 8)
    assert loop.request.num_pending == 7 == in_flight.num_cancellable
    assert not loop.speculation.propose() and in_flight.num_interrupts == 1


def test_steps_ahead_stay_where_drafts_bring_less_than_a_step() -> None:
    """Of two requests one can be guessed, a token at a time: taking steps back costs both of them more."""
    in_flight = StepsAhead(2)
    loop = Loop(in_flight, DraftBudget(3))
    loop.scheduler.add_request(loop.new_request("b", [20, 21, 22, 23]))
    for token_ids in ([5, 30], [6, 31], [7, 32], [8, 33]):
        assert loop.speculation.propose() and not in_flight.num_interrupts
        loop.answers(loop.scheduler.schedule(), token_ids)


def test_while_drafts_are_in_flight_no_step_is_made_that_may_be_taken_back() -> None:
    """It would have one token of each, at the places of the drafts that the next answer brings."""
    in_flight = StepsAhead(2)
    loop = Loop(in_flight, DraftBudget(16))
    in_flight.num_interrupts = 1
    for token_id in (5, 6, 7):
        in_flight.next_is_cancellable = True
        assert loop.speculation.propose(), "no drafts are in flight"
        loop.answer(loop.scheduler.schedule(), token_id)
    assert loop.speculation.propose()
    out = loop.scheduler.schedule()
    assert out is not None and out.drafts is not None
    assert not loop.speculation.propose()
    in_flight.next_is_cancellable = False
    assert loop.speculation.propose()


def test_drafts_follow_what_the_steps_in_flight_will_bring() -> None:
    """Two steps are in flight, and one token in ten is not the prompt's. The drafts behind a rejected one are wrong as
    well; those of the step after that are at their place again."""
    text = list(range(100, 130))
    written = [500 + place if place % 10 == 9 else token_id for place, token_id in enumerate(text)]
    loop, in_flight, num_steps = Loop(StepsInFlight(2), DraftBudget(8)), deque[Any](), 0
    loop.scheduler.finish(loop.request, FinishReason.ABORT)
    request = loop.new_request("b", text, len(text) + len(written))
    loop.scheduler.add_request(request)
    while request.finish_reason is None:
        while len(in_flight) < 2 and loop.speculation.propose() and (out := loop.scheduler.schedule()) is not None:
            in_flight.append(out)
        step = loop.scheduler.oldest_step
        assert step is not None
        drafts = step.ahead[0].token_ids if step.ahead else []
        following = written[request.num_output_tokens :]
        count = 1 + next(
            (i for i, pair in enumerate(zip(drafts, following, strict=False)) if pair[0] != pair[1]), len(drafts)
        )
        loop.answers(in_flight.popleft(), following[:count], counts=[count] if step.ahead else None)
        num_steps += 1
    assert request.output_token_ids == written
    assert num_steps <= 15, "19 if they are drafted for where the rejected ones would have led"


def test_where_steps_are_long_drafts_follow_tokens_that_are_known() -> None:
    """No step is made that would have none, nor one behind drafts that may be rejected."""
    loop = Loop(StepsInFlight(2), CostBudget(64, 0.01))
    propose, schedule = loop.speculation.propose, loop.scheduler.schedule
    for token_id in (5, 6):
        assert propose()
        loop.answer(schedule(), token_id, 0.02)
    assert propose()
    first = schedule()
    assert propose(), "nothing is found yet"
    second = schedule()
    loop.answer(first, 7, 0.02)
    assert not propose(), "a token is in flight"
    loop.answer(second, 8, 0.02)
    assert propose()
    out = schedule()
    assert out is not None and out.drafts is not None and out.drafts.token_ids[0] == 9
    assert not propose(), "drafts are in flight"


@pytest.mark.parametrize(("seconds", "most"), [(0.0005, 12), (0.1, 30)])
def test_searches_in_vain_take_little_of_the_time(seconds: float, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes a millisecond here: beside steps of half a one some are made without, beside long ones none."""
    now, asked = [0.0], list[int]()

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    class Budget(DraftBudget):
        def grant(self, num_rows: int, chances: Sequence[Sequence[float]], *, is_gated: bool = False) -> list[int]:
            asked.append(num_rows)
            return super().grant(num_rows, chances)

    monkeypatch.setattr(proposing, "monotonic", clock)
    loop = Loop(StepsInFlight(2), Budget(16))
    for token_id in range(10, 40):
        assert loop.speculation.propose()
        loop.answer(loop.scheduler.schedule(), token_id, seconds)
    assert 5 < len(asked) <= most
    assert seconds < 0.001 or len(asked) == 30


def test_a_burst_takes_the_drafts_back_at_once() -> None:
    """Those that come count as rows before they have any."""
    loop = Loop(StepsInFlight(2), DraftBudget(4))
    for token_id in (5, 6, 7):
        assert loop.speculation.propose()
        loop.answer(loop.scheduler.schedule(), token_id)
    for name in "bcd":
        loop.scheduler.add_request(loop.new_request(name))
    assert loop.speculation.propose()
    out = loop.scheduler.schedule()
    assert out is not None and out.drafts is None and len(out.req_idx) == 4


def test_who_waits_for_blocks_holds_no_drafts_back() -> None:
    loop = Loop(StepsInFlight(2), DraftBudget(16), num_blocks=10)
    loop.scheduler.add_request(loop.new_request("b", [3] * 32))
    for token_id in (5, 6, 7):
        assert loop.speculation.propose()
        loop.answer(loop.scheduler.schedule(), token_id)
    assert loop.speculation.propose()
    out = loop.scheduler.schedule()
    assert out is not None and out.drafts is not None and loop.scheduler.num_waiting == 1


@pytest.mark.parametrize("vocab_size", [2, 6, 12])
def test_any_text_can_be_followed(rng: random.Random, vocab_size: int) -> None:
    """Its own and past ones, in which something else comes again and again."""
    past = PastTexts()
    past.add(b"", [rng.randrange(vocab_size) for _ in range(50)])
    past.add(b"", [rng.randrange(vocab_size) for _ in range(5)])
    request = new_request([rng.randrange(vocab_size) for _ in range(rng.randint(1, 60))])
    history = SuffixHistory(request, Chances(), past)
    num_guesses = 0
    for _ in range(400):
        request.num_computed_tokens = len(request.token_ids) - 1 + rng.choice([0, 0, 1, 3])
        history.take_in(request, rng.choice([10_000, 10_000, 7]))
        guess = history.guess(request, rng.randint(1, 20))
        assert len(guess.token_ids) == len(guess.chances) <= MOST_DRAFTS
        assert all(0 <= token_id < vocab_size for token_id in guess.token_ids)
        assert all(0 < chance < 1 for chance in guess.chances)
        num_guesses += bool(guess.token_ids)
        follows = guess.token_ids[: rng.randint(0, 3)] if rng.random() < 0.6 else []
        add(request, [*follows, *(rng.randrange(vocab_size) for _ in range(rng.choice([1, 1, 1, 4])))])
    assert num_guesses > 10
