"""One log line that describes the running engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def summary_of(ready: Mapping[str, Any], speculation: str = "none") -> str:
    """Format the main facts of a start as ``name=value``; those that a worker does not tell are left out.
    ``speculation``: the method that the setting names."""
    device = ready.get("device")
    name = ready.get("device_name")
    shown = {
        "device": f"{device} ({name})" if name else device,
        "dtype": ready.get("dtype"),
        "activations": "int16" if "int16" in ready.get("activations", "") else None,
        "weights": (ready.get("weight_format") or "").replace(", ", ",") or None,
        "kv_tokens": ready["num_blocks"] // max(1, len(ready.get("kv_groups", ()))) * ready["block_size"],
        "kv_memory": _kv_memory(ready),
        "max_model_len": ready["max_model_len"],
        "attention": ready.get("attention_backend"),
        "speculation": None if speculation == "none" else speculation,
        "graphs": ready.get("num_graphs"),
        "threads": ready.get("num_threads"),
        "pid": ready.get("pid"),
    }
    return " ".join(f"{name}={value}" for name, value in shown.items() if value is not None)


def _kv_memory(ready: Mapping[str, Any]) -> str | None:
    """Return the memory of the KV cache as text. A CPU's system gives pages when they are first written, so that the
    process grows to this much with use."""
    if "kv_cache_bytes" not in ready:
        return None
    size = f"{ready['kv_cache_bytes'] / 2**30:.2f}GiB"
    return size if ready.get("is_accelerator") else f"{size}(taken-as-used)"
