"""Shared by all tests: loops (asyncio in debug mode, with I/O uvloop too), which no test may block, and seeds."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

# Helpers' asserts tell what they compared, and hold with python -O, too, as those of test files do. Some other
# sitecustomize than the tests' own may be imported already, of which pytest would warn.
pytest.register_assert_rewrite(
    *(
        path.stem
        for path in Path(__file__).parent.rglob("*.py")
        if not path.stem.startswith(("test_", "conftest", "__", "sitecustomize"))
    )
)

HAS_GPU = os.path.exists("/dev/nvidiactl")
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a Triton kernel is imported

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # each of the test processes has a core for its workers

for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # a shell has some ignored in what it starts behind it,
    if signal.getsignal(number) is signal.SIG_IGN:  # and our children would inherit that
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

settings.register_profile("aengine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("random", settings.get_profile("aengine"), derandomize=False)  # for `make stress`
settings.load_profile("aengine")


def _debug_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 1.0  # the debug loop is slow by itself; blockbuster finds blocking calls
    return loop


LOOPS = {"asyncio-debug": _debug_loop, "uvloop": uvloop.new_event_loop}


SLOW = {
    *("adversity", "e2e", "gpu", "integrations", "kernels", "models", "parallel", "remote", "runner", "server"),
    *("stress", "workers"),
}
"""Folders that `make test-fast` leaves out: their tests start processes or servers, compute models, or import torch or
a framework."""
SLOW_FILES = {
    "test_architecture.py",
    "test_channel_processes.py",
    "test_doctor.py",
    "test_embedded.py",
    "test_hostile.py",
    "test_hub.py",
    "test_linear_time.py",
    "test_model_command.py",
    "test_own_thread_life.py",
    "test_page_copies.py",
    "test_scheduler_properties.py",
    "test_text_bound.py",
    "test_trial.py",
    "test_walks.py",
}
"""Files of other folders that it leaves out: their tests start processes, or a few of them take ten seconds; that of
the architecture is part of `make check`."""
WITH_FAKES = {"api", "remote", "server", "telemetry"}
"""Folders whose tests read streams of engines without a model, in seconds: one that stands still is found sooner."""
WITH_IO = {"adversity", "ipc", "remote", "stress", "threads", "workers"}
"""Folders whose tests wait for bytes, processes or threads, and so run on both loops."""
WITH_IO_FILES = {
    "test_async_llm.py",
    "test_both_worlds.py",
    "test_loop_ownership.py",
    "test_own_thread.py",
    "test_own_thread_life.py",
    "test_page_copies.py",
    "test_replicas.py",
}


CACHE = Path(__file__).parent.parent / "build" / "cache"
"""In place of ~/.cache, also for processes that tests start: there the next run, too, finds the code of compiled
kernels."""


def _use_own_cache() -> None:
    """Models are still those of the user's cache."""
    from aengine.config import model_cache

    models, own = model_cache(), CACHE / "aengine" / "models"
    own.parent.mkdir(parents=True, exist_ok=True)
    if models != own and models.is_dir():
        with suppress(FileExistsError):
            own.symlink_to(models, target_is_directory=True)
    os.environ["XDG_CACHE_HOME"] = str(CACHE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unless-known", action="store_true", help="leave out files that are known to pass: unchanged.py")
    parser.addoption("--seed", type=int, help="of the random numbers of `rng`: the one that was printed with a failure")


def pytest_configure(config: pytest.Config) -> None:
    """In `make test`, workers of models on the CPU are forks of one process that has imported torch."""
    import pairs

    _use_own_cache()
    pairs.WITH_EXTENDED = "not extended" not in config.option.markexpr
    if not pairs.WITH_EXTENDED and not HAS_GPU:
        from forked_workers import Forks

        from aengine.workers.host import supervisor

        supervisor.subprocess = forks = Forks()
        config.add_cleanup(forks.close)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test-fast` does not even import the slow folders, nor `make test` what is known to pass as it is."""
    if config.option.unless_known and not HAS_GPU:
        from unchanged import is_known

        if is_known(collection_path):
            return True
    is_slow = collection_path.parent == Path(__file__).parent and collection_path.name in SLOW
    is_slow |= collection_path.name in SLOW_FILES
    return True if is_slow and "not slow" in config.option.markexpr else None


ON_BOTH_LOOPS = {
    "test_call_queue.py",
    "test_channel.py",
    "test_doorbell_shm.py",
    "test_loop_ownership.py",
    "test_threads.py",
}
"""Of the files whose tests run on both loops, those about the loop itself: `make test`, too, runs them on both. Each
test of the others has one of the loops there, and the other in `make test-all`."""


def _is_on_the_other_loop(item: pytest.Item) -> bool:
    """Whether it is the same test on the other loop that `make test` runs."""
    case = getattr(item, "callspec", None)
    loop = case and case.params.get("_asyncio_loop_factory")
    if loop not in LOOPS.values() or item.path.name in ON_BOTH_LOOPS or len(loops_of(item)) == 1:
        return False
    test = item.nodeid
    for name in LOOPS:
        test = test.replace(name, "")
    return loop is not list(LOOPS.values())[zlib.crc32(test.encode()) % 2]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from what stays for the whole session: modules and tests, a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what can't hold here, and mark what is in a slow folder."""
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if not __debug__ and item.get_closest_marker("invariant"):
            item.add_marker(pytest.mark.skip(reason="python -O leaves out asserts"))
        if _is_on_the_other_loop(item):
            item.add_marker(pytest.mark.extended)
        if SLOW.intersection(item.path.parts) or item.path.name in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        if WITH_FAKES.intersection(item.path.parts) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(60))


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict:
    return loops_of(item)


def loops_of(item: pytest.Item) -> dict:
    """Both loops where there is I/O; the fast one for what takes seconds; else the debug one, which finds more."""
    if "e2e" in item.path.parts:
        return {"uvloop": LOOPS["uvloop"]}
    if WITH_IO.intersection(item.path.parts) or item.path.name in WITH_IO_FILES:
        return LOOPS
    return {"asyncio-debug": LOOPS["asyncio-debug"]}


@pytest.fixture
def no_blocking() -> Iterator[None]:
    """A blocking call made by aengine while a coroutine runs fails the test."""
    blockbuster = BlockBuster(["aengine"])
    blockbuster.activate()
    try:
        yield
    finally:
        blockbuster.deactivate()


@pytest.fixture(scope="session")
def quick_interpreter() -> None:
    """Triton's interpreter, without what it does in vain. Where there is a GPU, kernels are compiled."""
    from triton_interpreter import quicken_interpreter

    if not HAS_GPU:
        quicken_interpreter()


@pytest.fixture
def few_idle_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode plan for a GPU of two multiprocessors: Triton's interpreter runs hundreds of idle programs otherwise."""
    from aengine.kernels.decode_plan import DecodeWorkspace

    sharing = DecodeWorkspace.sharing
    if not HAS_GPU:
        monkeypatch.setattr(DecodeWorkspace, "sharing", lambda self, n: sharing(self, n)._replace(max_extra=24))


@pytest.fixture
def wide_programs(monkeypatch: pytest.MonkeyPatch, few_idle_programs: None) -> None:
    """A product of one row in a tenth of its programs, for tests of whole models: the interpreter takes a millisecond
    for each, however much it multiplies. The tests of kernels have the real tiles."""
    if HAS_GPU:
        return
    pytest.importorskip("triton")
    from aengine.kernels.decode_plan import DecodeWorkspace
    from aengine.kernels.triton import linear_gemv, linear_grouped

    for module, name in (
        (linear_gemv, "_gemv_blocks"),
        (linear_gemv, "_gemv_blocks_of_codes"),
        (linear_grouped, "_gemv_blocks"),
    ):
        blocks = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *shape, of=blocks: (32, *of(*shape)[1:]))
    sharing = DecodeWorkspace.sharing
    monkeypatch.setattr(DecodeWorkspace, "sharing", lambda self, n: sharing(self, n)._replace(max_extra=8))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Fresh random numbers, or those of `pytest --seed`; the seed is printed with a failure."""
    seed = request.config.getoption("--seed")
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    print(f"again: pytest --seed {seed} '{request.node.nodeid}'")
    return random.Random(seed)


@pytest.fixture(scope="session")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SmolLM2 with a few of its layers."""
    from short_model import write_short_model

    return str(write_short_model(tmp_path_factory.mktemp("short") / "smollm2.gguf"))


@pytest.fixture
def collected() -> Iterator[None]:
    """Garbage of this test is collected inside it, so that a finaliser's warning is this test's."""
    yield
    gc.collect()
