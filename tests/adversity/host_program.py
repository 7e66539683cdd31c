"""A host process that lives as it is told, and ends in a way of its own or is killed:

    python host_program.py SCENARIO [MODEL [RANKS]]

It says on stdout how far it has come, a word a line. MODEL "fake" has a worker without a model; "uvloop" is the same on
that loop; "real" is SmolLM2.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "workers")]

from conftest_api import core_of
from slow_runner import HOLD_GIL, SLEEP

from aengine import AsyncLLM, EngineClosedError, SamplingParams
from aengine.engine.executor import ProcessExecutor

ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True, detokenize=False)
SHORT = SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False)
FAKE = "slow_runner:load_model"
EXECUTED = "import time; print('executed', flush=True); time.sleep(600)"
kept: list[Any] = []  # streams and engines that are open until the very end


def say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


def make() -> AsyncLLM:
    if model == "real":
        return AsyncLLM(
            "smollm2-135m", max_model_len=512, kv_cache_memory_bytes=64 << 20, num_threads=1, preload_grammars=False
        )
    return AsyncLLM("smollm2-135m", worker=FAKE, skip_tokenizer=True, tensor_parallel_size=ranks)


async def begin() -> AsyncLLM:
    """An engine with open streams, of which each has got a token."""
    say("begin")
    engine = await make().start()
    kept.append(engine)
    say("ready")
    streams = [engine.stream([5, 6, 7 + i], ENDLESS) for i in range(6)]
    for stream in streams:
        await anext(stream)
    kept.extend(streams)
    say("streaming")
    return engine


async def forever(stream: Any) -> None:
    async for _ in stream:
        pass


async def serve() -> None:
    engine = await begin()
    await asyncio.gather(*map(forever, kept[1:]))
    while True:
        await asyncio.gather(*(engine.generate([5, 6, i], SHORT) for i in range(6)))


async def churn() -> None:
    """Starts and ends again and again, so that a kill comes in any phase of a life."""
    while True:
        engine = await begin()
        await engine.aclose(drain=0.05)
        kept.clear()


async def restarts() -> None:
    """Its worker is killed again and again, and replaced by another, while streams go on."""
    engine = await begin()
    while True:
        executor = core_of(engine).replicas[0].worker.executor
        assert isinstance(executor, ProcessExecutor)
        pid = executor.workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await engine.generate([1, 2], SHORT)


async def closing() -> None:
    """The worker is stuck, so that the end takes its time."""
    engine = await begin()
    kept.append(engine.stream([SLEEP], SHORT))
    await asyncio.sleep(0.05)  # the worker has begun the step, most likely
    say("closing")
    await engine.aclose()


async def stuck() -> None:
    """The worker's interpreter is stopped: its guard thread can do nothing."""
    engine = await begin()
    kept.append(engine.stream([HOLD_GIL], SHORT))
    await asyncio.sleep(0.1)  # the worker has begun the step, most likely
    say("stuck")
    await asyncio.sleep(600)


async def asleep() -> None:
    """Its streams stand still, and its workers have given KV back."""
    engine = await begin()
    await engine.sleep(level=1)
    say("asleep")
    await asyncio.sleep(600)


async def asleep_without_workers() -> None:
    engine = await begin()
    await engine.sleep(level=2)
    say("asleep")
    await asyncio.sleep(600)


async def waking() -> None:
    """It falls asleep and wakes, again and again."""
    engine = await begin()
    say("asleep")
    while True:
        await engine.sleep(level=2)
        await engine.wake_up()


async def updating() -> None:
    """Its workers see a piece of its memory in which tensors come."""
    engine = await begin()
    await engine.start_weight_update()
    say("asleep")
    await asyncio.sleep(600)


# -- ends of its own


async def leave_by_os_exit() -> None:
    await begin()
    os._exit(3)


async def leave_by_exception() -> None:
    await begin()
    raise RuntimeError("a bug of the host's")


async def leave_by_sys_exit() -> None:
    await begin()
    sys.exit(4)


async def leave_by_sys_exit_in_a_callback() -> None:
    await begin()
    asyncio.get_running_loop().call_soon(sys.exit, 4)
    await asyncio.sleep(600)


async def leave_by_abort() -> None:
    await begin()
    os.abort()


async def leave_by_segfault() -> None:
    await begin()
    ctypes.string_at(0)


