"""Grammars that take llguidance long: tried in a process that is killed in time, and started for them alone."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from bombs import BOMBS, COUNTED, ENDLESS
from grammar_helpers import accepts, matcher_of, schema_spec, smollm2, tiny, vocabulary
from test_compiler import no_threads

from aengine.errors import GrammarError
from aengine.structured import compile_process
from aengine.structured.compiler import GrammarCompiler
from aengine.structured.llguidance import process as llguidance_process
from aengine.structured.llguidance.backend import LLGuidanceBackend
from aengine.structured.spec import GrammarSpec

ENDS = schema_spec({"type": "integer", "multipleOf": 30_011})
"""Not safe, but quick."""
ENDLESS_ONE = ENDLESS["large divisor"]


@pytest.fixture
def backend() -> Iterator[LLGuidanceBackend]:
    backend = LLGuidanceBackend(vocabulary("tiny"), timeout=60.0)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def large() -> Iterator[LLGuidanceBackend]:
    backend = LLGuidanceBackend(vocabulary("smollm2"), timeout=1.0)
    yield backend
    backend.close()


def children(backend: LLGuidanceBackend) -> list[compile_process.CompilerProcess]:
    return list(backend._trials._processes._all)


def test_ordinary_grammars_start_no_process(backend: LLGuidanceBackend) -> None:
    texts = ["ab", "[a-z]{1,100}", "(a|b){20}"]
    specs = [GrammarSpec("regex", text) for text in texts]
    specs += [schema_spec({"type": "string", "pattern": "^[A-Z]{3}$"}), GrammarSpec("ebnf", 'root ::= "a"')]
    for spec in specs:
        backend.compile(spec).matcher()
    with pytest.raises(GrammarError) as caught:
        backend.compile(GrammarSpec("ebnf", "root ::= ("))
    assert caught.value.kind == "invalid"
    assert not children(backend)


def test_what_passes_its_trial_is_compiled(backend: LLGuidanceBackend) -> None:
    waits: list[bool] = []
    for _ in range(2):
        compiled = backend.compile(ENDS, waits.append)
    assert waits == [True, False]  # the process is kept
    assert len(children(backend)) == 1
    assert accepts(compiled.matcher(), tiny(), "60022")


def test_the_librarys_own_errors_come_through(backend: LLGuidanceBackend) -> None:
    names = {f"^{i}.*a$": {} for i in range(40)} | {"b": {}, "^b$": {}}
    bad = schema_spec({"type": "object", "patternProperties": names})
    with pytest.raises(GrammarError, match="disjoint") as caught:
        backend.compile(bad)
    with pytest.raises(GrammarError) as here:
        backend.compile_here(bad)
    assert (str(caught.value), caught.value.kind, caught.value.path) == (
        str(here.value),
        here.value.kind,
        here.value.path,
    )
    assert len(children(backend)) == 1


@pytest.mark.parametrize("name", BOMBS)
def test_each_bomb_ends_in_a_result_or_an_error(large: LLGuidanceBackend, name: str) -> None:
    try:
        large.compile(BOMBS[name]).matcher()
    except GrammarError as error:
        assert error.kind == "too_complex" or "Unable to determine" in str(error)
        assert "\n" not in str(error) and len(str(error)) < 600
    else:
        assert name in COUNTED
    assert accepts(matcher_of(large, GrammarSpec("regex", "ab")), smollm2(), "ab")


def test_what_takes_too_long_is_killed_and_the_next_is_tried(backend: LLGuidanceBackend) -> None:
    backend.compile(ENDS)
    (first,) = children(backend)
    backend._trials._seconds = 0.3
    with pytest.raises(GrammarError, match=r"longer than 0\.3 s") as caught:
        backend.compile(ENDLESS_ONE)
    assert caught.value.kind == "too_complex"
    assert first._process.wait(30) == -9
    (second,) = children(backend)
    assert second is not first
    assert not second.is_ready  # started for the next one, but not waited for
    backend._trials._seconds = 60.0
    backend.compile(ENDS)
    assert children(backend) == [second]


def test_what_takes_too_much_memory_ends_its_process(backend: LLGuidanceBackend) -> None:
    with pytest.raises(GrammarError, match="1 GB") as caught:
        backend.compile(ENDLESS["allOf"])
    assert caught.value.kind == "too_complex"
    backend.compile(ENDS)


def test_without_a_process_it_is_refused(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError("no process to be had")

    with monkeypatch.context() as patch:
        patch.setattr(compile_process.subprocess, "Popen", fail)
        with pytest.raises(GrammarError, match="no process to be had") as caught:
            backend.compile(ENDLESS_ONE)
    assert caught.value.kind == "too_complex"
    with monkeypatch.context() as patch:
        patch.setattr(compile_process, "_interpreter", lambda: "/bin/false")
        with pytest.raises(GrammarError, match="does not start"):
            backend.compile(ENDLESS_ONE)
    assert not children(backend)
    assert backend.compile(GrammarSpec("regex", "ab"))
    backend.compile(ENDS)


def test_closing_kills_it(backend: LLGuidanceBackend) -> None:
    backend.compile(ENDS)
    (child,) = children(backend)
    caught: list[BaseException] = []

    def compile_endless() -> None:
        try:
            backend.compile(ENDLESS_ONE)
        except GrammarError as error:
            caught.append(error)

    thread = threading.Thread(target=compile_endless)
    thread.start()
    while backend._trials._processes._idle:
        pass
    backend.close()
    thread.join()
    assert child._process.wait(30) == -9
    assert len(caught) == 1
    with pytest.raises(GrammarError, match="closed"):
        backend.compile(ENDS)


def test_a_dropped_backend_kills_it() -> None:
    backend = LLGuidanceBackend(vocabulary("tiny"), timeout=60.0)
    backend.compile(ENDS)
    (child,) = children(backend)
    del backend
    assert child._process.wait(30) == -9


async def test_a_trial_holds_up_nobody_and_its_start_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ready only after far longer than the time limit."""
    words = await asyncio.to_thread(vocabulary, "tiny")
    compiler = GrammarCompiler(words, timeout=0.5)
    await compiler.warm_up()
    start = compile_process.CompilerProcess.start
    slow = threading.Event()

    def start_slowly(self: compile_process.CompilerProcess, timeout: float) -> None:
        assert slow.wait(60)
        start(self, timeout)

    monkeypatch.setattr(compile_process.CompilerProcess, "start", start_slowly)
    bomb = asyncio.create_task(compiler.compile(ENDLESS_ONE))
    assert await compiler.compile(GrammarSpec("regex", "a+"))
    await asyncio.sleep(1.0)
    assert not bomb.done()
    slow.set()
    with pytest.raises(GrammarError, match=r"longer than 0\.25 s"):
        await bomb
    assert await compiler.compile(GrammarSpec("regex", "b+"))
    await compiler.aclose()


