"""The worker's busy loop alone, in this process, over a channel that is a list."""

from __future__ import annotations

import gc
import os
import random
from array import array
from collections import deque
from typing import Any

import pytest
from fake_runner import READY
from worker_helpers import config, step

from aengine.ipc.channel import Frame, PeerGoneError
from aengine.ipc.lead import Lead, new_lead
from aengine.ipc.messages import (
    PLAN_LIMITS,
    GrammarOutput,
    Kind,
    ModelRunnerOutput,
    SchedulerOutput,
    int32,
    pack,
    unpack,
)
from aengine.workers import loading
from aengine.workers.device_watch import IDLE
from aengine.workers.loaded import FixedModel
from aengine.workers.loading import Loading
from aengine.workers.rank import Rank
from aengine.workers.worker import Worker


class ListChannel:
    """Gives the frames of ``incoming``, one at a time; None stands for a timeout. Then the host is gone."""

    def __init__(self, *incoming: Frame | None) -> None:
        self.incoming = deque(incoming)
        self.sent: list[tuple[Kind, int, Any]] = []
        self.timeouts: list[float | None] = []
        self.come_together = False
        self._gave = False  # a frame, at the last call

    def consume(self, timeout: float | None, *, spins: bool = True) -> Frame | None:
        if self._gave and not self.come_together:
            self._gave = False
            return None
        self.timeouts.append(timeout)
        if not self.incoming:
            raise PeerGoneError
        frame = self.incoming.popleft()
        self._gave = frame is not None
        return frame

    def beat(self, device_bytes: int = 0, device_word: int = 0) -> None:
        pass

    def bitmask(self) -> memoryview:
        return memoryview(b"")

    def publish(self, kind: int, step_id: int, payload: bytes) -> None:
        self.sent.append((Kind(kind), step_id, unpack(Kind(kind), payload)))

    def kinds(self) -> list[Kind]:
        return [kind for kind, _, _ in self.sent if kind is not Kind.PROGRESS]


class Slow:
    """An answer that is ready once the worker has looked ``looks`` times."""

    def __init__(self, step_id: int, looks: int) -> None:
        self.step_id, self.looks = step_id, looks

    def ready(self) -> bool:
        self.looks -= 1
        SlowRunner.num_pending -= self.looks == -1
        return self.looks < 0

    def get(self) -> ModelRunnerOutput:
        assert self.looks < 0, "taken before it was ready"
        if self.step_id == 13:
            raise FloatingPointError("found out late")
        return ModelRunnerOutput(self.step_id, array("i", [self.step_id]))


class SlowRunner:
    """Answers after as many looks as the batch has entries; tells ``log`` what it was asked."""

    log: list[tuple[str, int]] = []  # noqa: RUF012 (one test at a time fills it)
    num_pending = most_pending = 0

    def execute_model(self, out: SchedulerOutput) -> None:
        self.log.append(("execute", out.step_id))
        self.step = out

    prepares_after = None

    def prepare_more(self) -> None:
        pass

    def sample_tokens(self, grammar: GrammarOutput | None) -> Slow:
        self.log.append(("sample", -1 if grammar is None else grammar.step_id))
        SlowRunner.num_pending += 1
        SlowRunner.most_pending = max(SlowRunner.most_pending, SlowRunner.num_pending)
        return Slow(self.step.step_id, len(self.step.req_idx))


def load_slow(config: Any, source: Any, rank: Rank, progress: Any) -> FixedModel:
    SlowRunner.log = []
    SlowRunner.num_pending = SlowRunner.most_pending = 0
    return FixedModel(SlowRunner(), READY)


class EagerRunner(SlowRunner):
    """Has three graphs to capture."""

    left = 3
    fails_at = -1

    @property
    def prepares_after(self) -> float | None:  # type: ignore[override]
        return 0.125 if self.left > 0 else None

    def prepare_more(self) -> None:
        if self.left == EagerRunner.fails_at:
            raise RuntimeError("CUDA error: out of memory")
        self.left -= 1
        self.log.append(("more", self.left))


def load_eager(*args: Any) -> FixedModel:
    SlowRunner.log = []
    return FixedModel(EagerRunner(), READY)


def load_of(rank: Rank, **place: Any) -> Frame:
    return Frame(Kind.LOAD, 0, pack({"config": config().to_wire(), "source": {}, "rank": rank.to_wire(), **place}))


