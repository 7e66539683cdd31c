"""A fixture for tests that count drafts over workers whose steps take next to no time."""

from __future__ import annotations

import pytest

from aengine.engine.speculation import proposing


@pytest.fixture(autouse=True)
def every_step_has_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are looked for before each step: beside such short steps any search takes more than its share."""
    monkeypatch.setattr(proposing, "_FREE_SEARCHES", 1 << 40)
