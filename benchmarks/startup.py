#!/usr/bin/env python3
"""What the seconds of a start are: from the start of a process to the first token, stage by stage. Random weights.

    python benchmarks/startup.py                          warm: Triton's cache as it is, made by a first start
    python benchmarks/startup.py --cold                   cold: an empty TRITON_CACHE_DIR for every start
    python benchmarks/startup.py --shape llama-3.1-8b --starts 5 --set attention_backend='"triton"'

Every start is a new process. A stage ends where the next begins: "python", "import aengine" and "engine" are the
application's, "worker" is the start of the worker process; what follows is the worker's (`StartupProgress.stage`):
"import" is torch and the opening of the GPU; "first token" is that of a prompt of 16 tokens, once the engine is ready.
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
    from aengine import AsyncLLM, SamplingParams

    marks.append(("engine", time.time()))

    def note(report: Any) -> None:
        if marks[-1][0] != report.stage:
            marks.append((report.stage, time.time()))

    settings = {key: json.loads(value) for key, _, value in (item.partition("=") for item in args.set)}
    engine = AsyncLLM(folder, load_format="dummy", skip_tokenizer=True, progress=note, **settings)
    async with engine:
        marks.append(("first token", time.time()))
        await engine.generate(list(range(16)), SamplingParams(max_tokens=1, ignore_eos=True))
        marks.append(("", time.time()))
    seconds = {"total": marks[-1][1] - marks[0][1]}
    for (name, begun), (_, ended) in itertools.pairwise(marks):
        seconds[name] = seconds.get(name, 0.0) + ended - begun
    return seconds


def start_in_a_process(args: argparse.Namespace, folder: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--folder", folder, "--begun", str(time.time())]
    for item in args.set:
        command += ["--set", item]
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as cache:
        if args.cold:
            environment["TRITON_CACHE_DIR"] = cache
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="an empty cache of kernels for every start")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=JSON")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of config.json: this is one of the started processes
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
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
