"""Executors that are dropped, forked, cancelled, flooded, misplaced: each ends in a clear state, with nothing left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fake_runner
import psutil
import pytest
from forked_workers import TEMPLATES
from worker_helpers import config, decode, descriptors, gone, leftovers, make, running, stage, start, step

import aengine
from aengine.engine.executor import ProcessExecutor
from aengine.errors import EngineClosedError, EngineError, InternalError, ModelLoadError, WorkerDiedError
from aengine.ipc.channel import Frame, HostChannel
from aengine.ipc.messages import GrammarOutput, Kind, int32, pack
from aengine.outputs import StartupProgress
from aengine.workers.host import supervisor


def inject(executor: ProcessExecutor, kind: int, step_id: int, payload: bytes) -> None:
    """As if the worker had sent it."""
    worker = executor.workers[0]
    worker.channel.drain = lambda: [Frame(kind, step_id, payload)]  # type: ignore[method-assign]
    executor._on_frames(worker)


# -- the end


async def test_a_graceful_end_has_exit_code_zero() -> None:
    executor = make()
    await start(executor)
    process = executor.workers[0]._process
    assert process is not None
    await executor.aclose(5)
    assert process.returncode == 0


async def test_dropped_without_close() -> None:
    executor = make()
    await start(executor)
    pid = executor.workers[0].pid
    with pytest.warns(ResourceWarning, match="ProcessExecutor was not closed"):
        del executor
        gc.collect()
    await gone(pid)


async def test_close_that_is_cancelled_still_kills() -> None:
    executor = make()
    await start(executor)
    await executor.execute_model(step(0, [fake_runner.HANG]))
    pid = executor.workers[0].pid
    closing = asyncio.create_task(executor.aclose(60))
    await asyncio.sleep(0.05)  # it waits for the worker by then
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await gone(pid)


async def test_close_during_the_start() -> None:
    executor = make()
    starting = asyncio.create_task(start(executor, {"fail": "hang"}))
    while stage(executor) != "profile":
        await asyncio.sleep(0.01)
    await executor.aclose(0.5)  # it hangs, so it is killed when the time is over
    with pytest.raises(EngineClosedError):
        await starting
    await gone(executor.workers[0].pid)


async def test_close_is_possible_before_the_start() -> None:
    executor = make()
    await executor.aclose(1)
    executor.terminate()


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.003, 0.01, 0.03, 0.1])
async def test_a_start_cancelled_at_any_time_leaves_nothing(delay: float) -> None:
    def there() -> list[Any]:
        # Threads first: one that still makes a channel has nothing to show for it yet.
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("aengine-")]
        children = [child for child in psutil.Process().children() if child.pid not in TEMPLATES]
        return [*threads, *sorted(descriptors()), *leftovers(), *children]

    before = set(there())  # workers of other tests may still be ending

    def left() -> list[Any]:
        return [thing for thing in there() if thing not in before]

    executor = make()
    starting = asyncio.create_task(start(executor))
    await asyncio.sleep(delay)
    starting.cancel()
    try:
        await starting
    except asyncio.CancelledError:
        pass
    else:
        await executor.aclose(5)
    for _ in range(200):
        if not left():
            break
        await asyncio.sleep(0.01)
    assert not left()


def test_terminate_after_the_loop_was_closed(any_loop: asyncio.AbstractEventLoop) -> None:
    executor = make()
    any_loop.run_until_complete(start(executor))
    pid = executor.workers[0].pid
    any_loop.close()
    executor.terminate()
    executor.terminate()
    asyncio.run(gone(pid))


def test_terminate_from_another_thread_reaches_the_waiters(any_loop: asyncio.AbstractEventLoop) -> None:
    async def main() -> None:
        executor = make()
        await start(executor)
        future = await executor.execute_model(step(0, [fake_runner.HANG]))
        thread = threading.Thread(target=executor.terminate)
        thread.start()
        with pytest.raises(EngineClosedError):
            await future
        thread.join()
        await gone(executor.workers[0].pid)

    any_loop.run_until_complete(main())


def test_an_executor_on_a_loop_that_died_closes_on_another(any_loop: asyncio.AbstractEventLoop) -> None:
    executor = make()
    any_loop.run_until_complete(start(executor))
    pid = executor.workers[0].pid
    any_loop.close()

    async def elsewhere() -> None:
        await executor.aclose(5)
        await gone(pid)

    asyncio.run(elsewhere())


async def test_a_fork_of_the_host_leaves_the_worker_alone() -> None:
    """As gunicorn does, or multiprocessing's fork: the copy in the child is not the child's to end."""
    async with running() as executor:
        child = os.fork()
        if child == 0:
            try:
                executor.terminate()
                del executor
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        await asyncio.sleep(0.05)  # a worker that the child had ended would be noticed
        assert (await (await executor.execute_model(step(0, [5])))).token_ids[0] == 261


# -- failures


async def test_who_waits_for_room_hears_of_the_death_too() -> None:
    """The ring is full and nobody reads it: there is no future yet, only a coroutine that awaits its turn."""
    executor = make(ring_bytes=64 * 1024)
    await start(executor)
    await executor.execute_model(step(0, [fake_runner.HANG]))
    await asyncio.sleep(0.3)  # what comes before it hangs would be read
    blocked = [asyncio.create_task(executor.execute_model(step(i, [5] * 200_000, i))) for i in (1, 2)]
    await asyncio.sleep(0.05)  # tasks that found room would be done
    assert not any(task.done() for task in blocked)
    os.kill(executor.workers[0].pid, signal.SIGKILL)
    for task in blocked:
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            await asyncio.wait_for(task, 60)
    await executor.aclose(5)


async def test_one_rank_dies_and_all_are_ended() -> None:
    executor = make(tensor_parallel_size=2)
    await start(executor)
    pids = [worker.pid for worker in executor.workers]
    future = await executor.execute_model(step(0, [fake_runner.HANG]))
    os.kill(pids[1], signal.SIGTERM)
    with pytest.raises(WorkerDiedError, match="worker 1 .* died of SIGTERM") as caught:
        await future
    assert caught.value.rank == 1
    for pid in pids:
        await gone(pid)
    await executor.aclose(5)


async def test_a_call_that_times_out_between_two_ranks_reaches_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has the frame and the ring of the other is full: the engine goes on, and what follows comes after."""
    async with running(tensor_parallel_size=2) as executor:
        channel = executor.workers[1].channel
        is_full, room, published = True, asyncio.Event(), []
        has_room, publish = channel.has_room, channel.publish

        async def when_there_is_room(kind: int, step_id: int, payload: bytes) -> None:
            await room.wait()
            published.append(kind)
            await publish(kind, step_id, payload)

        monkeypatch.setattr(channel, "has_room", lambda num_bytes: not is_full and has_room(num_bytes))
        monkeypatch.setattr(channel, "publish", when_there_is_room)
        with pytest.raises(TimeoutError):
            await executor.call("ping", timeout=0.05)
        next_step = asyncio.create_task(executor.execute_model(step(0, [5, 6])))
        await asyncio.sleep(0.05)  # a step that passed the call would be done
        assert not next_step.done()
        room.set()
        assert (await (await next_step)).token_ids[0] == 262
        assert published == [Kind.CALL, Kind.STEP]
        is_full = False
        assert (await executor.call("ping", timeout=20))[0]["rank"] == 0
        assert executor.failure is None


