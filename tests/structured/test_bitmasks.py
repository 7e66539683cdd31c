"""Which grammars hold others up, and which rows the loop fills itself."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from aengine.engine.structured import bitmasks
from aengine.engine.structured.backend import MatcherLimitError
from aengine.engine.structured.bitmasks import BitmaskFiller, Filled, MaskJob, RequestGrammar, _are_short, _forced_ids
from aengine.errors import EngineClosedError


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
    just = grammar()
    note(just, *[bitmasks._SHORT_SECONDS / 2] * 4)
    assert are_short(just) and not are_short(just, quick)


class GroupMatcher:
    """Notes how many rows are filled at a time."""

    groups: list[int]

    @staticmethod
    def advance_group(items: Any, bitmask: Any, on_fill: Any) -> dict[int, Any]:
        on_fill()
        items[0][1].groups.append(len(items))
        return {}


async def test_matchers_that_take_long_to_make_are_not_taken_for_slow_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second step of a burst would fill its rows one after the other."""
    groups: list[int] = []
    clock = [100.0]
    now = SimpleNamespace(perf_counter=lambda: clock[0], thread_time=lambda: clock[0])
    monkeypatch.setattr(bitmasks, "time", now)

    def make() -> GroupMatcher:
        clock[0] += 0.005
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


VOCAB, FORBIDDEN = 65, 64


