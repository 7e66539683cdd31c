"""Which grammars hold others up, and which rows the loop fills itself."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from aengine.engine.structured import bitmasks
from aengine.engine.structured.backend import MatcherLimitError
from aengine.engine.structured.bitmasks import BitmaskFiller, Filled, MaskJob, RequestGrammar, _are_short


def grammar(mask_seconds: float = 0.0) -> RequestGrammar:
    compiled: Any = SimpleNamespace(mask_seconds=mask_seconds)
    return RequestGrammar(compiled)


def note(grammar: RequestGrammar, *cpu_seconds: float) -> list[bool]:
    told = []
    for seconds in cpu_seconds:
        grammar.note_time(2 * seconds, seconds)
        told.append(grammar.is_slow)
    return told


def test_rows_of_ordinary_schemas_hold_up_nobody() -> None:
    assert not any(note(grammar(), *([0.0001, 0.0015, 0.003] * 100)))


def test_a_slow_row_in_twenty_is_remembered_until_the_next() -> None:
    """As where an object may have any of 1,000 properties."""
    slow = grammar()
    note(slow, bitmasks._SLOW_SECONDS)
    assert not slow.is_slow, "only what takes longer"
    told = note(slow, *(([0.0002] * 19 + [0.02]) * 20))
    assert not any(told[:19]) and all(told[19:])
    note(slow, *[0.0002] * 160)
    assert not slow.is_slow


def test_a_grammar_that_was_slow_when_compiled_is_slow_until_its_rows_say_otherwise() -> None:
    assert grammar(0.02).is_slow and not grammar(0.003).is_slow
    told = note(grammar(0.02), *[0.0002] * 200)
    assert told[0] and not told[-1] and told == sorted(told, reverse=True)


def test_one_slow_row_keeps_a_grammar_off_the_loop_for_a_while() -> None:
    first = grammar()
    note(first, *[0.00005] * 3)
    assert first.seconds == math.inf  # too few are known
    note(first, 0.00005)
    assert first.seconds == 0.0001
    note(first, 0.001, 0.00005)
    assert first.seconds == 0.002
    note(first, *[0.00005] * 3)
    assert first.seconds == 0.0001


def test_the_loop_fills_few_quick_rows_and_none_of_a_slow_grammar() -> None:
    quick, slow = grammar(), grammar()
    note(slow, 0.02, *[0.00001] * 60)
    note(quick, *[0.00001] * 60)
    assert quick.seconds == slow.seconds < 0.0001 and slow.is_slow  # the last rows of both were quick

    def are_short(*grammars: RequestGrammar) -> bool:
        return _are_short([MaskJob(each, [5]) for each in grammars])

    assert are_short(quick) and are_short(quick, quick, quick, quick)
    assert not are_short(slow) and not are_short(quick, slow)
    assert not are_short(*[quick] * 5)
    assert not are_short(grammar())  # nobody knows it yet


class GroupMatcher:
    """Notes how many rows are filled at a time."""

    groups: list[int]

    @staticmethod
    def advance_group(items: Any, bitmask: Any, on_fill: Any) -> dict[int, Any]:
        on_fill()
        items[0][1].groups.append(len(items))
        return {}


async def test_matchers_that_take_long_to_make_are_not_taken_for_slow_rows() -> None:
    """Else the second step of a burst would fill its rows one after the other."""
    groups: list[int] = []

    def make() -> GroupMatcher:
        time.sleep(0.005)
        matcher = GroupMatcher()
        matcher.groups = groups
        return matcher

    compiled: Any = SimpleNamespace(mask_seconds=0.0, matcher=make)
    jobs = [MaskJob(RequestGrammar(compiled), []) for _ in range(8)]
    filler = BitmaskFiller(32)
    for _ in range(3):
        filled = filler.fill(jobs, bytearray(8 * filler.row_bytes))
        assert not isinstance(filled, Filled)
        await filled.filled
    await filler.aclose()
    assert groups == [8, 8, 8]


class Late:
    """A matcher whose rows take a second of CPU time and more, once it has accepted a token."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def accept(self, token_ids: list[int]) -> int:
        self.clock[0] += 1.5 * len(token_ids)
        return len(token_ids)

    def fill(self, bitmask: Any, row: int) -> None:
        bitmask[row, 0] = 2


def test_a_row_that_takes_too_long_is_a_limit_and_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(bitmasks, "time", SimpleNamespace(perf_counter=lambda: 0.0, thread_time=lambda: clock[0]))
    late, other = grammar(), grammar()
    late._matcher, other._matcher = Late(clock), Late(clock)  # type: ignore[assignment]
    filler = BitmaskFiller(32)
    for num_rows in (1, 2):
        filled = filler._fill([MaskJob(other, [])] * num_rows + [MaskJob(late, [5])], bytearray(4 * num_rows + 4))
        assert list(filled.failed) == [num_rows] and late.is_slow and not other.is_slow
        assert isinstance(filled.failed[num_rows], MatcherLimitError) and "1.5 s" in str(filled.failed[num_rows])
