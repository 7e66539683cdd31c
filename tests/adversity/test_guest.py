"""What a host sees of itself before, while and after it has an engine: a guest leaves no trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("guest_program.py")
WHILE_IT_RUNS = {"threads", "native threads", "children", "descriptors", "tasks", "readers"}


def stages_of(*options: str) -> dict[str, dict[str, list[Any]]]:
    command = [sys.executable, str(PROGRAM), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(line) for line in done.stdout.splitlines())


def check_settled(changes: dict[str, list[Any]]) -> None:
    """Takes out of ``changes`` what Python's own modules and native libraries keep once they have been used."""
    before, after = changes.pop("calls at exit", (0, 0))
    assert after - before <= 1, "weakref.finalize registers itself once"
    before, after = changes.pop("native threads", (0, 0))
    # Idle ones: the pool of the library tokenizers, one for each core.
    assert after - before <= 2 * (os.cpu_count() or 1)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_guest_leaves_no_trace(loop: str) -> None:
    """Text, token ids, grammars, a type, a chat and one with tools; twice."""
    stages = stages_of(loop)
    assert list(stages) == ["imported", "made", "started", "used", "closed", "closed again", "left"]
    assert stages["imported"] == stages["made"] == {}

    for name in ("started", "used"):
        changes = stages[name]
        assert len(changes["children"][1]) == 1, changes["children"]
        new_threads = set(changes["threads"][1]) - {"MainThread"}
        assert all(thread.startswith("aengine-") for thread in new_threads), new_threads
        check_settled(changes)
        assert set(changes) <= WHILE_IT_RUNS, changes

    for name in ("closed", "left"):
        changes = stages[name]
        check_settled(changes)
        assert not changes
    assert stages["closed again"] == {}
