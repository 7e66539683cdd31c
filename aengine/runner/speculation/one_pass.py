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
        own, ids = rows.clamp(min=0), self._requests.token_ids
        both = _joined(late, self._block(ends, columns, most), len(rows))
        hidden = self._compute(both).unflatten(0, (len(rows), -1))[:, -most:]
        guesses = self._best(hidden.flatten(0, 1)).unflatten(0, (-1, most))
        for number in range(most):
            is_asked = (rows >= 0) & (counts > number)
            write_guesses(ids, own, ends + left_out + number, guesses[:, number], is_asked)

    def _block(self, ends: Tensor, columns: Tensor, most: int) -> Tokens:
        """Return the places behind the pairs of each row, from ``ends`` on: all of a row, then all of the next one."""
        rows, counts = columns[:2]
        head, own = self._head, rows.clamp(min=0)
        more = 1 if head.predicts_itself else -1  # places that a row has beside one for each guess
        num_places = torch.where(counts > 0, counts + more, 0)[:, None]
        steps = torch.arange(most + more, device=rows.device)
        places = (ends[:, None] + steps).clamp_(min=0)
        masks = torch.full_like(places, head.mask_token_id)
        if head.predicts_itself:
            masks[:, 0] = self._requests.token_ids[own, ends.clamp(min=0)].long()
        owners = torch.where((rows >= 0)[:, None] & (steps < num_places), rows[:, None], -1)
        seen = (ends[:, None] + num_places).expand_as(places) if head.sees_masks else places + 1
        nothing = self._states.new_zeros((places.numel(), self._states.shape[2]))
        owned, flat = owners.flatten(), places.flatten()
        return Tokens(owned, flat, masks.flatten(), nothing, seen.flatten(), torch.ones_like(owned, dtype=torch.bool))


def _joined(pairs: Tokens, block: Tokens, num_rows: int) -> Tokens:
    """Return the pairs of each of ``num_rows`` rows, and behind them the places of its block."""
    columns: list[Any] = []
    for a, b in zip(pairs._replace(are_drafted=torch.zeros_like(pairs.rows, dtype=torch.bool)), block, strict=True):
        assert a is not None and b is not None
        columns.append(torch.cat((a.unflatten(0, (num_rows, -1)), b.unflatten(0, (num_rows, -1))), 1).flatten(0, 1))
    return Tokens(*columns)
