"""Writes the table of docs/memory.md: what models take of memory, by arithmetic from their shapes.

    python scripts/memory_table.py            # write the table
    python scripts/memory_table.py --check    # exit status 1 if the page has another one

The shapes are those of benchmarks/engine_bench.py, and SmolLM2's. Weights, keys and values have 16 bits.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from engine_bench import SHAPES, n_params  # noqa: E402

PAGE = ROOT / "docs" / "memory.md"
BEGIN, END = "<!-- memory: scripts/memory_table.py -->\n", "<!-- memory: end -->"
GIB = 1024**3
GPUS = {"24 GB": 24, "48 GB": 45, "80 GB": 79, "141 GB": 140}
"""GiB that such GPUs report, by what they are sold as."""
SHARE = 0.9  # the default of gpu_memory_utilization
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
MODELS = {
    "SmolLM2-135M": SMOLLM2,
    "Qwen3-0.6B": SHAPES["qwen3-0.6b"],
    "Llama-3.1-8B": SHAPES["llama-3.1-8b"],
    "Qwen3-30B-A3B": SHAPES["qwen3-30b-a3b"],
    "Llama-3.1-70B": SHAPES["llama-3.1-70b"],
}


def weight_bytes(shape: dict[str, Any]) -> int:
    return 2 * int(n_params(shape)[0])


def token_bytes(shape: dict[str, Any]) -> int:
    """Keys and values of a token in all layers."""
    return 2 * 2 * int(shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"])


def tokens_left(shape: dict[str, Any], gib: float) -> str:
    """Tokens of KV beside the weights, in thousands; "-" if the weights leave nothing."""
    left = SHARE * gib * GIB - weight_bytes(shape)
    return f"{left / token_bytes(shape) / 1000:,.0f}k" if left > 0 else "-"


def table() -> str:
    lines = [
        "| model | weights, GiB | KV of 1,000 tokens, MiB | " + " | ".join(GPUS) + " |",
        "|---|---|---|" + "---|" * len(GPUS),
    ]
    for name, shape in MODELS.items():
        cells = [tokens_left(shape, gib) for gib in GPUS.values()]
        weights, kv = weight_bytes(shape) / GIB, 1000 * token_bytes(shape) / 1024**2
        lines.append(f"| {name} | {weights:,.1f} | {kv:,.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    written = f"{before}{BEGIN}\n{table()}\n\n{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(written != text)
    PAGE.write_text(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
