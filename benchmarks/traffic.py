"""An engine under traffic as it really arrives: arrivals, prompts beside decodes, prefixes, agents, a blocked loop.

    python benchmarks/traffic.py --shape qwen3-0.6b --out results \\
        --engine aengine_adapter:Adapter \\
        --engine aengine_adapter:Adapter --set max_leased_steps=0
    python benchmarks/traffic.py --plot picture.png results/traffic.jsonl       a picture of what was measured
    python benchmarks/traffic.py --small                                        no GPU: counts of steps, with a limit

Each engine of each round is a process of its own, one after the other, after a calibration of the machine. One JSON
line a result goes to OUT/traffic.jsonl, a table to stdout. What each figure means: docs/internals/benchmarks.md.

--set, --name, --path and --python belong to the --engine before them; before the first, to all.
Exit code 1 if an engine or a workload failed, or if requests waited behind more steps than they may (--small).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine_bench import SHAPES
from traffic_client import BETWEEN_TOKENS_LIMIT_MS, FIRST_TOKEN_LIMIT_MS, Client
from traffic_report import headline, table
from traffic_workloads import WORKLOADS, Run, all_sizes

HERE = Path(__file__).resolve().parent
FULL: dict[str, dict[str, Any]] = {name: {} for name in WORKLOADS if name != "blocked_arrivals"} | {
    "bursty": {"rate": 20.0, "cv": 3.0}
}
SMALL: dict[str, dict[str, Any]] = {  # for the paced worker on a machine of few cores
    "poisson": {"seconds": 4.0, "most_prompt": 2000, "output_mean": 40, "most_output": 100},
    "bursty": {"rate": 20.0, "cv": 3.0, "seconds": 4.0, "most_prompt": 2000, "output_mean": 40, "most_output": 100},
    "prompts_beside_decodes": {"streams": 4, "prompts": 10, "prompt_tokens": 2000, "quiet": 0.5},
    "blocked_arrivals": {"streams": 4, "requests": 10},
}
SMALL_RATES = [20.0]


@dataclass
class Engine:
    """One of those that are measured, as the command line says."""

    adapter: str  # module:Class
    settings: list[str] = field(default_factory=list)
    name: str = ""
    path: str = ""  # put before PYTHONPATH: another checkout
    python: str = sys.executable

    def label(self) -> str:
        return self.name or " ".join([self.adapter.partition(":")[0].removesuffix("_adapter"), *self.settings])


@dataclass
class Spec:
    """What a child measures; travels as JSON."""

    engine: Engine
    shape: str
    model: str
    workloads: list[tuple[str, dict[str, Any]]]
    tags: dict[str, Any]  # in every line
    seed: int
    round_number: int
    out: str
    warm_up: float
    settle: float
    limit: float


# -- the child: one engine


async def measure(spec: Spec) -> None:
    """Start the engine, warm it up, run the workloads; then those that need it with a thread of its own."""
    module, _, name = spec.engine.adapter.partition(":")
    adapter_class = getattr(importlib.import_module(module), name)
    own_thread = getattr(adapter_class, "OWN_THREAD", None)
    await _serve(spec, adapter_class(), spec.engine.settings, spec.workloads)
    blocked = dict(spec.workloads).get("blocked_loop")
    if own_thread and blocked is not None and own_thread[0] not in spec.engine.settings:
        again = [("blocked_loop", blocked | {"name": "blocked_loop_own_thread"})]
        spec = replace(spec, warm_up=min(spec.warm_up, 1.0), settle=0.0)  # for full batches of decodes it is enough
        await _serve(spec, adapter_class(), [*spec.engine.settings, *own_thread], again)


async def _serve(spec: Spec, adapter: Any, settings: list[str], workloads: list[tuple[str, dict[str, Any]]]) -> None:
    base = spec.tags | {"engine": spec.engine.label(), "settings": settings, "event_loop": _loop_name()}
    begun = time.perf_counter()
    await adapter.start(spec.model, SimpleNamespace(tokenizer="", set=settings))
    client = Client(adapter)
    try:
        first = await client.request([200] * 64, 1, temperature=0.0)
        if first.error:
            raise RuntimeError(f"the first request failed: {first.error}")
        start = {"ready_s": round(time.perf_counter() - begun, 2), "describe": adapter.describe()}
        _write(spec.out, base | {"kind": "start"} | start)
        await _warm_up(client, spec)
        gc.collect()
        gc.freeze()  # as a server does once it is up
        for name, sizes in workloads:
            tags = base | {"kind": "result", "params": all_sizes(name, sizes), "seed": spec.seed}

            def report(result_name: str, result: dict[str, Any], tags: dict[str, Any] = tags) -> None:
                line = tags | {"workload": result_name} | result
                _write(spec.out, line)
                print(f"{line['engine']:>40}  {headline(line)}", flush=True)

            try:
                async with asyncio.timeout(spec.limit):
                    run = Run(client, f"{name} {sizes.get('rate', '')}", spec.seed, spec.round_number, report)
                    await WORKLOADS[name](run, **sizes)
            except Exception as error:
                report(name, {"error": f"{type(error).__name__}: {error}"})
    finally:
        await adapter.stop()


async def _warm_up(client: Client, spec: Spec) -> None:
    """What compiles or captures at first use does it now: batches of several sizes, long prompts, mixed arrivals."""
    if not spec.warm_up:
        return
    run = Run(client, "warm-up", spec.seed, spec.round_number, lambda name, result: None)
    for streams, prompt, output in ((1, 128, 32), (64, 128, 64), (256, 128, 32), (1, 4096, 4), (1, 8192, 4)):
        await client.at_once([(run.prompt(prompt), output) for _ in range(streams)])
    await WORKLOADS["poisson"](run, rate=60.0, seconds=spec.warm_up)
    await asyncio.sleep(spec.settle)


def _write(out: str, line: dict[str, Any]) -> None:
    with open(out, "a") as file:
        file.write(json.dumps(line, default=str) + "\n")


def _loop_name() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def child(text: str) -> None:
    values = json.loads(text)
    spec = Spec(**values | {"engine": Engine(**values["engine"])})
    try:
        import uvloop
    except ImportError:
        asyncio.run(measure(spec))
    else:
        uvloop.run(measure(spec))


# -- the parent: arguments, one process after the other, the table


class _OfEngine(argparse.Action):
    """--engine begins one; --set, --name, --path, --python say more of the last one, or of all before the first."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        common: Engine = namespace.common
        if self.dest == "engine":
            new = Engine(value, list(common.settings), common.name, common.path, common.python)
            namespace.engines = [*namespace.engines, new]
            return
        target = namespace.engines[-1] if namespace.engines else common
        if self.dest == "set":
            target.settings = [*target.settings, value]
        else:
            setattr(target, self.dest, value)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(engines=[], common=Engine(""))
    add = parser.add_argument
    add("files", nargs="*", help="JSON lines of earlier calls: only --plot and the table of them, nothing is measured")
    add("--engine", action=_OfEngine, metavar="MODULE:CLASS", help="an adapter, see engine_bench.py; repeatable")
    add("--set", action=_OfEngine, metavar="NAME=JSON", help="a setting of the engine; repeatable")
    add("--name", action=_OfEngine, help="what the engine is called in the results")
    add("--path", action=_OfEngine, help="put before its PYTHONPATH: another checkout")
    add("--python", action=_OfEngine, help="its interpreter: another environment")
    add("--shape", choices=list(SHAPES), default="qwen3-0.6b", help="of a model with random weights")
    add("--model", help="a model instead of a shape; the adapter must take it")
    add("--workloads", default="", help=f"of {','.join(WORKLOADS)}; all but the last by default")
    add("--rates", type=float, nargs="+", help="Poisson arrivals a second, a run each (default 20 60)")
    add("--size", action="append", default=[], metavar="WORKLOAD.NAME=JSON", help="another size of a workload")
    add("--rounds", type=int, default=1, help="all engines, in turn, so many times")
    add("--seed", type=int, default=0)
    add("--warm-up", type=float, default=4.0, help="seconds of arrivals before the first workload; 0: no warm-up")
    add("--settle", type=float, default=4.0, help="idle seconds after it")
    add("--limit", type=float, default=120.0, help="most seconds a workload may take")
    add("--out", type=Path, help="folder for traffic.jsonl, appended to (default: a new one in the temporary folder)")
    add("--plot", type=Path, help="a picture of the results; needs matplotlib")
    add("--small", action="store_true", help="with a paced worker without a model: counts of steps")
    add("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.chosen = args.workloads.split(",") if args.workloads else list(SMALL if args.small else FULL)
    if wrong := set(args.chosen) - set(WORKLOADS):
        parser.error(f"there is no workload {', '.join(wrong)}; there are {', '.join(WORKLOADS)}")
    for item in args.size:
        workload, _, name = item.partition("=")[0].partition(".")
        if workload not in WORKLOADS or name not in all_sizes(workload, {}):
            parser.error(f"--size {item}: there is no such workload or size")
    if not args.engines:
        common = args.common
        common.adapter = "paced_adapter:Adapter" if args.small else "aengine_adapter:Adapter"
        args.engines = [common]
    return args


def plan(args: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Workloads with the sizes that differ from their defaults, in the order in which they run."""
    result: list[tuple[str, dict[str, Any]]] = []
    for name in WORKLOADS:
        if name not in args.chosen:
            continue
        sizes = dict((SMALL if args.small else FULL).get(name, {}))
        for item in args.size:
            where, _, value = item.partition("=")
            if where.partition(".")[0] == name:
                sizes[where.partition(".")[2]] = json.loads(value)
        if name == "poisson":
            rates = args.rates or (SMALL_RATES if args.small else [20.0, 60.0])
            result.extend((name, {"rate": rate} | sizes) for rate in rates)
        else:
            result.append((name, sizes))
    return result


def model_folder(shape: str) -> str:
    """A folder with the settings of a model of that shape, as engine_bench.py makes it."""
    settings = SHAPES[shape]
    folder = Path(tempfile.gettempdir()) / "bench-models" / shape
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    ids = {key: settings[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    return str(folder)


def calibrate(engine: Engine, tags: dict[str, Any], out: str) -> None:
    done = subprocess.run([engine.python, str(HERE / "traffic_calibration.py")], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    found = json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": done.stderr[-300:]}
    _write(out, tags | {"kind": "calibration"} | found)
    print("calibration", json.dumps(found), flush=True)


def run_engines(args: argparse.Namespace, out: str) -> bool:
    """All rounds. Returns whether every engine ended well."""
    call = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    model = args.model or model_folder("tiny" if args.small else args.shape)
    all_well = True
    for round_number in range(args.rounds):
        tags = {
            "call": call,
            "round": round_number,
            "model": args.model or ("paced" if args.small else args.shape),
            "limits_ms": [FIRST_TOKEN_LIMIT_MS, BETWEEN_TOKENS_LIMIT_MS],
            "host": {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "python": sys.version[:6]},
        }
        calibrate(args.engines[0], tags, out)
        for order, engine in enumerate(args.engines):
            spec = Spec(
                engine=engine,
                shape=args.shape,
                model=model,
                workloads=plan(args),
                tags=tags | {"order": order},
                seed=args.seed,
                round_number=round_number,
                out=out,
                warm_up=0.0 if args.small else args.warm_up,
                settle=args.settle,
                limit=args.limit,
            )
            paths = [engine.path, os.environ.get("PYTHONPATH", "")]
            environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            command = [engine.python, str(HERE / "traffic.py"), "--child", json.dumps(asdict(spec))]
            if subprocess.run(command, env=environment).returncode:
                _write(out, tags | {"kind": "failure", "engine": engine.label()})
                all_well = False
    return all_well


def read(files: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]


def main() -> None:
    args = arguments()
    if args.child:
        child(args.child)
        return
    files, all_well = args.files, True
    if not files:
        folder = args.out or Path(tempfile.mkdtemp(prefix="traffic-"))
        folder.mkdir(parents=True, exist_ok=True)
        files = [str(folder / "traffic.jsonl")]
        all_well = run_engines(args, files[0])
    lines = read(files)
    print(table(lines))
    print("results:", *files)
    if args.plot:
        try:
            from traffic_plot import plot
        except ImportError as error:
            sys.exit(f"--plot needs matplotlib ({error}): pip install matplotlib, then --plot the results")
        plot(lines, args.plot)
        print("picture:", args.plot)
    broken = [line for line in lines if line.get("steps_waited", {}).get("over", 0) or "error" in line]
    for line in broken:
        print("BROKEN:", line["engine"], line["workload"], line.get("error") or line["steps_waited"])
    sys.exit(0 if args.files or (all_well and not broken) else 1)


if __name__ == "__main__":
    main()
