"""The picture of traffic.py's results: arrivals over time, load curves, and all workloads, engines side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from traffic_report import label, value

Line = dict[str, Any]
COLOURS = ("#0b6e99", "#d9622b", "#3a8f4d", "#8a4fb0", "#b08d1e", "#666666")
LIMIT_COLOUR = "#b3261e"
QUIET = "#777777"


def plot(lines: Sequence[Line], path: Path | str) -> None:
    """Write the picture. Raises ValueError if there are no results."""
    results = [line for line in lines if line["kind"] == "result" and "error" not in line]
    if not results:
        raise ValueError("there are no results to plot")
    engines = list(dict.fromkeys(line["engine"] for line in results))
    colours = {engine: COLOURS[i % len(COLOURS)] for i, engine in enumerate(engines)}
    over_time = _runs_over_time(results)
    rates = sorted({line["params"]["rate"] for line in results if line["workload"] == "poisson"})
    kinds = list(dict.fromkeys(label(line) for line in results if "first_token_ms" in line))

    heights = (
        [2.6] * len(over_time) + ([2.9] if len(rates) > 1 else []) + [1.0 + 0.16 * len(kinds) * (1 + len(engines))]
    )
    figure = Figure(figsize=(15, sum(heights) + 0.55 * len(heights) + 1.5), layout="constrained", dpi=110)
    rows = figure.subfigures(len(heights) + 1, 1, height_ratios=[0.5, *heights])
    _head(rows[0], lines, results, colours)
    at = 1
    for kind in over_time:
        _over_time(rows[at], [line for line in results if label(line) == kind], kind, colours)
        at += 1
    if len(rates) > 1:
        _load(rows[at], [line for line in results if line["workload"] == "poisson"], colours)
        at += 1
    _side_by_side(rows[at], results, kinds, colours)
    figure.savefig(path)


def _runs_over_time(results: Sequence[Line]) -> list[str]:
    """Of the Poisson runs the one with the highest load, and each other workload that has a course of time."""
    kinds = [label(line) for line in results if "requests_over_time" in line]
    poisson = [line for line in results if line["workload"] == "poisson" and "requests_over_time" in line]
    highest = max(poisson, key=lambda line: line["params"]["rate"], default=None)
    keep = [kind for kind in dict.fromkeys(kinds) if not kind.startswith(("poisson", "agents"))]
    return ([label(highest)] if highest else []) + keep


def _head(panel: Any, lines: Sequence[Line], results: Sequence[Line], colours: dict[str, str]) -> None:
    models = ", ".join(dict.fromkeys(line["model"] for line in results))
    machines = []
    for line in lines:
        if line["kind"] == "calibration":
            speeds = [f"{number:g} {_UNITS[key]}" for key, number in line.items() if key in _UNITS]
            machines.append(f"{line.get('device', '?')}: {', '.join(speeds)}")
    panel.text(0.008, 0.88, f"Traffic: {models}", fontsize=14, weight="bold", va="top")
    when = ", ".join(dict.fromkeys(line["call"] for line in results))
    panel.text(0.008, 0.38, f"{when}    {'; '.join(dict.fromkeys(machines))}", fontsize=8.5, color=QUIET, va="top")
    handles = [Line2D([], [], color=colour, lw=4, label=engine) for engine, colour in colours.items()]
    panel.legend(handles=handles, loc="upper right", ncols=min(4, len(handles)), frameon=False, fontsize=10)


_UNITS = {
    "copy_tb_s": "TB/s copied",
    "matmul_tflop_s": "TFLOP/s",
    "copy_gb_s": "GB/s copied",
    "matmul_gflop_s": "GFLOP/s",
}


def _over_time(panel: Any, results: Sequence[Line], kind: str, colours: dict[str, str]) -> None:
    """One workload, its last round of each engine: first tokens of requests, and gaps, against time."""
    first, gaps = panel.subplots(1, 2)
    latest = {line["engine"]: line for line in results}
    for engine, line in latest.items():
        requests = [row for row in line["requests_over_time"]["rows"] if row[0] >= 0]
        colour = colours[engine]
        first.plot([r[0] for r in requests], [r[1] for r in requests], "o", ms=3.2, mew=0, alpha=0.65, color=colour)
        bins = [row for row in line["gaps_over_time"]["rows"] if row[0] >= 0]
        gaps.plot([b[0] for b in bins], [max(b[2], 0.05) for b in bins], lw=1.3, color=colour)
        gaps.plot([b[0] for b in bins], [max(b[1], 0.05) for b in bins], lw=1, ls=":", color=colour)
    limits = results[0].get("limits_ms", [200.0, 20.0])
    _style(first, f"{kind}: first token, each request (ms)", "seconds", limits[0])
    _style(gaps, f"{kind}: between tokens, each 0.2 s: longest (line), median (dots)", "seconds", limits[1])


def _load(panel: Any, results: Sequence[Line], colours: dict[str, str]) -> None:
    """Throughput and tails of the Poisson runs against their rate."""
    tokens, first, gaps, good = panel.subplots(1, 4)
    for engine, colour in colours.items():
        own = [line for line in results if line["engine"] == engine]
        rates = sorted({line["params"]["rate"] for line in own})

        def curve(axes: Axes, *where: str, own: list[Line] = own, rates: list[float] = rates, **style: Any) -> None:
            heights = [_median([line for line in own if line["params"]["rate"] == rate], where) for rate in rates]
            axes.plot(rates, heights, **style)

        curve(tokens, "tokens_per_s", marker="o", ms=4, color=colour)
        for axes, of in ((first, "first_token_ms"), (gaps, "between_tokens_ms")):
            curve(axes, of, "p50", marker="o", ms=4, color=colour)
            curve(axes, of, "p99", marker="o", ms=4, ls="--", color=colour)
            curve(axes, of, "max", marker="^", ms=3, ls=":", lw=1, color=colour)
        curve(good, "good_share", marker="o", ms=4, color=colour)
    limits = results[0].get("limits_ms", [200.0, 20.0])
    _style(tokens, "tokens/s against load", "arrivals a second", None, log=False)
    _style(first, "first token (ms): p50, p99 (dashed), max (dots)", "arrivals a second", limits[0])
    _style(gaps, "between tokens (ms): p50, p99, max", "arrivals a second", limits[1])
    _style(good, f"goodput: share within {limits[0]:g} and {limits[1]:g} ms", "arrivals a second", None, log=False)
    tokens.set_ylim(bottom=0)
    good.set_ylim(-0.03, 1.03)


def _side_by_side(panel: Any, results: Sequence[Line], kinds: Sequence[str], colours: dict[str, str]) -> None:
    """Every workload a row: ranges of first tokens and of gaps; tokens/s against the first engine's."""
    first, gaps, speed = panel.subplots(1, 3, width_ratios=[1, 1, 0.8])
    limits = results[0].get("limits_ms", [200.0, 20.0])
    _ranges(first, results, kinds, colours, "first_token_ms")
    _ranges(gaps, results, kinds, colours, "between_tokens_ms")
    first.axvline(limits[0], color=LIMIT_COLOUR, lw=0.8, ls="--")
    gaps.axvline(limits[1], color=LIMIT_COLOUR, lw=0.8, ls="--")
    _rows(first, kinds, "first token (ms): p50, p99, max")
    _rows(gaps, kinds, "between tokens (ms): p50, p99, max")
    gaps.set_yticklabels([])
    reference = next(iter(colours))
    throughput = list(dict.fromkeys(label(line) for line in results if line.get("tokens_per_s")))

    def relative(line_of: Callable[[str], Any], kind: str) -> Callable[[str], float | None]:
        return lambda engine: _ratio(line_of(engine), line_of(reference))

    bars = [
        (kind, relative(lambda engine, kind=kind: _median(_of(results, kind, engine), ("tokens_per_s",)), kind))
        for kind in throughput
    ]
    bars += [
        (f"{kind}:\nto undisturbed", lambda engine, kind=kind: _median(_of(results, kind, engine), ("ratio",)))
        for kind in dict.fromkeys(label(line) for line in results if "ratio" in line)
    ]
    _bars(speed, bars, colours)
    speed.set_title(f"tokens/s, {reference} = 1; blocked: to undisturbed", fontsize=10, loc="left")


