"""Rounds of replicas that share experts: which steps are computed side by side, and whose turn it is."""

from __future__ import annotations

import asyncio

import pytest

from aengine.engine.pacing.peers import NoPeers, Peers
from aengine.engine.replicas.rounds import Rounds
from aengine.engine.scheduler.crash_quarantine import CrashQuarantine
from aengine.ipc.messages import SchedulerOutput, int32

pytestmark = pytest.mark.anyio


class Run:
    def __init__(self, max_in_flight: int = 2) -> None:
        self.published: list[tuple[int | None, ...]] = []
        self.watched: list[int | None] = []  # tokens of each round that began; None: one ended
        self.rounds = Rounds(2, max_in_flight, self)  # type: ignore[arg-type]
        self.rounds.begin(lambda outs: self.published.append(tuple(None if o is None else o.step_id for o in outs)))

    # as a Watchdog

    def begin(self, num_tokens: int) -> None:
        self.watched.append(num_tokens)

    def end(self) -> None:
        self.watched.append(None)

    def stop(self) -> None:
        self.watched.clear()

    # as the step loops

    def give(self, index: int, *step_ids: int) -> None:
        for step_id in step_ids:
            self.rounds.give(index, SchedulerOutput(step_id))

    def answer(self, *replicas: int) -> None:
        for index in replicas:
            self.rounds.note_answer(index)


def test_one_alone_does_not_wait() -> None:
    run = Run()
    run.give(0, 0, 1, 2)
    assert run.published == [(0, None), (1, None)]
    run.answer(0)
    assert run.published[2:] == [(2, None)]


def test_steps_pair_up() -> None:
    """Also when the second replica comes later, and whichever is answered first."""
    run = Run()
    run.give(0, 0, 1)
    run.give(1, 0, 1)
    run.answer(0)
    assert run.published == [(0, None), (1, None)], "the first is about to give another one"
    run.give(0, 2)
    run.rounds.note_idle(0)
    run.answer(0)
    run.give(0, 3)
    run.rounds.note_idle(0)
    assert run.published[2:] == [(2, 0), (3, 1)]
    for step_id in range(4, 8):
        first, second = (0, 1) if step_id % 2 else (1, 0)
        run.answer(first)
        run.give(first, step_id - 2 * first)
        run.rounds.note_idle(first)
        assert len(run.published) == step_id
        run.answer(second)
        run.give(second, step_id - 2 * second)
        run.rounds.note_idle(second)
        assert run.published[-1] == (step_id, step_id - 2)


def test_one_that_rests_is_left_out() -> None:
    run = Run()
    run.give(0, 0)
    run.give(1, 0)
    run.answer(0, 1)
    run.give(0, 1)
    assert run.published == [(0, None), (None, 0)]
    run.rounds.note_idle(1)
    assert run.published[2:] == [(1, None)]


def test_other_workers_begin_anew() -> None:
    run = Run(1)
    run.give(0, 0, 1)
    run.give(1, 0)
    run.rounds.begin(run.rounds._publish)
    run.give(1, 3)
    assert run.published == [(0, None), (None, 3)]


async def test_suspects_run_alone() -> None:
    """No other replica has steps while one computes a request that workers may have died of."""
    run = Run()
    works = [asyncio.Event(), asyncio.Event()]
    suspects = [CrashQuarantine(), CrashQuarantine()]
    for peers, suspect, work in zip(run.rounds.peers, suspects, works, strict=True):
        peers.attach(suspect, work, watchdog=None)  # type: ignore[arg-type]
    first, second = run.rounds.peers
    assert first.may_step and second.may_step
    for suspect in reversed(suspects):
        suspect._requests.append(None)  # type: ignore[arg-type]
    assert first.may_step and not second.may_step
    first.note_idle()
    assert not works[1].is_set()
    suspects[0]._requests.clear()
    first.note_idle()
    assert works[1].is_set() and second.may_step and not first.may_step


def test_rounds_are_watched_not_steps() -> None:
    """A round takes as long as if both had a step like the longer one; a step that waits for its round is no hang."""
    run = Run()
    steps = [SchedulerOutput(i, req_idx=int32([0]), num_scheduled_tokens=int32([n])) for i, n in enumerate((5, 7, 9))]
    run.rounds.give(0, steps[0])
    run.rounds.give(0, steps[1])
    run.rounds.give(0, steps[2])
    run.rounds.give(1, steps[0])
    assert run.watched == [10, 14], "the third step waits"
    run.answer(0)
    run.give(0, 3)
    run.rounds.note_idle(0)
    assert run.watched == [10, 14, None, 18]
    run.answer(0, 0)
    assert run.watched == [10, 14, None, 18, None, 0], "the third round still has the step of the second replica"
    run.answer(1)
    assert run.watched[6:] == [None]
    run.rounds.begin(lambda outs: None)
    assert not run.watched


def test_nothing_begins_while_there_are_no_workers() -> None:
    run = Run()
    run.give(0, 0)
    run.give(0, 1)
    run.give(0, 2)  # waits for room
    generation = run.rounds.generation
    run.rounds.end()
    run.rounds.note_idle(0)
    run.rounds.note_idle(1)
    assert run.published == [(0, None), (1, None)] and not run.watched
    assert run.rounds.generation == generation + 1


def test_whose_workers_a_turn_is_for() -> None:
    """The steps of workers that live and die together are watched once, and their deaths told once."""
    run, watchdog = Run(), Run()
    every: list[Peers] = [NoPeers("the worker of replica 1"), *run.rounds.peers]
    for peers in every:
        peers.attach(CrashQuarantine(), asyncio.Event(), watchdog)  # type: ignore[arg-type]
        peers.note_given(5)
        peers.note_answered()
    assert [peers.is_independent for peers in every] == [True, False, False]
    assert [peers.reports_deaths for peers in every] == [True, True, False]
    assert [peers.watchdog for peers in every] == [watchdog, run, run]
    assert watchdog.watched == [5, None] and not run.watched
    assert len({peers.name for peers in every}) == 2
