"""Start-up of an encoder: load, and compute the largest batch once. It keeps nothing of a text, so there is no KV."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.early_checks import resolve_max_model_len
from ...checkpoint.pooling import PoolingConfig
from ...checkpoint.safetensors_files import stored_names
from ...checkpoint.source import ModelSource
from ...config import EngineConfig, num_worker_threads
from ...errors import InvalidRequestError, ModelLoadError, NotEnoughMemoryError
from ...ipc.messages import STATE_BLOCK_SIZE, NewRequest, SchedulerOutput, int32
from ...workers.rank import Rank
from .. import profiler
from ..models.encoders import build_encoder, read_encoder_config
from ..models.encoders.encoder import Encoder
from ..platforms.choice import choose_platform
from ..platforms.platform import Platform
from ..pooling.asked import EXTRA
from ..pooling.encoder_runner import EncoderRunner
from ..pooling.vectors import VectorLayers, load_vector_layers
from ..weights.formats import choose_formats
from ..weights.scope import Place
from ..weights.sources.loader import LoadedWeights, Progress, check_layers, load_weights
from .warm_up import NUM_TOKENS

_BLOCKS_PER_ROW = 8
"""A text has one block, which takes no memory, until the answers in flight when it ends have come."""


def load_encoder(config: EngineConfig, source: Mapping[str, Any], rank: Rank, progress: Progress) -> LoadedEncoder:
    """Load one rank. Raises ModelLoadError."""
    if rank.tp_size > 1:
        raise ModelLoadError(
            f"tensor_parallel_size={rank.tp_size}: an encoder is not divided: leave it at 1; "
            f"data_parallel_size is for several GPUs"
        )
    for name in ("quantization", "model_impl", "attention_backend", "cudagraph_mode", "cudagraph_capture_sizes"):
        if (value := getattr(config, name)) not in ("auto", "native", None):
            raise ModelLoadError(f"{name}={value!r}: it is for decoders: leave it out")
    if config.batch_invariant:
        raise ModelLoadError(
            "batch_invariant=True: an encoder attends to whole batches at once: leave it at False here"
        )
    if config.logits_processors:
        raise ModelLoadError("logits_processors: an encoder samples no tokens: leave them out")
    if rank.pp_size > 1:
        raise ModelLoadError(
            f"pipeline_parallel_size={rank.pp_size}: an encoder is not divided by layers: leave it at 1"
        )
    torch.set_num_threads(num_worker_threads(config))
    torch.set_grad_enabled(False)
    checkpoint = ModelSource.from_wire(source)
    model_config = read_encoder_config(checkpoint.hf_config)
    check_layers(checkpoint, model_config.num_layers)
    platform = choose_platform(rank.device)
    platform.open()
    is_compiled = bool(platform.compiled_types)
    # A batch has many tokens: its products are not bound by reading weights, which float16 is for on a CPU.
    setting = "float32" if config.dtype == "auto" and not platform.is_accelerator else config.dtype
    dtype = platform.choose_dtype(setting, model_config.checkpoint_dtype)
    formats = choose_formats(dtype, platform.device, checkpoint.hf_config, is_compiled=is_compiled, is_encoder=True)
    model = build_encoder(model_config, formats)
    if checkpoint.format == "safetensors":
        adapt_names(model, set(stored_names(Path(checkpoint.path))))
    weights = load_weights(model, checkpoint, config.seed, progress, platform.memory)
    vectors = None if model_config.labels else _vectors(config, checkpoint, platform.device)
    return LoadedEncoder(config, model, weights, vectors, platform, rank)


def _vectors(config: EngineConfig, checkpoint: ModelSource, device: torch.device) -> VectorLayers:
    pooling = PoolingConfig.from_wire(checkpoint.pooling)
    if pooling.fault and config.pooling == "auto":
        raise ModelLoadError(f"{checkpoint.path}: {pooling.fault}; pooling='mean', 'cls' or 'last' overrides it")
    mode = (pooling.mode or "mean") if config.pooling == "auto" else config.pooling
    return load_vector_layers(mode, pooling, checkpoint.path, device)


def adapt_names(model: Encoder[Any], names: set[str]) -> None:
    """Set the names that the model asks for to those of this checkpoint: one that was written of the model without a
    head does not have its base's name before all others, and in old ones a norm's weight is "gamma"."""
    places, prefix = model.weights.places, f"{model.base}."
    has_prefix = any(name.startswith(prefix) for name in names)
    is_old = any(name.endswith("LayerNorm.gamma") for name in names)
    for wanted in list(places):
        name = wanted if has_prefix else wanted.removeprefix(prefix)
        if is_old:
            name = re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", name)
            name = re.sub(r"LayerNorm\.bias$", "LayerNorm.beta", name)
        if name != wanted:
            own: list[Place] = places.pop(wanted)
            places[name] = [place._replace(name=name) for place in own]


class LoadedEncoder:
    """A `LoadedModel` (workers/loaded.py)."""

    def __init__(
        self,
        config: EngineConfig,
        model: Encoder[Any],
        weights: LoadedWeights,
        vectors: VectorLayers | None,
        platform: Platform,
        rank: Rank,
    ) -> None:
        self._model = model
        self._weights = weights
        self._vectors = vectors
        self._platform = platform
        self._rank = rank
        longest = resolve_max_model_len(config, model.config.max_position_embeddings)
        most = config.max_num_batched_tokens or max(platform.default_batched_tokens, longest)
        if most < longest and config.max_model_len is not None:
            raise ModelLoadError(
                f"max_num_batched_tokens={most} is less than max_model_len={longest}, and an encoder computes a text "
                f"in one step: raise the one or lower the other"
            )
        self._most_tokens, self._enforce_eager = most, config.enforce_eager
        formats = model.weights.formats
        self.offer: dict[str, Any] = {
            "num_blocks": _BLOCKS_PER_ROW * config.max_num_seqs,
            "max_model_len": min(most, longest),
            "max_num_batched_tokens": most,
            "block_size": STATE_BLOCK_SIZE,
            "kv_groups": [["state", STATE_BLOCK_SIZE, 0]],
            "vocab_size": model.config.vocab_size,
            **formats.precision,
            "weight_format": formats.name,
            "model_type": model.config.model_type,
            "is_encoder": True,
        }
        if vectors is None:
            self.offer |= {"tasks": ["classify"], "labels": list(model.config.labels)}
        else:
            size = vectors.size(model.config.hidden_size)
            self.offer |= {"tasks": ["embed"], "pooling": vectors.mode, "embedding_size": size}

    def allocate(
        self, plan: Mapping[str, int], bitmasks: memoryview | None = None
    ) -> tuple[EncoderRunner, dict[str, Any]]:
        """See `LoadedModel`. Raises ModelLoadError if the device has no memory for the largest batch."""
        model, platform = self._model, self._platform
        num_tokens, longest = plan["max_num_batched_tokens"], plan["max_model_len"]
        forward = None
        if model.weights.formats.is_compiled and not self._enforce_eager:
            from ..pooling.encoder_tape import forward_of

            forward = forward_of(model, num_tokens)
        runner = EncoderRunner(model, self._vectors, platform, forward)
        if platform.is_accelerator:
            _compile_kernels(runner, num_tokens)
        try:
            _run(runner, [longest] * (num_tokens // longest) or [1])
        except torch.OutOfMemoryError as error:
            raise NotEnoughMemoryError(
                f"the GPU ran out of memory in a batch of {self._most_tokens} tokens: lower max_num_batched_tokens, or "
                f"end other processes on it ({str(error).partition('. ')[0]})"
            ) from error
        facts = {
            "num_parameters": self._weights.num_parameters,
            "device": str(platform.device),
            "is_accelerator": platform.is_accelerator,
            "num_threads": torch.get_num_threads(),
        }
        if platform.is_accelerator:
            facts |= {"device_name": platform.name, "device_memory_total_bytes": platform.memory().total}
        return runner, facts

    def reload_weights(self, path: str | None = None) -> int:
        raise InvalidRequestError("the weights of an encoder can't be loaded again: start another engine")

    def device_bytes(self) -> int:
        return self._platform.memory_taken()

    def start_profile(self, folder: str | None) -> str:
        return profiler.start(folder, self._platform)

    def stop_profile(self) -> str:
        return profiler.stop(self._rank.index, self._platform)


def _compile_kernels(runner: EncoderRunner, most_tokens: int) -> None:
    """Walk through batches of few tokens and texts, whose products have kernels of our own: compiled in the first step
    that needs them, they would keep all waiting."""
    from ...kernels.triton.launch import compiling

    with compiling(torch.get_num_threads()):
        for count in (1, *NUM_TOKENS):
            if count <= most_tokens:
                _run(runner, [1] * count)


def _run(runner: EncoderRunner, lengths: list[int]) -> None:
    """Run a step with texts of these lengths."""
    asked = {EXTRA: [b"", bytes(4)]}
    new = [NewRequest(row, int32([0]) * length, length, 0, int32(), extras=asked) for row, length in enumerate(lengths)]
    rows = int32(range(len(new)))
    steps = (
        SchedulerOutput(0, new_requests=new, req_idx=rows, num_scheduled_tokens=int32(lengths)),
        SchedulerOutput(0, removed=rows),
    )
    for out in steps:
        runner.execute_model(out)
        runner.sample_tokens(None).get()
