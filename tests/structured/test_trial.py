"""Grammars that take llguidance long: tried in a process that is killed in time, and started for them alone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from bombs import BOMBS, COUNTED, ENDLESS
from grammar_helpers import accepts, matcher_of, schema_spec, smollm2, tiny, vocabulary
from pairs import some
from test_compiler import no_threads

import aengine
from aengine.engine.structured.compiler import GrammarCompiler
from aengine.engine.structured.llguidance import trial
from aengine.engine.structured.llguidance.backend import LLGuidanceBackend
from aengine.engine.structured.llguidance.trial import TrialError, Trials
from aengine.engine.structured.spec import GrammarSpec
from aengine.errors import GrammarError

ENDS = schema_spec({"type": "integer", "multipleOf": 30_011})
"""Tried, and quick."""
ENDLESS_ONE = ENDLESS["large divisor"]


@pytest.fixture
def backend() -> Iterator[LLGuidanceBackend]:
    backend = LLGuidanceBackend(vocabulary("tiny"), timeout=60.0)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def large() -> Iterator[LLGuidanceBackend]:
    backend = LLGuidanceBackend(vocabulary("smollm2"), timeout=0.5)
    yield backend
    backend.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started."""
    found: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noted(*args: Any, **options: Any) -> Any:
        found.append(popen(*args, **options))
        return found[-1]

    monkeypatch.setattr(trial.subprocess, "Popen", noted)
    return found


def test_ordinary_grammars_start_no_process(backend: LLGuidanceBackend, started: list[Any]) -> None:
    specs = [GrammarSpec("regex", text) for text in ("ab", "[a-z]{1,100}", "(a|b){20}")]
    specs += [schema_spec({"type": "string", "pattern": "^[A-Z]{3}$"}), GrammarSpec("ebnf", 'root ::= "a"')]
    for spec in specs:
        backend.compile(spec).matcher()
    with pytest.raises(GrammarError) as caught:
        backend.compile(GrammarSpec("ebnf", "root ::= ("))
    assert caught.value.kind == "invalid"
    assert not started


def test_what_passes_its_trial_is_compiled(backend: LLGuidanceBackend, started: list[Any]) -> None:
    waits: list[bool] = []
    compiled = backend.compile(ENDS, waits.append)
    assert waits == [True, False]
    assert accepts(compiled.matcher(), tiny(), "60022")
    assert len(started) == 1 and started[0].returncode is not None  # nothing stays


def test_the_librarys_own_errors_come_through(backend: LLGuidanceBackend, started: list[Any]) -> None:
    names = {f"^{i}.*a$": {} for i in range(40)} | {"b": {}, "^b$": {}}
    with pytest.raises(GrammarError, match="disjoint") as caught:
        backend.compile(schema_spec({"type": "object", "patternProperties": names}))
    assert caught.value.kind == "unsupported" and started


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    some(
        BOMBS,
        *("once", "in Lark", "a long string", "four times in a schema", "intersection of names", "name patterns"),
    ),
)
def test_each_bomb_ends_in_a_result_or_an_error(large: LLGuidanceBackend, name: str) -> None:
    try:
        large.compile(BOMBS[name]).matcher()
    except GrammarError as error:
        assert error.kind == "too_complex" or "Unable to determine" in str(error)
        assert "\n" not in str(error) and len(str(error)) < 600
    else:
        assert name in COUNTED
    assert accepts(matcher_of(large, GrammarSpec("regex", "ab")), smollm2(), "ab")


def test_references_that_lead_too_deep_end_their_process_alone(backend: LLGuidanceBackend) -> None:
    with pytest.raises(GrammarError, match="references lead too deep") as caught:
        backend.compile(BOMBS["references"])
    assert caught.value.kind == "too_complex"


