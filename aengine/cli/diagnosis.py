"""`diagnose`: what the engine finds on this machine, what it would choose, and what to do about what is wrong.

Everything is tried as an engine would do it when it starts: shared memory is made, torch is imported in a process of
its own (`aengine.runner.platforms.probe`), models are looked for where they would be. The network is not asked.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from ..checkpoint.embedded import EMBEDDED_MODELS, find_embedded
from ..config import EngineConfig, is_offline, model_cache, thread_environment, worker_environment
from ..errors import EngineError, ModelLoadError
from ..ipc.channel import HostChannel
from ..limits.cgroups import cpu_quota, memory_limit, num_usable_cpus, threads_limit
from ..limits.memory import free_memory
from ..limits.ulimits import memory_ulimit_hint

Status = Literal["ok", "note", "warning", "error"]

GIB = 1024**3
_PROBE_TIMEOUT = 120.0  # seconds, for a cold disk and a large torch; usually it takes two
_MASK_BYTES = 5_000_000  # bytes of shared memory for bitmasks beside the rings, for a vocabulary of 150,000
_FEW_DESCRIPTORS = 256
_FEW_THREADS = 64
_CPU_FLAGS = "avx2 avx_vnni avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_int8 amx_bf16 asimd asimdhp bf16 i8mm"
_SHOWN_MODELS = 6
_SHOWN_PAIRS = 3
_DISTRIBUTION = "aengine-llm"
_CPU_TORCH = "pip install --index-url https://download.pytorch.org/whl/cpu torch"
_PEERS_ADVICE = (
    "a model is divided among those that can (`nvidia-smi topo -p2p r`): in a virtual machine or container pass them "
    "through together; data_parallel_size does without"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. "error": no engine starts; "warning": it runs, but not as it could."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """What it means and what to do; "" if there is nothing to do."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    version: str
    findings: list[Finding]
    choices: dict[str, Any]
    """What an engine with default settings would take: device, weights, dtype, threads, attention, kv_cache_bytes.
    Nothing after an error."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found that keeps an engine from running."""
        return all(finding.status != "error" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def diagnose(version: str = "", model: EngineConfig | None = None) -> Diagnosis:
    """Look at everything, and at what ``model`` would take. Blocking: two or three seconds, most of them torch's import
    in another process."""
    config = EngineConfig(model="-")  # the settings' defaults
    with _start_probe(config, model) as process:
        try:
            findings = [_python(), _packages(), _compiler(), _cpu(config), _memory(), _shared_memory(config)]
            findings += [_descriptors(), _threads(), _hub_cache(), _models()]
            report = _read_probe(process)
        finally:
            process.kill()  # this has no effect if the process has ended
    devices = [report] if isinstance(report, Finding) else list(_devices(report))
    findings[2:2] = devices
    if model is not None and not isinstance(report, Finding):
        findings.append(_model(model, report))
    found = Diagnosis(version, findings, {} if isinstance(report, Finding) else report["choices"])
    return found if found.ok else replace(found, choices={})


# -- Python and packages


def _python() -> Finding:
    libc = " ".join(platform.libc_ver()).strip() or "unknown C library"
    found = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.release()}, {libc}"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return Finding("Python", "error", f"{found}, {platform.machine()}", "aengine runs on Linux, x86-64 and arm64")
    return Finding("Python", "ok", f"{found}, {platform.machine()}")


