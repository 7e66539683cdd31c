"""Markers of langchain-tests, whose plugins this suite does without."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    for name in ("benchmark", "vcr"):
        config.addinivalue_line("markers", f"{name}: of langchain-tests")
