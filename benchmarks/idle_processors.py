"""Logits processors that change nothing, for sampling.py: one whose rows are sampled op by op, and one in graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.ipc.messages import NewRequest
from aengine.runner.input_batch import Rows
from aengine.runner.request_state import RequestState, Scalars
from aengine.runner.sampling.processors import LogitsProcessor, ProcessedRows
from aengine.runner.speculation.positions import SpecDecode


class Idle(LogitsProcessor):
    name = "idle"

    def process(self, logits: Tensor, rows: ProcessedRows) -> None:
        pass


class IdleInGraphs(LogitsProcessor):
    """Adds a number of its row, which is 0, to one token's logit."""

    name = "idle_in_graphs"
    is_in_graphs = True

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        super().__init__(requests, vocab_size)
        self._numbers = torch.zeros(len(self.uses), device=requests.token_ids.device)

    def add_request(self, request: NewRequest) -> None:
        self.uses[request.req_idx] = self.extra in request.extras

    def apply(self, logits: Tensor, rows: Rows, rows_device: Tensor, scalars: Scalars, spec_decode: SpecDecode) -> None:
        logits[:, 0] += self._numbers[rows_device.clamp(min=0)]