def _ranges(axes: Axes, results: Sequence[Line], kinds: Sequence[str], colours: dict[str, str], figure: str) -> None:
    step = 0.8 / len(colours)
    for row, kind in enumerate(kinds):
        for i, (engine, colour) in enumerate(colours.items()):
            own = _of(results, kind, engine)
            p50, p99, most = (_median(own, (figure, name)) for name in ("p50", "p99", "max"))
            if p50 is None or p99 is None or most is None:
                continue
            y = row - 0.4 + step * (i + 0.5)
            p50, p99, most = (max(number, 0.05) for number in (p50, p99, most))
            axes.plot([p50, p99], [y, y], lw=2.4, color=colour, solid_capstyle="butt")
            axes.plot([p99, most], [y, y], lw=0.9, color=colour)
            axes.plot([p50], [y], "o", ms=5, color=colour)
            if most > 1.02 * p50:
                axes.plot([most], [y], "|", ms=7, color=colour)
            beside = {"textcoords": "offset points", "va": "center", "fontsize": 7}
            axes.annotate(_number(p50), (p50, y), (-5, 0), ha="right", **beside)
            if most > 1.02 * p50:
                axes.annotate(_number(most), (most, y), (5, 0), **beside)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.8, high * 1.8)
    _readable(axes.xaxis)
    axes.grid(axis="x", color="#e3e3e3", lw=0.7)


