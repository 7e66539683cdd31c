"""The two phases of a step. ``execute_model`` ends with logits, ``sample_tokens`` turns them into the answer.

               execute_model(SchedulerOutput)                      sample_tokens(GrammarOutput | None)
    rows freed, taken, given blocks ─> InputBatch ─> model ─> logits ─┬─> mask, sample ─> ids into the rows, AsyncOutput
                                                                      │
                             ExecuteModelState, held between the two ─┘   the host fills bitmasks meanwhile

Nothing between the two ends asks the device for a value: what the host must know to queue the next op (which rows
sample, how long they are) follows from the SchedulerOutputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import InternalError
from ..ipc.messages import KV_LOST, GrammarOutput, KVCacheGroup, NewRequest, RowError, SchedulerOutput
from ..kernels.input_prep import DecodeInputs, PreparedInputs
from .async_output import NO_SIDE_OUTPUT, AsyncOutput, OutputCopier, SideOutput, Source
from .attention.kv_pages import PageCopies
from .block_tables import BlockTables, table_shape
from .distributed.group import ALONE
from .distributed.shares import VocabularyShare
from .exchange.step_exchange import StepExchange
from .graphs.batch_graphs import BatchGraphs
from .graphs.batch_states import BatchStates
from .graphs.cuda_graphs import CudaGraphManager, DecodeStep
from .graphs.launches import Launches
from .input_batch import NO_ROWS, BatchPlan, InputBatch, Rows
from .out_of_memory import OutOfMemory
from .platforms.platform import Platform
from .pooling.decoder import DecoderPooling
from .pooling.vectors import VectorLayers
from .profiler import phase
from .request_state import SCALAR_WORDS, RequestState
from .results.prompt_logprobs import PromptLogprobs
from .results.results import Results
from .sampling.bitmask_memory import HostBitmasks
from .sampling.features import SamplingFeature
from .sampling.logprob_modes import RAW_LOGPROBS, LogprobsMode
from .sampling.sampler import LogprobRows, Sampler, Sampling
from .sampling.vocabulary import Vocabulary
from .speculation.drafts import DraftVerifier
from .speculation.proposer import FINDS_IN_ROWS, ProposerSource, RunnerParts
from .speculation.speculation import Verifier
from .staged_writes import StagedArena
from .transfer import to_device
from .weights.step_rows import StepRows

_IDLE_FOR_GRAPHS = 0.05  # seconds without work before a graph is captured; each part takes a fifth of that
_IDLE_FOR_LONG_PARTS = 0.25  # seconds without work before a longer part is run


class Model(Protocol):
    """Interface of a model for the runner. ``attn`` is what ``KvMemory.bind`` makes of a batch."""

    def forward(self, input_ids: Tensor, positions: Tensor, attn: Any, received: Tensor | None = None) -> Tensor:
        """Return hidden [num_tokens, hidden_size] for int64 [num_tokens] ids and positions; writes and reads KV by
        attn. ``received``: hidden states of the layers before, which are another rank's; None: begin with the ids."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [n, vocab_size], a new tensor, for hidden [n, hidden_size]; on one rank of several, its
        share."""

    def final_hidden(self, hidden: Tensor) -> Tensor:
        """Return [n, hidden_size] as the head takes it: normalised, a new tensor, for hidden [n, hidden_size]."""


class KvMemory(Protocol):
    """The KV cache of all layers, as the runner sees it."""

    clears_blocks: bool
    """Whether `clear_blocks` must be called."""
    batch_states: BatchStates
    """Told what layers with states compute in steps with prompts that are graphs."""

    def watch_rows(self, first_lens: Tensor) -> None:
        """Take int32 [max_num_seqs], before all other calls: the tokens that the request of each row had when it got
        the row. The tensor's memory stays the same."""

    def decode_kinds(self, requests: RequestState, tables: BlockTables, step_rows: StepRows) -> StepRows:
        """Return what has the kinds of decode steps that run as graphs: those of ``step_rows``, and more if attention
        has some of its own."""

    def bind(self, batch: InputBatch) -> Any:
        """Return the attention of one step: the cache together with the batch's metadata."""

    def bind_decode(self, rows: Tensor, seq_lens: Tensor, block_table: Tensor) -> Any:
        """Return the attention of a step of one token each, over memory that graphs replay: rows int64 [n], -1 for
        padding; seq_lens int32 [n]; block_table int32 [num_groups, max_num_seqs, width], by KV group and row."""

    def bind_positions(self, rows: Tensor, positions: Tensor, seq_lens: Tensor, block_table: Tensor) -> Any:
        """Return the attention of a decode in which a row is named once for each of its tokens, at ``positions`` (int64
        [n]), which follow each other; otherwise as `bind_decode`."""

    def op_by_op(self, bound: Any) -> Any:
        """Return what `bind` or `bind_batch` gave as layers use it that run op by op, whatever the model's own do."""

    def bind_batch(self, inputs: PreparedInputs, rows: Tensor, block_table: Tensor) -> Any:
        """Return the attention of any batch, padded, over memory that graphs replay; rows are those of
        `bind_decode`."""

    def clear_blocks(self, block_ids: Tensor) -> None:
        """Clear blocks (int64 [m]) that have a new owner: a NaN left in them would spoil a sum even under a mask."""

    def preparations(self) -> list[Callable[[], None]]:
        """Return what is better done in idle time, in parts of a tenth of a second or less."""

    def copy_blocks(self, pairs: Sequence[int]) -> None:
        """Copy whole blocks: [from, to, from, to, ...]. No block is both."""