@pytest.mark.usefixtures("no_blocking")
async def test_real_grammars() -> None:
    words = await asyncio.to_thread(vocabulary, "smollm2")
    compiler = GrammarCompiler(words)
    await compiler.warm_up()
    schemas = [schema_spec({"type": "object", "properties": {f"p{i}": {"type": "integer"}}}) for i in range(20)]
    grammars = await asyncio.gather(*(compiler.compile(spec) for spec in schemas))
    matchers = await asyncio.to_thread(lambda: [accepts(g.matcher(), smollm2(), '{"p3": 1}') for g in grammars])
    assert all(matchers)
    with pytest.raises(GrammarError) as caught:
        await compiler.compile(schema_spec({"not": {}}))
    assert caught.value.kind == "unsupported"
    await compiler.aclose()
    await no_threads()


@pytest.mark.usefixtures("no_blocking")
async def test_a_bomb_holds_up_nobody() -> None:
    """A regex whose compile takes seconds: its request fails in time, and other grammars are compiled meanwhile."""
    words = await asyncio.to_thread(vocabulary, "smollm2")
    compiler = GrammarCompiler(words, timeout=0.2, num_threads=2)
    await compiler.warm_up()
    bomb = asyncio.create_task(compiler.compile(GrammarSpec("regex", "(((a{100}){100}){100}){100}")))
    assert (await compiler.compile(GrammarSpec("regex", "a+"))).spec == GrammarSpec("regex", "a+")
    with pytest.raises(GrammarError) as caught:
        await bomb
    assert caught.value.kind == "too_complex"
    await compiler.aclose()
    await no_threads()


async def test_many_trials_hold_up_nobody_in_as_many_processes_as_threads() -> None:
    words = await asyncio.to_thread(vocabulary, "tiny")
    compiler = GrammarCompiler(words, timeout=0.4)
    await compiler.warm_up()
    bombs = [
        asyncio.create_task(compiler.compile(schema_spec({"multipleOf": 99_999_989, "minimum": i}))) for i in range(6)
    ]
    assert await compiler.compile(GrammarSpec("regex", "b+"))
    assert not any(bomb.done() for bomb in bombs)
    backend = compiler._backends.get("llguidance")
    most = 0
    while not all(bomb.done() for bomb in bombs):
        most = max(most, len(children(backend)))  # type: ignore[arg-type]
        await asyncio.sleep(0.001)
    for result in await asyncio.gather(*bombs, return_exceptions=True):
        assert isinstance(result, GrammarError) and result.kind == "too_complex"
    assert most == 2
    await compiler.aclose()