def _bars(axes: Axes, bars: Sequence[tuple[str, Callable[[str], float | None]]], colours: dict[str, str]) -> None:
    step = 0.8 / len(colours)
    for row, (_, length) in enumerate(bars):
        for i, (engine, colour) in enumerate(colours.items()):
            number = length(engine)
            if number is not None:
                y = row - 0.4 + step * (i + 0.5)
                axes.barh([y], [number], height=step * 0.85, color=colour)
                axes.annotate(f"{number:.2f}", (number, y), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.axvline(1, color=QUIET, lw=0.8)
    axes.margins(x=0.12)
    _rows(axes, [name for name, _ in bars], "")


def _rows(axes: Axes, names: Sequence[str], title: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    for row in range(1, len(names)):
        axes.axhline(row - 0.5, color="#ededed", lw=0.8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left")


def _style(axes: Axes, title: str, x_title: str, limit: float | None, *, log: bool = True) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x_title, fontsize=8.5)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e8e8e8", lw=0.7)
    axes.set_axisbelow(True)
    if log:
        axes.set_yscale("log")
        _readable(axes.yaxis)
    if limit is not None:
        axes.axhline(limit, color=LIMIT_COLOUR, lw=0.8, ls="--")


def _readable(axis: Axis) -> None:
    """Plain numbers at 1, 2 and 5 of each decade."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda number, _: _number(number)))
    axis.set_minor_locator(NullLocator())


def _of(results: Sequence[Line], kind: str, engine: str) -> list[Line]:
    return [line for line in results if line["engine"] == engine and label(line) == kind]


def _median(results: Sequence[Line], where: tuple[str, ...]) -> float | None:
    found = [number for line in results if (number := value(line, where)) is not None]
    return statistics.median(found) if found else None


def _ratio(number: float | None, reference: float | None) -> float | None:
    return number / reference if number is not None and reference else None


def _number(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"
