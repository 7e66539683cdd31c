"""What a worker logs is seen by the host's `logging`, and costs neither of them more than that."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_runner import FLOOD, LOG, LOG_AND_KILL, LOG_AND_RAISE, LOG_FROM_A_THREAD
from worker_helpers import running, step

from aengine.errors import InternalError, WorkerDiedError
from aengine.ipc.messages import Kind, unpack
from aengine.telemetry.worker_logs import level_for_workers, log_for_worker
from aengine.workers import logs as module
from aengine.workers.logs import BURST, MOST_QUEUED, WorkerLogs

# -- in the worker


class FakeChannel:
    """Has room for so many messages."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = room
        self.sent: list[dict[str, Any]] = []
        self.num_nudges = 0
        self.when_sent: Callable[[], None] = lambda: None

    def try_publish(self, kind: int, step_id: int, payload: bytes) -> bool:
        if self.room == 0:
            return False
        self.room -= 1
        self.sent.append(unpack(Kind(kind), payload))
        self.when_sent()
        return True

    def nudge(self) -> None:
        self.num_nudges += 1

    @property
    def texts(self) -> list[str]:
        return [message["text"] for message in self.sent]


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def channel() -> FakeChannel:
    return FakeChannel()


@pytest.fixture
def handler(channel: FakeChannel, clock: Clock) -> WorkerLogs:
    return WorkerLogs(channel)  # type: ignore[arg-type]


@pytest.fixture
def logger(handler: WorkerLogs) -> Iterator[logging.Logger]:
    logger = logging.getLogger("aengine.test_worker_logs")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    yield logger
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_a_record_is_sent_at_once(channel: FakeChannel, logger: logging.Logger) -> None:
    logger.info("%d and %s", 5, "more")
    (message,) = channel.sent
    assert (message["level"], message["name"], message["text"]) == (logging.INFO, logger.name, "5 and more")
    assert message["path"] == __file__ and message["function"] == "test_a_record_is_sent_at_once"
    assert message["thread"] == "MainThread" and abs(message["created"] - time.time()) < 600


def test_texts_that_are_long_broken_or_not_unicode(
    channel: FakeChannel, handler: WorkerLogs, logger: logging.Logger
) -> None:
    logger.info("a" * 9000 + "b" * 9000)
    # Not by the logger: pytest-xdist can't report a captured text that has surrogates.
    handler.handle(logging.LogRecord("aengine", logging.INFO, __file__, 1, "weights-\udcff.gguf", (), None))
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError:
        logger.exception("it went wrong")
    long, surrogate, trace = channel.texts
    assert long.startswith("a" * 4000 + "\n... (10000 ") and long.endswith("b" * 4000)
    assert surrogate == "weights-\\udcff.gguf"
    assert trace.startswith("it went wrong\nTraceback") and trace.endswith("ZeroDivisionError: a bug")


def test_a_record_that_cannot_be_formatted_harms_nobody(
    handler: WorkerLogs, channel: FakeChannel, capsys: pytest.CaptureFixture
) -> None:
    for args in (("no number",), (5,)):
        handler.handle(logging.LogRecord("aengine", logging.INFO, __file__, 1, "%d", args, None))
    assert channel.texts == ["5"]
    assert "no number" in capsys.readouterr().err


def test_a_flood_is_cut_and_counted(
    channel: FakeChannel, handler: WorkerLogs, logger: logging.Logger, clock: Clock
) -> None:
    for i in range(BURST + 7):
        logger.info("%d", i)
    assert channel.texts == [str(i) for i in range(BURST)]
    assert handler.is_pending
    handler.publish()
    assert len(channel.sent) == BURST, "told once a second, not once a record"
    clock.now += 1.0
    handler.publish()
    assert channel.texts[BURST:] == ["7 more log records of this worker were left out: there were too many at a time"]
    assert channel.sent[-1]["level"] == logging.WARNING and channel.sent[-1]["name"] == "aengine.workers"
    assert not handler.is_pending
    for i in range(100):
        logger.info("%d", i)
    assert len(channel.sent) == BURST + 1 + 10, "ten a second after the burst"