LOAD = load_of(Rank())
ALLOCATE = Frame(Kind.ALLOCATE, 0, pack({name: READY[name] for name in PLAN_LIMITS}))
SHUTDOWN = Frame(Kind.SHUTDOWN, 0, b"")


@pytest.fixture(autouse=True)
def keep_the_title(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process. What a worker exempts from garbage collection stays exempt: to look at all modules of the tests
    again would take each later collection a second."""
    monkeypatch.setattr(Loading, "_set_title", lambda self, model: None)


def test_what_was_loaded_holds_up_no_step_when_garbage_is_collected() -> None:
    loaded = [[] for _ in range(10_000)]
    before = gc.get_freeze_count()
    run(LOAD, SHUTDOWN)
    assert gc.get_freeze_count() >= before + len(loaded)


def run(
    *frames: Frame | None, rank: int = 0, runner: str = f"{__name__}:load_slow", together: bool = False
) -> tuple[int, ListChannel]:
    """``together``: the worker finds all frames up to the next None at once. After LOAD comes what was agreed."""
    given = [
        part for frame in frames for part in ((frame, ALLOCATE) if frame and frame.kind == Kind.LOAD else (frame,))
    ]
    channel = ListChannel(*given)
    channel.come_together = together
    return Worker(channel, rank, runner).run(), channel  # type: ignore[arg-type]


def asked(step_id: int, looks: int, sample_now: bool = True, is_leased: bool = False) -> Frame:
    out = SchedulerOutput(step_id, req_idx=int32([0] * looks), num_scheduled_tokens=int32([1] * looks))
    out.sample_now, out.is_leased = sample_now, is_leased
    return Frame(Kind.STEP, step_id, pack(out))


def test_answers_come_in_the_order_of_the_steps(rng: random.Random) -> None:
    ids = rng.sample(range(100, 10_000), 40)
    frames: list[Frame | None] = [asked(i, rng.randrange(6)) for i in ids] + [None] * 300
    code, channel = run(LOAD, *frames, SHUTDOWN)
    assert code == 0
    answers = [message for kind, _, message in channel.sent if kind is Kind.OUTPUT]
    assert [answer.step_id for answer in answers] == ids
    assert [answer.token_ids[0] for answer in answers] == ids


@pytest.mark.parametrize("is_leased", [False, True])
def test_no_more_steps_are_launched_than_asked_for(is_leased: bool) -> None:
    frames = [asked(i, 3, is_leased=is_leased) for i in range(1, 9)]
    code, channel = run(LOAD, *frames, *[None] * 60, SHUTDOWN, None, together=True)
    assert code == 0
    assert [step_id for kind, step_id, _ in channel.sent if kind is Kind.OUTPUT] == list(range(1, 9))
    assert SlowRunner.most_pending == config().max_in_flight_steps == 2


def test_leased_steps_that_have_not_begun_are_dropped() -> None:
    revoke = Frame(Kind.REVOKE, 0, b"")
    given = [asked(1, 3), asked(2, 3), *(asked(i, 3, is_leased=True) for i in range(3, 9))]
    # After LOAD and ALLOCATE, the fourth look finds the answer to the first step; then one leased step begins.
    frames = [*given, *[None] * 7, revoke, asked(9, 1), *[None] * 20, SHUTDOWN, None]
    code, channel = run(LOAD, *frames, together=True)
    assert code == 0
    begun = [step_id for what, step_id in SlowRunner.log if what == "execute"]
    assert begun == [1, 2, 3, 9]
    assert [message for kind, _, message in channel.sent if kind is Kind.REVOKED] == [5]
    assert [step_id for kind, step_id, _ in channel.sent if kind is Kind.OUTPUT] == begun


def test_a_revoke_without_leased_steps_drops_none() -> None:
    code, channel = run(LOAD, asked(1, 3), asked(2, 3), asked(3, 0), Frame(Kind.REVOKE, 0, b""), *[None] * 9, SHUTDOWN)
    assert code == 0
    assert [message for kind, _, message in channel.sent if kind is Kind.REVOKED] == [0]
    assert [step_id for kind, step_id, _ in channel.sent if kind is Kind.OUTPUT] == [1, 2, 3]


def test_steps_that_the_first_rank_has_dropped_are_not_begun() -> None:
    """What drops them, and a newer step, come when the frames have just been taken; the first rank has begun that."""
    fd = new_lead()
    first = Lead(os.dup(fd))

    class Channel(ListChannel):
        def consume(self, timeout: float | None, *, spins: bool = True) -> Frame | None:
            frame = super().consume(timeout, spins=spins)
            if frame is None and self.incoming and self.incoming[0] is None:
                self.incoming.popleft()
                first.note_begun(4)
            return frame

    given = [load_of(Rank(index=1, tp_rank=1, tp_size=2), lead=fd), ALLOCATE]
    leased = [asked(i, 0, is_leased=True) for i in range(1, 4)]
    dropped = Frame(Kind.REVOKE, 0, pack([1, 3]))
    channel = Channel(*given, *leased, None, dropped, asked(4, 0), SHUTDOWN)
    assert Worker(channel, 1, f"{__name__}:load_slow").run() == 0  # type: ignore[arg-type]
    assert [step_id for what, step_id in SlowRunner.log if what == "execute"] == [4]


def test_it_parks_for_ever_only_when_nothing_is_pending() -> None:
    _, channel = run(LOAD, asked(1, 3), None, None, None, None, SHUTDOWN)
    pending = [timeout is not None for timeout in channel.timeouts]
    # LOAD, ALLOCATE and STEP are awaited without end; then three looks until the answer is ready; then parked.
    assert pending == [False, False, False, True, True, True, False, False]


def test_graphs_that_no_step_has_needed_are_captured_when_there_is_nothing_else_to_do() -> None:
    _, channel = run(LOAD, None, asked(1, 2), None, None, None, None, None, SHUTDOWN, runner=f"{__name__}:load_eager")
    # Idle; a step and two looks at its answer; idle until nothing is left; then parked.
    assert SlowRunner.log == [("more", 2), ("execute", 1), ("sample", -1), ("more", 1), ("more", 0)]
    assert [timeout == 0.125 for timeout in channel.timeouts].count(True) == 4
    assert channel.timeouts[0] is None and channel.timeouts[-2:] == [None, None]


def test_a_capture_ahead_that_fails_is_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(EagerRunner, "fails_at", 2)
    code, channel = run(LOAD, None, None, asked(1, 0), SHUTDOWN, runner=f"{__name__}:load_eager")
    assert code == 0 and "out of memory" in caplog.text
    assert SlowRunner.log == [("more", 2), ("execute", 1), ("sample", -1)]
    assert channel.timeouts == [None, None, 0.125, 0.125, None, None]


@pytest.mark.parametrize("rank", [Rank(tp_size=2), Rank(pp_size=2)], ids=["tensor", "pipeline"])
def test_each_of_several_ranks_captures_ahead(rank: Rank) -> None:
    run(load_of(rank), None, SHUTDOWN, runner=f"{__name__}:load_eager")
    assert SlowRunner.log == [("more", 2)]


def test_nothing_is_captured_between_a_step_and_its_bitmask() -> None:
    grammar = Frame(Kind.GRAMMAR, 7, pack(GrammarOutput(7, int32([0]), b"1234")))
    run(LOAD, asked(7, 0, sample_now=False), None, None, grammar, SHUTDOWN, runner=f"{__name__}:load_eager")
    assert SlowRunner.log == [("execute", 7), ("sample", 7)]


def test_other_ranks_compute_and_are_silent() -> None:
    code, channel = run(load_of(Rank(index=1, tp_rank=1, tp_size=2)), asked(1, 0), asked(2, 0), SHUTDOWN, rank=1)
    assert code == 0
    assert channel.kinds() == [Kind.PROFILED, Kind.READY]
    offer, ready = (message for kind, _, message in channel.sent if kind is not Kind.PROGRESS)
    assert offer == READY and ready.keys() == {"pid", "seconds"}, "each says what the other does not"
    assert [what for what, _ in SlowRunner.log] == ["execute", "sample"] * 2


def test_a_grammar_gates_sampling_and_not_the_forward() -> None:
    grammar = Frame(Kind.GRAMMAR, 7, pack(GrammarOutput(7, int32([0]), b"1234")))
    _, channel = run(LOAD, asked(7, 0, sample_now=False), None, grammar, asked(8, 0), SHUTDOWN)
    assert SlowRunner.log == [("execute", 7), ("sample", 7), ("execute", 8), ("sample", -1)]
    assert [step_id for kind, step_id, _ in channel.sent if kind is Kind.OUTPUT] == [7, 8]


def test_a_step_that_waits_for_its_bitmask_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of other ranks may wait for what it holds up: they are not stuck."""
    words: list[int] = []
    grammar = Frame(Kind.GRAMMAR, 7, pack(GrammarOutput(7, int32([0]), b"1234")))
    channel = ListChannel(LOAD, ALLOCATE, asked(7, 0, sample_now=False), None, None, grammar, None, SHUTDOWN)
    worker = Worker(channel, 0, f"{__name__}:load_slow")  # type: ignore[arg-type]
    consume = channel.consume
    monkeypatch.setattr(channel, "consume", lambda *args, **how: words.append(worker._device.word) or consume(*args))
    assert worker.run() == 0
    assert [word for word, again in zip(words, [None, *words]) if word != again] == [IDLE, 0, IDLE]


def test_what_is_prepared_is_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of other ranks may wait for the step that has come meanwhile."""
    words: list[int] = []
    worker = Worker(ListChannel(LOAD, ALLOCATE, None, None, SHUTDOWN), 0, f"{__name__}:load_eager")  # type: ignore[arg-type]
    monkeypatch.setattr(EagerRunner, "prepare_more", lambda self: words.append(worker._device.word))
    assert worker.run() == 0
    assert words and set(words) == {0}


def test_an_error_found_late_names_its_own_step() -> None:
    code, channel = run(LOAD, asked(13, 2), asked(14, 1), None, None, None)
    assert code == 1
    kind, step_id, report = channel.sent[-1]
    assert (kind, step_id) == (Kind.ERROR, 13)
    assert report["message"] == "FloatingPointError: found out late"
    assert "in get" in report["traceback"]


@pytest.mark.parametrize(
    "frame",
    [
        Frame(Kind.STEP, 5, b"\xc1"),
        Frame(Kind.STEP, 5, pack([1, 2])),
        Frame(Kind.GRAMMAR, 5, pack({})),
        Frame(Kind.CALL, 5, pack([])),
        Frame(Kind.LOAD, 5, pack({"config": {"no_such": 1}})),
        Frame(Kind.OUTPUT, 5, pack(ModelRunnerOutput(5, int32()))),
        Frame(77, 5, b""),
    ],
)
def test_malformed_frames_are_reported_and_end_the_worker(frame: Frame) -> None:
    code, channel = run(LOAD, frame)
    kind, step_id, report = channel.sent[-1]
    assert (code, kind, step_id) == (1, Kind.ERROR, 5)
    assert report["type"] in ("InternalError", "InvalidRequestError") and "Traceback" in report["traceback"]


def test_a_step_before_the_model() -> None:
    code, channel = run(Frame(Kind.STEP, 5, pack(step(5, [1]))))
    assert code == 1 and "before ALLOCATE" in channel.sent[-1][2]["message"]


@pytest.mark.parametrize("runner", ["no_such_module:load", "fake_runner:no_such_function"])
def test_a_runner_that_does_not_exist(runner: str) -> None:
    code, channel = run(LOAD, runner=runner)
    assert code == 1 and "no_such" in channel.sent[-1][2]["message"]


def test_each_rank_replies() -> None:
    calls = [Frame(Kind.CALL, 3, pack(["ping", True])), Frame(Kind.CALL, 4, pack(["ping", False]))]
    _, channel = run(*calls, SHUTDOWN, rank=1)
    assert [(kind, step_id) for kind, step_id, _ in channel.sent] == [(Kind.REPLY, 3), (Kind.REPLY, 4)]
    assert channel.sent[0][2]["value"]["rank"] == 1
    assert "before ALLOCATE" in channel.sent[1][2]["error"]["message"]


def load_talkative(config: Any, source: Any, rank: Rank, progress: Any) -> FixedModel:
    for done in range(10_001):
        progress("weights", done, 10_000, "bytes")
    progress("profile", 0, 0, "")
    return FixedModel(SlowRunner(), READY)


def test_progress_is_throttled_and_its_ends_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-4  # a second for ten thousand reports
        return now[0]

    monkeypatch.setattr(loading.time, "monotonic", clock)
    _, channel = run(LOAD, SHUTDOWN, runner=f"{__name__}:load_talkative")
    reports = [(m["stage"], m["done"]) for kind, _, m in channel.sent if kind is Kind.PROGRESS]
    assert reports[0] == ("import", 0) and reports[1] == ("weights", 0)
    assert reports[-2:] == [("weights", 10_000), ("profile", 0)]
    assert 10 < len(reports) < 40


def test_a_host_that_is_gone_is_no_error() -> None:
    with pytest.raises(PeerGoneError):
        run(LOAD, asked(1, 0))
