"""Logits to tokens. The order is that of SamplingParams' docstring, with the grammar's bitmask before the temperature.

logits ─> raw log-probabilities kept ───> bias, min tokens, ... ─> bitmask ─> cutoff ─────────────> / temperature, draw;
                                          (features/, in order)               (top-k, top-p, min-p)  greedy: the maximum

The same ops in two ways: one by one for the rows that sample in a step, each skipped when no row needs it (`sample`);
and all of them over a padded batch, as a graph holds them (`sample_padded`), where a row that does not need an op costs
it next to nothing. The bitmask comes last of what bans tokens, so that no feature allows what a grammar does not.

A feature that no graph holds (`SamplingFeature.is_in_graphs`) has its rows sampled in the first way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import InvalidRequestError
from ...ipc.messages import NewRequest
from ...kernels.bitmask import apply_bitmask
from ...kernels.gumbel import gumbel_sample, likeliest
from ...kernels.logprobs import token_logprobs
from ...kernels.select_rows import select_rows
from ...kernels.top_k_top_p import find_cutoff
from ..distributed.group import ALONE
from ..distributed.shares import VocabularyShare
from ..input_batch import NO_ROWS, Rows, SampleBatch, to_device
from ..request_state import RequestState, Scalars
from ..speculation.positions import NO_SPEC_DECODE, SpecDecode
from .bitmask_memory import HostBitmasks, MaskMemory
from .features import FEATURES, SamplingFeature
from .logprob_modes import RAW_LOGPROBS, LogprobsMode
from .vocabulary import Vocabulary

logger = logging.getLogger("aengine")


class Sampling(IntEnum):
    """Which work of the sampler a batch needs; each level includes those before it."""

    PLAIN = 0  # rows have a temperature and a seed
    MASKED = 1  # some row has a grammar's bitmask
    CUT = 2  # some row has top-k, top-p or min-p
    ANY = 3  # some row has another feature, such as a penalty


@dataclass(slots=True)
class LogprobRows:
    """The m rows that asked for log-probabilities."""

    rows: Rows  # host int64 [m]: which rows of logits these are
    batch_idx: Rows  # host int64 [m]: positions in the step's batch
    counts: Rows  # host int64 [m]: alternatives that each wants


@dataclass(slots=True)
class SamplerOutput:
    token_ids: Tensor  # int64 [n], always ids of the vocabulary
    checks: Tensor  # float32 [n]: finite if the row could be sampled; NaN or +inf: bad logits; -inf: all tokens banned
    logprobs: Tensor | None  # int32 [n, 1 + 2 * k], see `token_logprobs`: of the rows that asked


class Sampler:
    """Samples for whole steps; keeps which rows want log-probabilities, and the features' state."""

    def __init__(
        self,
        requests: RequestState,
        vocab_size: int,
        bitmasks: HostBitmasks,
        vocabulary: Vocabulary | None = None,
        processors: Sequence[Callable[[RequestState, int], SamplingFeature]] = (),
        logprobs_mode: LogprobsMode = RAW_LOGPROBS,
    ) -> None:
        """``vocabulary``: the ranks' shares of it; None: there is one rank. ``processors``: features of the caller's,
        which come last."""
        self._requests = requests
        self._vocab_size = vocab_size
        self.vocabulary = vocabulary or Vocabulary(VocabularyShare.of(vocab_size, 0, 1), ALONE)
        self._bitmasks, self._logprobs_mode = bitmasks, logprobs_mode
        makers: list[Callable[[RequestState, int], SamplingFeature]] = [*FEATURES, *processors]
        self._features = tuple(make(requests, vocab_size) for make in makers)
        self.extras = frozenset(feature.extra for feature in self._features) - {""}  # names of those that some reads
        self._in_graphs = tuple(feature for feature in self._features if feature.is_in_graphs)
        max_num_seqs = len(requests.in_use)
        # alternatives that each row wants beside the sampled token; -1: no log-probabilities
        self._num_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self._cuts = np.zeros(max_num_seqs, dtype=bool)  # whether each row is random, with top-k, top-p or min-p
        self._is_op_by_op = np.zeros(max_num_seqs, dtype=bool)  # whether each row uses a feature that no graph holds
        self._num_op_by_op = 0  # number of these rows
        self._asks = np.full(max_num_seqs, Sampling.PLAIN, dtype=np.int8)  # what each row asks for in every step
        self._asking: set[int] = set()  # rows that ask for more than `PLAIN` in some step
        self.faults: dict[
            int, str
        ] = {}  # what went wrong in `sample`, by row whose request fails; who reads it clears it

    def reserve(self) -> None:
        """Allocate the memory that graphs refer to."""
        for feature in self._in_graphs:
            feature.reserve()

    def add_request(self, request: NewRequest) -> tuple[str, str] | None:
        """Note what the request of a new row asks for. Returns the type and the message of what is wrong with it."""
        row, fault = request.req_idx, None
        greedy = request.temperature == 0 or request.top_k == 1
        cuts = 0 < request.top_k < self._vocab_size or request.top_p < 1 or request.min_p > 0
        for feature in self._features:
            try:
                feature.add_request(request)
            except InvalidRequestError as error:
                fault = ("InvalidRequestError", str(error))
            except BaseException as error:  # a caller's own feature may raise anything, SystemExit too
                logger.exception("a request is refused by %s", type(feature).__name__)
                fault = ("InternalError", f"what the request asks of sampling can't be read: {error!r:.300}")
            else:
                continue
            feature.remove_request(row)
        self._num_logprobs[row] = request.logprobs
        self._cuts[row] = cuts and not greedy
        self._asks[row] = Sampling.CUT if self._cuts[row] else Sampling.PLAIN
        if request.logprobs >= 0 or any(feature.uses[row] for feature in self._features):
            self._asks[row] = Sampling.ANY
        if self._asks[row] > Sampling.PLAIN or request.min_tokens > 0:
            self._asking.add(row)
        self._note_op_by_op(row, any(feature.uses[row] for feature in self._features if not feature.is_in_graphs))
        return fault

    def remove_request(self, row: int) -> None:
        for feature in self._features:
            feature.remove_request(row)
        self._asking.discard(row)
        self._note_op_by_op(row, False)

    def _note_op_by_op(self, row: int, is_so: bool) -> None:
        self._num_op_by_op += is_so - int(self._is_op_by_op[row])
        self._is_op_by_op[row] = is_so

    def apply_staged_writes(self) -> list[int]:
        """Write what the features need of the new rows. Returns the rows for which there is no memory; what they ask
        for is left out."""
        return [row for feature in self._features for row in feature.apply_staged_writes()]

    def asks(self, rows: Rows) -> Sampling:
        """Return what these rows ask of the sampler in the next step, apart from bitmasks."""
        if not self._asking:
            return Sampling.PLAIN
        return Sampling.ANY if self._is_pending(rows) else Sampling(self._asks[rows].max())

    def is_op_by_op(self, rows: Rows) -> bool:
        """Return whether some of these rows use a feature that no graph holds: `sample` is for them."""
        return self._num_op_by_op > 0 and bool(self._is_op_by_op[rows].any())

    def sample(self, logits: Tensor, batch: SampleBatch) -> SamplerOutput:
        """Sample one token for each row of this rank's logits float32 [n, share], which are overwritten."""
        rows, rows_device, scalars = batch.rows, batch.rows_device, batch.scalars
        asks = self.asks(rows)
        if batch.grammar is None and asks is Sampling.PLAIN:
            return self.sample_plainly(logits, batch)
        logits = self.vocabulary.whole(logits)
        most = int(self._num_logprobs[rows].max())
        kept = self._logprobs_mode.before(logits, scalars) if most >= 0 else None
        features: list[SamplingFeature] = []
        if asks is Sampling.ANY:
            features = [one for one in self._features if one.uses[rows].any() or one.is_pending(rows)]
        for feature in features:
            feature.apply(logits, rows, rows_device, scalars, batch.spec_decode)
            self.faults |= feature.take_faults()
        self._apply_bitmasks(logits, batch)
        token_ids, checks, cutoff = self._choose(logits, batch)
        for feature in features:
            feature.commit(token_ids, rows_device, scalars, batch.spec_decode)
        logprobs = None
        if kept is not None:
            kept = self._logprobs_mode.after(kept, logits, scalars, cutoff)
            logprobs = torch.empty((1, len(rows), 1 + 2 * most), dtype=torch.int32, device=logits.device)
            slot = torch.zeros(1, dtype=torch.int32, device=logits.device)
            token_logprobs(kept, token_ids, scalars.logprobs_asked, logprobs, slot)
            logprobs = logprobs[0]
        return SamplerOutput(token_ids, checks, logprobs)

    def sample_padded(
        self,
        logits: Tensor,
        rows: Tensor,
        masks: MaskMemory,
        logprobs: Tensor,
        slot: Tensor,
        spec_decode: SpecDecode = NO_SPEC_DECODE,
    ) -> tuple[Tensor, Tensor]:
        """Return (ids int64 [n], checks float32 [n]) of logits float32 [n, vocab_size], which are overwritten, with all
        that their rows (int64 [n]; -1: padding) ask for. Asks nothing of the host; `reserve` has been called.

        ``masks``: bitmasks of these rows; ``logprobs``, ``slot``: where the log-probabilities go, see
        `token_logprobs`. ``spec_decode``: what is verified of the rows, of which a request has several then.
        """
        n = len(rows)
        scalars = Scalars(select_rows(self._requests.scalars.words, rows))
        spec_decode.count_before(scalars.num_tokens)
        kept = self._logprobs_mode.before(logits, scalars)
        for feature in self._in_graphs:
            feature.apply(logits, NO_ROWS, rows, scalars, spec_decode)
        apply_bitmask(logits, masks.rows[:n], masks.bits[:n])
        cutoff = find_cutoff(logits, scalars.temperature, scalars.top_k, scalars.top_p, scalars.min_p)
        ids, checks = gumbel_sample(logits, scalars.temperature, scalars.seed, scalars.num_tokens, cutoff)
        kept = self._logprobs_mode.after(kept, logits, scalars, cutoff)
        token_logprobs(kept, ids, scalars.logprobs_asked, logprobs, slot)
        for feature in self._in_graphs:
            feature.commit(ids, rows, scalars, spec_decode)
        return ids, checks

    def cutoff(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Return `find_cutoff` of logits float32 [n, vocab_size] of rows int64 [n]; -1: padding."""
        scalars = Scalars(select_rows(self._requests.scalars.words, rows))
        return find_cutoff(logits, scalars.temperature, scalars.top_k, scalars.top_p, scalars.min_p)

    def logprob_rows(self, rows: Rows, batch_idx: Rows) -> LogprobRows | None:
        """Return which rows of logits want log-probabilities. The logits are those of ``rows`` [n], at the positions
        ``batch_idx`` [n] of the step. None: none of them does."""
        wants = np.flatnonzero(self._num_logprobs[rows] >= 0)
        if not len(wants):
            return None
        counts = np.minimum(self._num_logprobs[rows[wants]], self._vocab_size)
        return LogprobRows(wants, batch_idx[wants], counts)

    def needs_memory(self, batch: SampleBatch) -> npt.NDArray[np.bool_]:
        """Return bool [n]: the rows that ask for more than temperature and seed, and so may need memory to be
        sampled."""
        if batch.grammar is not None or self._is_pending(batch.rows):
            return np.ones(len(batch.rows), dtype=bool)
        asks: npt.NDArray[np.bool_] = self._asks[batch.rows] > Sampling.PLAIN
        return asks

    def sample_plainly(self, logits: Tensor, batch: SampleBatch) -> SamplerOutput:
        """Sample by temperature and seed alone: right for rows without other parameters."""
        scalars = batch.scalars
        if logits.is_cpu and not (self.vocabulary.is_divided or self._requests.is_random[batch.rows].any()):
            return SamplerOutput(*likeliest(logits), None)
        ids, checks = self.vocabulary.draw(logits, scalars.temperature, scalars.seed, scalars.num_tokens)
        return SamplerOutput(ids, checks, None)

    def _is_pending(self, rows: Rows) -> bool:
        return any(feature.is_pending(rows) for feature in self._features)

    def _apply_bitmasks(self, logits: Tensor, batch: SampleBatch) -> None:
        """Set the logits of tokens that the grammars of this step forbid to -inf."""
        rows, bits = self._bitmasks.of_batch(batch.grammar, batch.batch_idx)
        if bits is not None and len(rows):
            place = torch.empty(bits.shape, dtype=torch.uint8, device=logits.device)
            self._bitmasks.to_device(bits, place)
            apply_bitmask(logits, to_device(rows, logits.device), place)

    def _choose(self, logits: Tensor, batch: SampleBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Draw one token a row. Returns (ids int64 [n], checks float32 [n], cutoffs float32 [n])."""
        scalars = batch.scalars
        cutoff = torch.full_like(scalars.temperature, -torch.inf)
        if self._cuts[batch.rows].any():
            cutoff = find_cutoff(logits, scalars.temperature, scalars.top_k, scalars.top_p, scalars.min_p)
        return *gumbel_sample(logits, scalars.temperature, scalars.seed, scalars.num_tokens, cutoff), cutoff
