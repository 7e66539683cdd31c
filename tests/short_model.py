"""SmolLM2 without most of its layers: as good as the real one to tests that compare an engine with itself or with
transformers, at a quarter of the time."""

from __future__ import annotations

import struct
from pathlib import Path

from aengine.checkpoint.gguf_file import GgufFile
from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig

NUM_LAYERS = 3


def kv_memory(model: str, num_bytes: int) -> int:
    """Bytes in which the model keeps as many tokens as the whole one in ``num_bytes``."""
    return num_bytes if model == "smollm2-135m" else num_bytes * NUM_LAYERS // 30


def write_short_model(path: Path) -> Path:
    """Write the embedded model's first ``NUM_LAYERS`` layers, and what is beside the layers, as a file of their own."""
    source = Path(resolve_model(EngineConfig.create("smollm2-135m", {})).path)
    with GgufFile(source) as whole, open(source, "rb") as data:
        kept = [tensor for tensor in whole.tensors.values() if _layer(tensor.name) < NUM_LAYERS]
        first = next(iter(whole.tensors)).encode()
        head = data.read(1 << 24)
        metadata = bytearray(head[: head.index(struct.pack("<Q", len(first)) + first)])
        struct.pack_into("<Q", metadata, 8, len(kept))
        key = b"llama.block_count" + struct.pack("<I", 4)  # a number of 32 bits follows
        assert metadata.count(key) == 1
        struct.pack_into("<I", metadata, metadata.index(key) + len(key), NUM_LAYERS)
        offset = 0
        for tensor in kept:
            name, dims = tensor.name.encode(), tensor.shape[::-1]
            metadata += struct.pack("<Q", len(name)) + name
            metadata += struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor.type_code, offset)
            offset += _padded(tensor.nbytes)
        with open(path, "wb") as file:
            file.write(metadata.ljust(_padded(len(metadata)), b"\0"))
            for tensor in kept:
                data.seek(tensor.offset)
                file.write(data.read(tensor.nbytes).ljust(_padded(tensor.nbytes), b"\0"))
    return path


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blk.") else 0


def _padded(size: int) -> int:
    return -(-size // 32) * 32
