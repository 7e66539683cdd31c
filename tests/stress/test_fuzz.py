"""A few hundred of what fuzz.py does by the ten thousand, and what hypothesis makes up."""

from __future__ import annotations

import asyncio
import logging
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest
import slow_runner
from fuzz_calls import TOOL, FuzzedLLM, fuzz_answers, fuzz_calls
from fuzz_frames import Report, fuzz_frames
from fuzz_values import LyingList, OddText, Untouchable, deep
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_helpers import config, gone, start, step

from aengine import ContextLengthError, InvalidRequestError, SamplingParams
from aengine.engine.executor import ProcessExecutor
from aengine.errors import EngineError, InternalError
from aengine.ipc.layout import CONTROL_BYTES, HEAD, NOTHING_WANTED, WANTED, WHOLE
from aengine.ipc.messages import Kind, MessageError, unpack
from aengine.ipc.ring import Assembler, Consumer, FrameError, Producer

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
PLAIN = st.recursive(
    SCALARS | st.binary(max_size=12),
    lambda inner: st.lists(inner, max_size=10) | st.dictionaries(st.text(max_size=9), inner, max_size=5),
    max_leaves=30,
)


def check(report: Report) -> None:
    print(dict(report.outcomes), f"slowest: {report.slowest:.3f} s")
    assert not report.findings, "\n".join(report.findings)


# -- frames and messages


@pytest.mark.timeout(60)
def test_malformed_frames(rng: random.Random) -> None:
    check(asyncio.run(fuzz_frames(400, rng.getrandbits(30))))


@settings(max_examples=300)
@given(st.sampled_from(list(Kind)), st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(kind: Kind, payload: bytes) -> None:
    try:
        unpack(kind, payload)
    except MessageError as error:
        assert len(str(error)) < 1000


@settings(max_examples=300)
@given(st.sampled_from(list(Kind)), PLAIN)
def test_any_data_is_a_message_or_an_error(kind: Kind, data: Any) -> None:
    try:
        unpack(kind, msgpack.packb(data))
    except MessageError as error:
        assert len(str(error)) < 1000


@settings(max_examples=300)
@given(st.data())
def test_a_ring_that_was_scribbled_on(data: st.DataObject) -> None:
    region = memoryview(bytearray(CONTROL_BYTES + 512))
    words = region[:CONTROL_BYTES].cast("Q")
    words[WANTED] = NOTHING_WANTED
    producer, consumer, assembler = Producer(region, lambda: None), Consumer(region, lambda: None), Assembler(1 << 12)
    for size in data.draw(st.lists(st.integers(0, 60), max_size=4), "sizes"):
        producer.write(18, 1, WHOLE, bytes(size))
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, 511), st.integers(0, 255)), max_size=6), "bytes"):
        region[CONTROL_BYTES + at] = value
    if data.draw(st.booleans()):
        words[HEAD] = data.draw(st.integers(0, 1024) | st.integers(0, 2**64 - 1), "head")
    frames = []
    try:
        while consumer.refresh():
            while (raw := consumer.read()) is not None:
                frames.append(assembler.add(*raw))
    except FrameError:
        pass
    assert len(frames) <= 512 // 32