async def test_a_step_is_given_to_all_ranks_at_once_or_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tensor_parallel_size=3) as executor:
        answer = executor.try_execute_model(step(0, [5, 6]))
        assert answer is not None and (await answer).token_ids[0] == 262
        last = executor.workers[2].channel
        has_room = last.has_room
        monkeypatch.setattr(last, "has_room", lambda num_bytes: False)
        heads = [worker.channel._producer._head for worker in executor.workers]
        assert executor.try_execute_model(decode(1, [0])) is None
        assert [worker.channel._producer._head for worker in executor.workers] == heads
        waiting = asyncio.create_task(executor.execute_model(decode(1, [0])))
        await asyncio.sleep(0)
        monkeypatch.setattr(last, "has_room", has_room)
        assert executor.try_execute_model(decode(2, [0])) is None, "what waits comes first"
        assert (await (await waiting)).token_ids[0] == 263
        answer = executor.try_execute_model(decode(2, [0]))
        assert answer is not None and (await answer).token_ids[0] == 264


async def test_a_close_ends_what_is_between_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make(tensor_parallel_size=2)
    await start(executor)
    channel = executor.workers[1].channel

    async def never(*frame: Any) -> None:
        while not channel._closed:
            await asyncio.sleep(0.001)
        raise EngineClosedError("closed")

    monkeypatch.setattr(channel, "has_room", lambda num_bytes: False)
    monkeypatch.setattr(channel, "publish", never)
    with pytest.raises(TimeoutError):
        await executor.call("ping", timeout=0.01)
    await executor.aclose(0.1)
    await asyncio.sleep(0.05)  # the cancelled publisher ends in one of the loop's next turns
    assert executor.workers._publisher is None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Kind.PROGRESS, {"stage": "weights", "colour": "red"}),
        (Kind.PROGRESS, None),
        (Kind.ERROR, {}),
        (Kind.ERROR, [1]),
        (Kind.STEP, (0, b"", [], b"", b"", b"", b"", True)),
        (Kind.OUTPUT, (9, b"", None, [])),  # a step that nobody asked for
        (99, None),
    ],
)
async def test_frames_that_no_worker_sends(kind: int, message: Any) -> None:
    executor = make()
    failures: list[EngineError | None] = []
    await start(executor, failures=failures)
    future = await executor.execute_model(step(0, [fake_runner.HANG]))
    inject(executor, kind, 9, pack(message))
    with pytest.raises(InternalError, match="nonsense"):
        await future
    assert len(failures) == 1
    await executor.aclose(5)


