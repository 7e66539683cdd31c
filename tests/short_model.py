"""SmolLM2 without most of its layers: as good as the real one to tests that compare an engine with itself or with
transformers, at a quarter of the time."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig

NUM_LAYERS = 3


def kv_memory(model: str, num_bytes: int) -> int:
    """Bytes in which the model keeps as many tokens as the whole one in ``num_bytes``."""
    return num_bytes if model == "smollm2-135m" else num_bytes * NUM_LAYERS // 30


def write_short_model(path: Path) -> Path:
    """A copy of the embedded model's file whose header says that it has ``NUM_LAYERS`` layers.

    The weights of the others stay in it, and are not read.
    """
    shutil.copyfile(resolve_model(EngineConfig.create("smollm2-135m", {})).path, path)
    key = b"llama.block_count" + struct.pack("<I", 4)  # a number of 32 bits follows
    with path.open("r+b") as file:
        head = file.read(1 << 16)
        assert head.count(key) == 1
        file.seek(head.index(key) + len(key))
        file.write(struct.pack("<I", NUM_LAYERS))
    return path
