"""`OnePassProposer`: a head that guesses all tokens of a row in one pass, by masks in place of those before each.

    row        x  x  x  x  x  |  d1 d2 d3
    P-EAGLE         └late──┘     m  m           of the last late token d1, of the masks d2, d3
    DFlash          └late┘ x     m  m  m        of each mask the token there; all of x m m m see each other

A row has as many masks as it is to have guesses: behind these it may have no memory. So the guesses of `DFlash` depend
on how many are asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..models.heads.draft_head import OnePassHead
from .model_proposer import ModelProposer, ModelProposerSource, Tokens, write_guesses
from .proposer import Proposer, RunnerParts


class OnePassSource(ModelProposerSource):
    """A loaded `OnePassHead`."""

    head: OnePassHead

    @property
    def most_places(self) -> int:
        return super().most_places + self.num_tokens + (1 if self.head.predicts_itself else -1)

    def make(self, parts: RunnerParts) -> Proposer:
        return OnePassProposer(self, parts)


class OnePassProposer(ModelProposer):
    """See the module."""

    def _guess(self, late: Tokens, ends: Tensor, columns: Tensor, most: int) -> None:
        """See `ModelProposer`."""
        rows, counts, _, _, left_out = columns
        own, head, ids = rows.clamp(min=0), self._head, self._requests.token_ids
        more = 1 if head.predicts_itself else -1  # places that a row has beside one for each guess
        steps = torch.arange(most + more, device=rows.device)
        is_wanted = (rows >= 0)[:, None] & (counts > 0)[:, None] & (steps < (counts + more)[:, None])
        places = (ends[:, None] + steps).clamp_(min=0)
        masks = torch.full_like(places, head.mask_token_id)
        if head.predicts_itself:
            masks[:, 0] = ids[own, ends.clamp(min=0)].long()
        seen = (ends + counts + more)[:, None].expand_as(places) if head.sees_masks else places + 1
        assert late.received is not None
        width = len(late.rows) // len(rows)
        pairs = Tokens(*late[:5], torch.zeros_like(late.rows, dtype=torch.bool))
        block = Tokens(
            torch.where(is_wanted, rows[:, None], -1),
            places,
            masks,
            late.received.new_zeros((*places.shape, late.received.shape[1])),
            seen,
            torch.ones_like(is_wanted),
        )
        columns_of_both: list[Any] = [
            torch.cat((a.unflatten(0, (-1, width)), b), 1).flatten(0, 1)
            for a, b in zip(pairs, block, strict=True)
            if a is not None and b is not None
        ]
        hidden = self._compute(Tokens(*columns_of_both)).unflatten(0, (len(rows), -1))[:, -most:]
        guesses = self._best(hidden.flatten(0, 1)).unflatten(0, (-1, most))
        for number in range(most):
            is_asked = (rows >= 0) & (counts > number)
            write_guesses(ids, own, ends + left_out + number, guesses[:, number], is_asked)