HOST = """
import sys
sys.path.insert(0, sys.argv[1])
from bombs import BOMBS
from grammar_helpers import vocabulary
from aengine.errors import GrammarError
from aengine.structured.llguidance.backend import LLGuidanceBackend
"""


def host(code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOST + code, str(Path(__file__).parent)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_it_ends_with_a_killed_host() -> None:
    """In the middle of a trial that would take far longer."""
    process = host(
        "backend = LLGuidanceBackend(vocabulary('tiny'), timeout=600.0)\n"
        "backend._trials._processes.start()\n"
        "print(backend._trials._processes._idle[0]._process.pid, flush=True)\n"
        "backend.compile(BOMBS['large divisor'])\n"
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running()


def test_bombs_leave_no_memory_behind() -> None:
    """Those that took 0.8 GB and more of the host."""
    process = host(
        "import resource\n"
        "backend = LLGuidanceBackend(vocabulary('smollm2'), timeout=1.0)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for name in ('twice', 'four times', 'allOf', 'doubled terminals'):\n"
        "    try:\n"
        "        backend.compile(BOMBS[name])\n"
        "    except GrammarError:\n"
        "        pass\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
        "backend.close()\n"
    )
    said, _ = process.communicate(timeout=120)
    assert int(said) < 200 << 10


def unframed(parts: list[bytes]) -> Any:
    frame = b"".join(parts)
    assert compile_process._LENGTH.unpack(frame[:4]) == (len(frame) - 4,)
    return compile_process._unpack(frame[4:])


def test_long_messages_are_packed_in_pieces_that_fit_together(rng: random.Random) -> None:
    long, many = compile_process._LONG, compile_process._MANY
    for size in (0, 1, long - 1, long, long + 1, 3 * long + rng.randrange(long)):
        text = "".join(rng.choices("abc \U0001f9e9\u00e9\n", k=size))
        assert unframed(compile_process._frame({"text": text, "one": 1})) == {"text": text, "one": 1}
    for size in (0, 1, many - 1, many, many + 1, 5 * many + rng.randrange(many)):
        items = [rng.randbytes(rng.randrange(5)) for _ in range(size)]
        message = {"items": items, "ids": tuple(range(size)), "none": None}
        assert unframed(compile_process._frame(message)) == message | {"ids": list(range(size))}


def test_a_compiler_that_is_killed_writes_into_no_file_that_is_opened_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of its pipes are given anew as soon as they are closed: not while they are in use."""
    message = llguidance_process._message_of(vocabulary("smollm2"))
    process = compile_process.CompilerProcess("aengine.structured.llguidance.child", message)
    fds = [process._process.stdin.fileno(), process._process.stdout.fileno()]  # type: ignore[union-attr]
    ready, write = threading.Event(), os.write
    open_when_written = []

    def kill_and_write(fd: int, data: memoryview) -> int:
        if fd in fds and not ready.is_set():
            process.kill()
            process._process.wait()
            ready.set()
            time.sleep(0.05)  # for who would close them
        open_when_written.append(all(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds))
        return write(fd, data)

    monkeypatch.setattr(os, "write", kill_and_write)
    with pytest.raises(EOFError):
        process.start(10)
    assert ready.is_set() and open_when_written and all(open_when_written)
    for _ in range(200):
        if process._process.stdin.closed:  # type: ignore[union-attr]
            break
        time.sleep(0.01)
    assert process._process.stdin.closed  # type: ignore[union-attr]


def test_the_vocabulary_comes_whole() -> None:
    words = vocabulary("tiny")
    message = unframed(compile_process._frame(llguidance_process._message_of(words)))
    assert tuple(message["token_bytes"]) == words.token_bytes
    assert (tuple(message["eos_ids"]), frozenset(message["special_ids"])) == (words.eos_ids, words.special_ids)
    assert message["vocab_size"] == words.vocab_size


def test_close_waits_for_no_process_that_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called on the event loop, and a fork may be slow. What was started meanwhile is killed."""
    begun, go_on, killed = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        def __init__(self, module: str, vocabulary: object) -> None:
            begun.set()
            assert go_on.wait(60)

        def kill(self) -> None:
            killed.set()

    monkeypatch.setattr(compile_process, "CompilerProcess", Slow)
    processes = compile_process.CompilerProcesses("no.module", dict)
    told: list[BaseException] = []

    def start() -> None:
        try:
            processes.start()
        except compile_process.CompilerStartError as error:
            told.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    assert begun.wait(60)
    closing = threading.Thread(target=processes.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive(), "it waits for the start"
    go_on.set()
    thread.join(60)
    assert killed.is_set() and "closed" in str(told[0])
