"""The runner of fake_worker.py with so little memory and such small steps that requests queue, and are preempted."""

from __future__ import annotations

import os
from typing import Any

import fake_worker

from aengine.workers.loaded import FixedModel


def load_model(*args: Any) -> FixedModel:
    model: FixedModel = fake_worker.load_model(*args)
    sizes = {"num_blocks": int(os.environ["CHAOS_BLOCKS"]), "max_num_batched_tokens": 1024, "device": "cpu"}
    model.offer = {**model.offer, **sizes}
    return model
