"""`LLM` over a fake worker: what it returns, refuses, and leaves behind."""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from conftest_api import handle_of, settled
from pydantic import BaseModel

from aengine import (
    LLM,
    AsyncLLM,
    Completion,
    ContextLengthError,
    DeadlineExceededError,
    EngineClosedError,
    FinishReason,
    InvalidRequestError,
    ModelLoadError,
    SamplingParams,
    WorkerDiedError,
)
from aengine.chat import ToolCallStart
from aengine.engine.threads import loop_thread

MakeLLM = Callable[..., LLM]
pytestmark = pytest.mark.usefixtures("no_blocking")
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello"}]
TESTS = Path(__file__).resolve().parents[1]


def debug_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.SelectorEventLoop()
    loop.set_debug(True)
    loop.slow_callback_duration = 1.0
    return loop


@pytest.fixture(params=["asyncio-debug", "uvloop"])
def make_llm(
    request: pytest.FixtureRequest, make_engine: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeLLM]:
    """A factory of LLMs over the fake executor, on threads with either kind of loop; closed at the end."""
    monkeypatch.setattr(
        loop_thread, "_new_loop", lambda like: debug_loop() if request.param != "uvloop" else uvloop.Loop()
    )

    class FakeSyncLLM(LLM):
        def _make_engine(self, model: str, settings: dict[str, Any]) -> Any:
            return make_engine(**settings)

    made: list[LLM] = []

    def make(**settings: Any) -> LLM:
        made.append(FakeSyncLLM("smollm2-135m", **settings))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "aengine"]


def is_idle(llm: LLM) -> bool:
    """Nothing of any request is left; looked at in the engine's thread."""
    handle_of(llm.as_async()).wait(lambda core: settled(llm.as_async()))
    return True


def interrupt_after(seconds: float) -> None:
    """What Ctrl-C does, a while later."""
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


# -- what it returns


def test_one_prompt_gives_one_completion(make_llm: MakeLLM) -> None:
    llm = make_llm()
    for prompt in ("Hello there", [1, 2, 3], HELLO, (1, 2)):
        completion = llm.generate(prompt, SHORT)
        assert isinstance(completion, Completion) and len(completion.token_ids) == 5
    assert llm.statistics().num_finished == 4
    assert llm.describe()["max_model_len"] == 1024 and llm.tokenizer.has_chat_template and 0 < llm.check_health() < 10
    assert repr(llm) == "<LLM smollm2-135m running>"
    assert is_idle(llm)


def test_a_list_gives_a_list_in_order(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=8)
    prompts = [[7] * (1 + i % 50) for i in range(200)]
    params = [SamplingParams(max_tokens=1 + i % 13, ignore_eos=True) for i in range(200)]
    completions = llm.generate(prompts, params)
    assert [len(c.token_ids) for c in completions] == [1 + i % 13 for i in range(200)]
    assert [c.usage.prompt_tokens for c in completions] == [1 + i % 50 for i in range(200)]
    assert [len(c.token_ids) for c in llm.generate(["a", "b c"], SHORT)] == [5, 5]
    assert len(llm.generate([HELLO, HELLO, HELLO], SHORT)) == 3
    assert len(llm.generate(("a", "b"))) == 2
    assert llm.generate([]) == []
    assert is_idle(llm)


def test_they_run_side_by_side(make_llm: MakeLLM) -> None:
    llm = make_llm(fake={"delay": 0.005})
    begun = llm.statistics().num_steps
    llm.generate([[i] for i in range(1, 61)], SamplingParams(max_tokens=10, ignore_eos=True))
    assert llm.statistics().num_steps - begun < 60  # and not 600


def test_a_list_longer_than_the_queue(make_llm: MakeLLM) -> None:
    for settings in ({}, {"admission": "error"}):
        llm = make_llm(max_num_queued_requests=4, max_num_seqs=2, **settings)
        assert len(llm.generate([[1]] * 50, SHORT)) == 50
        assert is_idle(llm)


