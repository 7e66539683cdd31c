"""`load_model`: what a worker loads unless the setting ``worker`` names something else; see workers/loaded.py.

load         device, model, weights
profile      how much memory the KV cache may have; offered to the other ranks
allocate     the KV cache, as agreed
capture      one graph a batch size
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

import torch

from ...checkpoint.early_checks import check_cpu
from ...checkpoint.pooling import PoolingConfig
from ...checkpoint.source import ModelSource, resolve_model
from ...checkpoint.value_reader import damage_explained
from ...config import EngineConfig, num_worker_threads
from ...errors import InvalidRequestError, ModelLoadError
from ...workers.rank import LOOPBACK, Rank
from .. import profiler
from ..attention.torch_attention import DEFAULT_BLOCK_SIZE
from ..distributed.opening import open_device, open_experts_group, open_group, open_link, stage_of
from ..distributed.pipeline import StepSizes
from ..lora.choice import refuse_loras, with_loras
from ..model_runner import ModelRunner
from ..models import build_model, read_config
from ..models.encoders import is_encoder
from ..pooling.vectors import VectorLayers, load_vector_layers
from ..sampling.processors import load_processors
from ..sleeping.sleeper import Sleeper, choose_sleeper
from ..tiers.tier_pages import TierPages
from ..updates.receiver import WeightReceiver, answered
from ..updates.stamps import stamp_of
from ..weights.float16_cpu import Float16Format, agree_on_plan
from ..weights.formats import choose_formats
from ..weights.inventory import line_of, name_of
from ..weights.sources.loader import (
    LoadedWeights,
    Progress,
    check_layers,
    check_tensors,
    load_weights,
    tensor_names,
)
from .draft import Target, find_proposer, load_proposer
from .encoder import LoadedEncoder, load_encoder
from .estimate import check_library, gguf_matrices, tensors_of
from .heads import DecoderHead
from .kv_memory import KvPlan
from .kv_scales import choose_kv_format, measured
from .policy import choose_policy
from .profile import profile
from .setup import RunnerSetup

logger = logging.getLogger("aengine.runner")


def load_model(
    config: EngineConfig, source: Mapping[str, Any], rank: Rank, progress: Progress
) -> LocalModel | LoadedEncoder:
    """Load and profile one rank.

    Raises:
        ModelLoadError: the device, the checkpoint or the memory is not what is needed; the message says what helps.
    """
    if rank.address != LOOPBACK and not os.path.exists(source["path"]):  # found on the host's machine
        source = resolve_model(config).to_wire()
    with damage_explained(source["path"]):
        if is_encoder(source["hf_config"]):
            refuse_loras(config, "an encoder")
            return load_encoder(config, source, rank, progress)
        load_processors(config.logits_processors)  # their errors come before weights are read
        find_proposer(config)
        head = DecoderHead.of(ModelSource.from_wire(source))
        setup, weights, sleeper = _load(config, source, rank, progress, head)
    return LocalModel(setup, weights, profile(setup, progress), rank, progress, head, sleeper)


def _load(
    config: EngineConfig, source: Mapping[str, Any], rank: Rank, progress: Progress, head: DecoderHead
) -> tuple[RunnerSetup, LoadedWeights, Sleeper]:
    """Open the device, build the model and load its weights."""
    num_threads = num_worker_threads(config)
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(False)
    checkpoint = ModelSource.from_wire(source)
    hf = head.settings(checkpoint.hf_config)
    model_config = read_config(
        hf,
        model_impl=config.model_impl,
        folder=checkpoint.path if checkpoint.format != "gguf" else None,
        trust_remote_code=config.trust_remote_code,
    )
    if model_config.implementation == "native":
        check_layers(checkpoint, model_config.num_layers)
    model_config = model_config.of_rank(
        rank.tp_size, divides_experts=config.enable_expert_parallel, num_replicas=rank.num_sharing
    )
    platform = open_device(rank)
    platform.open()
    if platform.device.type == "cpu":
        check_cpu(config)
    dtype = platform.choose_dtype(config.dtype, model_config.checkpoint_dtype)
    group = open_group(rank, platform)
    experts_group = open_experts_group(rank, platform, group)
    packed = gguf_matrices(config, checkpoint, model_config, platform)
    policy = choose_policy(config, model_config, platform, dtype)
    formats = choose_formats(
        dtype,
        platform.device,
        hf,
        policy,
        packed,
        config.quantization,
        tensor_names(checkpoint),
        config.on_unsupported_format == "dequantise",
        is_compiled=model_config.implementation == "native" and bool(platform.compiled_types),
        folder=checkpoint.path,
    )
    check_library(config, model_config, formats)
    if isinstance(formats.plain, Float16Format):
        agree_on_plan(group)
    model_config.check_device(platform.device, formats.dtype)
    formats = with_loras(formats, config, model_config, platform)
    max_batched = config.max_num_batched_tokens or platform.default_batched_tokens
    sizes = model_config.hidden_size, formats.dtype, max_batched, config.max_logits, config.steps_in_flight
    link = open_link(rank, platform, StepSizes(*sizes))
    attention = platform.choose_attention(config, model_config, formats.dtype)
    sleeper = choose_sleeper(config, platform)
    with sleeper.places_weights(attention.join):
        model = build_model(model_config, formats, group, stage_of(rank), experts_group)
        weights = load_weights(model, checkpoint, config.seed, progress, platform.memory)
        proposer = load_proposer(config, Target(model, checkpoint, platform, dtype, group), progress)
        where = checkpoint, model_config.hidden_size, platform.device
        vectors = head.vectors(*where) if head.labels else _vectors(config, checkpoint, platform.device)
    logger.info("weights on %s: %s", platform.device, line_of(tensors := tensors_of(model, checkpoint)))
    setup = RunnerSetup(
        config=config,
        model_config=model_config,
        model=model,
        platform=platform,
        attention=attention,
        kv_format=choose_kv_format(config, model_config, formats.dtype, checkpoint, group.rank),
        block_size=config.block_size or DEFAULT_BLOCK_SIZE,
        max_batched=max_batched,
        weight_bytes=platform.memory().allocated if platform.is_accelerator else weights.own_bytes + proposer.num_bytes,
        num_threads=num_threads,
        num_processes=rank.tp_size * rank.pp_size * rank.dp_size,
        vectors=vectors,
        group=group,
        link=link,
        experts_group=experts_group,
        tensors=tensors,
        proposer=proposer,
    )
    return setup, weights, sleeper


def _vectors(config: EngineConfig, checkpoint: ModelSource, device: torch.device) -> VectorLayers | None:
    """Return how the decoder's embeddings are made; None: it gives none."""
    pooling = PoolingConfig.from_wire(checkpoint.pooling)
    mode = pooling.mode if config.pooling == "auto" else config.pooling
    if mode == "cls":
        raise ModelLoadError("pooling='cls' is for encoders: the first token of a decoder sees no other; use 'last'")
    return load_vector_layers(mode, pooling, checkpoint.path, device) if mode and not pooling.fault else None


