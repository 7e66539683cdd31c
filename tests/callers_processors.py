"""Logits processors as a caller's own file has them, for the setting ``logits_processors``."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from aengine.errors import InvalidRequestError
from aengine.ipc.messages import NewRequest
from aengine.runner.input_batch import Rows
from aengine.runner.request_state import RequestState, Scalars
from aengine.runner.sampling.processors import LogitsProcessor, ProcessedRows
from aengine.runner.speculation.positions import SpecDecode


class Residues(LogitsProcessor):
    """Forbids a share of the tokens, by the last token and how many there are."""

    name = "residues"
    arguments: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"modulus": {"type": "integer", "minimum": 2, "maximum": 1000}},
        "required": ["modulus"],
    }

    def prepare(self, arguments: Any) -> Any:
        if arguments["modulus"] == 999:
            raise InvalidRequestError("999 is not prime")
        if arguments["modulus"] == 998:
            raise RuntimeError("out of luck")
        return np.array([arguments["modulus"]])

    def process(self, logits: Tensor, rows: ProcessedRows) -> None:
        modulus = torch.stack(rows.states)
        if (modulus == 997).any():
            raise RuntimeError("it fails in a step")
        last = rows.token_ids.gather(1, rows.num_tokens.long()[:, None] - 1)
        token_ids = torch.arange(logits.shape[1], device=logits.device)
        is_banned = (token_ids + last + rows.num_tokens[:, None]) % modulus == 0
        logits[rows.places] = logits[rows.places].masked_fill(is_banned, -torch.inf)


class Nothing(LogitsProcessor):
    """Does nothing, but for requests that are greedy, to which it is not even given."""

    name = "nothing"
    changes_argmax = False

    def process(self, logits: Tensor, rows: ProcessedRows) -> None:
        assert (rows.num_tokens > rows.num_prompt_tokens - 1).all()


class Raised(LogitsProcessor):
    """Adds a number to one token's logit; a graph may hold it."""

    name = "raised"
    arguments: ClassVar[dict[str, Any]] = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
    is_in_graphs = True

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        super().__init__(requests, vocab_size)
        self._table = torch.zeros((len(self.uses), 2), device=requests.token_ids.device)

    def add_request(self, request: NewRequest) -> None:
        self.uses[request.req_idx] = self.extra in request.extras
        own = self.arguments_of(request) if self.uses[request.req_idx] else [0, 0]
        self._table[request.req_idx] = torch.tensor(own, device=self._table.device)

    def apply(self, logits: Tensor, rows: Rows, rows_device: Tensor, scalars: Scalars, spec_decode: SpecDecode) -> None:
        token_id, number = self._table.index_select(0, rows_device.clamp(min=0)).unbind(1)
        logits.scatter_add_(1, token_id.long()[:, None], number.masked_fill(rows_device < 0, 0.0)[:, None])


class Nameless(LogitsProcessor):
    """Can't be used."""


class Unclear(LogitsProcessor):
    """Has a schema that would not be followed to the letter."""

    name = "unclear"
    arguments: ClassVar[dict[str, Any]] = {"type": "string", "pattern": "a+"}
