"""Chaos and fuzz: programs with a seed, of which the tests run a little."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "workers"))  # behind all else: that folder has a conftest.py too
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # fake_worker.py
sys.path.append(str(Path(__file__).parents[1] / "adversity"))  # slow_runner.py
