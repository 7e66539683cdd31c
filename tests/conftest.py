"""Shared by all tests: every async test runs on asyncio in debug mode and on uvloop, and may not block its loop."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
from collections.abc import Iterator

import pytest
import uvloop
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

HAS_GPU = os.path.exists("/dev/nvidiactl")
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a Triton kernel is imported

for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # a shell has some ignored in what it starts behind it,
    if signal.getsignal(number) is signal.SIG_IGN:  # and our children would inherit that
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

settings.register_profile("aengine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("aengine")


def _debug_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = 1.0  # the debug loop is slow by itself; blockbuster finds blocking calls
    return loop


LOOPS = {"asyncio-debug": _debug_loop, "uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``gpu`` tests are skipped where there is none."""
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict:
    if "e2e" in item.path.parts:  # what takes seconds runs on one of them
        return {"uvloop": LOOPS["uvloop"]}
    return LOOPS


@pytest.fixture
def no_blocking() -> Iterator[None]:
    """A blocking call made by aengine while a coroutine runs fails the test."""
    blockbuster = BlockBuster(["aengine"])
    blockbuster.activate()
    try:
        yield
    finally:
        blockbuster.deactivate()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Fresh random numbers; the seed is printed with a failure."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed of {request.node.name}: {seed}")
    return random.Random(seed)


@pytest.fixture
def collected() -> Iterator[None]:
    """Garbage of this test is collected inside it, so that a finaliser's warning is this test's."""
    yield
    gc.collect()
