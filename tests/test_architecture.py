"""The house rules of docs/internals/architecture.md, read off the source.

Imports go one way:
kernels <- runner <- workers.worker -> ipc <- engine.scheduler <- engine <- async_llm <- server, integrations, cli
"""

from __future__ import annotations

import ast
import functools
import gc
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "aengine"
FILES = sorted(PACKAGE.rglob("*.py"))

# What a room may import of the house. The leaves are everybody's. A room is known by its longest name here.
LEAVES = {"__version__", "errors", "limits", "params", "outputs", "config", "settings"}
STREAM_ROOMS = {f"engine.{room}" for room in ("streams", "threads", "tokenizer", "structured", "chat")} | {"telemetry"}
HOST = LEAVES | STREAM_ROOMS | {"engine", "engine.scheduler", "engine.pooling.requests", "engine.sessions"}
DOORS = LEAVES | {"async_llm", "chat", "engine.streams", "engine.threads", "engine.pooling.requests", "telemetry"}
ROOMS: dict[str, set[str]] = {
    "__version__": set(),
    "outputs": set(),
    "errors": {"outputs"},
    "limits": {"errors"},
    "settings": {"errors", "limits", "outputs"},
    "params": {"limits", "errors", "settings"},
    "config": LEAVES,
    "checkpoint": LEAVES,
    "ipc": LEAVES,
    "kernels.cpu.compiler": {"__version__", "config"},  # where compiled code is kept, and whose it is
    "kernels": {"errors", "kernels.cpu.compiler"},
    "runner": LEAVES | {"kernels", "checkpoint", "ipc.messages", "workers.rank"},
    "workers": LEAVES | {"ipc"},
    "telemetry": LEAVES,
    "engine.threads": LEAVES | {"ipc.thread_calls"},
    "engine.scheduler": LEAVES | {"ipc.messages"},
    "engine.tokenizer": LEAVES | {"checkpoint", "engine.threads"},
    "engine.structured": LEAVES | {"engine.threads"},
    "engine.chat.syntax": LEAVES | {"engine.structured"},
    "engine.chat": LEAVES | {"engine.structured", "engine.threads", "engine.tokenizer", "engine.chat.syntax"},
    "engine.streams": LEAVES | STREAM_ROOMS,
    "engine.sessions": LEAVES | STREAM_ROOMS,
    "engine": HOST | {"ipc", "checkpoint"},
    "engine.pooling.requests": LEAVES,
    "engine.pooling": HOST | {"ipc.messages"},
    "engine.handles": HOST | {"engine.pooling"},
    "async_llm": HOST | {"engine.pooling", "engine.handles"},
    "llm": LEAVES | {"async_llm", "engine.handles", "engine.threads"},
    "chat": {"engine.chat"},
    "cli": DOORS | {"checkpoint", "server"},
    "server": DOORS | {"remote"},
    "remote": DOORS | {"engine.handles.handle", "engine.structured", "engine.tokenizer", "engine.tokenizer_view"},
    "integrations": DOORS | {"llm", "engine.handles", "engine.structured", "server"},
    "testing": HOST | {"async_llm", "llm", "chat", "checkpoint", "ipc"},
    "__main__": LEAVES | {"cli"},
    "__init__": LEAVES | {"async_llm", "llm", "engine", "telemetry", "server.in_process"},
}
# Files that may import more than their room.
ALSO: dict[str, set[str]] = {
    "engine.executor": {"workers"},
    "engine.handles.start": {"checkpoint"},
    "engine.replicas.joint": {"workers"},
    "remote.handle": {"engine.adapters.memory"},
    "remote.serving": {"engine.adapters.memory"},
    "cli.serve": {"remote"},
    "cli.diagnosis": {"ipc"},
}
HEAVY = {"torch", "numpy", "transformers", "tokenizers", "jinja2", "huggingface_hub", "gguf", "llguidance"}
TORCH_ROOMS = {"kernels", "runner", "workers.distributed"}


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes of a file, its module first."""
    return list(ast.walk(ast.parse(text_of(path))))


@pytest.fixture(scope="module", autouse=True)
def _millions_of_nodes() -> Iterator[None]:
    """The garbage collector would look at all of them again and again; afterwards they are gone."""
    gc.disable()
    yield
    for cached in (text_of, nodes_of, imports_of, calls_of):
        cached.cache_clear()
    gc.enable()


def module_of(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


@cache
def imports_of(path: Path, *, type_checking: bool = False) -> list[tuple[str, int, bool]]:
    """(absolute module name, line, whether at module level) of each import statement. ``type_checking``: also of those
    for type checkers only."""
    package = ["aengine", *path.relative_to(PACKAGE).parent.parts]
    found: list[tuple[str, int, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            if not type_checking and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((alias.name, child.lineno, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                name = ".".join([*base, *([child.module] if child.module else [])])
                found.append((name, child.lineno, top))
                if name.startswith("aengine"):
                    found.extend((f"{name}.{alias.name}", child.lineno, top) for alias in child.names)
            visit(child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(nodes_of(path)[0], True)
    return found


def within(module: str, rooms: set[str]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def room_of(module: str) -> str:
    best = max((room for room in ROOMS if within(module, {room})), key=len, default=None)
    assert best is not None, f"{module} is in no room: place it in ROOMS"
    return best


def test_imports_go_one_way() -> None:
    for path in FILES:
        module = module_of(path)
        own_room = room_of(module)
        for name, line, _ in imports_of(path):
            target = name.removeprefix("aengine.")
            if name.startswith("aengine.") and room_of(target) != own_room:
                allowed = ROOMS[own_room] | ALSO.get(module, set())
                assert within(target, allowed), f"{path}:{line}: {module} may not import {target}"


def test_torch_only_in_the_device_half() -> None:
    for path in FILES:
        module = module_of(path)
        for name, line, _ in imports_of(path):
            root = name.split(".")[0]
            if root in ("torch", "triton"):
                assert within(module, TORCH_ROOMS), f"{path}:{line}: the host half imports {root}"
            if root in ("asyncio", "uvloop"):
                assert not within(module, TORCH_ROOMS), f"{path}:{line}: the device half imports {root}"
            assert root not in ("pickle", "cloudpickle", "dill", "multiprocessing"), f"{path}:{line}: {root}"


def test_one_kernel_file_knows_of_cuda() -> None:
    """Triton has other backends; what only CUDA's has is imported in one file, which does without it elsewhere."""
    found = {module_of(path) for path in FILES for name, _, _ in imports_of(path) if "triton.language.extra" in name}
    assert found == {"kernels.triton.launch"}


