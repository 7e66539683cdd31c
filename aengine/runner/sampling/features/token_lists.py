"""`logit_bias`: numbers added to single tokens; `min_tokens`: until then, no token that would end a completion."""

from __future__ import annotations

from array import array

import numpy as np
from torch import Tensor

from ....ipc.messages import MessageError, NewRequest, int32_of
from ....kernels.logit_bias import MOST_BIASES, WIDTH, apply_lists, pack_lists
from ...input_batch import Rows
from ...request_state import RequestState, Scalars
from ...speculation.positions import SpecDecode
from ...staged_writes import StagedArena
from .feature import SamplingFeature, check_token_ids


class TokenLists(SamplingFeature):
    extra = "logit_bias"  # two columns: token ids, int32, and the numbers, float32

    def __init__(self, requests: RequestState, vocab_size: int) -> None:
        super().__init__(requests, vocab_size)
        max_num_seqs = len(requests.in_use)
        self._arena = StagedArena({"lists": (max_num_seqs, WIDTH)}, requests.token_ids.device)
        self._lists = self._arena.part("lists")
        self._has_lists = np.zeros(max_num_seqs, dtype=bool)  # [max_num_seqs]: the table has entries for the row
        # [max_num_seqs]: tokens of the row below which its stop tokens are banned; 0: nothing is banned
        self._banned_until = np.zeros(max_num_seqs, dtype=np.int64)

    def add_request(self, request: NewRequest) -> None:
        row = request.req_idx
        bias_ids, bias_values = self._bias(request)
        stop_ids = [t for t in request.stop_token_ids if t < self._vocab_size] if request.min_tokens > 0 else []
        self.uses[row] = bool(len(bias_ids))
        self._banned_until[row] = request.num_prompt_tokens + request.min_tokens if stop_ids else 0
        has_lists = bool(stop_ids) or bool(self.uses[row])
        if has_lists or self._has_lists[row]:
            parts = pack_lists(bias_ids, bias_values, stop_ids, int(self._banned_until[row]))
            for column, values in parts:
                self._arena.stage("lists", row, column, values)
        self._has_lists[row] = has_lists

    def _bias(self, request: NewRequest) -> tuple[array[int], array[float]]:
        if self.extra not in request.extras:
            return array("i"), array("f")
        ids, bits = int32_of(request.extras[self.extra], 2)
        values = array("f", bits.tobytes())
        if len(ids) != len(values) or len(ids) > MOST_BIASES:
            raise MessageError(f"logit_bias has {len(ids)} tokens and {len(values)} numbers")
        check_token_ids(self.extra, ids, self._vocab_size)
        return ids, values

    def remove_request(self, row: int) -> None:
        super().remove_request(row)
        self._banned_until[row] = 0

    def apply_staged_writes(self) -> list[int]:
        self._arena.apply()
        return []

    def is_pending(self, rows: Rows) -> bool:
        banned_until = self._banned_until[rows]
        if not banned_until.any():
            return False
        # While drafts are not settled the number of tokens is an upper bound: the device knows.
        is_unsettled = self._requests.num_unsettled[rows] > 0
        return bool((banned_until > np.where(is_unsettled, 0, self._requests.num_tokens[rows])).any())

    def apply(self, logits: Tensor, rows: Rows, rows_device: Tensor, scalars: Scalars, spec_decode: SpecDecode) -> None:
        apply_lists(logits, rows_device, self._lists, scalars.num_tokens)