def test_output_types(make_llm: MakeLLM) -> None:
    class Answer(BaseModel):
        yes: bool

    llm = make_llm()
    llm.as_async().executor.choose = random.Random(5).choice
    completions = llm.generate(["x", "y"], SamplingParams(max_tokens=300), output_type=Answer)
    done = [c for c in completions if c.finish_reason == "stop"]
    assert all(isinstance(c.parsed, Answer) for c in done)
    with llm.stream("x", SamplingParams(max_tokens=300), output_type=Answer) as stream:
        partials = [stream.partial for _ in stream]
    assert all(partial is None or set(partial) <= {"yes"} for partial in partials)
    with pytest.raises(InvalidRequestError, match="output_type"):
        llm.generate(["x", "y"], output_type=print)
    assert is_idle(llm)


def test_streams(make_llm: MakeLLM) -> None:
    llm = make_llm(fake={"delay": 0.001})
    stream = llm.stream("Hello", SHORT, request_id="mine")
    with pytest.raises(InvalidRequestError, match="not ended"):
        _ = stream.completion
    tokens = list(stream)
    assert stream.request_id == "mine" and [token.position for token in tokens] == list(range(5))
    assert stream.completion.text == "".join(token.text for token in tokens) == llm.generate("Hello", SHORT).text
    assert llm.stream("Hello", SHORT).wait().token_ids == stream.completion.token_ids
    with pytest.raises(StopIteration):
        next(stream)
    with llm.stream([1], ENDLESS) as stream:
        for token in stream:
            if token.position == 3:
                break
    assert stream.completion.finish_reason is FinishReason.ABORT
    stream.close()
    dropped = llm.stream([1], ENDLESS)
    next(dropped)
    del dropped
    named = llm.stream([1], ENDLESS, request_id="named")
    assert llm.abort("named")
    assert named.wait().finish_reason is FinishReason.ABORT
    assert is_idle(llm)


def test_chats(make_llm: MakeLLM) -> None:
    def add(a: bool, b: bool) -> int:
        """Adds."""
        return a + b

    llm = make_llm()
    llm.as_async().executor.choose = random.Random(1).choice
    params = SamplingParams(max_tokens=300)
    stream = llm.stream_chat(HELLO, params, tools=[add], tool_choice="required", parallel_tool_calls=False)
    deltas = list(stream)
    assert [d.name for d in deltas if isinstance(d, ToolCallStart)] == ["add"]
    assert stream.completion.message == stream.message
    completion = llm.chat(HELLO, params, tools=[add], tool_choice="add")
    assert completion.message is not None and completion.message.tool_calls[0].name == "add"
    with pytest.raises(InvalidRequestError, match="bogus"):
        llm.chat(HELLO, bogus=1)
    with llm.stream_chat(HELLO, ENDLESS) as half_read:
        next(half_read)
    assert is_idle(llm)


def test_many_threads(make_llm: MakeLLM) -> None:
    llm = make_llm(max_num_seqs=16)
    counts: list[int] = []

    def work(i: int) -> None:
        params = SamplingParams(max_tokens=1 + i, ignore_eos=True)
        counts.append(len(llm.generate([2], params).token_ids))
        counts.append(sum(len(c.token_ids) for c in llm.generate([[1], [2]], params)))
        counts.append(len(list(llm.stream([3], params))))
        counts.append(llm.chat(HELLO, params).usage.completion_tokens)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(counts) == sorted(n for i in range(12) for n in (1 + i, 2 + 2 * i, 1 + i, 1 + i))
    assert is_idle(llm)


# -- progress


def test_progress_is_told_in_this_thread(make_llm: MakeLLM) -> None:
    told: list[tuple[int, int]] = []
    here = threading.get_ident()

    def progress(done: int, num: int) -> None:
        assert threading.get_ident() == here
        told.append((done, num))

    make_llm().generate([[1]] * 7, SHORT, progress=progress)
    assert told == [(i, 7) for i in range(8)]