FAMILIES_MAY_BE_NAMED = {"runner.models", "engine.chat", "engine.tokenizer"}


def test_families_are_named_in_their_own_room() -> None:
    """What holds for one family of models is written in its file; tokenizers and chat formats have names of their own,
    some of them alike."""
    families: dict[str, str] = {}
    for file, name in (("__init__.py", "FAMILIES"), ("encoders/__init__.py", "ENCODERS")):
        registry = (PACKAGE / "runner/models" / file).read_text()
        families |= next(
            ast.literal_eval(node.value)
            for node in ast.parse(registry).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        )
    names = {*families, *(place.partition(".")[2] for place in families.values())}
    assert families
    for path in FILES:
        heart = {"runner", "kernels", "checkpoint", "workers", "engine", "ipc"}
        if within(module_of(path), heart) and not within(module_of(path), FAMILIES_MAY_BE_NAMED):
            for node in nodes_of(path):
                value = node.value if isinstance(node, ast.Constant) else getattr(node, "id", None)
                assert value not in names and not str(value).endswith("ForCausalLM"), f"{path}:{node.lineno}: {value}"


def test_environment_is_read_in_one_file() -> None:
    for path in FILES:
        if module_of(path) != "config":
            text = text_of(path)
            assert "os.environ" not in text and "os.getenv" not in text


_RE = {"compile", "match", "search", "fullmatch", "split", "findall", "finditer", "sub", "subn"}
FOREIGN_PATTERNS = {
    "engine/tokenizer/message_encoding.py": "names of control tokens that the tokenizer has, escaped and joined",
    "engine/chat/syntax/literals.py": "_signs_outside: a format's quotes, escaped and joined",
}
"""Files in which one call of `re` has a pattern that is not spelt in the file."""


def _is_spelt(pattern: ast.expr) -> bool:
    """Whether a pattern consists of texts and constants of the file, and of escaped texts."""
    if isinstance(pattern, ast.JoinedStr):
        return all(_is_spelt(part.value) for part in pattern.values if isinstance(part, ast.FormattedValue))
    if isinstance(pattern, ast.BinOp):
        return _is_spelt(pattern.left) and _is_spelt(pattern.right)
    if isinstance(pattern, ast.Call):
        return ast.unparse(pattern.func) == "re.escape"
    if isinstance(pattern, ast.Name):
        return pattern.id.isupper()
    return isinstance(pattern, ast.Constant)


def test_no_foreign_pattern_is_run_by_re() -> None:
    """It backtracks for as long as the pattern's author likes, and holds the GIL: grammars are llguidance's."""
    foreign: Counter[str] = Counter()
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in ("re", "regex"), f"{path}: write re.compile, so that this test sees it"
            if isinstance(node, ast.Import):
                assert all(name.name != "regex" and not (name.name == "re" and name.asname) for name in node.names), (
                    path
                )
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _RE:
                if ast.unparse(node.func.value) == "re" and not _is_spelt(node.args[0]):
                    foreign[path.relative_to(PACKAGE).as_posix()] += 1
    assert foreign == dict.fromkeys(FOREIGN_PATTERNS, 1)


