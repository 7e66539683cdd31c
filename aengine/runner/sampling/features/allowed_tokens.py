"""`allowed_token_ids`: the only tokens that a request is given."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....ipc.messages import MessageError, NewRequest, int32_of
from ....kernels.bitmask import apply_bitmask
from ...input_batch import Rows
from ...request_state import RequestState, Scalars
from ...transfer import to_device
from .feature import SamplingFeature, check_token_ids

__all__ = ["AllowedTokens"]


class AllowedTokens(SamplingFeature):
    extra = "allowed_token_ids"  # one column: int32, at least one id
    is_in_graphs = False

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        super().__init__(requests, vocab_size)
        self._new: dict[int, npt.NDArray[np.uint8]] = {}  # bitmasks that are not on the device yet, by row
        self._bits: dict[int, Tensor] = {}  # uint8 [row_bytes], a bitmask as `apply_bitmask` has it, by row

    def add_request(self, request: NewRequest) -> None:
        row = request.req_idx
        self.uses[row] = self.extra in request.extras
        if not self.uses[row]:
            return
        (token_ids,) = int32_of(request.extras[self.extra], 1)
        if not token_ids:
            raise MessageError(f"{self.extra} is empty")
        check_token_ids(self.extra, token_ids, self._vocab_size)
        is_allowed = np.zeros(32 * ((self._vocab_size + 31) // 32), dtype=bool)
        is_allowed[token_ids] = True
        self._new[row] = np.packbits(is_allowed, bitorder="little")

    def remove_request(self, row: int) -> None:
        super().remove_request(row)
        self._new.pop(row, None)
        self._bits.pop(row, None)

    def apply_staged_writes(self) -> list[int]:
        new, self._new = self._new, {}
        try:
            self._bits |= {row: to_device(bits, self._requests.token_ids.device) for row, bits in new.items()}
        except torch.OutOfMemoryError:
            self.uses[list(new)] = False
            return list(new)
        return []

    def apply(self, logits: Tensor, rows: Rows, rows_device: Tensor, scalars: Scalars) -> None:
        places = np.flatnonzero(self.uses[rows])
        bits = torch.stack([self._bits[row] for row in rows[places].tolist()])
        apply_bitmask(logits, to_device(places, logits.device), bits)