def test_a_flood_that_goes_on_is_summed_up_all_the_same(
    channel: FakeChannel, logger: logging.Logger, clock: Clock
) -> None:
    for i in range(1000):
        logger.info("%d", i)
        clock.now += 0.01
    counts = [int(text.split()[0]) for text in channel.texts if "left out" in text]
    assert 8 <= len(counts) <= 10
    assert len(channel.sent) <= BURST + 10 * 10 + len(counts) + 1


def test_a_full_ring_holds_nobody_up(handler: WorkerLogs, channel: FakeChannel, logger: logging.Logger) -> None:
    channel.room = 2
    for i in range(10):
        logger.info("%d", i)
    assert channel.texts == ["0", "1"] and handler.is_pending
    channel.room = 100
    handler.publish()
    assert channel.texts == [str(i) for i in range(10)] and not handler.is_pending


def test_the_queue_is_bounded(handler: WorkerLogs, channel: FakeChannel, logger: logging.Logger, clock: Clock) -> None:
    channel.room = 0
    for i in range(MOST_QUEUED * 2):
        logger.info("%d", i)
        clock.now += 1.0
    channel.room = MOST_QUEUED * 3
    handler.publish()
    handler.publish()
    assert channel.texts[:MOST_QUEUED] == [str(i) for i in range(MOST_QUEUED)]
    assert channel.texts[MOST_QUEUED:] == [
        f"{MOST_QUEUED} more log records of this worker were left out: there were too many at a time"
    ]


def test_only_the_main_thread_publishes(handler: WorkerLogs, channel: FakeChannel, logger: logging.Logger) -> None:
    thread = threading.Thread(target=logger.info, args=("from a thread",), name="some-thread")
    thread.start()
    thread.join()
    assert channel.sent == [] and channel.num_nudges == 1 and handler.is_pending
    handler.publish()
    assert channel.texts == ["from a thread"] and channel.sent[0]["thread"] == "some-thread"


def test_a_record_made_while_one_is_sent_comes_after_it(channel: FakeChannel, logger: logging.Logger) -> None:
    def log_once() -> None:  # as a finaliser does, which runs anywhere
        channel.when_sent = lambda: None
        logger.info("inner")

    channel.when_sent = log_once
    logger.info("outer")
    assert channel.texts == ["outer", "inner"]


# -- in the host

MESSAGE = {
    "level": logging.WARNING,
    "name": "aengine.runner",
    "text": "100% of it",
    "created": 1.7e9 + 0.25,
    "path": "/a/b.py",
    "line": 3,
    "function": "f",
    "thread": "some-thread",
}


async def test_a_record_says_which_worker_it_is_from(caplog: pytest.LogCaptureFixture) -> None:
    log_for_worker(1, 4711, MESSAGE)
    (record,) = caplog.records
    assert (record.name, record.levelno, record.getMessage()) == ("aengine.runner", logging.WARNING, "100% of it")
    assert (record.worker_rank, record.worker_pid) == (1, 4711)  # type: ignore[attr-defined]
    assert (record.process, record.processName, record.threadName) == (4711, "aengine worker 1", "some-thread")
    assert (record.created, record.msecs) == (1.7e9 + 0.25, 250.0)
    assert (record.filename, record.lineno, record.funcName) == ("b.py", 3, "f")


@pytest.mark.parametrize("name", ["root", "django", "py.warnings", "aengines", ""])
async def test_a_worker_cannot_write_to_loggers_of_the_application(name: str, caplog: pytest.LogCaptureFixture) -> None:
    log_for_worker(0, 1, {**MESSAGE, "name": name})
    assert [record.name for record in caplog.records] == [f"aengine.workers.{name}"]


async def test_a_level_that_is_not_shown_costs_no_record(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.Logger, "makeRecord", None)
    with caplog.at_level(logging.ERROR, "aengine.runner"):
        log_for_worker(0, 1, MESSAGE)


async def test_a_filter_that_fails_is_the_applications_matter(caplog: pytest.LogCaptureFixture) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    def broken(record: logging.LogRecord) -> bool:
        raise ZeroDivisionError

    logger = logging.getLogger("aengine.runner")
    logger.addFilter(broken)
    try:
        log_for_worker(0, 1, MESSAGE)
    finally:
        logger.removeFilter(broken)
    assert len(told) == 1 and isinstance(told[0]["exception"], ZeroDivisionError)