@cache
def calls_of(path: Path) -> list[tuple[ast.Call, bool]]:
    """Each call of a file, and whether it is awaited as it is made."""
    nodes = nodes_of(path)
    awaited = {id(node.value) for node in nodes if isinstance(node, ast.Await)}
    return [(node, id(node) in awaited) for node in nodes if isinstance(node, ast.Call)]


def function_of(call: ast.Call, *names: str) -> str:
    """The dotted name of what is called, if its last part is one of ``names``; else none."""
    last = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return ast.unparse(call.func) if last in names else ""


def test_nothing_runs_in_the_executor_of_the_loop() -> None:
    """The host's loop joins it at its end, however long its threads work; those of `ThreadPool` are daemons."""
    for path in FILES:
        for call, _ in calls_of(path):
            assert not function_of(call, "run_in_executor", "set_default_executor"), f"{path}:{call.lineno}"
            assert function_of(call, "to_thread") not in ("asyncio.to_thread", "to_thread"), f"{path}:{call.lineno}"


TOKENIZING = {"encode", "encode_plain", "decode", "count", "render", "render_ids", "apply_chat_template"}
IN_THREADS = {
    "engine.tokenizer",
    "engine.chat.prompt",  # of plans, which `Preparation` makes in its lanes
    "engine.tokenizer_view",  # blocks whoever calls it; of `Preparation.ask_tokenizer` a lane
    "engine.structured.vocabulary",  # made in a thread of its own
    "engine.sampling_extras",  # of words, which `Preparation` encodes in a lane
    "integrations.langchain",  # methods that LangChain calls in its caller's thread
    "integrations.lm_eval",  # on a loop of its own, in its caller's thread
}


def test_no_tokenizer_is_asked_on_a_loop() -> None:
    """A text's length is its sender's choice: a tokenizer is called in threads, or is an `AsyncTokenizer`."""
    for path in FILES:
        for call, is_awaited in calls_of(path):
            if not isinstance(call.func, ast.Attribute) or call.func.attr not in TOKENIZING:
                continue
            asked = ast.unparse(call.func.value)
            if asked.endswith("tokenizer") and not asked.endswith("async_tokenizer") and not is_awaited:
                assert within(module_of(path), IN_THREADS), f"{path}:{call.lineno}: {asked}.{call.func.attr}"


