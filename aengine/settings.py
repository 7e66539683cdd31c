"""All settings by name, for editors and type checkers; what `help()` shows of them; and their values out of texts.

The class at the end is written by scripts/settings.py from `EngineConfig`: edit that, and run it. What a setting means
is the docstring below it. Its unit, if it is a number, is in `UNITS` here or told by its name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

from .errors import InvalidRequestError
from .limits.values import nearest

if TYPE_CHECKING:
    from .limits.kv_tiers import DiskTier, HostTier, StoreTier
    from .limits.registry import Spares
    from .limits.tenants import Tenant
    from .outputs import RequestEnd, StartupProgress

UNITS = {
    **dict.fromkeys(
        ("seed", "temperature", "top_p", "min_p", "repetition_penalty", "n", "logprobs", "prompt_logprobs"), ""
    ),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), ""),
    **dict.fromkeys(("max_model_len", "block_size", "top_k"), "tokens"),
    **dict.fromkeys(("max_num_seqs", "max_num_queued_requests"), "requests"),
    "restart_window": "seconds",
    "sleep_after": "seconds",
    "max_step_seconds": "seconds",
    "gpu_memory_utilization": "share",
    "kept_kv_fraction": "share",
    "tensor_parallel_size": "GPUs",
    "pipeline_parallel_size": "stages",
    "data_parallel_size": "replicas",
    "num_threads": "threads",
    "max_loras": "adapters",
    "max_lora_rank": "",
    "max_lora_expert_rank": "",
    "worker_spin_us": "microseconds",
    "max_restarts": "restarts",
}
_UNIT_OF_ENDING = {"timeout": "seconds", "bytes": "bytes", "steps": "steps", "tokens": "tokens"}


class Field(NamedTuple):
    name: str
    type: str
    default: str  # "": it must be given
    unit: str
    doc: str  # one line


def fields_of(cls: type[Any]) -> list[Field]:
    """Read the fields of a dataclass from its source.

    Raises ValueError for a field without a docstring, or a number without a unit; OSError where there is no source.
    """
    import ast
    import inspect
    import textwrap

    body: list[Any] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    defaults = {field.name: _default(field) for field in dataclasses.fields(cls)}
    found = []
    for node, following in zip(body, [*body[1:], None]):
        if not isinstance(node, ast.AnnAssign):
            continue
        name, kind = ast.unparse(node.target), ast.unparse(node.annotation).replace("'", '"')
        if not isinstance(following, ast.Expr):
            raise ValueError(f"{cls.__name__}.{name} has no docstring")
        unit: str | None = ""
        if kind.removesuffix(" | None") in ("int", "float"):
            unit = UNITS.get(name, _UNIT_OF_ENDING.get(name.rsplit("_", 1)[-1]))
        if unit is None:
            raise ValueError(
                f"{cls.__name__}.{name} is a number without a unit: add it to UNITS in aengine/settings.py"
            )
        found.append(Field(name, kind, defaults[name], unit, " ".join(ast.literal_eval(following.value).split())))
    return found


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    if field.default is dataclasses.MISSING:
        return ""
    return f'"{field.default}"' if isinstance(field.default, str) else repr(field.default)


class _Described:
    """A docstring that is made when it is asked for."""

    def __init__(self, doc: str, cls: type[Any]) -> None:
        self._doc = doc
        self._cls = cls

    def __get__(self, instance: object, owner: type[Any]) -> str:
        return f"{self._doc.rstrip()}\n\n{_help_of(self._cls)}"


def described(doc: str | None, cls: type[Any]) -> Any:
    """Return a class' docstring with the settings at the end that ``cls`` defines, but for the model."""
    return _Described(doc or "", cls)


def _help_of(cls: type[Any]) -> str:
    import textwrap

    lines = ["    Settings:"]
    try:
        fields = [field for field in fields_of(cls) if field.name != "model"]
    except OSError:  # the package was installed without its source
        fields = []
    for name, kind, default, unit, doc in fields:
        lines.append(f"        {name}: {kind}{f' = {default}' if default else ''}{f'  ({unit})' if unit else ''}")
        lines += textwrap.wrap(doc, 108, initial_indent=" " * 12, subsequent_indent=" " * 12)
    return "\n".join(lines) + "\n"


_NO_SETTINGS = {"API_KEY", "ADMIN_KEY"}
"""What variables of the command line have behind the prefix."""

_OF_KUBERNETES = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)?)$")
"""Ends of variables that Kubernetes sets in each pod, with the name of a service before them: "aengine", for one."""

_PAGE = "https://github.com/aengine/aengine/blob/main/docs/settings.md"

