"""One stream's decode by each path that computes a class of transformers: natively, by transformers' code, and by that
code with the layers replaced that are known to compute what ours do. On a CPU, one thread, random weights.

    PYTHONPATH=$PWD python benchmarks/model_paths.py [--rounds 5] [model_type ...]     # seconds a class; JSON lines

Milliseconds a step of one token, the median of all rounds, which take the paths in turn: the model, the paged attention
and what makes a step ready for it, without scheduler and sampler. 8 layers of 256: small, so that ops count.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "models")]

import torch  # noqa: E402
from driver import CPU, Driver, no_progress, source_of  # noqa: E402
from zoo import write_zoo_model  # noqa: E402

from aengine.runner.models import FAMILIES, build_model, read_config  # noqa: E402
from aengine.runner.models.transformers import model as transformers_model  # noqa: E402
from aengine.runner.weights.formats import choose_formats  # noqa: E402
from aengine.runner.weights.sources.loader import load_weights  # noqa: E402

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 128,
}
CLASSES = (
    "olmo2", "olmo3", "exaone4", "cohere", "cohere2", "phi", "starcoder2", "stablelm",
    "seed_oss", "glm4_moe", "minimax_m2", "cohere2_moe", "minimax_m3_vl_text", "nemotron", "phimoe",
)  # fmt: skip
CONTEXT, STEPS = 64, 30


def load(folder: Path, model_impl: str) -> Any:
    source = source_of(folder)
    config = read_config(source.hf_config, model_impl=model_impl, folder=str(folder))
    model = build_model(config, choose_formats("float32", CPU, source.hf_config))
    load_weights(model, source, 0, no_progress)
    return model


def steps(driver: Driver, count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        driver.step({"a": [7]})
        times.append(1e3 * (time.perf_counter() - start))
    return times


def measure(model_type: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder, models = Path(name), dict[str, Any]()
        names = set(vars(_config(model_type)))
        write_zoo_model(folder, model_type, **{key: value for key, value in SHAPE.items() if key in names})
        if model_type in FAMILIES:
            models["native"] = load(folder, "native")
        models["replaced"] = load(folder, "transformers")
        with mock.patch.object(transformers_model, "fuse_layers", lambda *args: []):
            models["modules"] = load(folder, "transformers")
        drivers = {path: Driver(model, random.Random(0), num_blocks=256) for path, model in models.items()}
        for driver in drivers.values():
            driver.step({"a": list(range(CONTEXT))})
            steps(driver, 5)
        times: dict[str, list[float]] = {path: [] for path in drivers}
        for _ in range(rounds):
            for path, driver in drivers.items():
                times[path] += steps(driver, STEPS)
    found = {path: round(statistics.median(own), 3) for path, own in times.items()}
    return {"model_type": model_type, "layers_replaced": models["replaced"].fused["layers"], "ms": found}


def _config(model_type: str) -> Any:
    from zoo import tiny_config

    return tiny_config(model_type)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", default=CLASSES)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for model_type in options.model_types:
        with torch.inference_mode(False):
            print(json.dumps(measure(model_type, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
