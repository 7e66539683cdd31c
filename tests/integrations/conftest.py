"""Markers of langchain-tests, whose plugins this suite does without; and the real model, started once for all kits."""

from __future__ import annotations

import pytest

from aengine import LLM, AsyncLLM


def pytest_configure(config: pytest.Config) -> None:
    for name in ("benchmark", "vcr"):
        config.addinivalue_line("markers", f"{name}: of langchain-tests")


_STARTED: list[LLM] = []


@pytest.fixture
def smollm2() -> AsyncLLM:
    """The embedded model on a thread of its own: for tests of any loop, and for those without one."""
    if not _STARTED:
        _STARTED.append(LLM("smollm2-135m", device="cpu", max_model_len=4096))
    return _STARTED[0].as_async()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End it before the tests of another folder: some look for processes that are left."""
    if _STARTED and (nextitem is None or nextitem.path.parent != item.path.parent):
        _STARTED.pop().close()
