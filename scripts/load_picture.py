"""Writes load.svg and the table of gpu.md from load.json, in benchmarks/results: first token and throughput by load.

python scripts/load_picture.py RESULTS/traffic.jsonl    # take the Poisson runs of benchmarks/traffic.py in, then both
python scripts/load_picture.py                          # only picture and table
python scripts/load_picture.py --check                  # exit status 1 if picture or table are others

load.json: {"engine": [{"rate", "p50", "p99", "tokens_per_s"}, ...]}, requests a second, milliseconds until the
first token; null: not measured.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
FIGURES, PICTURE, PAGE = RESULTS / "load.json", RESULTS / "load.svg", RESULTS / "gpu.md"
BEGIN, END = "<!-- load: scripts/load_picture.py -->\n", "<!-- load: end -->\n"
COLOURS = ("#0b6e99", "#d9622b", "#3a8f4d", "#8a4fb0")
WIDTH, HEIGHT = 430, 300  # of a panel
LEFT, TOP, RIGHT, BOTTOM = 64, 46, 16, 44  # its margins

Point = dict[str, Any]
Figures = dict[str, list[Point]]


def points(files: Iterable[str]) -> Figures:
    """The Poisson runs of traffic.py, by engine and rate; medians where there are several of a rate."""
    runs: dict[str, dict[float, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        for line in map(json.loads, Path(file).read_text().splitlines()):
            if line["kind"] == "result" and line["workload"] == "poisson" and "error" not in line:
                first = line["first_token_ms"]
                point = {"p50": first["p50"], "p99": first["p99"], "tokens_per_s": line["tokens_per_s"]}
                runs[line["engine"]][line["params"]["rate"]].append(point)
    return {
        engine: [
            {"rate": rate} | {key: statistics.median(run[key] for run in of[rate]) for key in of[rate][0]}
            for rate in sorted(of)
        ]
        for engine, of in runs.items()
    }


def table(figures: Figures) -> str:
    """Markdown, a row a rate."""
    engines = list(figures)
    head = [
        "arrivals a second",
        *(f"{e}: first token p50; p99, ms" for e in engines),
        *(f"{e}: tokens/s" for e in engines),
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for rate in sorted({point["rate"] for of in figures.values() for point in of}):
        found = [next((p for p in figures[engine] if p["rate"] == rate), None) for engine in engines]
        cells = [f"{rate:g}"]
        cells += ["" if p is None else f"{p['p50']:.1f}; {p['p99']:.1f}" for p in found]
        cells += ["" if p is None or p["tokens_per_s"] is None else f"{p['tokens_per_s']:,.0f}" for p in found]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten within the limits."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [digit * 10.0**power for power in powers for digit in (1, 2, 5) if low <= digit * 10.0**power <= high]


class Panel:
    """Two logarithmic axes at ``left``, and the lines between them."""

    def __init__(self, left: float, title: str, rates: list[float], values: list[float]) -> None:
        self._left = left
        self._x = min(rates) / 1.15, max(rates) * 1.15
        self._y = min(values) / 1.4, max(values) * 1.4
        self._title = title

    def _at(self, rate: float, value: float) -> tuple[float, float]:
        def part(at: float, of: tuple[float, float]) -> float:
            return math.log(at / of[0]) / math.log(of[1] / of[0])

        x = self._left + LEFT + part(rate, self._x) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - part(value, self._y) * (HEIGHT - TOP - BOTTOM)

    def axes(self) -> Iterator[str]:
        yield f'<text x="{self._left + LEFT}" y="{TOP - 12}" font-weight="bold">{self._title}</text>'
        for rate in ticks(*self._x):
            x, bottom = self._at(rate, self._y[0])
            yield f'<path class="grid" d="M{x:.1f} {bottom:.1f}V{TOP}"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{rate:g}</text>'
        for value in ticks(*self._y):
            x, y = self._at(self._x[0], value)
            yield f'<path class="grid" d="M{x:.1f} {y:.1f}H{self._left + WIDTH - RIGHT}"/>'
            yield f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:,g}</text>'
        middle = self._left + (LEFT + WIDTH - RIGHT) / 2
        yield f'<text x="{middle:.1f}" y="{HEIGHT - 8}" text-anchor="middle">arrivals a second</text>'

    def line(self, of: list[Point], key: str, colour: str, *, dashed: bool = False) -> Iterator[str]:
        places = [self._at(point["rate"], point[key]) for point in of if point[key] is not None]
        if not places:
            return
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)


def picture(figures: Figures) -> str:
    """SVG: first token, p50 and p99, and tokens a second."""

    def all_of(*keys: str) -> list[float]:
        return [point[key] for of in figures.values() for point in of for key in keys if point[key] is not None]

    rates = all_of("rate")
    first = Panel(0, "first token, ms: p50, p99 dashed", rates, all_of("p50", "p99"))
    speed = Panel(WIDTH, "output tokens a second", rates, all_of("tokens_per_s"))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT + 24}" font-family="sans-serif" '
        'font-size="12">',
        "<style>.grid { stroke: #dddddd }</style>",
        f'<rect width="{2 * WIDTH}" height="{HEIGHT + 24}" fill="white"/>',
        *first.axes(),
        *speed.axes(),
    ]
    for i, (engine, of) in enumerate(figures.items()):
        colour, x = COLOURS[i % len(COLOURS)], LEFT + 160 * i
        out += first.line(of, "p50", colour)
        out += first.line(of, "p99", colour, dashed=True)
        out += speed.line(of, "tokens_per_s", colour)
        out.append(f'<path d="M{x} {HEIGHT + 10}h24" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{x + 30}" y="{HEIGHT + 14}">{engine}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    check = "--check" in sys.argv[1:]
    files = [argument for argument in sys.argv[1:] if argument != "--check"]
    figures: Figures = json.loads(FIGURES.read_text())
    if files:
        figures |= points(files)
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = {PAGE: before + BEGIN + "\n" + table(figures) + "\n" + END + after, PICTURE: picture(figures)}
    for path, text in wanted.items():
        if check and path.read_text() != text:
            sys.exit(f"{path.name} does not show load.json: run python scripts/load_picture.py")
        path.write_text(text)


if __name__ == "__main__":
    main()
