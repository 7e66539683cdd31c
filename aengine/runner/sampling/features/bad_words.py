"""`bad_words`: sequences of tokens of which a completion has none.

A sequence's last token is banned where the tokens before it are those that the completion ends with. The completion is
read in its row, where the drafts before a row of logits are, too; a prompt's tokens don't count.

    the row          ... prompt | completion .... a  b |
    a sequence                           -1  -1   a  b | c      aligned on the right; -1: any token, or none
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....ipc.messages import MessageError, int32_of
from ....limits.bounds import MAX_BAD_WORD_TOKENS
from ...input_batch import Rows
from ...request_state import Scalars
from ...speculation.positions import SpecDecode
from ...transfer import to_device
from .feature import OpByOpFeature, check_token_ids


class BadWords(OpByOpFeature):
    extra = "bad_words"  # two columns, int32: how many tokens each sequence has, and these, one after the other

    def read(self, columns: list[bytes]) -> npt.NDArray[np.int64]:
        """Return the sequences, int64 [k, MAX_BAD_WORD_TOKENS], as in the picture."""
        lengths, token_ids = int32_of(columns, 2)
        is_possible = lengths and 0 < min(lengths) <= max(lengths) <= MAX_BAD_WORD_TOKENS
        if not is_possible or sum(lengths) != len(token_ids):
            raise MessageError(f"{self.extra} has {len(token_ids)} tokens, which are not {len(lengths)} sequences")
        check_token_ids(self.extra, token_ids, self._vocab_size)
        sequences = np.full((len(lengths), MAX_BAD_WORD_TOKENS), -1, dtype=np.int64)
        sequences[MAX_BAD_WORD_TOKENS - 1 - np.arange(MAX_BAD_WORD_TOKENS) < np.array(lengths)[:, None]] = token_ids
        return sequences

    def apply(self, logits: Tensor, rows: Rows, rows_device: Tensor, scalars: Scalars, spec_decode: SpecDecode) -> None:
        places = np.flatnonzero(self.uses[rows])
        of_places = [self._of_row[row] for row in rows[places].tolist()]
        sequences = torch.cat(of_places)
        # The m sequences of all these rows of logits at once, each with the row of logits that it is for.
        place = to_device(np.repeat(places, [len(one) for one in of_places]), logits.device)
        before = torch.arange(1 - MAX_BAD_WORD_TOKENS, 0, device=logits.device)
        position = scalars.num_tokens.index_select(0, place)[:, None] + before  # [m, MAX_BAD_WORD_TOKENS - 1]
        is_own = position >= scalars.num_prompt_tokens.index_select(0, place)[:, None]
        row = rows_device.index_select(0, place)[:, None]
        is_there = is_own & (self._requests.token_ids[row, position.clamp_min(0)] == sequences[:, :-1])
        is_banned = (is_there | (sequences[:, :-1] < 0)).all(1)
        addend = torch.where(is_banned, -torch.inf, 0.0)
        logits.index_put_((place, sequences[:, -1]), addend, accumulate=True)