@pytest.mark.parametrize(
    ("token_id", "text"),
    [
        (fake_runner.SURROGATE, r"udcff"),
        (fake_runner.UNPRINTABLE, "Unprintable"),
        (fake_runner.CONNECTION, "ConnectionResetError: of the runner's own"),
        (fake_runner.EXIT, "SystemExit: 5"),
    ],
)
async def test_errors_that_are_hard_to_report(token_id: int, text: str) -> None:
    executor = make()
    await start(executor)
    future = await executor.execute_model(step(0, [token_id]))
    with pytest.raises(InternalError, match=text) as caught:
        await future
    assert "_harm" in caught.value.worker_traceback
    await executor.aclose(5)


async def test_a_callback_that_raises_does_not_stop_the_start(caplog: pytest.LogCaptureFixture) -> None:
    def report(progress: StartupProgress) -> None:
        raise RuntimeError("the host's own bug")

    executor = make()
    await start(executor, report=report)
    assert "the host's own bug" in caplog.text
    await executor.aclose(5)


# -- calls and grammars


async def test_calls() -> None:
    async with running(tensor_parallel_size=2) as executor:
        assert (await executor.call("memory_info", timeout=5))[0]["resident"] > 1024 * 1024
        with pytest.raises(InternalError, match="no collective call '__class__'; there are ping"):
            await executor.call("__class__", timeout=5)
        with pytest.raises(InternalError, match="TypeError"):
            await executor.call("ping", 1, 2, timeout=5)
        assert (await executor.call("ping", timeout=5))[0]["rank"] == 0
        await executor.execute_model(step(0, [fake_runner.SLOW]))
        with pytest.raises(TimeoutError):
            await executor.call("ping", timeout=0.05)
        assert (await executor.call("ping", timeout=5))[0]["rank"] == 0, "the late reply to the first did no harm"
        assert not executor._answers.calls


async def test_a_step_waits_for_its_bitmask() -> None:
    async with running() as executor:
        out = step(0, [5, 6])
        out.sample_now = False
        future = await executor.execute_model(out)
        await executor.call("ping", timeout=5)
        assert not future.done()
        await executor.send_grammar(GrammarOutput(0, int32([0]), b"\x2a\xff\xff\xff"))
        assert (await future).token_ids[0] == 42


async def test_a_bitmask_lies_in_memory_that_both_see() -> None:
    async with running({"hf_config": {"vocab_size": 32}}) as executor:
        assert executor.bitmask(1 << 40) is None
        out = step(0, [5, 6])
        out.sample_now = False
        future = await executor.execute_model(out)
        memory = executor.bitmask(4)
        assert memory is not None
        memory[:] = b"\x2b\xff\xff\xff"
        await executor.send_grammar(GrammarOutput(0, int32([0]), 4))
        assert list((await future).token_ids) == [43]
    memory[0] = 1  # not a segmentation fault


async def test_a_bitmask_beyond_the_memory_ends_the_worker() -> None:
    async with running() as executor:
        out = step(0, [5])
        out.sample_now = False
        future = await executor.execute_model(out)
        await executor.send_grammar(GrammarOutput(0, int32([0]), 1 << 40))
        with pytest.raises(InternalError, match="there is memory for"):
            await future


async def test_a_cancelled_answer_is_let_go() -> None:
    async with running() as executor:
        future = await executor.execute_model(step(0, [fake_runner.SLOW]))
        future.cancel()
        assert (await (await executor.execute_model(decode(1, [0])))).step_id == 1


