"""What tells a model's KV from that of all others: the first part of the keys of its pages."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ...checkpoint.source import ModelSource
from ...config import EngineConfig

_FORMAT = 1  # a page's layout by this version of aengine: another number finds nothing of what others saved
_KINDS = (".safetensors", ".gguf")
_CHUNK = 16 << 20
_READY = (
    *("activations", "attention_backend", "block_size", "device_name", "dtype", "fused", "kv_cache_dtype"),
    *("kv_cache_scales", "kv_groups", "model_impl", "model_type", "rope_border", "weight_format", "weights"),
)
"""What workers say of themselves that has a part in the bits of KV."""
_SETTINGS = ("batch_invariant", "enable_expert_parallel", "pipeline_parallel_size", "tensor_parallel_size")


def weights_digest(config: EngineConfig, source: ModelSource, is_dropped: Callable[[], bool]) -> bytes:
    """Return what tells these weights from all others, wherever their files lie. ``is_dropped``: whether nobody waits
    any longer. Blocking: reads the files, 3.9 GiB a second if they are in memory, but those of a hub's cache, whose
    names are hashes of their content."""
    digest = blake2b(digest_size=32)
    if source.format == "dummy":
        digest.update(f"dummy {config.seed}".encode())
        return digest.digest()
    place = Path(source.path)
    parts = (
        place.parent.glob(f"{_escaped(place.name.partition('-00001-of-')[0])}*") if place.is_file() else place.iterdir()
    )
    for file in sorted(file for file in parts if file.suffix in _KINDS):
        blob = file.resolve()
        if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name):
            digest.update(f"{file.name} {blob.name}".encode())
            continue
        digest.update(f"{file.name if place.is_dir() else ''} {blob.stat().st_size}".encode())
        with open(blob, "rb", buffering=0) as opened:
            chunk = memoryview(bytearray(_CHUNK))
            while (size := opened.readinto(chunk)) and not is_dropped():
                digest.update(zlib.crc32(chunk[:size]).to_bytes(4, "little"))
    return digest.digest()


def _escaped(name: str) -> str:
    return re.sub(r"([\[*?])", r"[\1]", name)


def fingerprints(
    config: EngineConfig, source: ModelSource, weights: bytes, ready: Mapping[str, Any], page_bytes: list[int]
) -> list[bytes]:
    """Return what the keys of each rank's pages begin with. ``weights``: their digest; ``ready``: what the workers say
    of themselves; ``page_bytes``: of each rank."""
    said = {name: ready.get(name) for name in _READY}
    settings = {name: getattr(config, name) for name in _SETTINGS}
    shared = json.dumps(
        [_FORMAT, weights.hex(), source.hf_config, said, settings], sort_keys=True, default=str
    ).encode()
    return [
        blake2b(shared + f" {rank} of {page_bytes}".encode(), digest_size=32).digest()
        for rank in range(len(page_bytes))
    ]
