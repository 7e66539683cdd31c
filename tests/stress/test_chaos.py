"""A little of each part of chaos.py: it runs, and no promise is broken."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from pairs import some

SCRIPT = Path(__file__).parent / "chaos.py"
MORE = [pytest.mark.slow, pytest.mark.extended]
"""Others do the same in the cases beside; hangs are in test_recovery_smollm2.py, ranks that die in
test_ranked_processes.py, replicas in test_replicas_engine.py and, many times, in tests/api/test_replicas.py."""
PROGRAMS = ["chaos", "fuzz", "fuzz_files", "grow", "transformers_classes"]
SMALL = "--streams 4 --tokens 10"


@pytest.mark.parametrize(
    ("options", "key", "count"),
    [
        pytest.param(f"kills --kills 1 {SMALL}", "restarts", 1, marks=MORE),
        pytest.param(f"hangs --hangs 1 {SMALL}", "restarts", 1, marks=MORE),
        pytest.param(f"replicas --kills 2 --mean 0.5 {SMALL}", "restarts", 2, marks=MORE),
        pytest.param(f"kills --kills 1 --ranks 2 {SMALL}", "restarts", 1, marks=MORE),
        pytest.param(f"hangs --hangs 1 --ranks 2 {SMALL}", "restarts", 1, marks=MORE),
        ("hosts --hosts 2 --model fake", "hosts", 2),
        pytest.param("hosts --hosts 2 --model real --ranks 2", "hosts", 2, marks=MORE),
        ("cancels --cancels 600", "cancels", 600),
        ("requests --count 2000", "requests", 2000),
    ],
)
def test_a_little_of_a_part(options: str, key: str, count: int, rng: random.Random) -> None:
    command = [sys.executable, str(SCRIPT), *options.split(), "--seed", str(rng.getrandbits(32))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout)
    assert line[key] == count and line["broken"] == []


@pytest.mark.parametrize("program", some(PROGRAMS, "fuzz"))  # the others are run, or import all of transformers
def test_the_programs_find_what_they_import(program: str) -> None:
    """By their own search path, not by that of these tests."""
    command = [sys.executable, str(SCRIPT.with_name(f"{program}.py")), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