# -- being a guest


async def test_the_worker_finds_what_the_host_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host put on its path by hand is found; what lies in its working directory shadows nothing."""
    (tmp_path / "late").mkdir()
    for name in ("signal", "msgpack", "torch", "aengine", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
        (tmp_path / "late" / f"{name}.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "late" / "house_runner.py").write_text("from fake_runner import load_model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "late")])
    executor = ProcessExecutor(config(worker="house_runner:load_model"))
    await start(executor)
    await executor.aclose(5)


async def test_the_worker_finds_a_package_that_the_host_found_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a finder, or by a relative folder."""
    package_parent = str(Path(aengine.__file__).parents[1])
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder and folder != package_parent])
    monkeypatch.setattr(supervisor, "interpreter", lambda: sys._base_executable)  # which has no path to it either
    async with running():
        pass


@pytest.mark.parametrize("executable", ["", None, "/usr/sbin/uwsgi"])
async def test_a_host_that_embeds_python(executable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    async with running() as executor:
        assert (await executor.call("ping", timeout=5))[0]["rank"] == 0
    monkeypatch.setattr(sys, "exec_prefix", "/nowhere")
    monkeypatch.setattr(sys, "base_exec_prefix", "/nowhere")
    with pytest.raises(EngineError, match=r"need a Python interpreter.*/nowhere"):
        await start(make())
    assert not leftovers()


async def test_no_descriptor_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    before = descriptors()
    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(EngineError, match="Too many open files"):
        await start(make())
    assert descriptors() <= before
    assert not leftovers()


async def test_an_interpreter_that_can_not_be_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(EngineError, match="could not be started.*No such file"):
        await start(make())
    assert not leftovers()


async def test_a_semaphore_that_can_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process exists by then: it is not left waiting for a name that never comes."""

    def full(channel: HostChannel) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HostChannel, "offer", full)
    executor = make()
    with pytest.raises(EngineError, match="could not be started.*No space left"):
        await start(executor)
    assert executor.workers[0].pid > 0
    await gone(executor.workers[0].pid)
    assert not leftovers()


async def test_the_hosts_environment_and_signals_are_its_own() -> None:
    def state() -> tuple[dict[str, str], list[Any], str]:
        handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
        return dict(os.environ), handlers, os.getcwd()

    before = state()
    executor = make(num_threads=3)
    ready = await start(executor)
    assert ready["OMP_NUM_THREADS"] == "3"
    assert psutil.Process(ready["pid"]).cmdline()[0] == "aengine worker 0: fake"
    assert state() == before
    await executor.aclose(5)
    assert state() == before


async def test_a_chatty_worker_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = Path(supervisor._ENTRY).read_text()
    assert "_TRIM_PERIOD = 30_000" in text
    entry = tmp_path / "entry.py"
    entry.write_text(text.replace("_TRIM_PERIOD = 30_000", "_TRIM_PERIOD = 20"))
    monkeypatch.setattr(supervisor, "_ENTRY", entry)
    async with running() as executor:
        worker = executor.workers[0]
        await (await executor.execute_model(step(0, [fake_runner.CHATTER])))
        for _ in range(500):
            if os.fstat(worker._stderr).st_size < fake_runner.CHATTER_BYTES // 2:
                break
            await asyncio.sleep(0.01)
        assert os.fstat(worker._stderr).st_size < fake_runner.CHATTER_BYTES // 2
        await (await executor.execute_model(step(1, [5], 1)))


async def test_the_channel_of_a_start_that_was_given_up_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[HostChannel] = []
    create = HostChannel.create

    def slowly(*sizes: int) -> HostChannel:
        time.sleep(0.2)  # four times the startup_timeout below
        made.append(create(*sizes))
        return made[-1]

    monkeypatch.setattr(HostChannel, "create", slowly)
    with pytest.raises(ModelLoadError, match="startup_timeout"):
        await start(make(startup_timeout=0.05))
    while any(thread.name == "aengine-channel" for thread in threading.enumerate()):
        await asyncio.sleep(0.01)
    assert made and made[0]._closed
    assert not leftovers()


async def test_nothing_blocks_the_loop(no_blocking: None) -> None:
    async with running() as executor:
        for step_id in range(20):
            await (await executor.execute_model(step(step_id, [5, 6], step_id)))
        await executor.call("ping", timeout=5)
