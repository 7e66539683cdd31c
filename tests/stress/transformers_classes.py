"""Tries every causal language model of transformers, tiny and random, through aengine's path for any decoder.

Run it in the repository's root, on one core, a few minutes: all classes, or those named:

    OMP_NUM_THREADS=1 PYTHONPATH=$PWD python tests/stress/transformers_classes.py [model_type ...] > classes.jsonl

Prints one JSON object a class, as it ends: ``model_type``, ``outcome``, ``seconds``, ``message``. The outcome is
"passed" (every scenario of tests/models/scenarios.py), "refused" (a ModelLoadError), "failed" (wrong tokens, or another
error, which is a defect), or "unwritten" (tests/models/zoo.py can't make the class tiny, or transformers itself can't
run it). The exit status is 1 if any failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "models")]
import torch
from scenarios import check_scenarios
from zoo import causal_lms, write_zoo_model

from aengine.errors import ModelLoadError
from aengine.runner.models.encoders import is_encoder


def try_class(model_type: str, seconds: int) -> dict[str, Any]:
    """What became of one class, within so many seconds."""
    begin = time.perf_counter()
    outcome, message = "unwritten", ""
    with tempfile.TemporaryDirectory() as name:
        try:
            with _at_most(seconds):
                reference = write_zoo_model(Path(name), model_type)
                with torch.inference_mode():
                    reference(torch.tensor([[5, 7, 9]]), use_cache=False)
                outcome = "failed"
                check_scenarios(Path(name), reference, model_impl="transformers")
            outcome = "passed"
        except ModelLoadError as error:
            outcome, message = "refused", str(error)
        except Exception as error:  # whatever a class raises is its row of the table
            message = f"{type(error).__name__}: {error}"
    row = {"model_type": model_type, "outcome": outcome, "seconds": round(time.perf_counter() - begin, 1)}
    return row | {"message": message[:400]}


@contextlib.contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took over {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="default: all but encoders with a file of ours")
    parser.add_argument("--seconds", type=int, default=60, help="at most, a class")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    all_types = sorted(name for name in causal_lms() if not is_encoder({"model_type": name}))
    for model_type in options.model_types or all_types:
        row = try_class(model_type, options.seconds)
        counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
        print(json.dumps(row), flush=True)
    print(counts, file=sys.stderr)
    return 1 if counts.get("failed") else 0


if __name__ == "__main__":
    raise SystemExit(main())
