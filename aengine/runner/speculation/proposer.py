"""`Proposer`: what guesses tokens on the device, for rows in which the host asks for guesses.

    rows taken, freed ─> update ─> catch_up ─> propose ─> the layers ─┬─> prefill, a step with prompts
                                                          of a step   └─> store_states, a step of decodes

A proposer writes its guesses behind the tokens of the rows, as these are on the device then; the host knows how many
there are, not which. The one here looks them up in the rows. `ModelProposer` has weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ...ipc.messages import SchedulerOutput
from ...kernels.find_drafts import find_drafts
from ...kernels.input_prep import PreparedInputs
from ..block_tables import BlockTables
from ..input_batch import BatchPlan, InputBatch, Rows
from ..model_config import ModelConfig
from ..platforms.platform import Platform
from ..request_state import RequestState
from ..transfer import to_device


class RunnerParts(NamedTuple):
    """What a proposer shares with the runner."""

    requests: RequestState
    tables: BlockTables
    kv_memory: Any  # a `KvMemory`
    platform: Platform
    enforce_eager: bool = False


class Proposer:
    """Guesses that what came after a row's last tokens comes again."""

    def __init__(self, parts: RunnerParts) -> None:
        self._requests = parts.requests

    def update(self, out: SchedulerOutput) -> None:
        """Called before the rows are changed as a step says."""

    def catch_up(self, plan: BatchPlan) -> None:
        """Compute what rows lack that would lack too much behind this step. Called before each step and its guesses."""

    def propose(self, rows: Rows, counts: Rows) -> None:
        """Write ``counts`` [n] guesses behind the tokens of ``rows`` [n]. There is room for so many."""
        requests = self._requests
        row, count = to_device(np.stack((rows, counts)), requests.token_ids.device).unbind()
        find_drafts(requests.token_ids, requests.scalars.num_tokens, row, count, int(counts.max()))

    def advance(self, plan: BatchPlan) -> None:
        """Count the tokens that the rows get in a step as not computed. Called before the step computes."""

    def prefill(self, inputs: PreparedInputs, rows: Tensor, hidden: Tensor, attn: Any) -> None:
        """Called behind the layers of a step with prompts, perhaps inside a graph. rows: int64 [num_reqs], of the
        requests; hidden: [num_tokens or more, hidden_size]; attn: that of the layers."""

    def run_behind(self, batch: InputBatch, hidden: Tensor, attn: Any) -> None:
        """Called behind the layers of any step that runs op by op."""

    def store_states(self, rows: Tensor, positions: Tensor, hidden: Tensor) -> None:
        """Called behind the layers of a step of decodes, perhaps inside a graph. rows: int64 [n], of each position, -1
        for padding; positions: int64 [n]; hidden: [n, hidden_size]."""

    def rehearse(self) -> None:
        """Launch what `propose` launches, over padding alone."""

    def capture(self, progress: Callable[[int, int], None], *, largest_only: bool = False) -> None:
        """Capture the graphs of `propose`. Nothing may be in flight. ``progress(done, total)``."""


class ProposerSource:
    """What proposers are made of, one for each runner: here, of nothing."""

    configs: Sequence[ModelConfig] = ()
    """Models whose layers keep keys and values behind the model's own."""
    num_bytes = 0
    """Bytes of its weights on this rank."""
    most_positions = 0
    """Most positions that a launch of it computes; 0: it computes none."""

    def make(self, parts: RunnerParts) -> Proposer:
        return Proposer(parts)

    def described(self) -> dict[str, Any]:
        """Return what `describe` says of it."""
        return {}


FINDS_IN_ROWS = ProposerSource()