FEATURES: dict[str, tuple[set[str], set[str]]] = {
    "multi-step scheduling": (
        {"lease", "leases", "leased", "revoke", "revoked"},
        {
            "config.py",  # its setting
            "settings.py",
            "engine/pacing/multi_step.py",
            "engine/pacing/in_flight_limit.py",
            "engine/replicas/replica.py",  # chooses it
            "engine/executor.py",  # carries what it asks of the workers, as those of other kinds do
            "engine/replicas/joint.py",
            "testing/executor.py",
            "testing/fake.py",
            "ipc/messages.py",
            "ipc/lead.py",
            "workers/host/answers.py",
            "workers/step_queue.py",
            "workers/worker.py",  # gives its messages to the queue
        },
    ),
    "swapped requests": (
        {"swapped", "SwapSpace", "SwappedRequests"},
        {
            "engine/replicas/replica.py",  # chooses it
            "engine/scheduler/swapped_requests.py",
            "runner/attention/swap_space.py",
            "runner/startup/setup.py",  # chooses it on the device
            "telemetry/",
        },
    ),
    "KV tiers": (
        {"tiers", "KVTier", "KVTiers", "TierPages", "HostTier", "DiskTier", "StoreTier"},
        {
            "__init__.py",  # what users name them by
            "config.py",  # its setting
            "settings.py",
            "limits/kv_tiers.py",
            "engine/tiers/",
            "engine/stores/",
            "engine/replicas/replica.py",  # chooses them
            "engine/replicas/start.py",  # has memory made for them
            "runner/tiers/",
            "telemetry/",
            "runner/startup/load.py",  # has the calls that copy their pages
        },
    ),
    "sessions": (
        {"ChatSession", "SyncChatSession", "SessionUsage", "SaidTokens"},
        {
            "__init__.py",
            "async_llm.py",  # makes them
            "engine/sessions/",
            "engine/handles/sync_llm.py",  # makes those that block
            "engine/preparation.py",  # asks it for a prompt's tokens
        },
    ),
    "kept blocks": (
        {"KeptBlocks", "Keeping"},
        {
            "engine/keeping/",
            "engine/core.py",  # makes it
            "engine/admission.py",  # tells it of each request that begins
            "engine/replicas/replica.py",  # chooses it
        },
    ),
    "keys and values in FP8": (
        {"ScaledKV", "KVFormat", "calibrated"},
        {
            "config.py",  # its settings
            "settings.py",
            "runner/attention/kv_format.py",
            "runner/attention/kv_pages.py",  # asks it for each layer's scales
            "runner/startup/",  # chooses it
        },
    ),
    "shared prefixes": (
        {"SharedPrefixes", "SharedKeys", "PrefixSizes", "find_groups", "LEAST_SAVED"},
        {
            "kernels/",
            "runner/attention/",
        },
    ),
    "drafts by lookup": (
        {"ngram", "SuffixHistory", "PastTexts", "TokenIndex"},
        {
            "config.py",  # its setting
            "settings.py",
            "engine/speculation/",
            "limits/registry.py",  # their names
        },
    ),
    "drafts": (
        {"draft", "drafts", "drafted", "Drafts", "DraftVerifier", "DraftColumns", "DraftHistory", "DraftStep"},
        {
            "config.py",  # its setting
            "settings.py",
            "limits/registry.py",  # their names
            "limits/speculation.py",  # reads it
            "engine/replicas/replica.py",  # chooses who makes them, and has their counts
            "engine/grammar_gate.py",  # proposes what a grammar forces, and has rows of bitmasks after each draft
            "engine/structured/",
            "engine/speculation/",
            "engine/step_loop.py",  # asks for them before each step
            "ipc/messages.py",  # their column
            "kernels/",
            "runner/model_runner.py",  # registers them
            "runner/models/heads/",
            "runner/sampling/features/bad_words.py",
            "runner/sampling/features/token_lists.py",
            "runner/speculation/",
            "runner/startup/draft.py",  # loads what makes them
            "runner/startup/load.py",  # captures their graphs
            "runner/startup/profile.py",
            "runner/startup/setup.py",
            "runner/startup/warm_up.py",
            "telemetry/",
            "testing/executor.py",
        },
    ),
    "sleep": (
        {"Sleeping", "SleepCalls", "ReplicaSleep", "Sleeper", "ArenaSleeper", "sleeper"},
        {
            "engine/core.py",  # has it, and asks it who starts another worker
            "engine/handles/core_calls.py",
            "engine/handles/sleep_calls.py",
            "engine/sleeping/",
            "runner/sleeping/",
            "runner/startup/load.py",  # chooses it on the device
        },
    ),
    "adapters": (
        {"lora", "loras", "Lora", "LoRA", "Loras", "LoraAdapters", "LoraSlots", "LoraFiles", "LoraCalls", "LoraRows"},
        {
            "config.py",  # its settings
            "settings.py",
            "params.py",  # the option of a request
            "async_llm.py",
            "limits/loras.py",
            "checkpoint/lora.py",
            "checkpoint/early_checks.py",  # names a size of DeepSeek's attention
            "runner/models/deepseek.py",  # names such, too
            "engine/adapters/",
            "engine/handles/core_calls.py",
            "engine/handles/lora_calls.py",
            "engine/handles/start.py",  # chooses them
            "engine/handles/sync_llm.py",
            "kernels/lora.py",
            "kernels/lora_types.py",
            "kernels/triton/lora.py",
            "remote/serving.py",
            "remote/handle.py",
            "cli/engine_options.py",  # an option that names one of them
            "cli/serve.py",
            "server/admin/loras.py",
            "engine/pooling/requests.py",  # the option
            "server/openai/embeddings.py",
            "telemetry/metrics.py",  # counts them
            "telemetry/prometheus.py",
            "server/app.py",  # their routes
            "server/openai/requests.py",  # the option
            "server/service.py",  # asks which there are
            "runner/lora/",
            "runner/startup/load.py",  # chooses it on the device
        },
    ),
    "tenants": (
        {"Tenant", "FairShare", "FairOrder", "FairQueue", "TokenBucket"},
        {
            "__init__.py",  # its class
            "config.py",  # its setting
            "settings.py",
            "errors.py",  # an error of its quotas
            "limits/tenants.py",
            "engine/tenants/",
        },
    ),
    "batch invariance": (
        {
            "InvariantAttention",
            "InvariantKvCache",
            "PartsWorkspace",
            "InOrderWeight",
            "InOrderFormat",
            "RowTiledFormat",
        },
        {
            "kernels/decode_plan.py",
            "kernels/invariant_attention.py",
            "kernels/triton/invariant_attention.py",
            "runner/attention/invariant.py",
            "runner/platforms/cuda.py",  # chooses the attention
            "runner/weights/invariant.py",
        },
    ),
    "pipelines": (
        {"pipeline", "pipelines", "micro", "Relay", "PipelineStage", "PipelineLink", "NoLink"},
        {
            "config.py",  # its setting
            "settings.py",
            "checkpoint/early_checks.py",  # refuses more stages than layers
            "limits/registry.py",  # counts their devices
            "engine/replicas/replica.py",  # has as many batches take turns as there are stages
            "engine/stores/",  # what is kept depends on how layers are divided; and Redis has pipelines
            "engine/scheduler/decode_batches.py",
            "runner/attention/kv_pages.py",  # what a stage has of the model
            "runner/kv_spec.py",
            "runner/models/",
            "runner/weights/",
            "runner/distributed/",
            "runner/exchange/",
            "runner/startup/",  # chooses its `StepExchange`
            "workers/agreement.py",
            "workers/rank.py",
            "workers/remote/",
        },
    ),
    "shared experts": (
        {"experts", "ExpertsGroup", "ExpertRounds", "Rounds", "RoundPeers", "Joint", "JoiningRunner"},
        {
            "config.py",  # its setting
            "settings.py",
            "cli/families.py",  # what mixtures of experts are, divided or not
            "checkpoint/",
            "kernels/",
            "runner/layers/",
            "runner/lora/",  # what adapters change of experts, divided or not
            "runner/model_config.py",
            "runner/models/",
            "runner/weights/",
            "runner/distributed/",
            "runner/exchange/",
            "runner/startup/",  # chooses its `StepExchange`
            "engine/replicas/joint.py",
            "engine/replicas/rounds.py",
            "engine/replicas/start.py",  # chooses its executors and turns
            "workers/loaded.py",  # its message's way to the runner
            "workers/worker.py",
            "workers/rank.py",
        },
    ),
    "log-probabilities of prompts": (
        {"PromptLogprobs", "PromptTable"},
        {
            "engine/streams/",
            "remote/",
            "runner/model_runner.py",  # registers it as what a step yields beside tokens
            "runner/results/",
        },
    ),
    "pooling": (
        {"pooled", "pooling", "Pooling", "DecoderPooling", "vectors", "VectorLayers"},
        {
            "__init__.py",  # its calls
            "engine/handles/",
            "remote/",
            "server/openai/embeddings.py",
            "limits/",
            "testing/executor.py",
            "config.py",  # its setting
            "settings.py",
            "checkpoint/",
            "cli/families.py",
            "engine/core.py",  # has what the checkpoint says of it
            "engine/user_request.py",  # the cure for a model that generates nothing
            "engine/pooling/",
            "engine/tokenizer/pooled_texts.py",
            "kernels/cpu/",  # vectors of a processor
            "runner/model_runner.py",  # registers it as what a step yields beside tokens
            "runner/layers/encoder.py",
            "runner/models/encoders/",
            "runner/pooling/",
            "runner/startup/",
        },
    ),
}
"""A feature, its words, and the files that may say them: its own, and those in which it is registered; of a folder,
which ends in a slash, all."""


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_named_in_its_own_files(feature: str) -> None:
    words, files = FEATURES[feature]
    naming: set[str] = set()  # by the entry that allows it; else the file itself
    for path in FILES:
        found = set(re.findall(r"[A-Za-z]+", text_of(path).replace("_", " ")))
        if found & words:
            name = path.relative_to(PACKAGE).as_posix()
            naming.add(next((place for place in files if place.endswith("/") and name.startswith(place)), name))
    assert naming == files, "a core file knows no feature: give the feature's object a verb, or register it in one line"


