"""Fixtures of the worker tests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import uvloop


@pytest.fixture(params=["asyncio", "uvloop"])
def any_loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that the test runs itself, by turns or from several threads."""
    loop = asyncio.new_event_loop() if request.param == "asyncio" else uvloop.new_event_loop()
    yield loop
    if not loop.is_closed():
        loop.close()