def _packages() -> Finding:
    try:
        needs = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        advice = "it runs from a folder: what it needs can't be compared with what is here; pip install -e that folder"
        return Finding("packages", "note", "aengine is not installed as a package", advice)
    wrong: list[str] = []
    for need in needs:
        match = re.match(r"([\w.-]+)(?:>=([\d.]+))?", need)
        if match is None or "extra ==" in need:
            continue
        try:
            version = importlib.metadata.version(match[1])
        except importlib.metadata.PackageNotFoundError:
            wrong.append(match[1])
            continue
        if match[2] and _numbers(version) < _numbers(match[2]):
            wrong.append(f"'{match[1]}>={match[2]}'")
    if wrong:
        return Finding("packages", "error", f"missing or too old: {', '.join(wrong)}", f"pip install {' '.join(wrong)}")
    extras = [name for name in ("uvloop", "pydantic") if importlib.util.find_spec(name) is not None]
    return Finding("packages", "ok", "all that is needed" + (f", and {', '.join(extras)}" if extras else ""))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", version.partition("+")[0])[:3])


def _compiler() -> Finding:
    compiler = next((path for name in ("gcc", "clang") if (path := shutil.which(name)) is not None), "")
    headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()
    found = f"{compiler or 'none'}, Python's headers: {'yes' if headers else 'no'}"
    if compiler and headers:
        return Finding("C compiler", "ok", found)
    advice = "only a GPU needs them, for Triton's launchers: apt install gcc python3-dev"
    return Finding("C compiler", "note", found, advice)


# -- the machine


def _cpu(config: EngineConfig) -> Finding:
    cores, quota, usable = len(os.sched_getaffinity(0)), cpu_quota(), num_usable_cpus()
    text = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = set((re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE) or ["", ""])[1].split())
    known = " ".join(name for name in _CPU_FLAGS.split() if name in flags)
    found = f"{cores} cores" + (f", a quota of {quota:g} CPUs" if quota is not None else "")
    found += f"; {model[1] if model else platform.machine()}; {known}"
    if platform.machine() == "x86_64" and "avx2" not in flags:
        return Finding(
            "CPU", "warning", found, "without AVX2 a model on the CPU is several times slower: use another machine"
        )
    if quota is not None and quota < 1:
        advice = "less than one CPU: the whole process is stopped for a part of each 100 ms. Raise the limit (docker "
        return Finding("CPU", "warning", found, advice + "run --cpus, in Kubernetes resources.limits.cpu)")
    if usable < cores:
        return Finding(
            "CPU", "note", found, f"threads are bounded by the quota; num_threads={usable} is the most that pays"
        )
    return Finding("CPU", "ok", found)


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, free = memory_limit(), free_memory()
    found = f"{free / GIB:.1f} GiB of {total / GIB:.1f} GiB are free"
    if limit is not None and limit < total:
        found += f", the container may use {limit / GIB:.1f} GiB"
    hint = memory_ulimit_hint().lstrip("; ")
    if hint:
        return Finding("memory", "warning", found, hint)
    if free < 2 * GIB:
        advice = "a worker takes 1 GiB, and twice the model's file on a CPU: take a small model, or free memory"
        return Finding("memory", "warning", found, advice)
    return Finding("memory", "ok", found)


def _shared_memory(config: EngineConfig) -> Finding:
    needed = 2 * config.ring_bytes + _MASK_BYTES
    try:
        HostChannel.create(config.ring_bytes, _MASK_BYTES).close()
        room = os.statvfs("/dev/shm")
    except (EngineError, OSError) as error:
        return Finding("/dev/shm", "error", f"an engine's {needed / 1e6:.0f} MB can't be shared", str(error))
    free = room.f_bavail * room.f_frsize
    found = f"{free / 1e6:.0f} MB free; an engine takes {needed / 1e6:.0f} MB"
    return Finding("/dev/shm", "ok", found)


def _descriptors() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found = "no limit" if limit == resource.RLIM_INFINITY else f"{limit} may be open"
    if limit != resource.RLIM_INFINITY and limit < _FEW_DESCRIPTORS:
        return Finding("descriptors", "warning", found, "few for a server beside an engine: ulimit -n 4096")
    return Finding("descriptors", "ok", found)