class Sums:
    """A matcher whose next token is the sum of those accepted or the one after; if that sum is 0, it is 0."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def accept(self, token_ids: list[int]) -> int:
        for place, token_id in enumerate(token_ids):
            if token_id == FORBIDDEN:
                return place
            self.taken.append(token_id)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.taken)
        del self.taken[len(self.taken) - num_tokens :]

    def fill(self, bitmask: Any, row: int) -> None:
        is_at = row_after(self.taken)
        for word in range(3):
            part = is_at >> 32 * word & 0xFFFFFFFF
            bitmask[row, word] = part - (part >> 31 << 32)

    def forced_tokens(self) -> list[int]:
        return [sum(self.taken) % 61] if sum(self.taken) % 61 == 0 else []


def row_after(taken: list[int]) -> int:
    total = sum(taken) % 61
    return 1 << total if total == 0 else 1 << total | 1 << total + 1


ALL = (1 << 96) - 1


async def test_rows_are_those_of_each_job_whoever_fills_them(rng: random.Random) -> None:
    """On the loop, in a thread, and ahead of the step; with drafts, certain ones, and tokens that are not allowed."""
    before = threading.enumerate()
    filler = BitmaskFiller(VOCAB)
    compiled: Any = SimpleNamespace(mask_seconds=0.0, matcher=Sums)
    grammars = [RequestGrammar(compiled) for _ in range(9)]
    taken: dict[int, list[int]] = {i: [] for i in range(9)}
    num_here = num_failed = 0
    for _ in range(120):
        chosen = rng.sample(range(9), rng.randint(1, 9))
        jobs, rows, fails = [], list[int](), dict[int, bool]()
        may_wait = rng.random() < 0.5
        for place, i in enumerate(chosen):
            grammar = grammars[i]
            new = [rng.choice([0, 1, 17, 60])] if rng.random() < 0.7 else []
            if may_wait and rng.random() < 0.3:
                grammar.pending = [*new]
                is_wanted = rng.random() < 0.7
                filler.fill_ahead(grammar, lambda is_wanted=is_wanted: is_wanted)
                assert grammar.pending == []
                if is_wanted:
                    taken[i] += new
                jobs.append(MaskJob(grammar, []))
                rows.append(row_after(taken[i]) if is_wanted else ALL)
                continue
            drafts = rng.choices([FORBIDDEN, 0, 1, 17, 60], k=rng.randint(0, 3)) if rng.random() < 0.3 else []
            certain = bool(drafts) and rng.random() < 0.5
            if rng.random() < 0.1:
                new = [FORBIDDEN]
            jobs.append(MaskJob(grammar, new, drafts, are_certain=certain))
            if new == [FORBIDDEN] or (certain and FORBIDDEN in drafts):
                fails[place] = True
                rows += [ALL] * jobs[-1].num_rows
                grammars[i], taken[i] = RequestGrammar(compiled), []
                continue
            taken[i] += new
            if certain:
                rows.append(row_after(taken[i] + drafts))
                continue
            for k in range(len(drafts) + 1):
                is_reached = all(row_after(taken[i] + drafts[:j]) >> drafts[j] & 1 for j in range(k))
                rows.append(row_after(taken[i] + drafts[:k]) if is_reached else ALL)
        target = bytearray(filler.row_bytes * len(rows))
        filled = filler.fill(jobs, target)
        if isinstance(filled, Filled):
            num_here += 1
        else:
            async with asyncio.timeout(30):
                await filled.free_until
                filled = await filled.filled
        assert filled.failed.keys() == fails.keys() and all(
            "token 64 was sampled" in str(e) for e in filled.failed.values()
        )
        shown = [int.from_bytes(target[k * 12 : k * 12 + 12], "little") for k in range(len(rows))]
        assert shown == rows
        for i, grammar in enumerate(grammars):
            assert grammar.is_new or grammar.matcher.taken == taken[i], "drafts have been taken back"
            assert grammar.ahead is None
        num_failed += len(fails)
    assert num_here and num_failed
    await filler.aclose()
    assert not [one for one in threading.enumerate() if one not in before and one.name.startswith("aengine-grammar")]
    for ask in (lambda: filler.fill([MaskJob(RequestGrammar(compiled), [])], bytearray(12)), filler.check_open):
        with pytest.raises(EngineClosedError):
            ask()
    with pytest.raises(EngineClosedError):
        filler.fill_ahead(grammars[0], lambda: True)


async def test_both_threads_are_there_from_the_beginning() -> None:
    before = set(threading.enumerate())
    filler = BitmaskFiller(VOCAB)
    filler.begin()
    assert len(set(threading.enumerate()) - before) == 2
    await filler.aclose()


class Numbers(Sums):
    """A matcher of 1, 2, 3, ..."""

    def fill(self, bitmask: Any, row: int) -> None:
        bitmask[row, 0], bitmask[row, 1], bitmask[row, 2] = 1 << len(self.taken) + 1, 0, 0

    def forced_tokens(self) -> list[int]:
        return [len(self.taken) + 1 + i for i in range(3)]


@pytest.mark.parametrize("num_jobs", [1, 4, 6])
async def test_the_ids_that_must_come_are_found_for_those_that_want_them(num_jobs: int) -> None:
    compiled: Any = SimpleNamespace(mask_seconds=0.0, matcher=Numbers)
    filler = BitmaskFiller(VOCAB)
    for drafts, are_certain in (((), False), ((2, 3), False), ((2, 3), True)):
        for failing in (num_jobs, 0, num_jobs - 1):
            jobs = []
            for place in range(num_jobs):
                ids = [FORBIDDEN] if place == failing else [1]
                jobs.append(MaskJob(RequestGrammar(compiled), ids, drafts, are_certain, wants_forced=place % 2 == 0))
            rows = bytearray(filler.row_bytes * sum(job.num_rows for job in jobs))
            filling = filler.fill(jobs, rows)
            filled = filling if isinstance(filling, Filled) else await filling.filled
            following = [len(drafts) + 2 + i for i in range(3)]
            assert filled.forced == {place: following for place in range(0, num_jobs, 2) if place != failing}
            assert list(filled.failed) == [place for place in (failing,) if place < num_jobs]
            assert all(job.grammar.matcher.taken == [1] for place, job in enumerate(jobs) if place != failing)
    await filler.aclose()


@pytest.mark.parametrize("ids", [[], [4], [4, 5], [4, 5, 6]])
def test_forced_ids_are_those_that_come_after_the_first_too(ids: list[int]) -> None:
    for following, is_same in ((ids[1:], True), ([*ids[1:], 9], True), ([*ids[2:], 9], False)):
        said = iter((ids, following))
        done: list[Any] = []
        matcher: Any = SimpleNamespace(
            forced_tokens=lambda said=said: next(said),
            accept=lambda some, done=done: done.append(some) or True,
            rollback=lambda number, done=done: done.append(number),
        )
        right = ids if is_same and len(ids) > 1 else []
        assert _forced_ids(matcher, (1 << 4).to_bytes(12, "little")) == right
        assert done == ([[4], 1] if len(ids) > 1 else []), "it is back where it was"
        said = iter((ids, following))
        matcher.forced_tokens = lambda said=said: next(said)
        assert _forced_ids(matcher, (3 << 4).to_bytes(12, "little")) == [], "another id is allowed, too"


async def test_the_loop_may_go_on_where_a_matcher_can_not_be_made() -> None:
    def fail() -> Any:
        raise MemoryError

    filler = BitmaskFiller(VOCAB)
    compiled: Any = SimpleNamespace(mask_seconds=0.0, matcher=fail)
    filled: Any = filler.fill([MaskJob(RequestGrammar(compiled), []) for _ in range(5)], bytearray(60))
    async with asyncio.timeout(30):
        assert await filled.free_until == 0.0
        with pytest.raises(MemoryError):
            await filled.filled
    await filler.aclose()


def test_rows_of_a_slow_batch_are_timed_one_by_one_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    now = SimpleNamespace(perf_counter=lambda: clock[0], thread_time=lambda: clock[0])
    monkeypatch.setattr(bitmasks, "time", now)

    class Timed(Sums):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def fill(self, bitmask: Any, row: int) -> None:
            clock[0] += self.seconds
            super().fill(bitmask, row)

    kinds: list[Any] = [
        SimpleNamespace(mask_seconds=0.0, matcher=lambda seconds=seconds: Timed(seconds))
        for seconds in (0.0, 0.005, 0.0, 0.0, 0.0)
    ]
    filler, grammars = BitmaskFiller(VOCAB), [RequestGrammar(kind) for kind in kinds]
    known = []
    for _ in range(4):
        rows, told = bytearray(60), list[float]()
        assert not filler._fill([MaskJob(grammar, []) for grammar in grammars], rows, told.append).failed
        assert int.from_bytes(rows, "little") == sum(1 << 96 * place for place in range(5))
        known.append(([grammar.is_slow for grammar in grammars], told))
    told_first, surveyed, together, last = known
    assert told_first == ([False] * 5, [0.001]) and surveyed == ([False, True, False, False, False], [])
    assert together[1] == [0.001] and last[1] == [pytest.approx(0.005)], "as long as the shorter of the last two"
    clock[0] += 2
    for _ in range(2):
        told = []
        filler._fill([MaskJob(grammar, []) for grammar in grammars], bytearray(60), told.append)
    assert told == [], "after a second, again"
