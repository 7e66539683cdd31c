"""Drafts in a step: where they are computed, and how many of them are accepted.

    a row        ... known tokens | drafts                      token_ids[row, num_tokens + j] = draft j
                              x     a    b    c
    logits of                 x     a    b    c                 1 + k rows, one after the other
    sampled                   a'    b'   c'   d'                each with the noise of its own position

A sampled token is the request's if every draft before it is what was sampled there: a' always, b' if a = a', and so on.
So a draft changes how many tokens a step brings, and never which. What the rejected ones left in the row and in the KV
cache is past the row's end, and is overwritten by the tokens that come to be there.

Drafts that are certain, as nothing else can be sampled, are the row's tokens as soon as they are written: the request
has one row of logits, after the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.commit_drafts import following_drafts
from ...kernels.penalties import PenaltyInputs, count_sampled
from ..request_state import RequestState
from ..transfer import to_device

Rows = npt.NDArray[np.int64]


class SpecDecode:
    """The rows of logits of a step without drafts: each request has one, and gets what is sampled."""

    def count_before(self, num_tokens: Tensor) -> None:
        """Add to ``num_tokens``, int32 [n], how many of its request's drafts are before each row of logits."""

    def counted(self, inputs: PenaltyInputs) -> PenaltyInputs:
        """Return the inputs for the rows of logits, whose counts have the drafts before each of them."""
        return inputs

    def count_sampled(self, sampled: Tensor, inputs: PenaltyInputs) -> None:
        """Add those of ``sampled`` (int64 [n]) that the requests get to their counts."""
        count_sampled(sampled, inputs)

    def commit(self, sampled: Tensor, rows: Tensor, requests: RequestState) -> Mapping[str, Tensor]:
        """Append to ``rows`` (int64 [n], the row of each row of logits) the tokens that they get. Returns what the host
        must know beside these, by field of `HostOutput`."""
        requests.append_sampled(rows, sampled)
        return {}


NO_SPEC_DECODE = SpecDecode()


@dataclass(slots=True)
class Positions(SpecDecode):
    """The drafts around n rows of logits, those of a request one after the other; int64 on the device."""

    draft_ids: Tensor  # [n]: the draft that follows each row of logits; -1: none
    places_device: Tensor  # [n]: number of the request's drafts before each row of logits
    starts_of: Tensor  # [n]: the first row of logits of each one's request
    most: int  # no request has more drafts

    def count_before(self, num_tokens: Tensor) -> None:
        num_tokens.add_(self.places_device)

    def counted(self, inputs: PenaltyInputs) -> PenaltyInputs:
        counts = inputs.counts.index_select(0, inputs.rows.clamp(min=0))
        drafts, is_before = self.drafts_before()
        counts.scatter_add_(1, drafts, is_before.int())
        each = torch.arange(len(inputs.rows), device=counts.device).masked_fill_(inputs.rows < 0, -1)
        return replace(inputs, rows=each, counts=counts)

    def count_sampled(self, sampled: Tensor, inputs: PenaltyInputs) -> None:
        rows, counts = inputs.rows, inputs.counts
        place = rows.clamp(min=0) * counts.shape[1] + sampled
        counts.view(-1).index_add_(0, place, (self.are_accepted(sampled) & (rows >= 0)).int())

    def drafts_before(self) -> tuple[Tensor, Tensor]:
        """Return the drafts that each row of logits comes after, int64 [n, most], and which of these there are, bool
        [n, most]."""
        place = torch.arange(self.most, device=self.draft_ids.device)
        index = self.starts_of[:, None] + place
        is_before = place < self.places_device[:, None]
        drafts = self.draft_ids[index.clamp_(max=len(self.draft_ids) - 1)]
        return drafts.masked_fill_(~is_before, 0), is_before

    def are_accepted(self, sampled: Tensor) -> Tensor:
        """Return which of ``sampled`` (int64 [n]) are tokens that the requests get: bool [n]."""
        is_miss = ((self.draft_ids >= 0) & (sampled != self.draft_ids)).long()
        misses_before = is_miss.cumsum(0) - is_miss
        return misses_before == misses_before.index_select(0, self.starts_of)


@dataclass(slots=True)
class Verification(Positions):
    """The rows of logits of s requests: n rows, those of a request one after the other. int64 on the device where
    nothing else is said."""

    places: Rows  # host [n]: number of the request's drafts before each row of logits
    owner_host: Rows  # host [n]: the request of each row of logits, as an index into ``rows_host``
    rows_host: Rows  # host [s]: row of each request that samples
    lengths_host: Rows  # host [s]: rows of logits of each request
    owner: Tensor  # [n]: `owner_host` on the device
    rows: Tensor  # [s]: `rows_host` on the device
    lengths: Tensor  # [s]: `lengths_host` on the device

    @classmethod
    def gather(cls, rows: Rows, num_drafts: Rows, requests: RequestState) -> Verification:
        """Gather the positions of a step. ``rows``, ``num_drafts``: host [s]; ``requests``: all rows, where the drafts
        are behind the tokens."""
        lengths, device = num_drafts + 1, requests.token_ids.device
        owner, places = places_in(lengths)
        starts = np.arange(len(owner)) - places
        of_logits = to_device(np.stack((rows[owner], places, starts, owner)), device)
        row, before, starts_of, owner_device = of_logits.unbind(0)
        following = following_drafts(requests.token_ids, requests.scalars.num_tokens, row, before)
        of_requests = to_device(np.stack((rows, lengths)), device)
        drafts = (following, before, starts_of, int(places.max()))
        return cls(*drafts, places, owner, rows, lengths, owner_device, *of_requests.unbind(0))

    def count_accepted(self, sampled: Tensor) -> Tensor:
        """Return how many of ``sampled`` (int64 [n]) each request gets: int64 [s], at least 1."""
        return torch.zeros_like(self.rows).index_add_(0, self.owner, self.are_accepted(sampled).long())

    def commit(self, sampled: Tensor, rows: Tensor, requests: RequestState) -> Mapping[str, Tensor]:
        """Append to each row its tokens up to the first that is not what was drafted; the host is told how many."""
        counts, scalars = self.count_accepted(sampled), requests.scalars
        end = scalars.num_tokens.index_select(0, rows)
        # What was sampled after a rejected draft is written too: it is overwritten before it is read.
        requests.token_ids.index_put_((rows, end + self.places_device), sampled.int())
        scalars.num_tokens.index_add_(0, self.rows, counts.int())
        # All drafts count as computed already.
        scalars.num_computed_tokens.index_add_(0, self.rows, (counts - self.lengths).int())
        return {"counts": counts}


def places_in(counts: Rows) -> tuple[Rows, Rows]:
    """Return for each item of several owners, of which each has ``counts`` [n] items, its owner and its place there."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
