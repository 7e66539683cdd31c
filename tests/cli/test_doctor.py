"""``aengine doctor``: what it finds on this machine, and what it says of machines where something is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aengine.__main__ import main
from aengine.cli import diagnosis
from aengine.cli.diagnosis import Finding
from aengine.config import EngineConfig
from aengine.errors import EngineError

ROOT = Path(__file__).resolve().parents[2]
REPORT: dict[str, Any] = {
    "torch": "2.13.0",
    "cuda": "13.0",
    "driver": "580.65",
    "triton": "3.7.1",
    "cpu_capability": "AVX512",
    "free_memory": 8 << 30,
    "gpu": None,
    "gpu_names": [],
    "gpus_apart": [],
    "gpu_problem": "",
    "triton_problem": "",
    "cpu_problem": "",
    "compiler": "llvmlite 0.50.0; AVX2",
    "compiler_problem": "",
    "choices": {"device": "cpu", "threads": 1, "attention": "torch", "kv_cache_bytes": 1 << 30},
}
GPU = {"name": "NVIDIA H200", "capability": "9.0", "free_memory": 139 << 30, "total_memory": 140 << 30}
NO_COMPILER = {"compiler": "torch's", "compiler_problem": "llvmlite is not installed: pip install 'aengine-llm[cpu]'"}


def finding(findings: list[Finding], name: str) -> Finding:
    return next(item for item in findings if item.name == name)


class Probe:
    """The process that is asked about torch and the GPU: it has answered."""

    returncode = 0

    def __init__(self, report: dict[str, Any]) -> None:
        self.report = report

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *error: object) -> None: ...

    def communicate(self, timeout: float) -> tuple[str, str]:
        return json.dumps(self.report), ""

    def kill(self) -> None: ...


Find = Callable[..., Finding]


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Find:
    """``find(name, **changes)``: what is told under that name, of a machine whose report has these changes."""

    def find(name: str, **changes: Any) -> Finding:
        with monkeypatch.context() as patch:
            patch.setattr(diagnosis.subprocess, "Popen", lambda *args, **options: Probe(REPORT | changes))
            return finding(diagnosis.diagnose().findings, name)

    return find


def test_this_machine_and_a_model_in_one_page_and_without_torch_in_the_process(tmp_path: Path) -> None:
    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads, "rope_theta": 10000.0}))
    asked = ["doctor", str(tmp_path), "--load-format", "dummy", "--dtype", "bfloat16", "--device", "cpu", "--json"]
    code = (
        "import sys\n"
        "from aengine.__main__ import main\n"
        f"status = main({asked})\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ok"] is True
    names = [item["name"] for item in told["findings"]]
    assert names == [
        "Python",
        "packages",
        "torch",
        "CPU kernels",
        "GPU",
        "Triton",
        "C compiler",
        "CPU",
        "memory",
        "/dev/shm",
        "descriptors",
        "threads",
        "hub cache",
        "models",
        "the model",
    ]
    kernels = told["findings"][names.index("CPU kernels")]
    assert kernels["status"] == "ok" and re.match(r"llvmlite [\d.]+; (AVX2|NEON)", kernels["found"])
    assert "matrices stay codes, fewer bytes than 16 bits: a GGUF's, AWQ's" in kernels["found"]
    assert told["choices"]["attention"] == "torch", "of bfloat16"
    found = told["findings"][-1]["found"]
    assert "attention and MLP: bfloat16, 0.1 MB" in found and "KV 256 bytes a token" in found
    assert not [item for item in told["findings"] if item["status"] == "error" or not item["found"]]
    assert told["choices"]["threads"] >= 1
    assert told["choices"]["kv_cache_bytes"] > 0


def estimated(folder: Path, model_type: str = "llama", **settings: Any) -> dict[str, Any]:
    """What the probe reports of a model with these settings, on a CPU."""
    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    norms = {"rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "hidden_act": "gelu" if model_type == "bert" else "silu"}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **sizes, **heads, **norms}))
    asked = {"load_format": "dummy", "device": "cpu", "num_threads": 1, **settings}
    from aengine.runner.platforms.probe import probe  # torch, which the other tests of this file do without

    return probe(EngineConfig.create(str(folder), asked))


def test_what_it_would_choose_is_by_the_settings_of_the_model(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 20, "kv_cache_dtype": "fp8"}
    report = estimated(tmp_path, dtype="float32", pipeline_parallel_size=2, **kept)
    assert report["choices"] == {
        "device": "cpu",
        "threads": 1,
        "attention": "torch",  # of several ranks
        "kv_cache_bytes": 1 << 20,
        "weights": "float32",
        "dtype": "float32",
        "activations": "float32",
    }
    assert report["model"]["kv_tokens"] == 2 * (1 << 20) // report["model"]["kv_bytes_per_token"], "of both ranks"


def test_attention_is_compiled_where_the_model_runs_as_a_tape(tmp_path: Path) -> None:
    report = estimated(tmp_path)
    found = [report, estimated(tmp_path, enforce_eager=True), estimated(tmp_path, "olmo2")]
    compiled = "torch" if report["compiler_problem"] else "compiled kernels"
    assert [one["choices"]["attention"] for one in found] == [compiled, "torch", "torch"]


def test_ranks_that_do_not_divide_a_model_are_told(tmp_path: Path) -> None:
    report = estimated(tmp_path, tensor_parallel_size=3)
    assert "it can be 1, 2 or 4" in report["model_problem"]
    assert report["choices"]["attention"] == "compiled kernels"


def test_an_encoder_is_no_error(tmp_path: Path) -> None:
    report = estimated(tmp_path, "bert")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnosis.subprocess, "Popen", lambda *args, **options: Probe(REPORT | report))
        told = diagnosis.diagnose(model=EngineConfig(model="m"))
    found = finding(told.findings, "the model")
    assert found.status == "ok" and found.found.startswith("an encoder") and "KV" not in found.found
    assert "weights" not in told.choices


def test_an_error_is_told_with_its_cure_and_by_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def create(*sizes: int) -> None:
        raise EngineError("/dev/shm can't be used: mount a tmpfs there")

    monkeypatch.setattr(diagnosis.HostChannel, "create", create)
    monkeypatch.setattr(diagnosis.subprocess, "Popen", lambda *args, **options: Probe(REPORT))
    assert main(["doctor"]) == 1
    page = capsys.readouterr().out
    assert "ERROR   /dev/shm      an engine's 13 MB can't be shared\n" in page
    assert "-> /dev/shm can't be used: mount a tmpfs there\n" in page
    assert "no engine can run here until the errors are mended (1 error, " in page
    assert len(page.splitlines()) <= 50
    assert all(len(line) <= 110 for line in page.splitlines())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13: cannot open"),
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
    ],
)
def test_a_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str) -> None:
    (tmp_path / "torch.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(diagnosis.__file__).parent.parent}")
    told = diagnosis.diagnose()
    torch = finding(told.findings, "torch")
    assert torch.status == "error" and said in torch.found and "pip install" in torch.advice
    assert not told.ok
    assert told.choices == {}


@pytest.mark.parametrize(
    ("changes", "name", "status", "said"),
    [
        ({"gpu": GPU}, "GPU", "ok", "NVIDIA H200, compute capability 9.0, 139.0 of 140.0 GiB free, driver 580.65"),
        ({"gpu": GPU, "triton_problem": "needs a C compiler: apt install gcc"}, "Triton", "error", "apt install gcc"),
        ({"gpu_problem": "the driver is too old: update it"}, "GPU", "warning", "update it"),
        ({"cuda": None, "gpu_problem": "built without CUDA: install another"}, "GPU", "warning", "install another"),
        (
            {"gpu": GPU, "gpu_names": ["NVIDIA H200"] * 4},
            "several GPUs",
            "ok",
            "4 of this kind; each can read the others' memory",
        ),
        (
            {"gpu": GPU, "gpu_names": ["NVIDIA H200", "NVIDIA A100"]},
            "several GPUs",
            "note",
            "cuda:0 NVIDIA H200, cuda:1 NVIDIA A100; each can read the others' memory a model is divided among equal",
        ),
        (
            {"gpu": GPU, "gpu_names": ["A", "B", "B", "B"], "gpus_apart": [[1, 2]]},
            "several GPUs",
            "note",
            "memory: cuda:1 and cuda:2 a model is divided among equal ones only, which the setting device names: "
            "device='cuda:1,3', say; a model is divided among those that can",
        ),
        (
            {"gpu": GPU, "gpu_names": ["NVIDIA L4"] * 4, "gpus_apart": [[0, 1], [0, 2], [0, 3], [1, 2]]},
            "several GPUs",
            "note",
            "cuda:0 and cuda:1, cuda:0 and cuda:2, cuda:0 and cuda:3, and 1 more a model is divided among those",
        ),
        ({"driver": None}, "torch", "note", "pip install --index-url https://download.pytorch.org/whl/cpu torch"),
        ({"driver": None}, "GPU", "ok", "there is no NVIDIA driver"),
        ({"cpu_problem": "no kernel for this CPU"}, "torch", "error", "no kernel for this CPU"),
        ({}, "CPU kernels", "ok", "llvmlite 0.50.0; AVX2"),
        (NO_COMPILER, "CPU kernels", "note", "torch's llvmlite is not installed: pip install 'aengine-llm[cpu]'"),
        ({"gpu": GPU, **NO_COMPILER}, "CPU kernels", "ok", "torch's llvmlite is not installed"),
    ],
)
def test_devices(find: Find, changes: dict[str, Any], name: str, status: str, said: str) -> None:
    item = find(name, **changes)
    assert item.status == status
    assert said in f"{item.found} {item.advice}"


def test_a_model_that_is_too_large_or_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    model: dict[str, Any] = {"line": "head: bfloat16, 9 GB", "device": "cpu", "room": 1 << 30, "weight_bytes": 9 << 30}
    config = diagnosis.EngineConfig(model="owner/model")
    item = diagnosis._model(config, {"model": model})
    assert item.status == "error" and "do not fit" in item.advice and "head: bfloat16" in item.found
    item = diagnosis._model(config, {"model_problem": "the cache lacks it"})
    assert item.status == "error" and item.advice == "the cache lacks it"


def test_what_is_installed_is_found_by_the_distributions_name() -> None:
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    assert name == diagnosis._DISTRIBUTION


def test_packages_that_are_missing_or_too_old(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["numpy>=1.26", "pytest>=9999", "no-such-package-anywhere>=1", 'uvloop>=9999; extra == "uvloop"']
    monkeypatch.setattr(diagnosis.importlib.metadata, "requires", lambda name: needs)
    item = find("packages")
    assert item.status == "error"
    assert item.advice == "pip install 'pytest>=9999' no-such-package-anywhere"


def test_a_quota_of_cpu_time(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "cpu_quota", lambda: 0.5)
    monkeypatch.setattr(diagnosis, "num_usable_cpus", lambda: 1)
    item = find("CPU")
    assert item.status == "warning" and "a quota of 0.5 CPUs" in item.found and "--cpus" in item.advice
    monkeypatch.setattr(diagnosis, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(diagnosis.os, "sched_getaffinity", lambda pid: set(range(8)))
    item = find("CPU")
    assert item.status == "note" and "8 cores, a quota of 1.5 CPUs" in item.found and "num_threads=1" in item.advice


def test_little_memory_and_few_descriptors(find: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "memory_ulimit_hint", lambda: "")
    monkeypatch.setattr(diagnosis, "memory_limit", lambda: 2 << 30)
    monkeypatch.setattr(diagnosis, "free_memory", lambda: 1 << 30)
    item = find("memory")
    assert item.status == "warning" and "1.0 GiB of" in item.found and "the container may use 2.0 GiB" in item.found
    monkeypatch.setattr(diagnosis, "memory_ulimit_hint", lambda: "; lift `ulimit -v`")
    assert find("memory").advice == "lift `ulimit -v`"
    monkeypatch.setattr(diagnosis.resource, "getrlimit", lambda kind: (64, 64))
    assert find("descriptors").status == "warning"


def test_models_and_caches(find: Find, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(diagnosis, "EMBEDDED_MODELS", {"smollm2-135m": None})
    monkeypatch.setattr(diagnosis, "find_embedded", _nothing_embedded)
    assert find("models").advice == "aengine model add smollm2-135m fetches a small one"
    snapshot = tmp_path / "hub" / "models--owner--one-GGUF" / "snapshots" / "0" / "Q4_0"
    snapshot.mkdir(parents=True)
    assert find("models").status == "note"  # no weights yet
    (snapshot / "one.gguf").touch()
    assert find("models").found == "owner/one-GGUF"
    assert find("hub cache").status == "ok"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(snapshot / "one.gguf" / "hub"))  # in no folder
    assert "set HF_HOME" in find("hub cache").advice
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in find("hub cache").advice


def _nothing_embedded(name: str, *, join: bool) -> Path:
    raise diagnosis.ModelLoadError("not here")