def _threads() -> Finding:
    user, group = resource.getrlimit(resource.RLIMIT_NPROC)[0], threads_limit()
    limits = [limit for limit in (group, None if user == resource.RLIM_INFINITY else user) if limit is not None]
    if not limits:
        return Finding("threads", "ok", "no limit")
    found = f"{min(limits)} may run"
    if min(limits) < _FEW_THREADS + 2 * num_usable_cpus():
        cure = "raise the container's pids.max (docker run --pids-limit)" if min(limits) == group else "raise ulimit -u"
        return Finding("threads", "warning", found, f"few for a server beside an engine and its worker: {cure}")
    return Finding("threads", "ok", found)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


# -- models


def _hub_cache() -> Finding:
    try:
        from huggingface_hub import constants, get_token
    except Exception as error:
        return Finding(
            "hub cache", "error", f"huggingface_hub can't be imported: {error}", "pip install huggingface-hub"
        )
    folder = Path(constants.HF_HUB_CACHE)
    found = f"{folder}; {'a token is set' if get_token() else 'no token'}"
    if is_offline():
        return Finding("hub cache", "note", found, "HF_HUB_OFFLINE is set: only models in the cache can be loaded")
    if not _can_write(folder):
        advice = "models of the hub can't be fetched: set HF_HOME to a folder that can be written"
        return Finding("hub cache", "warning", found + "; can't be written", advice)
    return Finding("hub cache", "ok", found)


def _models() -> Finding:
    names = []
    for name in EMBEDDED_MODELS:
        try:
            find_embedded(name, join=False)
            names.append(name)
        except ModelLoadError:
            pass
    names += sorted(_hub_models())
    if not names:
        name = next(iter(EMBEDDED_MODELS))
        advice = f"aengine model add {name} fetches a small one"
        if not _can_write(model_cache()):
            advice += "; first set XDG_CACHE_HOME to a folder that can be written"
        return Finding("models", "note", "none is here", advice)
    more = f", and {len(names) - _SHOWN_MODELS} more" if len(names) > _SHOWN_MODELS else ""
    return Finding("models", "ok", ", ".join(names[:_SHOWN_MODELS]) + more)


def _hub_models() -> Iterator[str]:
    """Return the ids of the repositories in the hub's cache that have weights."""
    from huggingface_hub import constants

    for folder in Path(constants.HF_HUB_CACHE).glob("models--*--*"):
        if any(folder.glob("snapshots/*/*.safetensors")) or any(folder.glob("snapshots/*/**/*.gguf")):
            yield folder.name.removeprefix("models--").replace("--", "/", 1)


def _model(config: EngineConfig, report: dict[str, Any]) -> Finding:
    """What the model that was asked about would take."""
    if problem := report.get("model_problem"):
        return Finding("the model", "error", config.model, problem.replace("HF_HUB_OFFLINE is set and t", "t"))
    told = report["model"]
    found = f"{told['line']}; on {told['device']} {told['room'] / GIB:.1f} GiB are free for it"
    if told["weight_bytes"] > told["room"]:
        advice = "its weights do not fit: take a smaller model or format, or free memory"
        return Finding("the model", "error", found, advice)
    if not told["kv_bytes_per_token"]:
        return Finding("the model", "ok", found)
    found += f"; KV {told['kv_bytes_per_token']} bytes a token: {told['kv_tokens']} tokens fit, activations not counted"
    return Finding("the model", "ok", found)


