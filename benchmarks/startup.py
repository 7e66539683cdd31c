#!/usr/bin/env python3
"""What the seconds of a start are: from the start of a process to the first token, stage by stage.

    python benchmarks/startup.py                          warm: Triton's cache as it is, made by a first start
    python benchmarks/startup.py --cold                   cold: an empty TRITON_CACHE_DIR for every start
    python benchmarks/startup.py --spare                  with a process of `SpareWorkers` that is ready
    python benchmarks/startup.py --shape llama-3.1-8b --starts 5 --set attention_backend='"triton"'
    python benchmarks/startup.py --run smollm2-135m       the time line of `aengine run`, as JSON, seen from outside
    python benchmarks/startup.py --run smollm2-135m --tree . --tree ../before    of two checkouts, in turn

Every start is a new process. Without --run weights are random. A stage ends where the next begins: "python", "import
aengine" and "engine" are the application's, "worker" is the start of the worker process; what follows is the worker's
(`StartupProgress.stage`): "import" is torch and the opening of the GPU; "first token" is that of a prompt of 16 tokens,
once the engine is ready.

With --run each line of JSON has a stage's end in seconds after the exec of the command, medians of all starts, and the
CPU seconds that the host and the worker had taken by then. Files are in the page cache, and bytecode is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from engine_bench import SHAPES


async def start_once(args: argparse.Namespace, folder: str) -> dict[str, float]:
    """Start an engine in this process, which has just begun. Returns seconds by stage, in order."""
    marks: list[tuple[str, float]] = [("python", args.begun), ("import aengine", time.time())]
    from aengine import AsyncLLM, SamplingParams, SpareWorkers

    spares = SpareWorkers() if args.spare else None
    if spares is not None:
        await asyncio.to_thread(spares.wait)
        marks.clear()
    marks.append(("engine", time.time()))

    def note(report: Any) -> None:
        if marks[-1][0] != report.stage:
            marks.append((report.stage, time.time()))

    settings = {key: json.loads(value) for key, _, value in (item.partition("=") for item in args.set)}
    settings |= {"load_format": "dummy", "skip_tokenizer": True, "progress": note, "spare_workers": spares}
    engine = AsyncLLM(folder, **settings)
    async with engine:
        marks.append(("first token", time.time()))
        await engine.generate(list(range(16)), SamplingParams(max_tokens=1, ignore_eos=True))
        marks.append(("", time.time()))
    if spares is not None:
        spares.close()
    seconds = {"total": marks[-1][1] - marks[0][1]}
    for (name, begun), (_, ended) in itertools.pairwise(marks):
        seconds[name] = seconds.get(name, 0.0) + ended - begun
    return seconds


def start_in_a_process(args: argparse.Namespace, folder: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--folder", folder, "--begun", str(time.time())]
    for item in args.set:
        command += ["--set", item]
    command += ["--spare"] * args.spare
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as cache:
        if args.cold:
            environment["TRITON_CACHE_DIR"] = cache
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


# -- the time line of `aengine run`

LINES = {
    "finding the model": "host imported",
    "starting the worker": "model found",
    "importing the engine": "worker asked to load",
    "loading weights": "torch and runner imported",
    "measuring memory": "weights loaded",
    "ready": "ready",
}
"""What a line of the command on stderr is the end of."""
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def worker_of(pid: int) -> tuple[int, float]:
    """Return the host's worker, and when it began, in seconds since the boot; (0, 0.0): there is none yet."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            return int(child), int(fields[19]) / TICKS
    return 0, 0.0


def time_line(model: str, tree: str) -> dict[str, dict[str, float]]:
    """Run `aengine run` of the checkout ``tree``. Returns for each stage when it ended, and the CPU seconds till then.
    Times are to 0.01 s."""
    environment = {**os.environ, "PYTHONPATH": str(Path(tree).resolve())}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-P", "-m", "aengine", "run", model, "The capital of France is", "--max-tokens", "2"]
    begun = time.clock_gettime(time.CLOCK_BOOTTIME)
    line: dict[str, dict[str, float]] = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as host:
        assert host.stdout is not None and host.stderr is not None
        worker, worker_begun = 0, 0.0

        def note(stage: str) -> None:
            nonlocal worker, worker_begun
            at = time.clock_gettime(time.CLOCK_BOOTTIME) - begun
            if not worker:
                worker, worker_begun = worker_of(host.pid)
                if worker:
                    line["worker exec"] = {"at": worker_begun - begun}
            line[stage] = {"at": at, "host_cpu": cpu_of(host.pid), "worker_cpu": cpu_of(worker) if worker else 0.0}

        for raw in iter(host.stderr.readline, b""):
            for text, stage in LINES.items():
                if f"] {text}" in raw.decode():
                    note(stage)
            if "ready" in line:
                break
        host.stdout.read(1)
        note("first token")
        host.communicate()
    assert host.returncode == 0, host.returncode
    return line


def print_time_lines(model: str, trees: list[str], starts: int) -> None:
    for tree in trees:
        time_line(model, tree)
    runs: dict[str, list[dict[str, dict[str, float]]]] = {tree: [] for tree in trees}
    for _ in range(starts):
        for tree in trees:
            runs[tree].append(time_line(model, tree))
    for tree, lines in runs.items():
        for stage in sorted(lines[0], key=lambda stage: lines[0][stage]["at"]):
            facts = {key: round(statistics.median(line[stage][key] for line in lines), 3) for key in lines[0][stage]}
            print(json.dumps({"tree": tree, "model": model, "starts": starts, "stage": stage, **facts}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="an empty cache of kernels for every start")
    parser.add_argument("--spare", action="store_true", help="the worker is a spare one; seconds from the engine on")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=JSON")
    parser.add_argument("--run", metavar="MODEL", help="the time line of `aengine run MODEL`")
    parser.add_argument("--tree", action="append", metavar="FOLDER", help="a checkout, for --run; more are run in turn")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of config.json: this is one of the started processes
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print_time_lines(args.run, args.tree or [str(Path(__file__).parents[1])], args.starts)
        return
    if args.folder:
        print(json.dumps(asyncio.run(start_once(args, args.folder))))
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[args.shape]))
        if not args.cold:
            start_in_a_process(args, folder)
        runs = [start_in_a_process(args, folder) for _ in range(args.starts)]
    print(f"{args.shape}, {'cold' if args.cold else 'warm'}, {args.starts} starts; seconds: median (least to most)")
    for name in dict.fromkeys(name for run in runs for name in run):
        values = sorted(run.get(name, 0.0) for run in runs)
        print(f"{name:<16} {statistics.median(values):6.2f} ({values[0]:.2f} to {values[-1]:.2f})")


if __name__ == "__main__":
    main()