_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def read_settings(config_class: type, prefix: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Name to value of the settings that variables with ``prefix`` give; those that are empty give none.

    Raises InvalidRequestError for a variable that names no setting, or can't be read as its type.
    """
    if not isinstance(prefix, str) or not prefix:
        raise InvalidRequestError(f"prefix={prefix!r} is not valid: it must be a non-empty string", param="prefix")
    types: dict[str, str] = config_class.__annotations__
    names = {f"{prefix}{name.upper()}": name for name in types}
    read: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(prefix):
            continue
        name = names.get(variable)
        if name is None:
            rest = variable.removeprefix(prefix)
            if rest in _NO_SETTINGS or _OF_KUBERNETES.search(rest):
                continue
            near = nearest(rest.lower(), set(types))
            hint = f"did you mean {prefix + near.upper()!r}?" if near else f"{_PAGE} lists them"
            message = f"in the environment: there is no setting {variable!r}; {hint}"
            raise InvalidRequestError(message, param=variable)
        text = text.strip()
        if text:
            read[name] = value_of(variable, name, types[name], text)
    return read


def value_of(variable: str, name: str, type_name: str, text: str) -> Any:
    """Read a setting's value. ``type_name``: as it stands in the class, "int | None".

    Raises InvalidRequestError, which names ``variable``.
    """
    if type_name.startswith("Callable"):
        raise InvalidRequestError(f"{variable}: a function can't be given in the environment", param=name)
    kind = type_name.removesuffix(" | None")
    if kind != type_name and text.lower() == "none":
        return None
    wanted = "1 or 0, true or false, yes or no, on or off"
    try:
        if kind == "bool":
            return _BOOLEANS[text.lower()]
        if kind == "int":
            wanted = "an integer"
            return int(text)
        if kind == "Sequence[str]":
            return tuple(name for part in text.split(",") if (name := part.strip()))
        if kind == "Sequence[int]":
            wanted = "integers with commas between them"
            return tuple(map(int, text.split(",")))
        if kind == "Mapping[str, str]":
            wanted = "name=value, or several with commas between them"
            return {name.strip(): own.strip() for name, own in (part.split("=", 1) for part in text.split(","))}
        if kind == "float":
            wanted = "a number"
            return float(text)
    except (KeyError, ValueError):
        raise InvalidRequestError(f"{variable}={text!r} is not valid: it must be {wanted}", param=name) from None
    return text


class Settings(TypedDict, total=False):
    """The keyword arguments of `AsyncLLM` and `LLM`, as `EngineConfig` defines them."""

    revision: str | None
    """Branch, tag or commit of a hub id; of any other model it is refused. Default: None."""
    gguf_file: str | None
    """The GGUF file to load of a hub repository or folder: its name, or a pattern that fits one model ("*Q4_K_M*").
    Default: None."""
    tokenizer: str | None
    """Another folder, .gguf file or hub id to take the tokenizer from. None: the model's. Default: None."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"]
    """Kind of the weights' files; "auto" looks which there are. "dummy": random weights, in the format that config.json
    describes, the only file that is read; for benchmarks. Default: "auto"."""
    model_impl: Literal["auto", "native", "transformers"]
    """Whose code computes the model: "native": aengine's, which is the faster; "transformers": that of the package
    (aengine-llm[transformers]). "auto": native where there is a family for it, else transformers. Default: "auto"."""
    trust_remote_code: bool
    """Run Python code that lies beside the model's weights, where neither aengine nor transformers has the model. Read
    it first: it may do whatever the worker process may. Default: False."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    """Number format of weights, activations and KV. "auto": the checkpoint's on a GPU; on a CPU 16-bit weights, or a
    GGUF's own codes with activations of 16 bits where they are multiplied, and the rest in float32. Default: "auto"."""
    quantization: Literal["auto", "gguf", "fp8"]
    """What matrices are kept in. "auto": as the checkpoint's quantization_config says; those of a GGUF stay in their
    own types on a GPU and on a CPU with compiled kernels if dtype is "auto", else they become numbers of dtype as they
    are loaded. "gguf": they stay in their own types whatever the dtype, on a CPU without compiled kernels as blocks,
    which is slower. "fp8": on a GPU, 16-bit weights become FP8 with a scale a row as they are loaded: half the memory,
    and faster; and so do, on Hopper, activations of steps of more than 8 tokens. Default: "auto"."""
    on_unsupported_format: Literal["error", "dequantise"]
    """What happens to a quantised matrix whose codes the GPU can't multiply: "error": a ModelLoadError that names it.
    "dequantise": it becomes 16-bit numbers as it is loaded, and a line of the log says so. A CPU multiplies numbers of
    nearly every format anyway. Default: "error"."""
    device: str
    """Where the model runs: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:N", "cuda:N,M" (one for each rank; as
    CUDA_VISIBLE_DEVICES counts them), or the name of an entry point in the group "aengine.platforms", likewise.
    Default: "auto"."""
    seed: int
    """Seed of the weights of load_format="dummy". Sampling has a seed in `SamplingParams`. Default: 0."""
    generation_config: Literal["auto", "none"]
    """What temperature, top_p, top_k, min_p and repetition_penalty are where a request does not give them. "auto": as
    the checkpoint's file of that name says, if there is one. "none": the defaults of `SamplingParams`. Default:
    "auto"."""
    pooling: Literal["auto", "mean", "cls", "last"]
    """How the hidden states of a text become its embedding: their mean, the first or the last of them. "auto": as the
    checkpoint says; where it says nothing an encoder takes the mean, and a decoder gives no embeddings. A model that
    classifies texts has none, and refuses it. Default: "auto"."""
    skip_tokenizer: bool
    """Prompts and outputs are token ids only; no tokenizer is loaded. Default: False."""
    allow_special_tokens: bool
    """The names of special tokens in a chat's messages and tools ("<|im_end|>") become those tokens. False: they stay
    text, so that no message can pretend to be another. Prompts that are a text are not affected. Default: False."""
    preload_grammars: bool
    """Make the grammar library's tables while the engine starts: 0.4 s of a thread and 30 MB for a vocabulary of 49,152
    tokens, 2.4 s and 0.1 GB for 262,144. False: at the first request with a structured output, which waits for them.
    The loop goes on meanwhile. Default: False."""
    max_model_len: int | None
    """Most tokens of prompt and completion together. None: the model's own, as far as the KV memory reaches. In tokens.
    Default: None."""
    max_num_seqs: int
    """Most requests in one batch. In requests. Default: 256."""
    max_num_batched_tokens: int | None
    """Most tokens computed in one step. None: 8192 on a GPU, 512 on a CPU. An encoder computes a text in one step: None
    is as many at least as its longest text has. In tokens. Default: None."""
    attention_backend: Literal["auto", "triton", "flash-attn-2", "flash-attn-3", "flash-attn-4", "cudnn"]
    """What attends to long prompts on a GPU. "auto": the fastest that is installed and fits the GPU, else "triton". Any
    other value is refused on a CPU. Default: "auto"."""
    block_size: int | None
    """Tokens in a KV block. None: the attention back end's default. In tokens. Default: None."""
    gpu_memory_utilization: float
    """Share of the GPU's memory that the engine may use, weights and KV together. Default: 0.9."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"]
    """What keys and values are kept in. "auto": the dtype that the model computes in. "fp8": eight bits (e4m3), with a
    scale for each key-value head (docs/memory.md). Default: "auto"."""
    kv_cache_scales: Literal["auto", "calibrated", "one"]
    """The scales of kv_cache_dtype="fp8". "auto": those of the checkpoint, and if it has none, "calibrated": measured
    at the start, by the same tokens in 16 or 32 bits. "one": 1. Only with that kv_cache_dtype. Default: "auto"."""
    kv_cache_memory_bytes: int | None
    """Memory for the KV cache of each rank. None: what gpu_memory_utilization leaves; on a CPU a quarter of what is
    free, at most 4 GiB, divided among the ranks of all replicas. In bytes. Default: None."""
    enable_sleep_mode: bool
    """On a GPU: weights and KV are laid out so that ``sleep(level=1)`` moves the weights to the host's memory and the
    worker lives on (docs/sleep.md). False: it ends the worker there. On a CPU the worker lives on either way. Default:
    False."""
    swap_space_bytes: int
    """The host's memory, pinned, in which each rank keeps the KV of preempted requests, so that it is copied back and
    not computed again (docs/memory.md). 0: they are computed again. In bytes. Default: 0."""
    enable_prefix_caching: bool
    """Prompts that begin alike share KV. Default: True."""
    kv_tiers: Sequence[HostTier | DiskTier | StoreTier] | str
    """Where the KV of prefixes is kept that the device has no room for, nearest first (docs/kv-tiers.md):
    HostTier("40GB"), DiskTier("/path", "200GB"), StoreTier("redis", url="redis://..."). In a text:
    "host:40GB,disk:/path:200GB". (): it is computed again. Default: ()."""
    kept_kv_fraction: float
    """Share of the KV blocks that is kept for the next turns of sessions, at most (docs/memory.md). 0: none is.
    Default: 0.9."""
    max_in_flight_steps: int
    """Steps given to the worker before the oldest has been answered; 1 or more. In steps. Default: 2."""
    max_leased_steps: int
    """Most steps given to the worker while the host's loop is often late, so that it goes on alone meanwhile. A new
    request, an abort or a deadline takes back those that it has not begun. 0: no more than max_in_flight_steps. In
    steps. Default: 64."""
    max_step_seconds: float | None
    """Seconds that requests which decode may wait for a step with prompts: it has as many tokens of these as steps so
    far had in that time, and with a small model on a GPU no more than run as one launch (2,304). It may take six times
    as long as it would without prompts, and longer where many requests wait for their first token. None: no limit. In
    seconds. Default: 0.01."""
    speculation: str | Mapping[str, Any] | None
    """Which tokens are guessed, so that a step brings several where the guess is right (docs/speculation.md); the
    output is the same. "suffix", or "ngram": those that came after the last ones where these occurred before, in the
    prompt or in the completion; "suffix_past": or in the outputs of earlier requests of the same cache_salt;
    "ngram_worker": found by the worker; {"method": "draft_model", "model": PATH, "tokens": 4}: what a smaller model of
    the same tokenizer says; {"method": "eagle3", "model": PATH}, with "peagle" or "dflash" likewise, or "mtp": what a
    head on the model's states says. Or the name of an entry point in the group "aengine.proposers". None is "none".
    Default: "none"."""
    tensor_parallel_size: int
    """Ranks that share each layer of the model (docs/parallel.md): a GPU each; with device="cpu" a process each. In
    GPUs. Default: 1."""
    pipeline_parallel_size: int
    """Stages among which the layers of the model are divided (docs/parallel.md), each of tensor_parallel_size ranks:
    GPUs of one machine; with device="cpu" processes. At least as many steps and one more are in flight, whatever
    max_in_flight_steps says. In stages. Default: 1."""
    enable_expert_parallel: bool
    """Of mixtures of experts each of those ranks has some experts as a whole, instead of a part of every one; with
    data_parallel_size each rank of all replicas, so that there are all experts once (docs/parallel.md). A model without
    mixtures of experts refuses it. Default: False."""
    data_parallel_size: int
    """Replicas of the model, each on GPUs of its own, or with its share of a CPU's cores. A request runs on the one
    that has most of its prompt cached, or less to do; when a worker dies its requests go on with another. In replicas.
    Default: 1."""
    executor: Literal["process", "ray"]
    """Where the ranks run: "process": on this machine; "ray": on the machines of a Ray cluster (aengine-llm[ray]), each
    pipeline stage on one of them (docs/parallel.md#several-machines). Default: "process"."""
    ray_address: str | None
    """The Ray cluster, as `ray.init` takes it. None: the one that this process is connected to, else $RAY_ADDRESS, else
    the one that runs on this machine. Only with executor="ray". Default: None."""
    loras: Mapping[str, str] | None
    """LoRA adapters that requests can name: the name of each, and its folder or hub id, in PEFT's format. In a text:
    "name=folder,other=folder". Default: None."""
    max_loras: int | None
    """Adapters that are on the device at a time. None: as many as loras has, at most 16. 0: none, and nothing is kept
    for them. In adapters. Default: None."""
    max_lora_rank: int | None
    """The largest rank of an adapter. None: the largest of loras, or 16 if there are none. Default: None."""
    max_lora_expert_rank: int | None
    """The largest rank of what adapters change of experts, which takes memory for each expert of each layer. None: the
    largest of loras. 0: they change none. Default: None."""
    enforce_eager: bool
    """No CUDA graphs: each step's kernels are launched one by one. Default: False."""
    cudagraph_mode: Literal["auto", "FULL", "PIECEWISE", "NONE"]
    """What of a step on a GPU is launched as CUDA graphs (docs/gpu.md#cuda-graphs). "FULL": layers, head and sampling.
    "PIECEWISE": head and sampling, for models with an op in their layers that can't be captured. "NONE": nothing.
    "auto": "FULL", unless enforce_eager says otherwise. Default: "auto"."""
    cudagraph_capture_sizes: Sequence[int] | None
    """Numbers of requests of the decodes that are CUDA graphs, at most 512; a smaller batch is padded to the next one,
    a larger one than all runs as steps with prompts do. None: 1, 2, 4, 8, then with a growing distance up to
    max_num_seqs or 512. Default: None."""
    batch_invariant: bool
    """A request's logits have the same bits whatever else is in the batch and however its prompt is cut into steps, as
    training against an engine needs. On a CPU, slower without compiled kernels, or in 16 bits on a GPU of compute
    capability 9.0 (docs/batch-invariance.md). Default: False."""
    num_threads: int | None
    """CPU threads of each worker, at most 64 or the machine's cores. None: what $OMP_NUM_THREADS says, within that
    limit; else the cores that they may use (no more than a container's CPU quota has whole CPUs), less one for the host
    when there are over four, divided among the ranks. In threads. Default: None."""
    max_num_queued_requests: int
    """Most requests waiting; one more is refused or waits, as admission says. In requests. Default: 10000."""
    admission: Literal["error", "wait"]
    """When the queue is full: raise EngineOverloadedError, or let the caller await its turn. Default: "error"."""
    tenants: str | Mapping[str, Tenant | Mapping[str, Any]] | None
    """Shares and quotas of those who ask, by the name that requests give as ``tenant`` (docs/tenants.md): a mapping to
    Tenant(weight=2, max_running=16, ...), or a TOML file with such tables under "tenants". "*": of all others, each.
    None: all have equal shares and no quotas. Default: None."""
    sleep_after: float | None
    """Seconds without a request after which the engine sleeps, at level 1 (docs/sleep.md). None: only when it is told
    to. In seconds. Default: None."""
    when_asleep: Literal["wake", "wait", "error"]
    """What a request does that comes while the engine sleeps: it wakes it; waits until it is woken; or is refused with
    EngineClosedError. Default: "wake"."""
    unread_timeout: float | None
    """Seconds after which a stream ends with DeadlineExceededError when tokens lie unread and nobody has asked for one,
    though it is held somewhere. None: it runs on to its max_tokens, or to the end of the model's context. In seconds.
    Default: 300.0."""
    worker: str
    """What loads and runs the model in a worker process: "default", the name of an entry point in the group
    "aengine.workers", or "module:function" (docs/extending.md). Default: "default"."""
    worker_extension: str | None
    """Class whose methods `AsyncLLM.collective_rpc` calls in each worker: "module:Class" (docs/extending.md). Default:
    None."""
    logits_processors: Sequence[str]
    """Classes that change the logits of requests whose ``extra_args`` name them, at most 16: each "module:Class", or
    the name of an entry point in the group "aengine.logits_processors", such as "thinking_budget" (docs/extending.md).
    Default: ()."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"]
    """Of which distribution ``SamplingParams.logprobs`` are: the model's own, or the one that the token was drawn from,
    after penalties, bans, the grammar, temperature and cutoffs. A prompt's are always the model's own. Default:
    "raw_logprobs"."""
    own_thread: bool
    """The engine runs on an event loop of its own, in a daemon thread: its methods may be called from any loop in any
    thread, and a blocked loop of yours doesn't hold it up. progress and on_request_end are called in that thread.
    Default: False."""
    worker_spin_us: int
    """How long an idle worker spins on its ring before it parks. In microseconds. Default: 100."""
    ring_bytes: int
    """Size of each shared-memory ring; larger messages travel in fragments. In bytes. Default: 4194304."""
    startup_timeout: float
    """How long a worker may take from its start until it can serve; a download of the model is not part of it. In
    seconds. Default: 600.0."""
    shutdown_timeout: float
    """How long aclose() lets the workers end by themselves before it kills them. In seconds. Default: 5.0."""
    max_restarts: int
    """Most restarts of workers within restart_window. A worker that dies or hangs is started again, and all requests go
    on; one more, and the engine fails. 0: it fails at the first death. In restarts. Default: 10."""
    restart_window: float
    """For how long a restart counts towards max_restarts. In seconds. Default: 600.0."""
    hang_timeout: float
    """How long a worker may show no sign of life, or a step take longer than one of its size can, before the workers
    are killed and started again (docs/recovery.md). In seconds. Default: 4.0."""
    spare_workers: Spares | None
    """A `SpareWorkers`: processes of yours that have imported torch, one of which becomes a worker as it starts or
    starts again (docs/recovery.md#spare-workers). None: each worker imports it. Only with executor="process". Default:
    None."""
    progress: Callable[[StartupProgress], None] | None
    """Called on the loop with each step of the start. None: reports go to the logger "aengine" only. Default: None."""
    on_request_end: Callable[[RequestEnd], object] | None
    """Called on the engine's loop with a `RequestEnd` for each request that was accepted and has ended, in whatever
    way, once. It must return soon; what it raises is logged. With own_thread it is called in the engine's thread.
    Default: None."""