class Preparation(NamedTuple):
    """Work done in idle time, so that no step has to wait for it."""

    idle_seconds: float  # see `ModelRunner.prepares_after`
    run: Callable[[], None]


@dataclass(slots=True)
class ExecuteModelState:
    """State of a step between `execute_model` and `sample_tokens`."""

    step_id: int = -1
    plan: BatchPlan | None = None  # the batch that was run; None: no request could be run
    idx_mapping: Tensor | None = None  # int64 [num_reqs]: the plan's rows, on the device
    logits: Tensor | None = None  # float32 [num_sampled, share]; None: nothing samples, or it was sampled already
    side: SideOutput = NO_SIDE_OUTPUT  # what the step yields beside tokens
    graphs: CudaGraphManager | None = None  # the rest of the step is queued as one of these; None: op by op
    ends_by_graph: bool = False  # the graph is the end of a step with prompts, not the second half of decodes
    num_reqs: int = 0  # requests of the step, those that could not be run included
    row_errors: dict[int, RowError] = field(default_factory=dict)  # errors by position in the SchedulerOutput


class ModelRunner:
    """Rows, model and sampler of one rank. Not thread-safe; the phases alternate, or it raises InternalError."""

    may_prepare = True
    graphs: CudaGraphManager | None = None
    batch_graphs: BatchGraphs | None = None
    _state: ExecuteModelState | None = None
    _preparations: list[Preparation] | None = None  # None: to be looked for when asked

    def __init__(
        self,
        model: Model,
        kv_memory: KvMemory,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        kv_groups: Sequence[KVCacheGroup],
        platform: Platform,
        graph_sizes: list[int] | None = None,
        max_graph_tokens: int = 0,
        position_sizes: Sequence[int] = (),
        max_in_flight_steps: int = 2,
        enforce_eager: bool = False,
        captures_ends: bool = False,
        vectors: VectorLayers | None = None,
        vocabulary: Vocabulary | None = None,
        exchange: StepExchange | None = None,
        page_copies: PageCopies | None = None,
        step_rows: StepRows | None = None,
        compiled: Callable[[Tensor], Model] | None = None,
        processors: Sequence[Callable[[RequestState, int], SamplingFeature]] = (),
        logprobs_mode: LogprobsMode = RAW_LOGPROBS,
        proposer: ProposerSource = FINDS_IN_ROWS,
    ) -> None:
        """``graph_sizes``: batch sizes of decode steps that run as one launch; None: all run op by op.
        ``position_sizes``: as these, of rows with several positions, by the positions; empty: they run as steps with
        prompts do. ``max_graph_tokens``: most tokens of a step with prompts whose layers run as one launch.
        ``enforce_eager``, ``captures_ends``: see `CudaGraphManager`.
        ``vectors``: how a pooled request gets its vector; None: as its last hidden state. ``vocabulary``: tokens whose
        logits this rank has; None: all. ``processors``, ``logprobs_mode``: see `Sampler`. ``exchange``: what this rank
        exchanges of each step with others; None: there are none, and it decides by itself what to leave out of a step
        that it has no memory for. ``page_copies``: how pages are copied beyond the pool; ``step_rows``: what is told
        whose tokens a step has; ``compiled``: makes what runs in place of the model, of the persistent block tables;
        ``proposer``: what makes the one that guesses tokens on the device.

        Ranks exchange tensors within a step, as the SchedulerOutputs alone tell: all of them do the same. Whether a
        step runs as a graph or op by op is each rank's own matter."""
        self._exchange, self.step_rows = exchange or StepExchange(), step_rows or StepRows()
        self.kv_memory, self._page_copies = kv_memory, page_copies or PageCopies()
        self.vocab_size, self.platform = vocab_size, platform
        self._arena = StagedArena(
            {
                "scalars": (max_num_seqs, SCALAR_WORDS),
                "token_ids": (max_num_seqs, max_model_len),
                "block_table": table_shape(kv_groups, max_num_seqs, max_model_len),
            },
            platform.device,
        )
        self.requests = RequestState(self._arena)
        kv_memory.watch_rows(self.requests.scalars.first_len)
        self._exchange.attach(self.requests, has_graphs=bool(graph_sizes))
        self.samples = self._exchange.samples  # whether this rank has the head, and samples
        self.tables = BlockTables(self._arena, num_blocks=num_blocks, groups=kv_groups)
        self.model: Model = model if compiled is None else compiled(self.tables.table)
        vocabulary = vocabulary or Vocabulary(VocabularyShare.of(vocab_size, 0, 1), ALONE)
        pooling = DecoderPooling(model, self.requests, vectors or VectorLayers("last"), vocab_size)
        self._results = Results([pooling, PromptLogprobs(model, self.requests, vocabulary, vocab_size)])
        self._bitmasks = HostBitmasks(4 * ((vocab_size + 31) // 32))
        self.num_logits = vocabulary.share_size  # logits of each row on this rank
        self.sampler = Sampler(self.requests, vocab_size, self._bitmasks, vocabulary, processors, logprobs_mode)
        self._row_faults: dict[int, tuple[str, str]] = {}  # type and message of the fault of a row's request, by row
        self._copy_out = OutputCopier(platform)
        self._memory = OutOfMemory(platform, is_alone=self._exchange.is_alone, may_repeat=not self.tables.has_states)
        self.decode_kinds = kinds = kv_memory.decode_kinds(self.requests, self.tables, self.step_rows)
        parts = (self.requests, self, self.sampler, max_in_flight_steps, self._bitmasks, platform)
        if graph_sizes:
            how: dict[str, Any] = {"enforce_eager": enforce_eager, "captures_ends": captures_ends, "step_rows": kinds}
            self.graphs = CudaGraphManager(self._decode_step(parts, max(graph_sizes)), graph_sizes, platform, **how)
        self.proposer = proposer.make(RunnerParts(self.requests, self.tables, kv_memory, platform, enforce_eager))
        verified = (position_sizes, parts, enforce_eager, self._exchange.has_tokens, self.proposer, self.step_rows)
        self.speculation: Verifier = DraftVerifier(self.requests, *verified)
        if graph_sizes and not enforce_eager:
            most, others = (max_num_seqs, max_graph_tokens), (self._exchange.group, self.step_rows)
            own = self.requests, self.tables, self.forward_batch
            self.batch_graphs = BatchGraphs(*own, *most, platform, *others, kv_memory.batch_states)
        self._exchange.use_graphs(self.graphs, self.batch_graphs)
        self._launches = Launches.of(self.graphs, self.speculation.graphs, self.batch_graphs)

    def _decode_step(self, parts: Sequence[Any], max_size: int) -> DecodeStep:
        if self.samples:
            self.sampler.reserve()
        sized = *parts[:3], max_size, *parts[3:]
        return DecodeStep(*sized, samples=self.samples, sampled=self._exchange.sampled_ids)

    @cached_property
    def _extras(self) -> frozenset[str]:
        """The names of the extras that some feature reads."""
        return self.sampler.extras | self._results.extras | self.step_rows.extras

    def _find_preparations(self) -> list[Preparation]:
        parts: list[Preparation] = []
        if self.batch_graphs is not None:
            shapes = self.batch_graphs.missing()
            parts = [Preparation(_IDLE_FOR_GRAPHS, partial(self.batch_graphs.prepare, shape)) for shape in shapes]
        return [*parts, *(Preparation(_IDLE_FOR_LONG_PARTS, part) for part in self.kv_memory.preparations())]

    @phase("execute_model")
    @torch.inference_mode()
    def execute_model(self, out: SchedulerOutput) -> None:
        """Apply the step's row changes and run the model; logits stay on the device.

        Raises:
            InternalError: the step before has not been sampled, or this one does not fit the rows.
        """
        if self._state is not None:
            raise InternalError(f"step {out.step_id} came before step {self._state.step_id} was sampled")
        self._update_rows(out)
        if not out.req_idx:
            self._exchange.begin_empty(out)
            self._state = ExecuteModelState(out.step_id)
            return
        plan = BatchPlan.make(out, self.requests, self.tables, self.speculation.ahead(out, self.vocab_size))
        self._exchange.begin(out, plan.rows, plan.num_tokens)
        self.speculation.begin(plan)
        self.step_rows.choose(plan.rows)
        state, errors = self._memory.execute(self._run, plan)
        state = state or ExecuteModelState()
        self._results.commit()
        if state.plan is not None:
            self.requests.advance(state.plan.rows, state.plan.seq_lens)
        state.step_id, state.num_reqs = out.step_id, plan.num_reqs
        state.row_errors = errors | _errors_of(plan, self._row_faults)
        self._state = state

    def _run(self, plan: BatchPlan) -> ExecuteModelState:
        if plan.is_decode:
            graphs = self.graphs if plan.num_samples is None else self.speculation.graphs
            size = self._exchange.decode_size(graphs, plan.num_tokens)
            if graphs is not None and size is not None:
                return self._run_graph(plan, graphs, size)
        self.speculation.begin_batch()
        return self._run_batch(plan)

    def _run_graph(self, plan: BatchPlan, graphs: CudaGraphManager, size: int) -> ExecuteModelState:
        """Run a step of decodes by graphs: one launch here, the second by `sample_tokens`. If this rank does not
        sample, there is no second one; nor if a row uses what no graph holds: the logits are sampled op by op then."""
        self._exchange.receive_for_graph(plan.num_tokens)
        rows, _ = plan.sampled()
        if self.sampler.is_op_by_op(plan.rows):
            rows_device, half = graphs.run_to_logits(rows, size)
            seq_lens = half.inputs.seq_lens[: len(rows)]
            if plan.num_samples is not None:  # the positions of a row follow each other, and the last is its length
                last = to_device(np.cumsum(plan.query_lens) - 1, rows_device.device)
                rows_device, seq_lens = rows_device.index_select(0, last), seq_lens.index_select(0, last)
            self.requests.advance_device(rows_device, seq_lens)
            return ExecuteModelState(plan=plan, idx_mapping=rows_device, logits=half.logits[: len(rows)])
        hidden = graphs.run(rows, size)
        if hidden is not None:
            self._exchange.send(hidden)
        return ExecuteModelState(plan=plan, graphs=graphs if self.samples else None)

    def _run_batch(self, plan: BatchPlan) -> ExecuteModelState:
        shape = None
        padded = self._exchange.batch_tokens(plan.num_tokens)
        if self.batch_graphs is not None and padded is not None:
            shape = self.batch_graphs.shape_for(plan, padded)
        if self.batch_graphs is not None and shape is not None:
            self._exchange.receive_for_graph(plan.num_tokens)
            hidden, rows, seq_lens, last = self.batch_graphs.run(plan, shape)
        else:
            self._launches.note(is_graph=False)
            batch = InputBatch.gather(plan, self.requests, self.tables)
            inputs, attn = batch.inputs, self.kv_memory.bind(batch)
            self.step_rows.begin(batch.idx_mapping, inputs.query_start_loc, plan.num_tokens)
            received = self._exchange.receive(plan.num_tokens)
            hidden = self.model.forward(inputs.input_ids, inputs.positions, attn, *received)
            self.proposer.run_behind(batch, hidden, attn)
            rows, seq_lens, last = batch.idx_mapping, batch.inputs.seq_lens, None
        if not self.samples:
            self._exchange.send(hidden[: plan.num_tokens])
            self.requests.advance_device(rows, seq_lens)
            return ExecuteModelState(plan=plan)
        logits, side = None, self._results.compute(plan, hidden)
        most = 0 if self.graphs is None or plan.num_samples is not None else self.graphs.max_size
        ends_by_graph = not side.tensors and 0 < len(plan.sampling) <= most
        ends_by_graph = ends_by_graph and not self.sampler.is_op_by_op(plan.rows[plan.sampling])
        if len(plan.sampling):
            if plan.num_logits == len(hidden):
                last = None
            elif last is None or plan.num_logits != plan.num_reqs or plan.num_samples is not None:
                last = to_device(plan.logits_indices(), hidden.device)
            if ends_by_graph and self.graphs is not None:
                self.graphs.hold(hidden, last, plan.rows[plan.sampling])
            else:
                logits = self.model.compute_logits(hidden if last is None else hidden.index_select(0, last))
        if not ends_by_graph or len(plan.sampling) < plan.num_reqs:  # the graph of the end advances rows that sample
            self.requests.advance_device(rows, seq_lens)
        graphs = self.graphs if ends_by_graph else None
        return ExecuteModelState(
            plan=plan, idx_mapping=rows, logits=logits, side=side, graphs=graphs, ends_by_graph=ends_by_graph
        )

    def forward_batch(self, inputs: PreparedInputs, rows: Tensor) -> Tensor:
        """See `BatchGraphs`: the forward of a step with prompts over a graph's memory."""
        attn = self.kv_memory.bind_batch(inputs, rows, self.tables.table)
        self.step_rows.begin(rows, inputs.query_start_loc, len(inputs.input_ids))
        received = self._exchange.received(len(inputs.input_ids))
        hidden = self.model.forward(inputs.input_ids, inputs.positions, attn, *received)
        self.proposer.prefill(inputs, rows, hidden, attn)
        return hidden

    def decode(self, inputs: DecodeInputs, rows: Tensor, *, has_several: bool = False) -> Tensor:
        """See `DecodeModel`: the forward of a step over a graph's memory."""
        lens, table = inputs.seq_lens, self.tables.table
        if has_several:
            attn = self.kv_memory.bind_positions(rows, inputs.positions, lens, table)
        else:
            attn = self.kv_memory.bind_decode(rows, lens, table)
        self.step_rows.begin(rows)
        received = self._exchange.received(len(rows), rows)
        hidden = self.model.forward(inputs.input_ids, inputs.positions, attn, *received)
        self.proposer.store_states(rows, inputs.positions, hidden)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `DecodeModel`."""
        return self.model.compute_logits(hidden)

    def join(self, sizes: Sequence[int], has_prompts: bool) -> None:
        """See `StepExchange`."""
        self._exchange.join(sizes, has_prompts)

    @phase("sample_tokens")
    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> AsyncOutput:
        """Sample the step that `execute_model` ran last, under its bitmask if it has one.

        Raises:
            InternalError: no step waits to be sampled, or ``grammar`` is another step's.
        """
        state, self._state = self._state, None
        if state is None:
            raise InternalError("there is no step to sample: execute_model comes first")
        if grammar is not None and grammar.step_id != state.step_id:
            raise InternalError(f"the bitmask of step {grammar.step_id} came for step {state.step_id}")
        answer = self._sample_step(state, grammar)
        self._exchange.end()
        return answer

    def _sample_step(self, state: ExecuteModelState, grammar: GrammarOutput | None) -> AsyncOutput:
        plan = state.plan
        if plan is None:
            return self._answer(state, NO_ROWS, None)
        if not self.samples:
            self.speculation.note_sampled(plan)
            counts = None if plan.num_samples is None else plan.num_samples[plan.sampling]
            self._exchange.expect_ids(plan.rows[plan.sampling], counts)
            return self._answer(state, NO_ROWS, self._copy_out({}))
        if state.graphs is None:
            return self._sample_op_by_op(state, plan, grammar)
        rows, batch_idx = plan.sampled()
        logprobs = self.sampler.logprob_rows(rows, batch_idx)
        masked, bits = self._bitmasks.of_batch(grammar, batch_idx)
        sampling = self.sampler.asks(rows)
        queue = state.graphs.end if state.ends_by_graph else state.graphs.sample
        queue(masked, bits, sampling if bits is None else max(sampling, Sampling.MASKED))
        published = state.graphs.step.published(len(rows), has_logprobs=logprobs is not None)
        self._exchange.send_ids_of_graph(len(rows))
        self.speculation.note_sampled(plan)
        return self._answer(state, batch_idx, published, logprobs)

    def _sample_op_by_op(self, state: ExecuteModelState, plan: BatchPlan, grammar: GrammarOutput | None) -> AsyncOutput:
        sampling, logprobs = NO_ROWS, None
        tensors = dict(state.side.tensors)
        if state.logits is not None and state.idx_mapping is not None:
            self._launches.note(is_graph=False)
            batch = self.speculation.gather(plan, state.idx_mapping, grammar)
            sampling = batch.batch_idx
            sampled, errors = self._memory.sample(self.sampler, state.logits, batch)
            if faults := self.sampler.faults:  # the steps on their way to which these rows belong fail as well
                self._row_faults |= {row: ("InternalError", fault) for row, fault in faults.items()}
                errors |= _errors_of(plan, self._row_faults)
                faults.clear()
            state.row_errors |= errors
            self.speculation.note_sampled(plan)
            tensors |= {"token_ids": sampled.token_ids, "checks": sampled.checks}
            tensors |= self.speculation.append(batch, sampled.token_ids)
            self._exchange.send_ids(sampled.token_ids)
            if sampled.logprobs is not None:
                logprobs = self.sampler.logprob_rows(batch.rows, sampling)
                tensors["logprobs"] = sampled.logprobs
        return self._answer(state, sampling, self._copy_out(tensors), logprobs)

    def _answer(
        self, state: ExecuteModelState, sampling: Rows, source: Source | None, logprobs: LogprobRows | None = None
    ) -> AsyncOutput:
        """See `AsyncOutput`."""
        columns = state.step_id, state.num_reqs, sampling, source, state.row_errors, logprobs
        answer = self.speculation.answer(state.plan, *columns, side=state.side)
        answer.launches = self._launches.take()
        return answer

    @property
    def prepares_after(self) -> float | None:
        """Seconds without work after which `prepare_more` is worth the risk that a request comes meanwhile; None: there
        is nothing to prepare, or none may be."""
        if not self.may_prepare:
            return None
        if self._preparations is None:
            self._preparations = self._find_preparations()
        return self._preparations[0].idle_seconds if self._preparations else None

    @torch.inference_mode()
    def prepare_more(self) -> None:
        """Capture a graph, or the like, in idle time: the first steps that need it would take longer, and all requests
        would wait."""
        if self._state is not None:
            return
        preparations = self._find_preparations()  # again: steps that came since may need something else first
        if preparations:
            preparations[0].run()
        self._preparations = None

    def share_bitmasks(self, memory: memoryview) -> None:
        """Use ``memory``, which is shared with the host, for the bitmasks of GRAMMAR frames. Called before graphs are
        captured, which read it."""
        self._bitmasks.register(memory, self.platform)

    def _update_rows(self, out: SchedulerOutput) -> None:
        """Apply the step's changes in the order of the SchedulerOutput's fields: a row may be freed and taken again in
        one step."""
        self.speculation.update(out)
        sampler = self.sampler if self.samples else None
        for row in out.removed:
            self.requests.remove_request(row)
            self.step_rows.remove_request(row)
            if sampler is not None:
                sampler.remove_request(row)
            self._row_faults.pop(row, None)
        for request in out.new_requests:
            fault = _check_request(request, self.vocab_size, self._extras)
            self.requests.add_request(request)
            self._exchange.add_request(request.req_idx)
            fault = self._results.add_request(request) or fault
            fault = self.step_rows.add_request(request) or fault
            if sampler is not None:
                fault = sampler.add_request(request) or fault
            if fault is not None:
                self._row_faults[request.req_idx] = fault
            self.tables.replace(request)
        self.tables.append(out.block_rows, out.block_ids, out.block_groups)
        fresh = self.tables.take_fresh()
        copies, lost = self._page_copies.apply(out.page_copies, fresh)
        if len(fresh) and self.kv_memory.clears_blocks:
            self.kv_memory.clear_blocks(to_device(fresh, self.requests.token_ids.device))
        if copies:
            self.kv_memory.copy_blocks(self.tables.checked(copies))
        for request in out.new_requests if lost else ():
            if not lost.isdisjoint(request.block_ids):
                self._row_faults[request.req_idx] = KV_LOST, "its KV did not come back from the host's memory"
        self._arena.apply()
        for row in () if sampler is None else sampler.apply_staged_writes():
            self._row_faults[row] = self._memory.fault_of_row()


def _errors_of(plan: BatchPlan, faults: Mapping[int, tuple[str, str]]) -> dict[int, RowError]:
    """Return the errors of the plan's rows, by position in the batch. ``faults``: type and message, by row."""
    if not faults:
        return {}
    places = ((int(i), faults.get(int(row))) for i, row in zip(plan.batch_idx, plan.rows, strict=True))
    return {i: RowError(i, *fault) for i, fault in places if fault is not None}


def _check_request(request: NewRequest, vocab_size: int, extras: frozenset[str]) -> tuple[str, str] | None:
    """Return the type and message of the fault of the request's token ids, which are then replaced by valid ones, or of
    its extras; None if there is none.

    The host has checked them. A wrong index would still kill the worker, and every other request with it.
    """
    ids = np.asarray(request.token_ids)
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = next(t for t in request.token_ids if not 0 <= t < vocab_size)
        for i, token_id in enumerate(request.token_ids):
            if not 0 <= token_id < vocab_size:
                request.token_ids[i] = 0
        known = f"this model's are 0 to {vocab_size - 1}"
        return "InvalidRequestError", f"the prompt has token id {wrong}, but {known}"
    for name in request.extras.keys() - extras:
        return "InternalError", f"the request has {name:.80}, which no feature of this worker reads"
    return None
