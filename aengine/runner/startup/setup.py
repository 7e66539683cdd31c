"""The set-up of a runner: what is decided before memory is measured, and how the runner is made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ...config import EngineConfig
from ...errors import ModelLoadError, NotEnoughMemoryError
from ...ipc.messages import most_ahead
from ...limits.graphs import GraphMode
from ..attention.backend import AttentionBackend
from ..attention.kv_format import KVFormat
from ..attention.kv_pages import KvCacheSpec
from ..attention.swap_space import SwapSpace
from ..distributed.experts_group import ExpertsGroup
from ..distributed.group import ALONE, TensorGroup
from ..distributed.pipeline import NoLink, PipelineLink
from ..distributed.stage import PipelineStage
from ..exchange.expert_rounds import ExpertRounds
from ..exchange.relay import Relay
from ..exchange.step_exchange import StepExchange
from ..graphs.cuda_graphs import graph_sizes, not_captured, out_of_memory
from ..kv_spec import KVLayout, lay_out_kv
from ..layers.decoder import Decoder
from ..lazy_zeros import NewZeros, lazy_zeros
from ..model_config import AttendingLayers, ModelConfig
from ..model_runner import ModelRunner
from ..models.causal_lm import CausalLM
from ..platforms.platform import Platform
from ..pooling.vectors import VectorLayers
from ..sampling.logprob_modes import LOGPROBS_MODES
from ..sampling.processors import LogitsProcessor, load_processors, make_processor
from ..sampling.vocabulary import Vocabulary
from ..speculation.graphs import draft_sizes
from ..speculation.proposer import FINDS_IN_ROWS, ProposerSource
from ..weights.inventory import TensorsOfAKind

MAX_GRAPH_TOKENS = 2304
"""Tokens of the largest step with prompts that has a graph: 2048 of prompts, and 256 that decode. The host takes 11 to
20 ms to queue a larger one of 28 layers op by op, Qwen3-0.6B on an H200 16 ms for 8192 tokens."""
_MOST_LOOKED_UP = 7
"""Drafts of a request with states in a step, of those that are looked up. For each the pages have 4% of memory more
(Qwen3-Next), and the states of a step are read and written once, however many there are."""


@dataclass(frozen=True, slots=True)
class RunnerSetup:
    """A loaded model on a device, and the settings that the device resolves."""

    config: EngineConfig
    model_config: ModelConfig
    model: CausalLM
    platform: Platform
    attention: AttentionBackend
    kv_format: KVFormat  # what keys and values are kept as
    block_size: int
    max_batched: int  # tokens in a step
    weight_bytes: int
    num_threads: int  # threads that compile kernels
    num_processes: int = 1  # ranks of all replicas
    vectors: VectorLayers | None = None  # how vectors are computed; None: the model gives no embeddings
    group: TensorGroup = ALONE
    link: PipelineLink | None = None  # connection with the other pipeline stages; None: there is one stage
    experts_group: ExpertsGroup | None = None  # ranks that divide the experts, of all replicas; None: none do
    tensors: Sequence[TensorsOfAKind] = ()  # what the weights have become
    proposer: ProposerSource = FINDS_IN_ROWS  # what guesses tokens on the device

    def _exchange(self, *, is_rehearsal: bool) -> StepExchange:
        if self.experts_group is not None:
            assert isinstance(self.model, Decoder), "others are refused by their config"
            return ExpertRounds(self.experts_group, self.model.join)
        if self.link is not None:
            link = NoLink(self.stage, self.link.sizes, self.platform.device) if is_rehearsal else self.link
            return Relay(self.stage, link, self.group)
        return StepExchange(self.group)

    @property
    def num_experts(self) -> int:
        """Number of experts of each mixture of which this rank has a part or all."""
        config = self.model_config
        group = self.experts_group or self.group
        return config.num_experts // group.size if config.divides_experts else config.num_experts

    @property
    def stage(self) -> PipelineStage:
        """The pipeline stage whose layers this rank has."""
        return self.model.weights.stage

    @property
    def kv_layout(self) -> KVLayout:
        layers = self._attending.kv_layers
        layout = lay_out_kv(layers, self.block_size, self.kv_format.dtype.itemsize)
        return layout.of_layers(self.stage.layers(len(layers)))

    @property
    def _attending(self) -> AttendingLayers:
        layers = AttendingLayers.of(self.model_config, *self.proposer.configs)
        chosen = self.config.speculation_settings
        if chosen.method == "none":
            return layers
        return layers.with_ahead(chosen.tokens if self.proposer.configs else _MOST_LOOKED_UP)

    @property
    def processors(self) -> tuple[type[LogitsProcessor], ...]:
        """The logits processors that the settings name."""
        return load_processors(self.config.logits_processors)

    @property
    def graph_mode(self) -> GraphMode:
        """What of a step is launched as graphs."""
        return self.config.graph_mode if self.platform.is_accelerator else "NONE"

    @property
    def graph_sizes(self) -> list[int]:
        """Numbers of requests to which decodes are padded; empty: they are not."""
        if not self.platform.is_accelerator:
            return []
        chosen = self.config.cudagraph_capture_sizes
        return list(chosen or graph_sizes(min(self.config.max_num_seqs, self.max_batched)))

    @property
    def draft_sizes(self) -> list[int]:
        """Numbers of positions of decodes with drafts that have graphs; pipelines run them as steps with prompts."""
        if self.config.speculation == "none" or not self.platform.is_accelerator or self.link is not None:
            return []
        if not most_ahead(self.kv_layout.groups, otherwise=1):
            return []
        return draft_sizes(min(self.max_batched, self.config.max_logits))

    @property
    def num_swap_pages(self) -> int:
        """Number of this rank's pages for which the host has places."""
        return self.config.swap_space_bytes // self.kv_layout.page_bytes

    def make_cache(self, num_blocks: int, max_model_len: int, zeros: NewZeros = lazy_zeros) -> Any:
        """Make a KV cache of ``num_blocks`` blocks, with memory by ``zeros``."""
        spec = KvCacheSpec(
            self._attending,
            num_blocks,
            self.block_size,
            self.model.weights.formats.dtype,
            self.platform.device,
            self.config.max_num_seqs,
            max_model_len,
            self.kv_format,
            self.stage,
            max((self.proposer.most_positions, *self.draft_sizes)),
            zeros,
        )
        return self.attention.make_cache(spec)

    def make_runner(
        self, num_blocks: int, max_model_len: int, *, is_rehearsal: bool = False, cache: Any = None
    ) -> ModelRunner:
        """Make a runner over ``cache``, a KV cache of ``num_blocks`` blocks, or a new one; no graph is captured yet.
        ``is_rehearsal``: its steps are exchanged with no other pipeline stage."""
        config, platform, exchange = self.config, self.platform, self._exchange(is_rehearsal=is_rehearsal)
        cache = cache or self.make_cache(num_blocks, max_model_len)
        page_copies = None
        if self.num_swap_pages and not is_rehearsal:
            sizes = num_blocks, self.num_swap_pages
            page_copies = SwapSpace(cache.pages, *sizes, platform, is_alone=exchange.is_alone)
        return ModelRunner(
            self.model,
            cache,
            vocab_size=self.model_config.vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            kv_groups=self.kv_layout.groups,
            platform=platform,
            graph_sizes=self.graph_sizes or None,
            max_graph_tokens=min(MAX_GRAPH_TOKENS, self.max_batched),
            position_sizes=self.draft_sizes,
            max_in_flight_steps=config.steps_in_flight,  # steps beyond these wait in the worker's queue
            enforce_eager=self.graph_mode != "FULL",
            captures_ends=self.graph_mode == "PIECEWISE",
            vectors=self.vectors,
            vocabulary=Vocabulary(self.model.vocabulary, self.group),
            exchange=exchange,
            page_copies=page_copies,
            step_rows=self.model.weights.formats.step_rows,
            compiled=self._compiled(cache, exchange, max_model_len),
            processors=[partial(make_processor, one) for one in self.processors],
            logprobs_mode=LOGPROBS_MODES[config.logprobs_mode],
            proposer=self.proposer,
        )

    def _compiled(self, cache: Any, exchange: StepExchange, max_model_len: int) -> Callable[[Tensor], Any] | None:
        """What makes the model a tape, if compiled kernels multiply its weights; see `ModelRunner`."""
        formats, config = self.model.weights.formats, self.config
        if not formats.is_compiled or config.enforce_eager or not exchange.is_alone:
            return None
        from ..graphs.tape_model import taped

        return partial(
            taped,
            self.model,
            cache,
            max_tokens=self.max_batched,
            max_model_len=max_model_len,
            step_rows=formats.step_rows,
        )

    @contextmanager
    def errors_explained(self) -> Iterator[None]:
        """Convert a lack of memory, of the device or of a multiprocessor, to a ModelLoadError with its use and cure."""
        try:
            yield
        except Exception as error:
            if self.platform.is_accelerator and (reason := out_of_memory(error)):
                raise self._too_large(reason) from error
            if type(error).__name__ == "OutOfResources":  # Triton's, which need not be installed
                raise self._too_small(error) from error
            if self.graph_mode == "NONE" or (reason := not_captured(error)) is None:
                raise
            cures = {"FULL": "'PIECEWISE' launches the layers op by op, 'NONE' all", "PIECEWISE": "use 'NONE'"}
            mode = f"cudagraph_mode={self.graph_mode!r}"
            raise ModelLoadError(
                f"{mode}: a graph of a step could not be captured ({reason}): {cures[self.graph_mode]}"
            ) from error

    def _too_large(self, reason: str) -> NotEnoughMemoryError:
        memory = self.platform.memory()
        graphs = "give fewer cudagraph_capture_sizes, " if self.config.cudagraph_capture_sizes else ""
        return NotEnoughMemoryError(
            f"the GPU ran out of memory while the engine started: {_gib(memory.total)} in all, {_gib(memory.free)} "
            f"free, weights {_gib(self.weight_bytes)}: {graphs}lower gpu_memory_utilization, max_num_batched_tokens or "
            f"max_num_seqs, or end other processes on the GPU ({reason})"
        )

    def _too_small(self, error: Any) -> ModelLoadError:
        model, formats = self.model_config, self.model.weights.formats
        return ModelLoadError(
            f"a kernel needs more {error.name} than a program may have on {self.platform.name} ({error.required} of "
            f"{error.limit}), with heads of {model.head_dim} in {formats.name}, "
            f"{model.num_heads // model.num_kv_heads} for a key-value head: use "
            f"{'' if formats.dtype.itemsize == 2 else 'a 16-bit dtype, '}another GPU or device='cpu'"
        )


def _gib(count: int) -> str:
    return f"{count / 1024**3:.2f} GiB"
