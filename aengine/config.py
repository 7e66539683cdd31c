"""The engine's settings: frozen, keyword-only, checked; an unknown name raises.

`EngineConfig.create` is what ``AsyncLLM(model, **config)`` calls. Values that depend on the model or the machine
stay None here and are resolved by whoever knows (the loader, the worker), which return new objects.

This is the one file that reads ``os.environ``.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import InvalidRequestError
from .limits.cgroups import num_usable_cpus
from .limits.graphs import GraphMode, checked_graphs
from .limits.kv_tiers import DiskTier, HostTier, StoreTier, checked_kv_tiers
from .limits.loras import checked_loras
from .limits.registry import (
    PROPOSERS,
    WORKERS,
    Spares,
    check_device,
    check_processors,
    check_target,
    is_in_module,
    registered,
    target_of,
)
from .limits.speculation import SpeculationSettings, checked_speculation
from .limits.tenants import Tenant, checked_tenants
from .limits.values import (
    check_choices,
    checked_number,
    choices_of,
    is_unicode,
    not_valid,
    refuses_unknown_names,
    shown,
    unknown_name,
)
from .settings import described, read_settings

if TYPE_CHECKING:
    from typing import Unpack

    from .outputs import RequestEnd, StartupProgress
    from .settings import Settings

PACKAGE_FOLDER = Path(__file__).parent
"""The folder of this package: what other processes run lies there, and they find the package beside it."""

LEAST_LOGITS = 64
"""Rows of logits that a step may have, however few requests have a row."""


@refuses_unknown_names
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every setting of an engine. Sizes are in tokens, requests or bytes as named; times in seconds.

    Raises:
        InvalidRequestError: a wrong value; ``param`` names it.
    """

    model: str
    """An embedded default ("smollm2-135m"), a folder, a .gguf file, or a hub id: "Qwen/Qwen3-0.6B", or with a GGUF's
    quantisation "Qwen/Qwen3-0.6B-GGUF:Q8_0"."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; of any other model it is refused."""
    gguf_file: str | None = None
    """The GGUF file to load of a hub repository or folder: its name, or a pattern that fits one model ("*Q4_K_M*")."""
    tokenizer: str | None = None
    """Another folder, .gguf file or hub id to take the tokenizer from. None: the model's."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """Kind of the weights' files; "auto" looks which there are. "dummy": random weights, in the format that
    config.json describes, the only file that is read; for benchmarks."""
    model_impl: Literal["auto", "native", "transformers"] = "auto"
    """Whose code computes the model: "native": aengine's, which is the faster; "transformers": that of the package
    (aengine-llm[transformers]). "auto": native where there is a family for it, else transformers."""
    trust_remote_code: bool = False
    """Run Python code that lies beside the model's weights, where neither aengine nor transformers has the model. Read
    it first: it may do whatever the worker process may."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights, activations and KV. "auto": the checkpoint's on a GPU; on a CPU 16-bit weights, or a
    GGUF's own codes with activations of 16 bits where they are multiplied, and the rest in float32."""
    quantization: Literal["auto", "gguf", "fp8"] = "auto"
    """What matrices are kept in. "auto": as the checkpoint's quantization_config says; those of a GGUF stay in their
    own types on a GPU and on a CPU with compiled kernels if dtype is "auto", else they become numbers of dtype as they
    are loaded. "gguf": they stay in their own types whatever the dtype, on a CPU without compiled kernels as blocks,
    which is slower. "fp8": on a GPU, 16-bit weights become FP8 with a scale a row as they are loaded: half the
    memory, and faster; and so do, on Hopper, activations of steps of more than 8 tokens."""
    on_unsupported_format: Literal["error", "dequantise"] = "error"
    """What happens to a quantised matrix whose codes the GPU can't multiply: "error": a ModelLoadError that names it.
    "dequantise": it becomes 16-bit numbers as it is loaded, and a line of the log says so. A CPU multiplies numbers of
    nearly every format anyway."""
    device: str = "auto"
    """Where the model runs: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:N", "cuda:N,M" (one for each rank; as
    CUDA_VISIBLE_DEVICES counts them), or the name of an entry point in the group "aengine.platforms", likewise."""
    seed: int = 0
    """Seed of the weights of load_format="dummy". Sampling has a seed in `SamplingParams`."""
    generation_config: Literal["auto", "none"] = "auto"
    """What temperature, top_p, top_k, min_p and repetition_penalty are where a request does not give them. "auto": as
    the checkpoint's file of that name says, if there is one. "none": the defaults of `SamplingParams`."""
    pooling: Literal["auto", "mean", "cls", "last"] = "auto"
    """How the hidden states of a text become its embedding: their mean, the first or the last of them. "auto": as the
    checkpoint says; where it says nothing an encoder takes the mean, and a decoder gives no embeddings. A model that
    classifies texts has none, and refuses it."""
    skip_tokenizer: bool = False
    """Prompts and outputs are token ids only; no tokenizer is loaded."""
    allow_special_tokens: bool = False
    """The names of special tokens in a chat's messages and tools ("<|im_end|>") become those tokens. False: they stay
    text, so that no message can pretend to be another. Prompts that are a text are not affected."""
    preload_grammars: bool = False
    """Make the grammar library's tables while the engine starts: 0.4 s of a thread and 30 MB for a vocabulary of 49,152
    tokens, 2.4 s and 0.1 GB for 262,144. False: at the first request with a structured output, which waits for them.
    The loop goes on meanwhile."""

    max_model_len: int | None = None
    """Most tokens of prompt and completion together. None: the model's own, as far as the KV memory reaches."""
    max_num_seqs: int = 256
    """Most requests in one batch."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step. None: 8192 on a GPU, 512 on a CPU. An encoder computes a text in one step:
    None is as many at least as its longest text has."""
    attention_backend: Literal["auto", "triton", "flash-attn-2", "flash-attn-3", "flash-attn-4", "cudnn"] = "auto"
    """What attends to long prompts on a GPU. "auto": the fastest that is installed and fits the GPU, else "triton". Any
    other value is refused on a CPU."""
    block_size: int | None = None
    """Tokens in a KV block. None: the attention back end's default."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that the engine may use, weights and KV together."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    """What keys and values are kept in. "auto": the dtype that the model computes in. "fp8": eight bits (e4m3), with a
    scale for each key-value head (docs/memory.md)."""
    kv_cache_scales: Literal["auto", "calibrated", "one"] = "auto"
    """The scales of kv_cache_dtype="fp8". "auto": those of the checkpoint, and if it has none, "calibrated": measured
    at the start, by the same tokens in 16 or 32 bits. "one": 1. Only with that kv_cache_dtype."""
    kv_cache_memory_bytes: int | None = None
    """Memory for the KV cache of each rank. None: what gpu_memory_utilization leaves; on a CPU a quarter of what is
    free, at most 4 GiB, divided among the ranks of all replicas."""
    enable_sleep_mode: bool = False
    """On a GPU: weights and KV are laid out so that ``sleep(level=1)`` moves the weights to the host's memory and the
    worker lives on (docs/sleep.md). False: it ends the worker there. On a CPU the worker lives on either way."""
    swap_space_bytes: int = 0
    """The host's memory, pinned, in which each rank keeps the KV of preempted requests, so that it is copied back and
    not computed again (docs/memory.md). 0: they are computed again."""
    enable_prefix_caching: bool = True
    """Prompts that begin alike share KV."""
    kv_tiers: Sequence[HostTier | DiskTier | StoreTier] | str = ()
    """Where the KV of prefixes is kept that the device has no room for, nearest first (docs/kv-tiers.md):
    HostTier("40GB"), DiskTier("/path", "200GB"), StoreTier("redis", url="redis://..."). In a text:
    "host:40GB,disk:/path:200GB". (): it is computed again."""
    kept_kv_fraction: float = 0.9
    """Share of the KV blocks that is kept for the next turns of sessions, at most (docs/memory.md). 0: none is."""
    max_in_flight_steps: int = 2
    """Steps given to the worker before the oldest has been answered; 1 or more."""
    max_leased_steps: int = 64
    """Most steps given to the worker while the host's loop is often late, so that it goes on alone meanwhile. A new
    request, an abort or a deadline takes back those that it has not begun. 0: no more than max_in_flight_steps."""
    max_step_seconds: float | None = 0.01
    """Seconds that requests which decode may wait for a step with prompts: it has as many tokens of these as steps so
    far had in that time, and with a small model on a GPU no more than run as one launch (2,304). It may take six times
    as long as it would without prompts, and longer where many requests wait for their first token. None: no limit."""
    speculation: str | Mapping[str, Any] | None = "none"
    """Which tokens are guessed, so that a step brings several where the guess is right (docs/speculation.md); the
    output is the same. "suffix", or "ngram": those that came after the last ones where these occurred before, in the
    prompt or in the completion; "suffix_past": or in the outputs of earlier requests of the same cache_salt;
    "ngram_worker": found by the worker; {"method": "draft_model", "model": PATH, "tokens": 4}: what a smaller model of
    the same tokenizer says; {"method": "eagle3", "model": PATH}, with "peagle" or "dflash" likewise, or "mtp": what a
    head on the model's states says. Or the name of an entry point in the group "aengine.proposers". None is "none"."""
    tensor_parallel_size: int = 1
    """Ranks that share each layer of the model (docs/parallel.md): a GPU each; with device="cpu" a process each."""
    pipeline_parallel_size: int = 1
    """Stages among which the layers of the model are divided (docs/parallel.md), each of tensor_parallel_size ranks:
    GPUs of one machine; with device="cpu" processes. At least as many steps and one more are in flight, whatever
    max_in_flight_steps says."""
    enable_expert_parallel: bool = False
    """Of mixtures of experts each of those ranks has some experts as a whole, instead of a part of every one; with
    data_parallel_size each rank of all replicas, so that there are all experts once (docs/parallel.md). A model without
    mixtures of experts refuses it."""
    data_parallel_size: int = 1
    """Replicas of the model, each on GPUs of its own, or with its share of a CPU's cores. A request runs on the one
    that has most of its prompt cached, or less to do; when a worker dies its requests go on with another."""
    executor: Literal["process", "ray"] = "process"
    """Where the ranks run: "process": on this machine; "ray": on the machines of a Ray cluster (aengine-llm[ray]), each
    pipeline stage on one of them (docs/parallel.md#several-machines)."""
    ray_address: str | None = None
    """The Ray cluster, as `ray.init` takes it. None: the one that this process is connected to, else $RAY_ADDRESS, else
    the one that runs on this machine. Only with executor="ray"."""
    loras: Mapping[str, str] | None = None
    """LoRA adapters that requests can name: the name of each, and its folder or hub id, in PEFT's format. In a text:
    "name=folder,other=folder"."""
    max_loras: int | None = None
    """Adapters that are on the device at a time. None: as many as loras has, at most 16. 0: none, and nothing is kept
    for them."""
    max_lora_rank: int | None = None
    """The largest rank of an adapter. None: the largest of loras, or 16 if there are none."""
    max_lora_expert_rank: int | None = None
    """The largest rank of what adapters change of experts, which takes memory for each expert of each layer. None: the
    largest of loras. 0: they change none."""
    enforce_eager: bool = False
    """No CUDA graphs: each step's kernels are launched one by one."""
    cudagraph_mode: Literal["auto", "FULL", "PIECEWISE", "NONE"] = "auto"
    """What of a step on a GPU is launched as CUDA graphs (docs/gpu.md#cuda-graphs). "FULL": layers, head and sampling.
    "PIECEWISE": head and sampling, for models with an op in their layers that can't be captured. "NONE": nothing.
    "auto": "FULL", unless enforce_eager says otherwise."""
    cudagraph_capture_sizes: Sequence[int] | None = None
    """Numbers of requests of the decodes that are CUDA graphs, at most 512; a smaller batch is padded to the next one,
    a larger one than all runs as steps with prompts do. None: 1, 2, 4, 8, then with a growing distance up to
    max_num_seqs or 512."""
    batch_invariant: bool = False
    """A request's logits have the same bits whatever else is in the batch and however its prompt is cut into steps, as
    training against an engine needs. On a CPU, slower without compiled kernels, or in 16 bits on a GPU of compute
    capability 9.0 (docs/batch-invariance.md)."""
    num_threads: int | None = None
    """CPU threads of each worker, at most 64 or the machine's cores. None: what $OMP_NUM_THREADS says, within that
    limit; else the cores that they may use (no more than a container's CPU quota has whole CPUs), less one for the host
    when there are over four, divided among the ranks."""

    max_num_queued_requests: int = 10_000
    """Most requests waiting; one more is refused or waits, as admission says."""
    admission: Literal["error", "wait"] = "error"
    """When the queue is full: raise EngineOverloadedError, or let the caller await its turn."""
    tenants: str | Mapping[str, Tenant | Mapping[str, Any]] | None = None
    """Shares and quotas of those who ask, by the name that requests give as ``tenant`` (docs/tenants.md): a mapping to
    Tenant(weight=2, max_running=16, ...), or a TOML file with such tables under "tenants". "*": of all others, each.
    None: all have equal shares and no quotas."""
    sleep_after: float | None = None
    """Seconds without a request after which the engine sleeps, at level 1 (docs/sleep.md). None: only when it is told
    to."""
    when_asleep: Literal["wake", "wait", "error"] = "wake"
    """What a request does that comes while the engine sleeps: it wakes it; waits until it is woken; or is refused with
    EngineClosedError."""
    unread_timeout: float | None = 300.0
    """Seconds after which a stream ends with DeadlineExceededError when tokens lie unread and nobody has asked for one,
    though it is held somewhere. None: it runs on to its max_tokens, or to the end of the model's context."""

    worker: str = "default"
    """What loads and runs the model in a worker process: "default", the name of an entry point in the group
    "aengine.workers", or "module:function" (docs/extending.md)."""
    worker_extension: str | None = None
    """Class whose methods `AsyncLLM.collective_rpc` calls in each worker: "module:Class" (docs/extending.md)."""
    logits_processors: Sequence[str] = ()
    """Classes that change the logits of requests whose ``extra_args`` name them, at most 16: each "module:Class", or
    the name of an entry point in the group "aengine.logits_processors", such as "thinking_budget" (docs/extending.md).
    """
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Of which distribution ``SamplingParams.logprobs`` are: the model's own, or the one that the token was drawn from,
    after penalties, bans, the grammar, temperature and cutoffs. A prompt's are always the model's own."""
    own_thread: bool = False
    """The engine runs on an event loop of its own, in a daemon thread: its methods may be called from any loop in any
    thread, and a blocked loop of yours doesn't hold it up. progress and on_request_end are called in that thread."""
    worker_spin_us: int = 100
    """How long an idle worker spins on its ring before it parks."""
    ring_bytes: int = 4 * 1024 * 1024
    """Size of each shared-memory ring; larger messages travel in fragments."""
    startup_timeout: float = 600.0
    """How long a worker may take from its start until it can serve; a download of the model is not part of it."""
    shutdown_timeout: float = 5.0
    """How long aclose() lets the workers end by themselves before it kills them."""
    max_restarts: int = 10
    """Most restarts of workers within restart_window. A worker that dies or hangs is started again, and all requests go
    on; one more, and the engine fails. 0: it fails at the first death."""
    restart_window: float = 600.0
    """For how long a restart counts towards max_restarts."""
    hang_timeout: float = 4.0
    """How long a worker may show no sign of life, or a step take longer than one of its size can, before the workers
    are killed and started again (docs/recovery.md)."""
    spare_workers: Spares | None = None
    """A `SpareWorkers`: processes of yours that have imported torch, one of which becomes a worker as it starts or
    starts again (docs/recovery.md#spare-workers). None: each worker imports it. Only with executor="process"."""
    progress: Callable[[StartupProgress], None] | None = None
    """Called on the loop with each step of the start. None: reports go to the logger "aengine" only."""
    on_request_end: Callable[[RequestEnd], object] | None = None
    """Called on the engine's loop with a `RequestEnd` for each request that was accepted and has ended, in whatever
    way, once. It must return soon; what it raises is logged. With own_thread it is called in the engine's thread."""

    @classmethod
    def create(cls, model: str | os.PathLike[str] | EngineConfig, settings: Mapping[str, Any]) -> EngineConfig:
        """Check and build; from a configuration, with ``settings`` in place of its own.

        Raises InvalidRequestError naming an unknown setting or a wrong value.
        """
        known = {f.name for f in fields(cls)}
        for name in settings:
            if name not in known:
                raise InvalidRequestError(unknown_name(name, known), param=name)
        if isinstance(model, EngineConfig):
            return model.replace(**settings) if settings else model
        return cls(model=os.fspath(model) if isinstance(model, os.PathLike) else model, **settings)

    @classmethod
    def from_env(
        cls, prefix: str = "AENGINE_", *, model: str | None = None, **settings: Unpack[Settings]
    ) -> EngineConfig:
        """Settings out of environment variables: AENGINE_MODEL, AENGINE_MAX_NUM_SEQS, and so on for each setting.

        Numbers are written as in Python; True and False as 1 and 0, true and false, yes and no, or on and off; None as
        "none". An empty variable counts as one that is not set. Arguments come before the environment.

        Raises InvalidRequestError for a variable with the prefix that names no setting, or has a wrong value.
        """
        read = read_settings(cls, prefix, os.environ)
        given: dict[str, Any] = {**read, **settings}
        if model is not None:
            given["model"] = model
        if "model" not in given:
            raise InvalidRequestError(f"no model was given, and {prefix}MODEL is not set", param="model")
        try:
            return cls.create(given.pop("model"), given)
        except InvalidRequestError as error:
            if error.param not in read.keys() - settings.keys():
                raise
            raise InvalidRequestError(f"{prefix}{error.param.upper()}: {error}", param=error.param) from None

    def replace(self, **changes: Any) -> EngineConfig:
        """A copy with some settings changed, checked like a new one."""
        return replace(self, **changes)

    def to_wire(self) -> dict[str, Any]:
        """Return what a worker needs of it, as plain data."""
        wire = asdict(replace(self, progress=None, on_request_end=None, spare_workers=None))
        del wire["progress"], wire["on_request_end"], wire["spare_workers"]
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> EngineConfig:
        return cls(**wire)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise not_valid("model", self.model, "a name, a folder, a .gguf file or a hub id")
        for name, low in _AT_LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
                wanted = f"an integer >= {low}, of at most 63 bits" + (", or None" if name in _OPTIONAL else "")
                raise not_valid(name, value, wanted)
            if name in _AT_MOST and value > _AT_MOST[name]:
                raise not_valid(name, value, f"at most {_AT_MOST[name]} here")
        check_choices(self, _CHOICES)
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise not_valid(name, getattr(self, name), "True or False")
        for name in _POSITIVE:
            if not _is_positive(getattr(self, name)):
                raise not_valid(name, getattr(self, name), "a number above 0 that a float can hold")
        for name in ("unread_timeout", "max_step_seconds", "sleep_after"):
            if getattr(self, name) is not None and not _is_positive(getattr(self, name)):
                raise not_valid(name, getattr(self, name), "a number above 0 that a float can hold, or None")
        checked_number("kept_kv_fraction", self.kept_kv_fraction, 0, 1, "a number from 0 to 1")
        if self.gpu_memory_utilization > 1:
            raise not_valid("gpu_memory_utilization", self.gpu_memory_utilization, "at most 1")
        for name in ("revision", "gguf_file", "tokenizer", "ray_address"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise not_valid(name, getattr(self, name), "a string, or None")
        for name in ("model", "revision", "gguf_file", "tokenizer", "ray_address"):
            if not is_unicode(getattr(self, name) or ""):
                wanted = "valid Unicode: it has a lone surrogate, as a path that is not UTF-8 has; rename such a file"
                raise not_valid(name, getattr(self, name), wanted)
        if self.spare_workers is not None and not isinstance(self.spare_workers, Spares):
            raise not_valid("spare_workers", self.spare_workers, "a SpareWorkers, or None")
        for name, (other, value, hint) in _ONLY_WITH.items():
            if getattr(self, name) != _DEFAULTS[name] and getattr(self, other) != value:
                effect = f"{name}={shown(getattr(self, name))} has no effect without {other}={value!r}"
                raise InvalidRequestError(f"{effect}: give that, too, or leave {name} out{hint}", param=name)
        check_device(self.device, self.num_ranks * self.data_parallel_size)
        if self.executor == "ray" and ":" in self.device:
            raise not_valid(
                "device", self.device, "a name without numbers with executor='ray', as Ray chooses the GPUs"
            )
        check_target("worker", self.worker, WORKERS, "module:function")
        known = partial(target_of, PROPOSERS), partial(registered, PROPOSERS)
        object.__setattr__(self, "speculation", checked_speculation(self.speculation, *known))
        ranks = {name: getattr(self, name) for name in ("max_lora_rank", "max_lora_expert_rank")}
        object.__setattr__(self, "loras", checked_loras(self.loras, self.max_loras, ranks))
        if self.num_lora_slots and self.batch_invariant:
            raise InvalidRequestError("batch_invariant=True takes no adapters: leave it out, or loras and max_loras")
        tiers = checked_kv_tiers(self.kv_tiers, caches_prefixes=self.enable_prefix_caching)
        object.__setattr__(self, "kv_tiers", tiers)
        if tiers and self.executor != "process":
            message = "kv_tiers takes workers of this machine: leave it out, or executor='ray'"
            raise InvalidRequestError(message, param="kv_tiers")
        object.__setattr__(self, "tenants", checked_tenants(self.tenants))
        check_processors(self.logits_processors)
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        if self.worker_extension is not None and not is_in_module(self.worker_extension):
            raise not_valid("worker_extension", self.worker_extension, "'module:Class', or None")
        sizes = checked_graphs(
            self.cudagraph_mode,
            self.cudagraph_capture_sizes,
            enforce_eager=self.enforce_eager,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
        object.__setattr__(self, "cudagraph_capture_sizes", sizes)
        for name in ("progress", "on_request_end"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise not_valid(name, getattr(self, name), "a callable, or None")

    @property
    def model_name(self) -> str:
        """The name that the engine was made with: a hub id as it is, of a path its last part. Blocking."""
        if _HUB_ID.fullmatch(self.model) and not os.path.exists(self.model):
            return self.model
        return Path(self.model).name or self.model

    @property
    def num_ranks(self) -> int:
        """Number of worker processes of each replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def graph_mode(self) -> GraphMode:
        """What of a step is launched as graphs, on a GPU."""
        if self.enforce_eager or self.cudagraph_mode == "NONE":
            return "NONE"
        return "PIECEWISE" if self.cudagraph_mode == "PIECEWISE" else "FULL"

    @property
    def num_lora_slots(self) -> int:
        """Adapters that are on the device at a time; 0: none can be."""
        return min(len(self.loras or ()), 16) if self.max_loras is None else self.max_loras

    @property
    def may_span_machines(self) -> bool:
        """Whether the workers of a replica may be on several machines."""
        return self.executor != "process" and self.pipeline_parallel_size > 1

    @property
    def max_logits(self) -> int:
        """Most rows of logits of a step, of which a request may have several."""
        return max(self.max_num_seqs, LEAST_LOGITS)

    @property
    def speculation_settings(self) -> SpeculationSettings:
        assert isinstance(self.speculation, str), "it was checked"
        return SpeculationSettings.of(self.speculation)

    @property
    def steps_in_flight(self) -> int:
        """Steps given to the worker before the oldest has been answered: as many as keep all pipeline stages busy."""
        stages = self.pipeline_parallel_size
        return self.max_in_flight_steps if stages == 1 else max(self.max_in_flight_steps, stages + 1)


EngineConfig.__doc__ = described(EngineConfig.__doc__, EngineConfig)

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
_AT_LEAST = {
    "seed": -(2**63),
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "block_size": 1,
    "kv_cache_memory_bytes": 1,
    "swap_space_bytes": 0,
    "max_in_flight_steps": 1,
    "max_leased_steps": 0,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "max_loras": 0,
    "max_lora_rank": 1,
    "max_lora_expert_rank": 0,
    "num_threads": 1,
    "max_num_queued_requests": 1,
    "max_restarts": 0,
    "worker_spin_us": 0,
    "ring_bytes": 64 * 1024,
}
_MOST_THREADS = max(64, os.cpu_count() or 1)  # beyond the cores each makes all of them slower
_AT_MOST = {
    "ring_bytes": 2**40,
    "max_num_seqs": 2**20,
    "tensor_parallel_size": 1024,
    "pipeline_parallel_size": 1024,
    "data_parallel_size": 1024,
    "max_loras": 1024,
    "max_lora_rank": 512,
    "max_lora_expert_rank": 512,
    "max_in_flight_steps": 1024,  # the device keeps room for the answer of each
    "num_threads": _MOST_THREADS,
}
_POSITIVE = ("gpu_memory_utilization", "startup_timeout", "shutdown_timeout", "restart_window", "hang_timeout")
_OPTIONAL = {"max_model_len", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes", "num_threads"}
_OPTIONAL |= {"max_loras", "max_lora_rank", "max_lora_expert_rank"}
_CHOICES = choices_of(EngineConfig)
_ONLY_WITH: dict[str, tuple[str, object, str]] = {
    "tokenizer": ("skip_tokenizer", False, ""),
    "allow_special_tokens": ("skip_tokenizer", False, ""),
    "seed": ("load_format", "dummy", "; a request's seed is SamplingParams.seed"),
    "kv_cache_scales": ("kv_cache_dtype", "fp8", ""),
    "ray_address": ("executor", "ray", ""),
    "spare_workers": ("executor", "process", ""),
}
"""Settings that have an effect with that value of another one alone, and what else may have been meant."""
_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}
_BOOLS = [name for name, kind in EngineConfig.__annotations__.items() if kind == "bool"]


def _is_positive(value: object) -> bool:
    """Tell whether it is a number above 0, infinity included, that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max or value == math.inf


def worker_environment() -> dict[str, str]:
    """A copy of the host's environment, for a worker that it starts; the host's own is not touched. Without the number
    of threads, see `thread_environment`."""
    environment = dict(os.environ)
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads of a parallel loop spin for each other for some microseconds, not milliseconds: beside any other busy
    # process the default makes two threads many times slower than one (benchmarks/cpu.py with --hog).
    environment.setdefault("GOMP_SPINCOUNT", "1000")
    # Ranks of one machine: NCCL talks over the loopback interface, and multicast of NVLink fails in virtual machines.
    environment["NCCL_SOCKET_IFNAME"] = "lo"
    environment["NCCL_NVLS_ENABLE"] = "0"
    environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    # The host watches over the ranks; NCCL's own watch would end a process by abort, and after minutes.
    environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    environment["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    return environment


def take_environment(environment: Mapping[str, str]) -> None:
    """Give this process, which is to be a worker, the environment of one."""
    os.environ.clear()
    os.environ.update(environment)


def thread_environment(config: EngineConfig) -> dict[str, str]:
    """Return the variables that bound the threads of torch's libraries, read at their load. Blocking: reads files."""
    threads = str(num_worker_threads(config))
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def num_worker_threads(config: EngineConfig) -> int:
    """Threads of a worker's CPU kernels: as set, else OMP_NUM_THREADS, else its share of the cores that the workers may
    use, less one for the host when over four. Blocking: reads files."""
    if config.num_threads is not None:
        return config.num_threads
    of_environment = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0][:9]  # a number for each level of nesting
    if of_environment.isdecimal() and int(of_environment) > 0:
        return min(int(of_environment), _MOST_THREADS)
    cores = num_usable_cpus()
    num_workers = config.num_ranks * config.data_parallel_size
    return max(1, (cores - 1 if cores > 4 else cores) // num_workers)


def model_cache() -> Path:
    """Return the folder of `aengine model add`: aengine/models in $XDG_CACHE_HOME, which is ~/.cache if not set."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")  # stays "~" for a user id without an account, as in some containers
    base = Path(given) if os.path.isabs(given) else Path("/" if home == "~" else home, ".cache")
    return base / "aengine" / "models"


def server_api_key() -> str | None:
    """Return AENGINE_API_KEY: the key that ``aengine serve`` asks for; None: it is not set, or empty."""
    return os.environ.get("AENGINE_API_KEY") or None


def server_admin_key() -> str | None:
    """Return AENGINE_ADMIN_KEY: the key of requests that change ``aengine serve``'s engine; None: not set, or empty."""
    return os.environ.get("AENGINE_ADMIN_KEY") or None


def ray_cluster() -> str:
    """Return RAY_ADDRESS: the Ray cluster that the setting ``ray_address`` means by None; "auto": it is not set."""
    return os.environ.get("RAY_ADDRESS") or "auto"


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