def _can_write(folder: Path) -> bool:
    """Return whether ``folder`` may be written to, or made."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


# -- torch and the GPU, asked in another process


def _start_probe(config: EngineConfig, model: EngineConfig | None) -> subprocess.Popen[str]:
    environment = worker_environment() | thread_environment(config)
    command = [sys.executable, "-m", "aengine.runner.platforms.probe"]
    if model is not None:
        environment["HF_HUB_OFFLINE"] = "1"  # a diagnosis fetches nothing
        command.append(json.dumps(model.to_wire()))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def _read_probe(process: subprocess.Popen[str]) -> dict[str, Any] | Finding:
    try:
        out, errors = process.communicate(timeout=_PROBE_TIMEOUT)
    except subprocess.TimeoutExpired:
        advice = "a driver or a disk that does not answer: try `nvidia-smi` and `python -c 'import torch'`"
        return Finding("torch", "error", f"no answer within {_PROBE_TIMEOUT:.0f} s", advice)
    if process.returncode == 0:
        report: dict[str, Any] = json.loads(out.splitlines()[-1])
        return report
    last = errors.strip().splitlines()[-1] if errors.strip() else "it said nothing"
    advice = f"install it again: pip install --force-reinstall torch (on a machine without a GPU {_CPU_TORCH})"
    if process.returncode < 0:
        last = f"the process was killed by signal {-process.returncode}; {last}"
    return Finding("torch", "error", f"can't be used: {last}", advice)


def _devices(report: dict[str, Any]) -> Iterator[Finding]:
    build = f"for CUDA {report['cuda']}" if report["cuda"] else "for the CPU"
    units = ", 16-bit matrix products are faster" if report.get("matrix_units") else ""
    found = f"{report['torch']}, built {build}; its own CPU kernels: {report['cpu_capability']}{units}"
    if report["cpu_problem"]:
        yield Finding(
            "torch", "error", found, f"its kernels fail on this CPU ({report['cpu_problem']}): use dtype='float32'"
        )
    elif report["cuda"] and not report["driver"]:
        advice = f"of no use here: its CPU build, 3 GB smaller, is in a new environment what {_CPU_TORCH} installs"
        yield Finding("torch", "note", found, advice)
    else:
        yield Finding("torch", "ok", found)
    gpu, problem = report["gpu"], report["compiler_problem"]
    yield Finding("CPU kernels", "note" if problem and gpu is None else "ok", report["compiler"], problem)
    if gpu is not None:
        memory = f"{gpu['free_memory'] / GIB:.1f} of {gpu['total_memory'] / GIB:.1f} GiB free"
        text = f"{gpu['name']}, compute capability {gpu['capability']}, {memory}, driver {report['driver']}"
        yield Finding("GPU", "ok", text)
        if len(report["gpu_names"]) > 1:
            yield _several_gpus(report["gpu_names"], report["gpus_apart"])
    elif report["driver"]:
        yield Finding("GPU", "warning", f"not used, though driver {report['driver']} is here", report["gpu_problem"])
    else:
        yield Finding("GPU", "ok", "none: there is no NVIDIA driver")
    triton = report["triton"] or "not installed"
    if report["triton_problem"]:
        yield Finding("Triton", "error", triton, report["triton_problem"])
    else:
        yield Finding("Triton", "ok", triton if gpu is not None else f"{triton} (only a GPU needs it)")


def _several_gpus(names: list[str], apart: list[list[int]]) -> Finding:
    """Report whether a model can be divided among them. ``apart``: pairs of which one can't read the other's memory."""
    if len(set(names)) > 1:
        found = ", ".join(f"cuda:{i} {name}" for i, name in enumerate(names))
        advice = "a model is divided among equal ones only, which the setting device names"
        pairs = combinations(range(len(names)), 2)
        usable = next((f"cuda:{i},{j}" for i, j in pairs if names[i] == names[j] and [i, j] not in apart), "")
        if usable:
            advice += f": device={usable!r}, say"
    else:
        found = f"{len(names)} of this kind"
        advice = ""
    if apart:
        shown = ", ".join(f"cuda:{i} and cuda:{j}" for i, j in apart[:_SHOWN_PAIRS])
        more = len(apart) - _SHOWN_PAIRS
        found += f"; these can't read each other's memory: {shown}" + (f", and {more} more" if more > 0 else "")
        advice = "; ".join(filter(None, [advice, _PEERS_ADVICE]))
    else:
        found += "; each can read the others' memory"
    return Finding("several GPUs", "note" if advice else "ok", found, advice)
