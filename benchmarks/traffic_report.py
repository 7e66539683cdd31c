"""What traffic.py prints: a line a result, and a table with the engines side by side."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

# title, where it is in a result, decimals
_COLUMNS: list[tuple[str, tuple[str, ...], int]] = [
    ("first p50", ("first_token_ms", "p50"), 1),
    ("p99", ("first_token_ms", "p99"), 1),
    ("max", ("first_token_ms", "max"), 1),
    ("gap p50", ("between_tokens_ms", "p50"), 2),
    ("p99", ("between_tokens_ms", "p99"), 2),
    ("max", ("between_tokens_ms", "max"), 1),
    ("tokens/s", ("tokens_per_s",), 0),
    ("good", ("good_share",), 3),
    ("host CPU", ("host_cpu_s",), 2),
    ("worker", ("worker_cpu_s",), 2),
    ("late p99", ("client_late_ms", "p99"), 2),
    ("failed", ("failures",), 0),
]


def value(line: dict[str, Any], where: tuple[str, ...]) -> float | None:
    """A figure of a result; of several repetitions the median, of failures their number."""
    found: Any = line
    for key in where:
        found = found.get(key) if isinstance(found, dict) else None
    if isinstance(found, dict):
        return sum(found.values())
    if isinstance(found, list):
        return statistics.median(found) if found else None
    return found


def label(line: dict[str, Any]) -> str:
    """The workload, with its rate where there is one."""
    rate = line.get("params", {}).get("rate")
    return line["workload"] + (f" {rate:g}/s" if rate else "")


def headline(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"{label(line):28} {line['error']}"
    parts = [
        f"{title} {found:.{decimals}f}"
        for title, where, decimals in _COLUMNS
        if (found := value(line, where)) is not None and (title != "failed" or found)
    ]
    return f"{label(line):28} " + ", ".join(parts + _extras(line))


def _extras(line: dict[str, Any]) -> list[str]:
    found = []
    if "ratio" in line:
        found.append(f"blocked to undisturbed {line['ratio']:.3f}")
    hit_rate = (line.get("engine_counted") or {}).get("hit_rate")
    if hit_rate is not None and "prefix" in line["workload"]:
        found.append(f"hit rate {hit_rate:.3f}")
    if "decode_between_tokens_ms" in line:
        gap = line["decode_between_tokens_ms"]["p99"]
        found.append(f"all decoding: {line['decode_tokens_per_s']:.0f} tokens/s, gap p99 {gap:.2f}")
    if "steps_waited" in line:
        waited = line["steps_waited"]
        found.append(f"steps waited p50 {waited['p50']}, max {waited['max']}, limit {waited['limit']}")
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """Medians over rounds, a row an engine; milliseconds, seconds of CPU."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        if line["kind"] == "result" and "error" not in line:
            rows[label(line), line["engine"]].append(line)
    wide = max((len(engine) for _, engine in rows), default=10)
    out = ["", " " * (30 + wide) + "".join(f"{title:>11}" for title, _, _ in _COLUMNS)]
    for workload in dict.fromkeys(workload for workload, _ in rows):
        for (of, engine), results in rows.items():
            if of != workload:
                continue
            cells = []
            for _, where, decimals in _COLUMNS:
                found = [number for result in results if (number := value(result, where)) is not None]
                cells.append(f"{statistics.median(found):11.{decimals}f}" if found else " " * 11)
            extras = ", ".join(_extras(results[len(results) // 2]))
            out.append(f"{workload:28}  {engine:{wide}}" + "".join(cells) + (f"  {extras}" if extras else ""))
    return "\n".join(out) + "\n"