def test_what_takes_too_long_is_killed(backend: LLGuidanceBackend, started: list[Any]) -> None:
    backend._trials.seconds = 0.3  # for this grammar alone: the next one has its time
    with pytest.raises(GrammarError, match=r"longer than 0\.3 s") as caught:
        backend.compile(ENDLESS_ONE)
    assert caught.value.kind == "too_complex"
    assert started[0].returncode == -9
    backend._trials.seconds = 60.0
    backend.compile(ENDS)


@pytest.mark.slow
def test_what_takes_too_much_memory_ends_its_process(
    backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of less memory than it may have otherwise, which this one takes 8 s to fill. Of much less, glibc can't reserve
    the 128 MiB of a thread's arena, and each allocation tries that anew: the compile would take minutes."""
    assert trial.MAX_BYTES == 1 << 30
    monkeypatch.setattr(trial, "MAX_BYTES", 1 << 28)
    with pytest.raises(GrammarError, match="compiling it takes more than") as caught:
        backend.compile(ENDLESS["allOf"])
    assert caught.value.kind == "too_complex"
    backend.compile(ENDS)


def test_without_a_process_it_is_refused(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError("no process to be had")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(trial.subprocess, "Popen", fail)
        for _ in range(3):
            with pytest.raises(GrammarError, match="no process to be had") as caught:
                backend.compile(ENDLESS_ONE)
    assert caught.value.kind == "too_complex"
    with monkeypatch.context() as patch:
        patch.setattr(trial, "_interpreter", lambda: "/bin/false")
        with pytest.raises(GrammarError, match="ended with code 1"):
            backend.compile(ENDLESS_ONE)
    assert len(os.listdir("/proc/self/fd")) == before
    assert backend.compile(GrammarSpec("regex", "ab"))
    backend.compile(ENDS)


def test_one_that_does_not_start_in_time_is_killed(
    backend: LLGuidanceBackend, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_START_SECONDS", 0.0)
    with pytest.raises(GrammarError, match="not ready in time"):
        backend.compile(ENDS)
    assert started[0].returncode == -9


def test_closing_kills_it(backend: LLGuidanceBackend, started: list[Any]) -> None:
    waiting = threading.Event()
    caught: list[BaseException] = []

    def compile_endless() -> None:
        try:
            backend.compile(ENDLESS_ONE, lambda is_waiting: waiting.set())
        except GrammarError as error:
            caught.append(error)

    thread = threading.Thread(target=compile_endless)
    thread.start()
    assert waiting.wait(60)
    backend.close()
    thread.join(60)
    assert started[0].returncode == -9 and len(caught) == 1
    with pytest.raises(GrammarError, match="closed"):
        backend.compile(ENDS)


def test_the_process_finds_a_package_that_the_host_found_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a finder, or by a relative folder."""
    package_parent = str(Path(aengine.__file__).parents[1])
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder and folder != package_parent])
    trials = Trials(vocabulary("tiny"), 60.0)
    assert trials.run("nonsense")
    trials.close()


def test_a_trial_says_what_the_library_says_and_leaves_no_file(backend: LLGuidanceBackend) -> None:
    trials = Trials(vocabulary("tiny"), 60.0)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError) as caught:
        backend.try_out("nonsense")
    assert trials.run("nonsense") == str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_trial_holds_up_nobody_and_its_start_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ready only after far longer than the time limit."""
    words = await asyncio.to_thread(vocabulary, "tiny")
    compiler = GrammarCompiler(lambda: words, timeout=0.5)
    await compiler.warm_up()
    read = trial._read  # slowed down, as a busy machine does it
    slow = threading.Event()

    def read_slowly(source: int, size: int, seconds: float) -> bytes | None:
        assert size < 0 or slow.wait(60)
        return read(source, size, seconds)

    monkeypatch.setattr(trial, "_read", read_slowly)
    bomb = asyncio.create_task(compiler.compile(ENDLESS_ONE))
    assert await compiler.compile(GrammarSpec("regex", "a+"))
    await asyncio.sleep(1.0)  # four times the time limit, which is what is tested here
    assert not bomb.done()
    slow.set()
    with pytest.raises(GrammarError, match=r"longer than 0\.25 s"):
        await bomb
    assert await compiler.compile(GrammarSpec("regex", "b+"))
    await compiler.aclose()


@pytest.mark.usefixtures("no_blocking")
async def test_real_grammars() -> None:
    words = await asyncio.to_thread(vocabulary, "smollm2")
    compiler = GrammarCompiler(lambda: words)
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


async def test_many_trials_hold_up_nobody_in_as_many_processes_as_threads(started: list[Any]) -> None:
    words = await asyncio.to_thread(vocabulary, "tiny")
    compiler = GrammarCompiler(lambda: words, timeout=0.4)
    await compiler.warm_up()
    bombs = [
        asyncio.create_task(compiler.compile(schema_spec({"multipleOf": 99_999_989, "minimum": i}))) for i in range(6)
    ]
    assert await compiler.compile(GrammarSpec("regex", "b+"))
    assert not any(bomb.done() for bomb in bombs)
    most = 0
    while not all(bomb.done() for bomb in bombs):
        most = max(most, sum(process.returncode is None for process in started))
        await asyncio.sleep(0.001)  # processes are looked at as long as there are any
    for result in await asyncio.gather(*bombs, return_exceptions=True):
        assert isinstance(result, GrammarError) and result.kind == "too_complex"
    assert most == 2 and len(started) == 6
    await compiler.aclose()


HOST = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from bombs import BOMBS
from grammar_helpers import vocabulary
from aengine.errors import GrammarError
from aengine.engine.structured.llguidance.backend import LLGuidanceBackend
"""


def host(code: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOST + code, str(Path(__file__).parent)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_it_ends_with_a_killed_host() -> None:
    """In the middle of a trial that would take far longer."""
    process = host(
        "backend = LLGuidanceBackend(vocabulary('tiny'), timeout=600.0)\n"
        "said = lambda is_waiting: print(*[p.pid for p in backend._trials._running], flush=True)\n"
        "backend.compile(BOMBS['large divisor'], said)\n"
    )
    assert process.stdout is not None
    process.stdout.readline()
    child = psutil.Process(int(process.stdout.readline()))  # it has begun
    process.kill()
    process.wait()
    process.stdout.close()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running()


def test_a_terminal_that_takes_all_that_must_follow_writes_no_endless_text() -> None:
    """In a process of its own: the library would go on until memory ends, at compile time or in mid-stream."""
    process = host(
        "import resource\n"
        "from aengine.engine.structured.spec import GrammarSpec\n"
        "from grammar_helpers import allowed, text_ids, tiny\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (40, 40))\n"
        "backend = LLGuidanceBackend(vocabulary('tiny'))\n"
        "grammars = ['start: A A\\nA: \"b\"+', 'start: /b*b/ \"b\"']\n"
        'grammars += [\'root ::= a a\\na ::= "b"+\', \'root ::= "b"* "b"\']\n'
        "grammars += ['%llguidance {\"no_forcing\": false}\\n' + grammars[0]]\n"
        "for grammar in grammars:\n"
        "    kind = 'ebnf' if '::=' in grammar else 'lark'\n"
        "    matcher = backend.compile(GrammarSpec(kind, grammar)).matcher()\n"
        "    for token_id in text_ids(tiny(), 'b') * 3:\n"
        "        assert token_id in allowed(backend, matcher) and matcher.forced_tokens() == []\n"
        "        assert matcher.accept([token_id]) == 1\n"
        "    print(len(grammar), flush=True)\n"
        "backend.close()\n"
    )
    said, _ = process.communicate(timeout=300)
    assert len(said.split()) == 5 and process.returncode == 0


@pytest.mark.slow
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


def test_a_closed_one_tries_nothing() -> None:
    trials = Trials(vocabulary("tiny"), 60.0)
    trials.close()
    trials.close()
    with pytest.raises(TrialError, match="closed"):
        trials.run("")