def test_progress_on_a_terminal_only(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    llm = make_llm()
    for out, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", out)
        llm.generate([[1]] * 7, SHORT, progress=True)
        assert ("7/7 completions" in out.getvalue()) is shown and (out.getvalue() == "") is not shown
        llm.generate([[1]] * 7, SHORT)
        assert out.getvalue().count("7/7") == shown
    with pytest.raises(InvalidRequestError, match="progress"):
        llm.generate([[1]], SHORT, progress="yes")


def test_a_progress_that_raises_ends_the_requests(make_llm: MakeLLM) -> None:
    llm = make_llm(fake={"delay": 0.001})

    def progress(done: int, num: int) -> None:
        if done == 2:
            raise ZeroDivisionError

    params = [SamplingParams(max_tokens=5 + 50 * i, ignore_eos=True) for i in range(10)]
    with pytest.raises(ZeroDivisionError):
        llm.generate([[1]] * 10, params, progress=progress)
    assert llm.statistics().num_aborted == 8
    assert is_idle(llm)


# -- what it refuses


def test_not_on_an_event_loop(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream([1], SHORT)

    async def on_a_loop() -> None:
        for call in (
            lambda: LLM("smollm2-135m"),
            lambda: llm.generate("x"),
            lambda: llm.stream("x"),
            lambda: llm.chat(HELLO),
            lambda: llm.stream_chat(HELLO),
            lambda: llm.start_profile(),
            lambda: llm.check_health(),
            lambda: llm.close(),
            lambda: list(stream),
        ):
            with pytest.raises(InvalidRequestError, match="you are on an event loop.*use AsyncLLM"):
                call()

    asyncio.run(on_a_loop())
    assert len(stream.wait().token_ids) == 5


def test_wrong_arguments(make_llm: MakeLLM) -> None:
    llm = make_llm()
    for wrong, param in (
        ({"prompts": 7}, "prompt"),
        ({"prompts": [1.5]}, "prompt"),
        ({"prompts": b"x"}, "prompt"),
        ({"prompts": ["x", ""]}, "prompt"),
        ({"prompts": ["x", "y"], "params": [SHORT]}, "params"),
        ({"prompts": ["x"], "params": 3}, "params"),
        ({"prompts": ["x"], "params": [3]}, "params"),
        ({"prompts": "x", "params": [SHORT]}, "params"),
        ({"prompts": ["x"], "deadline": -1}, "deadline"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate(**wrong)
        assert caught.value.param == param
    for settings in ({"own_thread": False}, {"nonsense": 1}):
        with pytest.raises(InvalidRequestError) as caught:
            make_llm(**settings)
        assert caught.value.param == next(iter(settings))
    with pytest.raises(ModelLoadError, match="smollm2-135m"):
        LLM("smollm3-135m")
    assert is_idle(llm)


def test_the_first_error_ends_the_others(make_llm: MakeLLM) -> None:
    llm = make_llm(fake={"delay": 0.001})
    prompts: list[Any] = [[1]] * 5 + ["word " * 2000] + [[1]] * 5
    with pytest.raises(ContextLengthError):
        llm.generate(prompts, ENDLESS)
    assert is_idle(llm)
    results = llm.generate(prompts, SHORT, return_exceptions=True)
    assert [type(result) for result in results] == [Completion] * 5 + [ContextLengthError] + [Completion] * 5
    results = llm.generate([[1], [-1], [2]], SHORT, return_exceptions=True)
    assert [type(result) for result in results] == [Completion, InvalidRequestError, Completion]
    with pytest.raises(DeadlineExceededError):
        llm.generate([1], ENDLESS, deadline=0.02)
    assert is_idle(llm)


# -- interrupts


@pytest.fixture
def insistent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt again where Python has swallowed it, as it does in the callback of a weak reference, of which each of
    asyncio's tasks has one: a user presses Ctrl-C again, too."""
    told = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            interrupt_after(0.2)
        else:
            told(unraisable)

    monkeypatch.setattr(sys, "unraisablehook", hook)


def test_a_swallowed_interrupt_comes_again(insistent: None) -> None:
    class Held:
        pass

    held = Held()
    reference = weakref.ref(held, lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        del held
        assert reference() is None  # which is reached: the first one is swallowed
        time.sleep(20)


@pytest.mark.parametrize("what", ["one", "many", "stream", "chat"])
def test_an_interrupt_aborts_and_leaves_the_engine(make_llm: MakeLLM, insistent: None, what: str) -> None:
    llm = make_llm(fake={"delay": 0.005})
    for seconds in (0.0, 0.05):
        with pytest.raises(KeyboardInterrupt):
            interrupt_after(seconds)
            if what == "one":
                llm.generate([1], ENDLESS)
            elif what == "many":
                llm.generate([[i] for i in range(1, 300)], ENDLESS)
            elif what == "stream":
                for _ in llm.stream([1], ENDLESS):
                    pass
            else:
                llm.chat(HELLO, ENDLESS)
            time.sleep(1)
        assert is_idle(llm)
        assert len(llm.generate([1], SHORT).token_ids) == 5


def test_an_interrupt_while_it_starts(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from fakes import FakeExecutor

    async def slow(self: Any, *args: Any) -> Any:
        await asyncio.sleep(30)

    with monkeypatch.context() as patch:
        patch.setattr(FakeExecutor, "start", slow)
        with pytest.raises(KeyboardInterrupt):
            interrupt_after(0.2)
            make_llm()
    assert len(make_llm().generate([1], SHORT).token_ids) == 5


# -- life


def test_close_and_use(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        stream = llm.stream([1], ENDLESS)
        next(stream)
    with pytest.raises(EngineClosedError):
        list(stream)
    with pytest.raises(EngineClosedError, match="closed"):
        llm.generate("x")
    with pytest.raises(EngineClosedError):
        llm.chat(HELLO)
    with pytest.raises(EngineClosedError):
        llm.statistics()
    llm.close()


def test_drain_resume_and_abort_all(make_llm: MakeLLM) -> None:
    with make_llm(max_leased_steps=0, fake={"delay": 0.01}) as llm:
        streams = [llm.stream([i + 1], ENDLESS) for i in range(3)]
        assert llm.drain(0.02) is False
        for refused in (lambda: llm.generate([1]), lambda: llm.stream([1]), lambda: llm.chat(HELLO)):
            with pytest.raises(EngineClosedError, match="draining"):
                refused()
        assert llm.statistics().num_running == 3
        assert llm.abort_all() == 3
        assert llm.drain() is True
        assert [stream.wait().finish_reason for stream in streams] == [FinishReason.ABORT] * 3
        llm.resume()
        assert len(llm.generate([1], SHORT).token_ids) == 5


def test_close_lets_other_threads_finish_if_asked(make_llm: MakeLLM) -> None:
    for drain, ended in ((20.0, True), (0.0, False)):
        llm = make_llm(fake={"delay": 0.001})
        result: list[Any] = []

        def work() -> None:
            try:
                result.append(llm.generate([1], SamplingParams(max_tokens=100, ignore_eos=True)))
            except EngineClosedError as error:
                result.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        while not llm.statistics().num_running:
            time.sleep(0.001)
        llm.close(drain=drain)
        thread.join(10)
        assert isinstance(result[0], Completion) is ended


def test_a_dead_worker_reaches_every_thread(make_llm: MakeLLM) -> None:
    llm = make_llm(max_restarts=0, fake={"delay": 0.005})
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            if i % 3 == 0:
                llm.generate([1], ENDLESS)
            elif i % 3 == 1:
                llm.generate([[1], [2]], ENDLESS)
            else:
                list(llm.stream([1], ENDLESS))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    while llm.statistics().num_running < 8:
        time.sleep(0.001)
    handle_of(llm.as_async()).thread.post(llm.as_async().executor.fail, WorkerDiedError("killed", rank=0, exit_code=-9))
    for thread in threads:
        thread.join(10)
    assert [type(error) for error in errors] == [WorkerDiedError] * 6
    with pytest.raises(EngineClosedError, match="killed"):
        llm.generate("x")


def test_an_interrupt_at_any_place_of_a_wait(make_llm: MakeLLM) -> None:
    """As Ctrl-C's exception comes: between two lines, of ours or of the library's."""
    llm = make_llm(fake={"delay": 0.001})
    num_interrupts = 0
    for place in range(1, 400):
        lines_left = [place]

        def trace(frame: Any, event: str, arg: Any, left: list[int] = lines_left) -> Any:
            name = frame.f_code.co_filename
            if not name.endswith(("loop_thread.py", "threading.py", "queue.py", "llm.py")):
                return None
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            llm.check_health()
        except KeyboardInterrupt:
            num_interrupts += 1
        finally:
            sys.settrace(before)
        if lines_left[0] > 0:  # it has come through
            break
        assert llm.check_health() > 0
    assert num_interrupts > 20


# -- the end of the process


PROGRAM = """
import asyncio, sys, threading
sys.path[:0] = [{tests!r}]
from fakes import FakeExecutor
from aengine import LLM, AsyncLLM, EngineClosedError, SamplingParams, StructuredOutput
class Fake(AsyncLLM):
    def _make_executor(self, config):
        return FakeExecutor(delay=0.001)
class Sync(LLM):
    def _make_engine(self, model, settings):
        return Fake(model, skip_tokenizer=not settings.pop("with_tokenizer", False), **settings)
def new():
    return Fake("smollm2-135m", skip_tokenizer=True, own_thread=True)
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True)
{body}
print("end", flush=True)
"""
ENDINGS = {
    "engine open": "engine = asyncio.run(new().start())",
    "engine dropped": "asyncio.run(new().start())",
    "uvloop": """
import uvloop
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner: engine = runner.run(new().start())
""",
    "stream open": """
engine = asyncio.run(new().start())
stream = engine.stream([1], ENDLESS)
async def read(): await anext(stream)
asyncio.run(read())
""",
    "a daemon reads": """
llm = Sync("smollm2-135m")
def read():
    try: llm.generate([[1], [2]], ENDLESS)
    except EngineClosedError: pass
threading.Thread(target=read, daemon=True).start()
while llm.statistics().num_running < 2: pass
""",
    "iterator open": "llm = Sync('smollm2-135m')\ntokens = llm.stream([1], ENDLESS)\nnext(tokens)",
    "while it starts": """
async def start(self, *args): await asyncio.sleep(60)
FakeExecutor.start = start
def begin():
    try: Sync("smollm2-135m")
    except EngineClosedError: pass
threading.Thread(target=begin, daemon=True).start()
while not [t for t in threading.enumerate() if t.name == "aengine"]: pass
""",
    "a thread outlives the main thread": """
llm = Sync("smollm2-135m", with_tokenizer=True)
def go_on():
    threading.main_thread().join()
    for prompt, more in (("Hello", {}), ([1], {"structured_output": StructuredOutput(regex="[ab]{9}")})):
        assert llm.generate(prompt, SamplingParams(max_tokens=20, **more)).token_ids
    llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=3))
    llm.close()
    print("end", flush=True)
threading.Thread(target=go_on).start()
""",
    "an error": "llm = Sync('smollm2-135m')\nprint('end', flush=True)\nsys.exit('an error')",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDINGS)
def test_the_interpreter_ends_with_the_engine_open(how: str) -> None:
    """It ends at once, says nothing, and does not crash."""
    code = PROGRAM.format(tests=str(TESTS), body=textwrap.dedent(ENDINGS[how]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.endswith("end\n"), done.stderr
    expected = (1, "an error\n") if how == "an error" else (0, "")
    assert (done.returncode, done.stderr) == expected