def test_only_rows_reach_into_rows() -> None:
    """Which request has which row, and which of them catch up, is asked of `Rows` and changed by its verbs alone."""
    state = {"running", "held", "free_rows", "catching_up"}
    for path in FILES:
        if module_of(path) == "engine.scheduler.rows":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and node.attr in state and ast.unparse(node.value).endswith("rows"):
                raise AssertionError(f"{path}:{node.lineno}: {ast.unparse(node)}")


def test_one_device_is_named_in_one_room() -> None:
    """Streams, events, graphs and memory of CUDA are asked of a `Platform`; kernel bodies need no CUDA to be
    imported."""
    for path in FILES:
        if "torch.cuda" in text_of(path):
            assert within(module_of(path), {"runner.platforms"}), path
        if within(module_of(path), {"kernels"}) and path.stem != "launch":
            assert not [name for name, *_ in imports_of(path) if ".cuda" in name or ".nvidia" in name], path


def test_functions_stay_small() -> None:
    too_big: list[str] = []
    for path in FILES:
        lines = text_of(path).splitlines()
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                reason = "large on purpose:" in lines[max(0, node.lineno - 2)]
                if size > 80 and not reason:
                    too_big.append(f"{path}:{node.lineno} {node.name}: {size} lines")
    assert not too_big, "\n".join(too_big)


MOST_FILES = 14
LARGE_ROOMS = {"kernels", "kernels/triton", "runner/models"}  # one operation a file, or one family
MOST_METHODS = 20


