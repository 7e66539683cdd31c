"""`StepExchange`: what a rank exchanges with others for each step, beside what its layers do.

    begin ─> decode_size or batch_tokens ─> receive ─> the layers ─> send, or sampling and send_ids ─> end

A rank that has all of a model, alone or with those that share each of its layers, exchanges nothing: that is this
class. `Relay` passes steps on between ranks that have some layers each, and `ExpertRounds` pairs the steps of replicas
that share experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...ipc.messages import SchedulerOutput
from ..distributed.group import ALONE, Peers
from ..graphs.batch_graphs import BatchGraphs
from ..graphs.cuda_graphs import CudaGraphManager
from ..request_state import RequestState

Rows = npt.NDArray[np.int64]


class StepExchange:
    """Exchanges nothing. `ModelRunner` calls the methods in the order in which they stand here."""

    samples = True
    """Whether this rank has the model's last layers and its head, and samples."""

    has_tokens = True
    """Whether this rank's rows get the sampled tokens."""

    sampled_ids: Tensor | None = None
    """int64 [max_num_seqs]: memory for the sampled ids, to which decode graphs copy them; None: nobody needs them."""

    def __init__(self, group: Peers = ALONE) -> None:
        self.group = group  # the ranks that exchange tensors in each layer
        self._graphs: CudaGraphManager | None = None
        self._batch_graphs: BatchGraphs | None = None

    @property
    def is_alone(self) -> bool:
        """Whether no other rank computes the same steps."""
        return self.group.size == 1

    def attach(self, requests: RequestState, *, has_graphs: bool) -> None:
        """Connect with a runner's rows, before its graphs are made. ``has_graphs``: it will have some."""

    def use_graphs(self, graphs: CudaGraphManager | None, batch_graphs: BatchGraphs | None) -> None:
        """Pad steps to the sizes of these graphs from now on."""
        self._graphs = graphs
        self._batch_graphs = batch_graphs

    def add_request(self, row: int) -> None:
        """Note that the row belongs to another request from now on."""

    def begin_empty(self, out: SchedulerOutput) -> None:
        """Begin a step without requests; called instead of `begin`."""

    def begin(self, out: SchedulerOutput, rows: Rows, num_tokens: int) -> None:
        """Begin a step of ``num_tokens`` tokens of the requests in ``rows`` (host int64 [n]), which `end` ends."""

    def decode_size(self, graphs: CudaGraphManager | None, num_tokens: int) -> int | None:
        """Return the size of that of ``graphs`` that runs a decode step of so many tokens; None: there is none for
        it."""
        return None if graphs is None else graphs.size_for(num_tokens)

    def batch_tokens(self, num_tokens: int) -> int | None:
        """Return the tokens of the graph that runs a step of so many, some of prompts; None: there is none for it."""
        return None if self._batch_graphs is None else self._batch_graphs.tokens_for(num_tokens)

    def receive(self, num_tokens: int) -> tuple[Tensor, ...]:
        """Return what the model's forward gets for a step that runs op by op, beside its inputs: hidden states
        [num_tokens, hidden_size], or nothing."""
        return ()

    def receive_for_graph(self, num_tokens: int) -> None:
        """Receive the same where graphs read it. What pads it there is of earlier steps."""

    def received(self, num_tokens: int, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return what `receive` does, within a graph, for a step of so many tokens, padding included. ``rows``: int64
        [num_tokens], each token's row, -1 for padding; None in a step with prompts."""
        return ()

    def send(self, hidden: Tensor) -> None:
        """Pass on what the layers yield, [num_tokens, hidden_size]; on a rank that does not sample."""
        raise AssertionError("a rank that has the head passes nothing on")

    def expect_ids(self, rows: Rows, counts: Rows | None) -> None:
        """Note that another rank samples for each of these rows (host int64 [n]), at so many positions of each; None:
        at one."""

    def send_ids(self, token_ids: Tensor) -> None:
        """Pass on the sampled ids (int64 [n])."""

    def send_ids_of_graph(self, count: int) -> None:
        """Pass on the first ``count`` ids that a graph has left in `sampled_ids`."""

    def end(self) -> None:
        """End the step, which has been sampled."""

    def join(self, sizes: Sequence[int], has_prompts: bool) -> None:
        """Take part in steps of other replicas, of ``sizes`` tokens, while this one has none."""
        raise AssertionError("this rank takes no part in other replicas' steps")
