"""`ExpertRounds`: the shapes in which a rank takes part in the rounds of replicas that share experts.

What ranks exchange in a round has the same shape on all of them, and with CUDA graphs that is the shape of a graph.
Each rank finds it by the sizes of the round, which the host has told all of them:

    every request one token   the decode graph that holds the most requests of a replica     (graphs/cuda_graphs.py)
    some prompts              the graph that holds the most tokens of a replica              (graphs/batch_graphs.py)
    more than any graph has,
    or on a device without    as many rows as each replica has tokens, op by op

A replica that has no step replays the graph with padding alone, which in decodes takes no expert. A rank without that
graph, as it had no memory to capture it, runs the same shape op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...ipc.messages import SchedulerOutput
from ..distributed.experts_group import ExpertsGroup
from ..graphs.cuda_graphs import CudaGraphManager
from .step_exchange import Rows, StepExchange


class RoundShape(NamedTuple):
    """How the steps of a round are padded. Both None: each replica exchanges as many rows as it has tokens."""

    decodes: int | None = None  # size of the decode graph that all replicas run; None: none
    tokens: int | None = None  # tokens of the graph for steps with prompts that all replicas run; None: none


class ExpertRounds(StepExchange):
    """Exchange of a rank whose replicas share experts: they compute their steps in rounds."""

    group: ExpertsGroup

    def __init__(self, group: ExpertsGroup, join_layers: Callable[[], None]) -> None:
        """``join_layers`` makes the model's layers with experts take part in a round, without tokens of this
        replica."""
        super().__init__(group)
        self._join_layers = join_layers
        self._shape = RoundShape()  # the graphs of the step being run
        self._is_stepping = False
        # (sizes, has prompts) of the rounds to be joined when the step being run has ended
        self._joins: list[tuple[Sequence[int], bool]] = []

    def begin_empty(self, out: SchedulerOutput) -> None:
        self.join(out.round_sizes, out.round_has_prompts)

    def begin(self, out: SchedulerOutput, rows: Rows, num_tokens: int) -> None:
        """Take part with a step of ``num_tokens``, which `end` ends. A step that is in no round, as all those before
        the first request, is one that all replicas compute alike."""
        self._is_stepping = True
        if out.round_sizes:
            self._shape = self._begin(out.round_sizes, out.round_has_prompts)
        else:
            self.group.begin_even(num_tokens)
            self._shape = self._shape_for(num_tokens, has_prompts=num_tokens > len(out.req_idx))

    def decode_size(self, graphs: CudaGraphManager | None, num_tokens: int) -> int | None:
        """Return the size of the graph; None for graphs of rows with several positions: the replicas of a round have
        different numbers of these, as with prompts."""
        return self._shape.decodes if graphs is self._graphs else None

    def batch_tokens(self, num_tokens: int) -> int | None:
        return self._shape.tokens

    def received(self, num_tokens: int, rows: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return None, as there is no stage before; the replicas exchange ``num_tokens`` rows of each."""
        self.group.begin_even(num_tokens, rows)
        return ()

    def end(self) -> None:
        """Release the graphs' memory after sampling. The step owned it until then, so that rounds in which this replica
        has no tokens had to wait: the host sends what the step samples under, whatever becomes of the requests."""
        self._is_stepping = False
        joins, self._joins = self._joins, []
        for sizes, has_prompts in joins:
            self.join(sizes, has_prompts)

    @torch.inference_mode()
    def join(self, sizes: Sequence[int], has_prompts: bool) -> None:
        """Take part in a round in which this replica has no tokens, and the others so many: ``sizes``, by replica."""
        if not any(sizes):
            return
        if self._is_stepping and self._graphs is not None:
            self._joins.append((sizes, has_prompts))
            return
        shape = self._begin(sizes, has_prompts)
        if shape.decodes is not None and self._graphs is not None:
            self._graphs.run_empty(shape.decodes)
        elif shape.tokens is not None and self._batch_graphs is not None:
            self._batch_graphs.run_empty(shape.tokens)
        else:
            self._join_layers()

    def _begin(self, sizes: Sequence[int], has_prompts: bool) -> RoundShape:
        shape = self._shape_for(max(sizes), has_prompts=has_prompts)
        size = shape.decodes or shape.tokens
        if size is None:
            self.group.begin(sizes)
        else:
            self.group.begin_even(size)
        return shape

    def _shape_for(self, most: int, *, has_prompts: bool) -> RoundShape:
        if has_prompts:
            return RoundShape(tokens=super().batch_tokens(most))
        return RoundShape(decodes=super().decode_size(self._graphs, most))
