"""`allowed_token_ids`: the only tokens that a request is given."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....ipc.messages import MessageError, int32_of
from ....kernels.bitmask import apply_bitmask
from ...input_batch import Rows
from ...request_state import Scalars
from ...speculation.positions import SpecDecode
from ...transfer import to_device
from .feature import OpByOpFeature, check_token_ids


class AllowedTokens(OpByOpFeature):
    extra = "allowed_token_ids"  # one column: int32, at least one id

    def read(self, columns: list[bytes]) -> npt.NDArray[np.uint8]:
        """Return the bitmask of the ids, uint8 [row_bytes], as `apply_bitmask` has it."""
        (token_ids,) = int32_of(columns, 1)
        if not token_ids:
            raise MessageError(f"{self.extra} is empty")
        check_token_ids(self.extra, token_ids, self._vocab_size)
        is_allowed = np.zeros(32 * ((self._vocab_size + 31) // 32), dtype=bool)
        is_allowed[token_ids] = True
        return np.packbits(is_allowed, bitorder="little")

    def apply(self, logits: Tensor, rows: Rows, rows_device: Tensor, scalars: Scalars, spec_decode: SpecDecode) -> None:
        places = np.flatnonzero(self.uses[rows])
        bits = torch.stack([self._of_row[row] for row in rows[places].tolist()])
        apply_bitmask(logits, to_device(places, logits.device), bits)