BUDGETS = {
    "root": 2890,
    "checkpoint": 2850,
    "cli": 1700,
    "engine": 32000,
    "integrations": 2650,
    "ipc": 2200,
    "kernels": 19360,
    "limits": 1110,
    "remote": 1700,
    "runner": 27810,
    "server": 7400,
    "telemetry": 1320,
    "testing": 815,
    "workers": 3240,
}
"""Lines that a wing may have, by ``wc -l``: some more than it had when this was written. Raising one is a commit of its
own that says why; whoever makes a wing smaller lowers its budget."""


def test_each_wing_keeps_its_budget_of_lines() -> None:
    sizes: Counter[str] = Counter()
    for path in FILES:
        wing, *rest = path.relative_to(PACKAGE).parts
        sizes[wing if rest else "root"] += text_of(path).count("\n")
    assert sizes.keys() == BUDGETS.keys()
    assert not {wing: size for wing, size in sizes.items() if size > BUDGETS[wing]}


def test_the_root_stays_small() -> None:
    """What a user holds is a handful of files; all else is in a room."""
    files = [path for path in PACKAGE.glob("*.py") if not path.name.startswith("__")]
    folders = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert len(files) <= 8, files
    assert len(folders) <= 13, folders


def test_no_module_is_imported_by_a_text() -> None:
    """A name in a text is an import that no reader and no tool sees. Registries of families, platforms, workers
    and processors, whose modules are chosen by a checkpoint or a setting, are the exceptions."""
    allowed = {"__init__", "runner.models", "runner.models.encoders", "runner.platforms.choice", "workers.calls"}
    allowed |= {"workers.loading", "runner.attention.library", "runner.sampling.processors"}
    for path in FILES:
        for call, _ in calls_of(path):
            if function_of(call, "import_module") in ("import_module", "importlib.import_module"):
                text = call.args[0]
                is_ours = not isinstance(text, ast.Constant) or str(text.value).startswith("aengine")
                assert not is_ours or module_of(path) in allowed, path


def test_rooms_stay_small() -> None:
    """A room of more files than one holds in mind is to be divided."""
    rooms = Counter(path.parent for path in FILES if path.name != "__init__.py")
    too_many = {str(room.relative_to(PACKAGE)): count for room, count in rooms.items() if count > MOST_FILES}
    assert set(too_many) <= LARGE_ROOMS, too_many


def _is_own_method(part: ast.stmt) -> bool:
    """Whether it is a method of the class' own: not ``__enter__``, nor an overload for type checkers."""
    if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) or part.name.startswith("__"):
        return False
    return not any(ast.unparse(decorator) == "overload" for decorator in part.decorator_list)


def test_classes_stay_small() -> None:
    """Python's own methods (``__enter__``) are not counted."""
    sizes: dict[str, int] = {}
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                sizes[f"{path.stem}.{node.name}"] = sum(map(_is_own_method, node.body))
    too_large = {name: size for name, size in sizes.items() if size > MOST_METHODS}
    assert not too_large, too_large


# Files that import each other, to be untied.
CIRCLES: list[set[str]] = []


def test_comments_have_a_subject() -> None:
    """A comment that begins with one of these words can't be read without the code around it: what is it that is "of
    the step that was run last"?"""
    begins = re.compile(r"(?P<code>.*\S  |\s*)# (?:\[[^\]]*\]:? )?(?:of|by|likewise|else|whose|which)\b")
    found = []
    for path in FILES:
        lines = ["", *text_of(path).splitlines()]
        for number, (before, line) in enumerate(pairwise(lines), 1):
            match = begins.match(line)
            if match and (match["code"].strip() or not before.lstrip().startswith("#")):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_a_name_with_an_underscore_stays_in_its_file() -> None:
    """All others are what a file has for others: no list beside them says so again."""
    for path in FILES:
        for name, line, _ in imports_of(path, type_checking=True):
            part = name.rpartition(".")[2]
            is_private = part.startswith("_") and not part.startswith("__")
            assert not (is_private and name.startswith("aengine")), f"{path}:{line}: {name}"


def test_no_files_import_each_other() -> None:
    """Imports inside functions count too; those for a type checker and a package's face do not."""
    modules = {module_of(path) for path in FILES if path.name != "__init__.py"}
    graph: dict[str, set[str]] = {}
    for path in FILES:
        targets: set[str] = set()
        for name, _, _ in imports_of(path):
            target = name.removeprefix("aengine.")
            while target and target not in modules:
                target = target.rpartition(".")[0]
            targets.add(target)
        if module_of(path) in modules:
            graph[module_of(path)] = targets & modules - {module_of(path)}
    circles = circles_of(graph)
    assert all(circle in CIRCLES for circle in circles), circles
    assert all(circle in circles for circle in CIRCLES), "no exception is needed any more"


