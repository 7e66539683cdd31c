"""``python -O``: what comes from outside is checked by other means than asserts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("optimized_program.py")


def test_wrong_requests_harm_nobody_without_asserts(short_model: str) -> None:
    environment = {**os.environ, "PYTHONOPTIMIZE": "1", "PYTHONPATH": str(PROGRAM.parent)}
    command = [sys.executable, "-B", str(PROGRAM), short_model]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.stdout.strip() == "fine", done.stdout + done.stderr
