"""Steps of decodes with drafts as CUDA graphs: of so many positions, whatever rows they belong to.

    row        3    3    3    5    0    0   -1   -1       a row with k drafts has k + 1 positions, one after the other
    place      0    1    2    0    0    1    0    0       drafts before each; -1: padding, which is written nowhere
    draft      -    a    b    -    -    c    -    -       the one that the position computes

The step itself writes the drafts into the rows, behind their tokens, where its end reads them again to verify them.
So one graph serves any mixture of rows with few, many and no drafts, and nothing is computed for drafts that a row does
not have: a graph of (batch, k + 1) would compute k + 1 positions of each. Steps without any draft have the graphs that
there are without speculation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...kernels.commit_drafts import commit_drafts, following_drafts
from ...kernels.input_prep import DecodeInputs, prepare_decode
from ..graphs.cuda_graphs import DecodeStep
from ..input_batch import Rows
from ..request_state import COLUMNS
from ..transfer import send
from .positions import Positions

_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def draft_sizes(most: int) -> list[int]:
    """Return the numbers of positions of which there are graphs, ascending: those up to ``most``."""
    return [size for size in _SIZES if size <= most]


class DraftStep(DecodeStep):
    """A step in which rows have drafts. Its n rows are those of the positions."""

    def __init__(self, *args: Any, **how: Any) -> None:
        """Take the arguments of `DecodeStep`; its sizes count positions."""
        super().__init__(*args, **how)
        self._columns = torch.zeros((3, self._max_size), dtype=torch.int64, device=self._device)
        self._rows, self._places, self._drafts = self._columns.unbind()
        self.positions = np.empty((2, 0), dtype=np.int64)
        """Place of each position of the next step, and the draft that the step writes there; -1: none."""

    def set_rows(self, rows: Rows, size: int) -> Tensor:
        """Put the positions' rows, with their places and drafts, where the step of ``size`` reads them."""
        columns = np.zeros((3, self._max_size), dtype=np.int64)  # all of it, so that it is one copy
        columns[0, len(rows) :] = -1
        columns[0, : len(rows)] = rows
        columns[1:, : len(rows)] = self.positions[:, : len(rows)]
        send(columns, self._columns)
        return self._rows[:size]

    def prepare(self, size: int) -> DecodeInputs:
        requests = self._requests
        where = (requests.token_ids, requests.scalars.words, COLUMNS)
        return prepare_decode(*where, *(column[:size] for column in self._columns))

    def forward(self, inputs: DecodeInputs, size: int) -> Tensor:
        return self._model.decode(inputs, self._rows[:size], has_several=True)

    def sample_all(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        requests, places = self._requests, self._places[: len(rows)]
        drafts = following_drafts(requests.token_ids, requests.scalars.num_tokens, rows, places)
        starts = (torch.arange(len(rows), device=rows.device) - places).clamp_(min=0)
        positions = Positions(drafts, places, starts, len(rows) - 1)
        where = (self._masks, self._logprobs, self._cursor)
        return self._sampler.sample_padded(logits, rows, *where, positions)

    def commit(self, rows: Tensor, ids: Tensor, checks: Tensor) -> None:
        requests = self._requests
        where = (requests.token_ids, requests.scalars.words, COLUMNS, rows, self._places[: len(rows)])
        commit_drafts(*where, ids, checks, self._published, self._cursor)