def test_no_rooms_import_each_other() -> None:
    """Imports for type checkers count too: to read a room takes those below it, and no others."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        module = module_of(path)
        if module in ("__init__", "workers.entry"):  # the face of all; the script that imports all from elsewhere
            continue
        names = {name for name, *_ in imports_of(path, type_checking=True) if name.startswith("aengine.")}
        rooms = {room_of(name.removeprefix("aengine.")) for name in names}
        graph.setdefault(room_of(module), set()).update(rooms - {room_of(module)})
    assert not circles_of(graph)


def circles_of(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of nodes that reach each other; a set for each node of it."""

    def reached_from(start: str) -> set[str]:
        found: set[str] = set()
        stack = [start]
        while stack:
            for target in graph.get(stack.pop(), set()) - found:
                found.add(target)
                stack.append(target)
        return found

    reach = {node: reached_from(node) for node in graph}
    tied = [{other for other in reach[node] & reach.keys() if node in reach[other]} for node in graph]
    return [circle for circle in tied if circle]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return done.stdout


def test_modules_that_moved_are_found_in_their_old_places() -> None:
    code = """
import warnings
warnings.simplefilter("error")
for module in "aengine.structured.parts", "aengine.structured.spec":
    try:
        __import__(module)
    except DeprecationWarning as warning:
        print(warning)
"""
    assert run_python(code).split("\n")[:-1] == [
        f"aengine.structured.{name} has moved to aengine.engine.structured.{name}" for name in ("parts", "spec")
    ]


def test_importing_is_light() -> None:
    out = run_python("import sys, json; import aengine; print(json.dumps(sorted(sys.modules)))")
    loaded = {name.split(".")[0] for name in json.loads(out)}
    assert not loaded & {*HEAVY, "msgpack", "asyncio"}


def test_the_host_half_is_light_too() -> None:
    out = run_python(
        "import sys, json; from aengine import AsyncLLM; import aengine.engine.core; AsyncLLM('x');"
        "print(json.dumps(sorted(sys.modules)))"
    )
    loaded = {name.split(".")[0] for name in json.loads(out)}
    assert not loaded & HEAVY


def test_workers_begin_before_the_rest_of_the_host_is_imported() -> None:
    """They take longest to start; what follows is the host's work while they do."""
    out = run_python("""
import asyncio, json, sys, tempfile
from pathlib import Path
from aengine import AsyncLLM, ModelLoadError

class Early(AsyncLLM):
    def _make_executor(self, config):
        print(json.dumps(sorted(sys.modules)))
        raise ModelLoadError("seen")

async def main():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text('{"model_type": "llama"}')
        try:
            await Early(folder, load_format="dummy").start()
        except ModelLoadError as error:
            assert str(error) == "seen"

asyncio.run(main())
""")
    loaded = set(json.loads(out))
    late = {"core", "admission", "step_loop", "scheduler.scheduler", "tokenizer.tokenizer", "structured.service"}
    assert "aengine.engine.replicas.start" in loaded
    assert not loaded & {f"aengine.engine.{name}" for name in late}
    assert not {name.split(".")[0] for name in loaded} & HEAVY


def test_a_worker_on_a_cpu_imports_no_more_than_torch_does() -> None:
    """Up to its first step: each of these would add to a start what it takes to import."""
    out = run_python("""
import json, sys
import torch
torchs_own = set(sys.modules)
import aengine.workers.worker
from aengine.checkpoint.source import ModelSource
from aengine.config import EngineConfig
from aengine.runner.startup.begin import load_model
from aengine.runner.startup.kv_memory import profile_run
from aengine.workers.rank import Rank

hf = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
      "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
config = EngineConfig(model="tiny", device="cpu", dtype="float32", load_format="dummy")
source = ModelSource("tiny", "/nowhere", "dummy", hf).to_wire()
model = load_model(config, source, Rank(), lambda *report: None)
runner, _ = model.allocate(model.offer)
profile_run(runner, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64)
print(json.dumps([sorted(torchs_own), sorted(sys.modules)]))
""")
    torchs_own, loaded = map(set, json.loads(out))
    added = loaded - torchs_own
    assert "aengine.runner.model_runner" in added
    assert not {name for name in added if name.split(".")[0] == "torch"}
    packages = {name.split(".")[0] for name in added} - {name.split(".")[0] for name in torchs_own}
    assert not packages & (HEAVY | {"triton", "sympy", "pydantic", "sentencepiece", "yaml", "scipy"})


