"""Model files as an attacker writes them: each must end soon in a load, or in one ModelLoadError that names its cause.

    python tests/stress/fuzz_files.py [--cases 3000] [--seed S] [--first N]

A case is a small checkpoint (any native family, an encoder, GGUF, each kind of tokenizer) of which one to three things
were changed: a value of a JSON file or of a GGUF's metadata to an odd one, bytes of a file, a name in an index, a file
to a pipe, a link to itself or nothing. It is resolved, its tokenizer loaded and its weights loaded as a worker does, in
a process of its own with bounded memory and time. Seed and number of a case make it again: --cases 1 --first N.

Prints one JSON object: how often what came of it, and the findings, of which there should be none: else the exit code
is 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
import torch
from fuzz_checkpoints import spoiled, write_bases

from aengine.checkpoint.early_checks import check_start
from aengine.checkpoint.source import ModelSource, resolve_model
from aengine.config import EngineConfig
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.errors import ModelLoadError
from aengine.runner.models.transformers import config as _transformers  # imported once, and not in each process
from aengine.runner.startup.load import load_model
from aengine.workers.rank import Rank

CPU_SECONDS = 10  # of a case; an honest one takes a tenth
WALL_SECONDS = 120  # the machine may be busy
MORE_MEMORY = 2 << 30  # of addresses, beyond what the process had
LONGEST_MESSAGE = 800  # a file's own text is quoted by 80 letters or so

assert _transformers


def load_case(path: Path) -> str:
    """Load it as host and worker do. Returns what came of it; raises what should not have come."""
    config = EngineConfig.create(
        str(path), {"dtype": "float32", "max_model_len": 32, "kv_cache_memory_bytes": 16 << 20, "num_threads": 1}
    )
    outcomes = []
    try:
        source = resolve_model(config)
    except ModelLoadError as error:
        return checked(error, path)
    sent = msgpack.unpackb(msgpack.packb(source.to_wire()))
    assert all(0 <= token_id < 2**31 for token_id in source.eos_token_ids)
    for part in (lambda: load_host(config, source), lambda: load_worker(config, sent)):
        try:
            part()
            outcomes.append("loaded")
        except ModelLoadError as error:
            outcomes.append(checked(error, path))
    return " and ".join(outcomes)


def load_host(config: EngineConfig, source: ModelSource) -> None:
    check_start(config, source.hf_config)
    tokenizer = Tokenizer.load(source)
    assert all(0 <= token_id < 2**31 for token_id in tokenizer.eos_token_ids)
    tokenizer.decode(tokenizer.encode("a b"))


def load_worker(config: EngineConfig, sent: dict[str, Any]) -> None:
    model = load_model(config, sent, Rank(), lambda *progress: None)
    msgpack.packb(dict(model.offer))


NAMES = ("config.json", "quantization", "model_type", "tokenizer", "is not supported", "transformers", "max_model_len",
         "kv_cache")  # fmt: skip
"""Words of errors that name a setting, or a kind of model, in place of the file."""


def checked(error: ModelLoadError, path: Path) -> str:
    """What kind of error it is. Raises AssertionError for one that does not name its file, or has no bounds."""
    text = str(error)
    assert len(text) < LONGEST_MESSAGE, f"a message of {len(text)} letters: {text[:200]}"
    assert any(name in text for name in (str(path.parent), *NAMES)), f"no file is named: {text}"
    return "ModelLoadError"


def run_case(seed: int, number: int, bases: list[Path], folder: Path) -> tuple[str, str, float]:
    """(what was changed, what came of it, seconds), in a process of its own. An outcome with ":" is a finding."""
    rng = random.Random(f"{seed} {number}")
    path, what = spoiled(rng, rng.choice(bases), folder / str(number))
    begun = time.perf_counter()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        run_child(path, writing)
    os.close(writing)
    outcome = b""
    with open(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, begun + WALL_SECONDS - time.perf_counter()))[0]:
            if not (part := pipe.read(1 << 16)):
                break
            outcome += part
        else:
            os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    shutil.rmtree(folder / str(number), ignore_errors=True)
    text = outcome.decode(errors="replace")
    if os.WIFSIGNALED(status):
        text = f"died: {signal.Signals(os.WTERMSIG(status)).name} (SIGXCPU: after {CPU_SECONDS} s of computing) {text}"
    return what, text or "died: without a word", time.perf_counter() - begun


def run_child(path: Path, writing: int) -> None:
    """Never returns."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_MEMORY,) * 2)
    spent = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (spent + CPU_SECONDS,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        text = load_case(path)
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/aengine/" in frame.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        text = f"{type(error).__name__}: {place} {error!s:.300}"
    os.write(writing, text.encode(errors="replace"))
    os._exit(0)


def fuzz_files(count: int, seed: int, first: int = 0) -> dict[str, Any]:
    """Run the cases ``first`` to ``first + count``."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not be there after a fork
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("aengine").setLevel(logging.CRITICAL)
    begun = time.perf_counter()
    outcomes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    findings: list[str] = []
    slowest, slowest_what = 0.0, ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bases").mkdir()
        bases = write_bases(folder / "bases")
        for number in range(first, first + count):
            what, outcome, seconds = run_case(seed, number, bases, folder)
            if seconds > slowest:
                slowest, slowest_what = seconds, f"{number} {what[:200]}"
            kind = " ".join(outcome.split(" ")[:2]) if ":" in outcome else outcome
            outcomes["a finding" if ":" in outcome else outcome] += 1
            if ":" in outcome:
                counts[kind] += 1
                if counts[kind] == 1:
                    findings.append(f"case {number} ({what}): {outcome}")
    return {
        "outcomes": dict(outcomes.most_common()),
        "findings": findings,
        "counts": dict(counts),
        "slowest_s": round(slowest, 3),
        "slowest": slowest_what,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    args = parser.parse_args()
    result = {"benchmark": "fuzz_files", "seed": args.seed, **fuzz_files(args.cases, args.seed, args.first)}
    print(json.dumps(result))
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