class LocalModel:
    """A `LoadedModel` of our own runner."""

    def __init__(
        self,
        setup: RunnerSetup,
        weights: LoadedWeights,
        plan: KvPlan,
        rank: Rank,
        progress: Progress,
        head: DecoderHead,
        sleeper: Sleeper,
    ) -> None:
        self._setup = setup
        self._sleeper = sleeper
        self._weights = weights
        self._rank = rank
        self._progress = progress
        self._receiver = WeightReceiver(setup.model, setup.platform, rank.pp_rank * rank.tp_size + rank.tp_rank)
        self._page_calls: Mapping[str, Callable[..., Any]] = {}  # none before `allocate`
        formats, groups = setup.model.weights.formats, setup.kv_layout.groups
        self.offer: dict[str, Any] = {
            "num_blocks": plan.num_blocks,
            "max_model_len": plan.max_model_len,
            "max_num_batched_tokens": setup.max_batched,
            "block_size": min(group.block_size for group in groups),
            "kv_groups": [list(astuple(group)) for group in groups],
            "kv_cache_dtype": setup.kv_format.name,
            "kv_cache_scales": setup.kv_format.origin,
            "vocab_size": setup.model_config.vocab_size,
            "rope_border": setup.model_config.rope_border,
            **formats.precision,
            "weight_format": name_of(setup.tensors) or formats.name,
            "model_type": setup.model_config.model_type,
            "model_impl": setup.model_config.implementation,
            "why_not_native": setup.model_config.why_not_native,
            "fused": getattr(setup.model, "fused", {}),
            "takes_weights": setup.model_config.implementation == "native",
            "logits_processors": {one.name: dict(one.arguments) for one in setup.processors},
        }
        if setup.platform.is_accelerator:
            self.offer["device_name"] = setup.platform.name
        self.offer |= head.offer(setup.model, setup.vectors)

    def allocate(
        self, plan: Mapping[str, int], bitmasks: memoryview | None = None
    ) -> tuple[ModelRunner, dict[str, Any]]:
        """See `LoadedModel`. Raises ModelLoadError."""
        platform, formats = self._setup.platform, self._setup.model.weights.formats
        begun = time.monotonic()
        with self._setup.errors_explained():
            setup = self._setup = measured(self._setup)
            sizes = plan["num_blocks"], plan["max_model_len"]
            cache = setup.make_cache(*sizes, self._sleeper.zeros)
            runner = setup.make_runner(*sizes, cache=cache)
            self._sleeper.attach(runner, formats.step_rows.settle)
            self._page_calls = TierPages(cache.pages, platform, self._receiver.rank).calls
            if bitmasks is not None:
                runner.share_bitmasks(bitmasks)
            drafts = runner.speculation.graphs
            if runner.graphs is not None:
                runner.graphs.capture_all(lambda done, total: self._progress("graphs", done, total, "graphs"))
                if drafts is not None:
                    drafts.capture_all(lambda done, total: self._progress("graphs", done, total, "drafts"))
                runner.proposer.capture(lambda done, total: self._progress("graphs", done, total, "proposer"))
                decodes = time.monotonic() - begun
                if runner.batch_graphs is not None:
                    runner.batch_graphs.prepare_first()
                platform.synchronize()
                prompts = time.monotonic() - begun - decodes
                count = runner.graphs.num_captured
                logger.info(
                    "graphs of %d batch sizes in %.1f s, of steps with prompts in %.1f s", count, decodes, prompts
                )
        facts = {
            "num_parameters": self._weights.num_parameters,
            "kv_cache_bytes": plan["num_blocks"] * setup.kv_layout.page_bytes,
            "num_swap_pages": setup.num_swap_pages,
            "device": str(platform.device),
            "is_accelerator": platform.is_accelerator,
            "attention_backend": setup.attention.name,
            "cudagraph_mode": setup.graph_mode,
            "cudagraph_capture_sizes": setup.graph_sizes if setup.graph_mode != "NONE" else [],
            "num_graphs": 0 if runner.graphs is None else runner.graphs.num_captured,
            "num_draft_graphs": 0 if drafts is None else drafts.num_captured,
            "prompt_step_sizes": [] if runner.batch_graphs is None else runner.batch_graphs.num_tokens,
            "num_threads": torch.get_num_threads(),
            "num_experts": setup.num_experts,
            "weights": [group._asdict() for group in self._setup.tensors],
            "proposer": setup.proposer.described(),
            "can_sleep": self._sleeper.can_sleep,
            **formats.step_rows.facts,
        }
        if platform.is_accelerator:
            facts["device_memory_total_bytes"] = platform.memory().total
            logger.info("%s, %s, long prompts through %s", platform.name, formats.name, setup.attention.name)
        return runner, facts

    def reload_weights(self, path: str | None = None) -> int:
        """See `LoadedModel`. The memory that it takes is that of the largest matrix, or of those multiplied together.

        What is not in the files of a decoder itself, as the layers behind it that make its vectors, stays as it is.
        """
        setup = self._setup
        if setup.model_config.implementation != "native":
            raise InvalidRequestError("a model that transformers computes can't be loaded again: start another engine")
        try:
            source = self._found(path)  # what their headers show is known before a weight is replaced
            setup.platform.synchronize()
            with damage_explained(source.path):
                loaded = load_weights(setup.model, source, setup.config.seed, self._progress)
        except ModelLoadError as error:
            raise InvalidRequestError(f"reload_weights: {error}") from error
        finally:
            setup.platform.synchronize()
        return loaded.num_parameters

    def _found(self, path: str | None) -> ModelSource:
        """Return the files of the start, or of ``path``. Raises ModelLoadError: they are not there, or not of this
        model."""
        config = self._setup.config
        source = resolve_model(config if path is None else config.replace(model=path, revision=None))
        with damage_explained(source.path):
            check_tensors(self._setup.model, source)
        return source

    @property
    def calls(self) -> Mapping[str, Callable[..., Any]]:
        """Collective calls of what sees the rows of its steps, of weights that come from elsewhere, of memory that
        goes, and of pages that are copied."""
        own: dict[str, Callable[..., Any]] = {
            "check_weights": lambda path: answered(self._check_for_update, path),
            "load_weights": lambda path, stamp: answered(self._load_for_update, path, stamp),
        }
        if self._setup.model_config.implementation == "native":
            own |= self._receiver.calls
        step_rows = self._setup.model.weights.formats.step_rows
        return {**step_rows.calls, **self._sleeper.calls, **self._page_calls, **own}

    def _check_for_update(self, path: str) -> dict[str, Any]:
        return {"stamp": stamp_of(self._found(path).path)}

    def _load_for_update(self, path: str | None, stamp: Any) -> dict[str, Any]:
        """``stamp``: what the folder had when these weights were its own; None: that does not matter."""
        if path is not None and stamp is not None and stamp_of(path) != stamp:
            raise ModelLoadError(f"the files of {path} have changed since its update: they may be other weights")
        return {"num_parameters": self.reload_weights(path)}

    def device_bytes(self) -> int:
        return self._setup.platform.memory_taken()

    def start_profile(self, folder: str | None) -> str:
        return profiler.start(folder, self._setup.platform)

    def stop_profile(self) -> str:
        return profiler.stop(self._rank.index, self._setup.platform)