def test_exported_names_are_pinned() -> None:
    import aengine

    assert set(aengine.__all__) - {"__version__"} == set(aengine._HOME)
    assert sorted(aengine.__all__) == aengine.__all__
    for name in aengine.__all__:
        assert getattr(aengine, name) is not None
    assert aengine.__all__ == [
        "AEngineError",
        "AsyncLLM",
        "ChatChoice",
        "ChatCompletion",
        "ChatIterator",
        "ChatMessage",
        "ChatOptions",
        "ChatSession",
        "ChatStream",
        "Choice",
        "Completion",
        "ContextLengthError",
        "DeadlineExceededError",
        "Delta",
        "DiskTier",
        "EngineClosedError",
        "EngineConfig",
        "EngineError",
        "EngineOverloadedError",
        "FinishReason",
        "GenerateOptions",
        "GrammarError",
        "Histogram",
        "Histograms",
        "HostTier",
        "InternalError",
        "InvalidRequestError",
        "IpcTensors",
        "KVStore",
        "LLM",
        "Logprob",
        "ModelLoadError",
        "NotEnoughMemoryError",
        "PoolingOptions",
        "PoolingRequest",
        "PoolingResult",
        "QuotaExceededError",
        "RankedDocument",
        "ReasoningDelta",
        "ReplicaStatistics",
        "RequestEnd",
        "RequestError",
        "RequestListener",
        "RequestOptions",
        "RequestStart",
        "SamplingParams",
        "ScoredCompletion",
        "Settings",
        "SpareWorkers",
        "StartupProgress",
        "Statistics",
        "StoreTier",
        "StructuredOutput",
        "SyncChatSession",
        "SyncLLM",
        "Tenant",
        "TenantStatistics",
        "TextDelta",
        "Timings",
        "Token",
        "TokenIterator",
        "TokenStream",
        "TokenizerView",
        "Tool",
        "ToolCall",
        "ToolCallDelta",
        "ToolCallEnd",
        "ToolCallStart",
        "ToolChoice",
        "TrainerGroup",
        "Usage",
        "WeightsLostError",
        "WorkerCallError",
        "WorkerDiedError",
        "WorkerRestart",
        "__version__",
    ]


def test_names_of_loggers_are_pinned() -> None:
    """They are public: users set their levels (docs/versions.md)."""
    found = {name for path in FILES for name in re.findall(r'getLogger\("(aengine[^"]*)"\)', path.read_text())}
    ends = "access access.probes checkpoint remote requests runner server structured tokenizer workers".split()
    assert found == {"aengine", *(f"aengine.{end}" for end in ends)}
    page = (ROOT / "docs" / "logging.md").read_text()
    assert [name for name in found if f"`{name}`" not in page] == []


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "scripts", "tests"])
def test_what_programs_beside_the_package_import_is_there(folder: str) -> None:
    """Many of them are run by hand, now and then, or where there is a GPU."""
    gone = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aengine."):
                names = _names_in(PACKAGE.joinpath(*node.module.split(".")[1:]))  # type: ignore[union-attr]
                gone += [f"{path.name}: {node.module}.{alias.name}" for alias in node.names if alias.name not in names]
    assert gone == []


@functools.cache
def _names_in(module: Path) -> set[str]:
    """The modules of a package, and what its file, or the module's, binds."""
    names = {path.stem for path in module.glob("*") if path.suffix == ".py" or path.is_dir()}
    path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    if not path.exists():
        return names
    for node in nodes_of(path):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # a name that a module finds when it is asked for it
    return names


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by their base names."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}


def _short_sleeps_outside_loops(node: ast.AST) -> Iterator[ast.Call]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and function_of(child, "sleep") in ("time.sleep", "asyncio.sleep"):
            seconds = child.args[0]
            if isinstance(seconds, ast.Constant) and 0 < seconds.value < 10:  # type: ignore[operator]
                yield child
        elif not isinstance(child, ast.While | ast.For | ast.AsyncFor):
            yield from _short_sleeps_outside_loops(child)


def test_a_short_sleep_of_a_test_has_a_reason() -> None:
    """A sleep as synchronisation hopes that something has happened by then: a loop asks for it, and ends as soon as it
    has. Times that have a name, and those of what hangs (10 s or more), are the test's subject."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        lines = text_of(path).splitlines()
        calls = _short_sleeps_outside_loops(nodes_of(path)[0])
        found += [f"{path}:{call.lineno}" for call in calls if "  # " not in lines[call.lineno - 1]]
    assert not found, "\n".join(found)


MOST_PRIVATE_USES = 240
"""How often all tests together use a private attribute of an object that is not theirs; 239 when this was written. It
is to fall."""


def test_few_tests_use_private_attributes() -> None:
    uses = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        nodes = nodes_of(path)
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        own |= {"_exit", "_replace", "_fields"}  # of os, and of named tuples
        for node in nodes:
            if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr) and node.attr not in own:
                if ast.unparse(node.value) not in ("self", "cls", "super()"):
                    uses.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.attr}")
    assert len(uses) <= MOST_PRIVATE_USES, "\n".join(uses)