async def leave_by_exec() -> None:
    await begin()
    os.execv(sys.executable, [sys.executable, "-c", EXECUTED])


async def leave_with_open_streams() -> None:
    await begin()


def leave_without_closing_the_loop() -> None:
    kept.append(new_loop())
    kept[0].run_until_complete(begin())
    say("falling")


def leave_with_the_loop_in_a_thread() -> None:
    started = threading.Event()

    async def inside() -> None:
        await begin()
        started.set()
        await asyncio.sleep(600)

    threading.Thread(target=run, args=(inside(),), daemon=True).start()
    started.wait()


def live_on_after_the_loop() -> None:
    run(leave_with_open_streams())
    say("lives")
    time.sleep(600)


def live_on_after_an_error() -> None:
    try:
        run(leave_by_exception())
    except RuntimeError:
        kept.clear()
    say("lives")
    time.sleep(600)


# -- forks


async def fork_and_go_on() -> None:
    """Children that end in several ways; the engine is the parent's, and serves as before."""
    engine = await begin()
    children = [os.fork()]
    if children[0] == 0:
        os._exit(0)
    children.append(os.fork())
    if children[1] == 0:
        engine.terminate()
        kept.clear()
        os._exit(0)
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
    process.start()
    await asyncio.to_thread(process.join)
    for child in children:
        os.waitpid(child, 0)
    for _ in range(3):
        assert len((await engine.generate([1, 2], SHORT)).token_ids) == 20
    for stream in kept[1:]:
        await anext(stream)
    say("served")
    await engine.aclose()
    say("closed")


async def fork_and_use() -> None:
    """A child that calls what it inherited is told so, by a typed error, and does the parent no harm."""
    engine = await begin()
    child = os.fork()
    if child == 0:
        try:
            problems = use_in_fork(engine)
            say("refused" if not problems else f"problems {problems}")
        finally:
            os._exit(0)
    await asyncio.to_thread(os.waitpid, child, 0)
    for _ in range(3):
        assert len((await engine.generate([1, 2], SHORT)).token_ids) == 20
    say("served")
    await engine.aclose()
    say("closed")


def use_in_fork(engine: AsyncLLM) -> list[str]:
    problems = []

    async def generate() -> None:
        await engine.generate([1], SHORT)

    async def stream() -> None:
        engine.stream([1], SHORT)

    async def start() -> None:
        await engine.start()

    async def abort() -> None:
        engine.abort("req-1")

    async def statistics() -> None:
        engine.statistics()

    for call in (generate, stream, start, abort, statistics):
        result: list[BaseException | None] = []
        thread = threading.Thread(target=lambda: result.append(outcome(call())), daemon=True)
        thread.start()
        thread.join(5)
        if not result or not isinstance(result[0], EngineClosedError):
            problems.append(f"{call.__name__}: {result}")
    return problems


def outcome(call: Coroutine[Any, Any, None]) -> BaseException | None:
    try:
        asyncio.run(call)
    except BaseException as error:
        return error
    return None


async def fork_that_outlives() -> None:
    """The child has a copy of everything that the parent's death should close."""
    await begin()
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    say("forked")
    await asyncio.sleep(600)


# -- a notebook


def notebook() -> None:
    """A kernel: the engine on a loop in the background, interrupts and SIGTERM taken by the main thread."""
    loop = new_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda number, frame: say("terminated"))
    engine = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    while True:
        try:
            say("cell")
            time.sleep(600)
        except KeyboardInterrupt:
            completion = asyncio.run_coroutine_threadsafe(engine.generate([1, 2], SHORT), loop).result()
            say(f"interrupted {len(completion.token_ids)}")


# -- grammars


async def compiling() -> None:
    """A compiler process is made, and has more to do than it is given time for."""
    from aengine import StructuredOutput

    engine = await AsyncLLM("smollm2-135m", worker=FAKE).start()
    hard = StructuredOutput(json_schema={"multipleOf": 99_999_989})
    kept.append(engine.stream([5], SamplingParams(structured_output=hard)))
    say("asked")
    await asyncio.sleep(600)


def new_loop() -> asyncio.AbstractEventLoop:
    if model == "uvloop":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main)


if __name__ == "__main__":
    scenario, model, ranks = sys.argv[1], (*sys.argv, "fake")[2], int((*sys.argv, "", "1")[3] or 1)
    done = globals()[scenario]()
    if asyncio.iscoroutine(done):
        run(done)
