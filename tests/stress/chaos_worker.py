"""The runner of fake_worker.py with so little memory and such small steps that requests queue, and are preempted."""

from __future__ import annotations

import os
from typing import Any

import fake_worker


def load_runner(*args: Any) -> tuple[fake_worker.FakeRunner, dict[str, Any]]:
    runner, ready = fake_worker.load_runner(*args)
    return runner, ready | {
        "num_blocks": int(os.environ["CHAOS_BLOCKS"]),
        "max_num_batched_tokens": 1024,
        "device": "cpu",
    }
