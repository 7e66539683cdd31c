"""Whatever becomes of a host, its worker processes and its names in /dev/shm go with it, within two seconds.

The tests wait for longer, as the machine may be busy, and print what it took.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from processes import Host, subreaper

STARTS, LIVES = 4, 2
"""Hosts that are killed at a random moment of each kind: `make stress` kills sixteen more."""
LOOPS = ("fake", "uvloop")


@pytest.fixture(autouse=True)
def orphans_are_ours() -> Iterator[None]:
    with subreaper():
        yield


def check_all_gone(host: Host) -> None:
    host.wait()
    print(f"gone after {host.seconds_until_nothing_is_left():.3f} s")


def sleep_a_while(rng: random.Random, most: float) -> None:
    delay = rng.uniform(0, most)
    print(f"after {delay:.4f} s:", end=" ")
    time.sleep(delay)


# -- SIGKILL


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_while_it_starts(ranks: int, rng: random.Random) -> None:
    """A tenth of a second of processes, names and rings in the making, then loading."""
    for _ in range(STARTS // ranks):
        with Host("serve", rng.choice(LOOPS), ranks) as host:
            host.until("begin")
            sleep_a_while(rng, 0.2)
            host.kill()
            check_all_gone(host)


@pytest.mark.parametrize("scenario", ["serve", "churn", "restarts"])
def test_killed_at_any_time(scenario: str, rng: random.Random) -> None:
    """Mid-step; anywhere in the lives of one engine after another (a start takes 0.5 s, an end 0.1 s); and while a
    worker that died is replaced."""
    for _ in range(LIVES):
        with Host(scenario, rng.choice(LOOPS)) as host:
            host.until("streaming")
            sleep_a_while(rng, {"serve": 0.1, "churn": 0.8, "restarts": 0.8}[scenario])
            host.kill()
            check_all_gone(host)


@pytest.mark.parametrize(("scenario", "word"), [("closing", "closing"), ("stuck", "stuck")])
def test_killed_while_the_worker_hangs(scenario: str, word: str) -> None:
    """In a step that never ends, while aclose() waits for it; and in one that keeps the worker's GIL."""
    with Host(scenario) as host:
        host.until(word)
        host.kill()
        check_all_gone(host)


@pytest.mark.parametrize("word", ["begin", "streaming"])
def test_a_real_model_goes_with_its_host(word: str, rng: random.Random) -> None:
    """While torch is imported and weights are read; and while it generates, or with an interpreter that ends then."""
    with Host(rng.choice(["serve", "leave_by_sys_exit"]), "real") as host:
        host.until(word)
        sleep_a_while(rng, {"begin": 1.5, "streaming": 0.3}[word])
        host.kill()
        check_all_gone(host)


@pytest.mark.parametrize("scenario", ["asleep", "asleep_without_workers", "waking", "updating"])
def test_killed_asleep(scenario: str, rng: random.Random) -> None:
    """And with weights under way, of which no file has a name."""
    with Host(scenario, "real") as host:
        host.until("asleep")
        assert any("memfd:aengine-weights" in name for name in host.descriptors()) == (scenario == "updating")
        sleep_a_while(rng, 2.0 if scenario == "waking" else 0.1)
        host.kill()
        check_all_gone(host)


# -- other ends


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ended_by_a_signal(number: int) -> None:
    with Host("serve") as host:
        host.until("streaming")
        host.kill(number)
        check_all_gone(host)
        errors = host.errors()
    assert "KeyboardInterrupt" in errors if number == signal.SIGINT else not errors


@pytest.mark.parametrize(
    ("scenario", "code", "said"),
    [
        ("leave_by_os_exit", 3, ""),
        ("leave_by_exception", 1, "RuntimeError: a bug of the host's"),
        ("leave_by_sys_exit", 4, ""),
        ("leave_by_sys_exit_in_a_callback", 4, ""),
        ("leave_by_abort", -signal.SIGABRT, ""),
        ("leave_by_segfault", -signal.SIGSEGV, ""),
        ("leave_with_open_streams", 0, ""),
        ("leave_without_closing_the_loop", 0, ""),
        ("leave_with_the_loop_in_a_thread", 0, ""),
    ],
)
def test_a_host_that_ends_by_itself(scenario: str, code: int, said: str, rng: random.Random) -> None:
    """With streams open; and nothing of ours is said about it on stderr."""
    with Host(scenario, rng.choice(LOOPS)) as host:
        host.until("streaming")
        assert host.wait() == code
        check_all_gone(host)
        errors = host.errors()
    for word in ("Fatal Python error", "Exception ignored", "never retrieved", "EngineClosedError:"):
        assert word not in errors, errors
    assert said in errors and bool(said) == bool(errors), errors


@pytest.mark.parametrize("scenario", ["live_on_after_the_loop", "live_on_after_an_error"])
def test_a_host_that_outlives_its_loop(scenario: str, rng: random.Random) -> None:
    """asyncio.run has ended with streams open: no worker, no zombie, no descriptor of ours in the process."""
    with Host(scenario, rng.choice(LOOPS)) as host:
        host.until("lives")
        print(f"gone after {host.seconds_until_nothing_is_left():.3f} s")
        process = psutil.Process(host.pid)
        assert process.children() == []
        assert not [f for f in host.descriptors() if "eventfd" in f or "aengine" in f]


def test_a_host_that_becomes_another_program() -> None:
    """exec, as servers do to load new code: the pid goes on, and can't reap the worker that it does not know of."""
    with Host("leave_by_exec") as host:
        host.until("executed")
        while any(process.status() != psutil.STATUS_ZOMBIE for process in host.others()):
            time.sleep(0.005)
        assert not host.names()
        assert not [f for f in host.descriptors() if "aengine" in f]
        host.kill()
        check_all_gone(host)


# -- forks


@pytest.mark.parametrize(("scenario", "model"), [("fork_and_go_on", "fake"), ("fork_and_use", "uvloop")])
def test_a_fork_does_no_harm(scenario: str, model: str) -> None:
    with Host(scenario, model) as host:
        said = host.rest()
        assert host.wait() == 0, host.errors()
        assert said == ["begin", "ready", "streaming", *["refused"] * (scenario == "fork_and_use"), "served", "closed"]
        check_all_gone(host)


def test_a_fork_that_outlives_the_host(rng: random.Random) -> None:
    """It holds a copy of the death pipe, so that only the kernel's signal tells the worker."""
    with Host("fork_that_outlives", rng.choice(LOOPS)) as host:
        host.until("forked")
        host.kill()
        host.wait()
        print(f"gone after {host.seconds_until_nothing_is_left(but=1):.3f} s")
        assert len(host.others()) == 1, "the fork lives"


# -- notebooks and grammars


def test_a_kernel_is_interrupted_and_restarted(rng: random.Random) -> None:
    with Host("notebook", rng.choice(LOOPS)) as host:
        host.until("cell")
        for _ in range(3):
            host.kill(signal.SIGINT)
            host.until("interrupted 20")
            host.until("cell")
        host.kill(signal.SIGTERM)
        host.until("terminated")
        host.kill()
        check_all_gone(host)


def test_a_compiler_process_goes_with_its_host(rng: random.Random) -> None:
    """It takes half a second to start; then it compiles for the second that it is given."""
    with Host("compiling") as host:
        host.until("asked")
        while len(host.others()) < 2:  # a worker and a compiler
            time.sleep(0.01)
        sleep_a_while(rng, 3.0)
        host.kill()
        check_all_gone(host)