def test_workers_tell_what_any_logger_here_shows(caplog: pytest.LogCaptureFixture) -> None:
    assert level_for_workers() == logging.INFO
    with caplog.at_level(logging.ERROR, "aengine"):
        assert level_for_workers() == logging.INFO
    with caplog.at_level(logging.DEBUG, "aengine.runner.of_this_test"):
        assert level_for_workers() == logging.DEBUG


# -- from end to end


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if hasattr(record, "worker_rank")]


@pytest.mark.timeout(60)
async def test_all_that_a_worker_says_is_seen_while_it_lives(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as executor:
        await (await executor.execute_model(step(1, [LOG, 5])))
        await executor.call("ping", timeout=30)
        dark, wrong, library, warning = [record for record in caplog.records if hasattr(record, "worker_rank")]
        assert dark.name == "aengine.runner" and dark.getMessage() == "it is dark here"
        assert dark.process == executor.workers[0].pid
        assert wrong.levelno == logging.ERROR and wrong.getMessage().endswith("ZeroDivisionError: a bug")
        assert library.name == "aengine.workers.torch.fake" and library.getMessage() == "of a library"
        assert warning.name == "aengine.workers.py.warnings" and "UserWarning: do it otherwise" in warning.getMessage()


@pytest.mark.timeout(60)
async def test_details_come_when_the_host_shows_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "aengine"):
        async with running() as executor:
            await (await executor.execute_model(step(1, [LOG, 5])))
            await executor.call("ping", timeout=30)
    assert "a detail" in messages(caplog)


@pytest.mark.timeout(60)
async def test_a_thread_of_an_idle_worker(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as executor:
        await (await executor.execute_model(step(1, [LOG_FROM_A_THREAD, 5])))
        while not messages(caplog):
            await asyncio.sleep(0.01)
        assert messages(caplog) == ["from a thread"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("token_id", "error"), [(LOG_AND_RAISE, InternalError), (LOG_AND_KILL, WorkerDiedError)])
async def test_last_words(token_id: int, error: type, caplog: pytest.LogCaptureFixture) -> None:
    async with running() as executor:
        with pytest.raises(error):
            await (await executor.execute_model(step(1, [token_id, 5])))
        assert messages(caplog) == ["last words"]


@pytest.mark.timeout(60)
async def test_a_flood_through_a_ring_that_nobody_empties(caplog: pytest.LogCaptureFixture) -> None:
    """The ring is too small for what may come at once, and the host's loop stands still."""
    async with running(ring_bytes=64 * 1024) as executor:
        answer = await executor.execute_model(step(1, [FLOOD, 5]))
        time.sleep(0.5)  # the blocked loop, which is what is tested here
        await answer
        await (await executor.execute_model(step(2, [5, 6], row=1)))
        numbers: list[str] = []
        while len(numbers) + num_left_out(caplog) < 5000:
            numbers = [text.split()[0] for text in messages(caplog) if "left out:" not in text]
            await asyncio.sleep(0.01)
    assert numbers == sorted(numbers, key=int)
    assert numbers[:BURST] == [str(i) for i in range(BURST)]
    assert len(numbers) + num_left_out(caplog) == 5000


def num_left_out(caplog: pytest.LogCaptureFixture) -> int:
    return sum(int(text.split()[0]) for text in messages(caplog) if "left out:" in text)


@pytest.mark.timeout(60)
def test_warnings_are_seen_without_any_set_up() -> None:
    """`logging` shows on stderr what nobody has set up anything for, from WARNING on; the host has set up nothing."""
    import subprocess

    program = f"""
import asyncio, logging, sys
sys.path.insert(0, {str(module.__file__.rsplit("/aengine/", 1)[0] + "/tests/workers")!r})
from worker_helpers import running, step

async def main():
    async with running() as executor:
        await (await executor.execute_model(step(1, [{LOG}, 5])))
        await executor.call("ping", timeout=30)
        assert not logging.getLogger("aengine").handlers and not logging.root.handlers

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("it is dark here\nit went wrong\n") and "do it otherwise" in done.stderr