BLOW_UPS = """
import resource, struct, sys, time
from aengine.ipc.messages import Kind, MessageError, unpack
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for payload in (
    b"\\xdd\\xff\\xff\\xff\\xff", b"\\xc6\\xff\\xff\\xff\\xff", b"\\xdf\\xff\\xff\\xff\\xff", b"\\x91" * (1 << 20),
    (b"\\xdd" + struct.pack(">I", 1 << 20)) * 1000 + bytes(1 << 20),  # a thousand lists of a million each
    b"\\xc0" + b"\\xff" * (20 << 20),  # 20 MB after the message
):
    for kind in Kind:
        try:
            unpack(kind, payload)
        except MessageError as error:
            assert len(str(error)) < 1000
        else:
            sys.exit(f"{kind.name} took {payload[:10]!r}")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_claimed_lengths_take_no_memory() -> None:
    """In a process of its own, whose peak is its own."""
    done = subprocess.run([sys.executable, "-c", BLOW_UPS], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    grown = int(done.stdout)
    print(f"grown by {grown} MB")
    assert grown < 300


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("unpickled",))


@pytest.mark.parametrize("kind", list(Kind))
def test_nothing_is_unpickled(kind: Kind, capsys: pytest.CaptureFixture[str]) -> None:
    """Not as a message, and not inside one."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        evil = pickle.dumps(Evil(), protocol)
        for payload in (
            evil,
            msgpack.packb(evil),
            msgpack.packb(msgpack.ExtType(1, evil)),
            msgpack.packb({"value": evil}),
        ):
            try:
                unpack(kind, payload)
            except MessageError:
                pass
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("seed", range(6))
async def test_a_worker_that_scribbles_on_its_rings(seed: int) -> None:
    """A real one, as a stray pointer in a kernel library would: who waits gets one typed error, and it is killed."""
    executor = ProcessExecutor(config(worker="slow_runner:load_scribbling_model"))
    failures: list[EngineError | None] = []
    await start(executor, failures=failures)
    future = await executor.execute_model(step(0, [slow_runner.SCRIBBLE, seed]))
    with pytest.raises(InternalError, match="sent nonsense: FrameError"):
        await asyncio.wait_for(future, 30)
    assert len(failures) == 1
    pid = executor.workers[0].pid
    await executor.aclose(5)
    await gone(pid)


# -- model files


@pytest.mark.extended  # ten seconds are the start; what a spoiled file leads to is in tests/checkpoint and models
@pytest.mark.slow
@pytest.mark.timeout(170)
def test_spoiled_model_files() -> None:
    """The same cases each time; `make stress` runs others. In a process of its own: it forks one for each case,
    which a process with threads must not."""
    program = Path(__file__).with_name("fuzz_files.py")
    command = [sys.executable, str(program), "--cases", "40", "--seed", "614015349"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=165)
    assert done.returncode == 0, done.stdout + done.stderr


# -- calls


FOUND: list[tuple[str, Any]] = [  # the parameter that the error names, and the call
    ("prompt", lambda engine: engine.generate(LyingList())),
    ("prompt", lambda engine: engine.generate([5, int])),
    ("prompt", lambda engine: engine.generate([5, deep(5000, lambda v: [v])])),
    ("messages", lambda engine: engine.chat(LyingList(), tools=[TOOL])),
    ("messages", lambda engine: engine.chat([{"role": "tool", "tool_call_id": [], "content": object}], tools=[TOOL])),
    ("messages", lambda engine: engine.chat(with_call(arguments=object()), tools=[TOOL])),
    ("messages", lambda engine: engine.chat(with_call(content=5), tools=[TOOL])),
    ("tool_choice", lambda engine: engine.chat(HELLO, tools=[TOOL], tool_choice=deep(5000, lambda v: [v]))),
    ("tools", lambda engine: engine.chat(HELLO, tools=[Untouchable()])),
    ("priority", lambda engine: engine.generate("a", priority=[10**5000])),
    ("cache_salt", lambda engine: engine.generate("a", cache_salt=deep(5000, lambda v: [v]))),
    ("request_id", lambda engine: engine.generate("a", request_id=["x"] * 5000)),
]


HELLO = [{"role": "user", "content": "Hello"}]


def with_call(content: Any = None, arguments: Any = "{}") -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [*HELLO, {"role": "assistant", "content": content, "tool_calls": [call]}]


@pytest.mark.parametrize(("param", "call"), FOUND, ids=[f"{param}-{i}" for i, (param, _) in enumerate(FOUND)])
async def test_what_was_found_before(param: str, call: Any) -> None:
    async with FuzzedLLM("smollm2-135m", preload_grammars=False) as engine:
        with pytest.raises((InvalidRequestError, ContextLengthError)) as caught:
            await call(engine)
        # A list that lies about its length is believed where it says that it can't fit.
        assert getattr(caught.value, "param", param) == param and len(str(caught.value)) < 500
        completion = await engine.generate(OddText("odd"), SamplingParams(max_tokens=2))
        assert len(completion.token_ids) == 2
        assert not engine.abort([])  # type: ignore[arg-type]


@pytest.mark.timeout(120)
def test_malformed_calls(rng: random.Random) -> None:
    check(asyncio.run(fuzz_calls(400, rng.getrandbits(30))))


@pytest.mark.timeout(120)
def test_malformed_answers(rng: random.Random, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "aengine")
    check(asyncio.run(fuzz_answers(200, rng.getrandbits(30))))
