"""A model on several devices beside the same model on one: engine_bench.py with each division, in turn.

    python benchmarks/divisions.py --shape llama-3.1-8b --divisions one tp2 pp2 dp2 --out two-gpus.json
    python benchmarks/divisions.py --shape qwen3-30b-a3b --divisions one tp2 tp2ep dp2ep
    python benchmarks/divisions.py --shape tiny --divisions one tp2 tp2pp2 --set device=cpu --tasks single
    python benchmarks/divisions.py --tasks offline --in-proportion     so many requests a GPU, not 256 in all

A division names sizes: tp (tensor parallel), pp (pipeline), dp (data), and ep where experts are divided whole. JSON to
stdout, or to --out: the medians of each, and how many times those of the first division they are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_bench import SHAPES

HERE = Path(__file__).parent
SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}
SHOWN = ("itl_ms_mean", "ttft_ms_p50", "tok_s", "client_cpu_s")


def settings_of(division: str) -> dict[str, int | bool]:
    """The engine's settings for "tp2pp2", say; "one": none. Raises ValueError."""
    sizes = re.findall(r"(tp|pp|dp)([1-9]\d*)", division)
    if not re.fullmatch(r"one|((tp|pp|dp)[1-9]\d*)+(ep)?", division) or len(dict(sizes)) < len(sizes):
        raise ValueError(f"{division!r} is no division: it is 'one', or sizes such as tp2, pp2dp2, tp4ep")
    settings: dict[str, int | bool] = {SIZES[name]: int(size) for name, size in sizes}
    return settings | ({"enable_expert_parallel": True} if division.endswith("ep") else {})


def run(args: argparse.Namespace, division: str, out: Path) -> dict[str, Any]:
    """What engine_bench.py finds: {"start": {...}, scenario: {figure: median}}; or {"failed": its exit status}."""
    command = [sys.executable, str(HERE / "engine_bench.py"), "--engine", "aengine_adapter:Adapter"]
    command += ["--shape", args.shape, "--tasks", args.tasks, "--reps", str(args.reps), "--out", str(out)]
    if args.in_proportion:
        num_devices = math.prod(size for size in settings_of(division).values() if size is not True)
        command += ["--offline-requests", str(256 * num_devices)]
    given = [f"{name}={json.dumps(value)}" for name, value in settings_of(division).items()]
    command += [word for setting in [*args.set, *given] for word in ("--set", setting)]
    environment = os.environ | {"BENCH_T0": str(time.time())}
    status = subprocess.run(command, stdout=sys.stderr, env=environment).returncode
    if status:
        return {"failed": status}
    result = json.loads(out.read_text())
    found: dict[str, Any] = {"start": {"first_token_s": result["startup"]["first_token_s"]}}
    for scenario, figures in result.items():
        if isinstance(figures, dict) and "median" in figures:
            scenario = re.sub(r"^offline\d+_a", "offline_a", scenario)  # with whatever number of requests
            found[scenario] = {name: figures["median"][name] for name in SHOWN if name in figures["median"]}
    if "errors" in result:
        found["failed"] = sorted(result["errors"])
    return found


def times(figures: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Each figure over that of the first division, by scenario."""
    return {
        scenario: {name: round(value / first[scenario][name], 3) for name, value in values.items()}
        for scenario, values in figures.items()
        if scenario in first and scenario != "failed"
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--divisions", nargs="+", default=["one", "tp2", "pp2", "dp2"], metavar="DIVISION")
    parser.add_argument("--tasks", default="single,burst,offline", help="of engine_bench.py")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--in-proportion", action="store_true", help="256 requests offline a device, not in all")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a setting of all engines")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    try:  # what is wrong is told before anything is measured
        for division in args.divisions:
            settings_of(division)
        if args.out is not None:
            args.out.touch()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if len(set(args.divisions)) < len(args.divisions):
        parser.error("a division is named twice")
    result: dict[str, Any] = {"shape": args.shape, "divisions": {}, "times_the_first": {}}
    first: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for division in args.divisions:
            figures = run(args, division, Path(folder, f"{division}.json"))
            result["divisions"][division] = figures
            if division == args.divisions[0]:
                first = figures
            else:
                result["times_the_first"][division] = times(figures, first)
            if args.out is not None:  # whatever becomes of the next ones
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(any("failed" in figures for figures in result["divisions"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
