"""A batch of whole texts for an encoder: their tokens one after the other, without padding.

Texts of like length are neighbours. Attention takes them in groups: all of a group in one call.

    texts        of 9, 9, 9, 5, 4 tokens
    tokens       [ 9 | 9 | 9 | 5 | 4 ]
    groups       [     0     |   1   ]    one of equal lengths; one of several, which attention pads by itself
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..transfer import to_device


@dataclass(frozen=True, slots=True)
class PaddedTexts:
    """Texts of similar length, padded to the longest: attention to all of them is one call."""

    begin: int  # place of their first token in the batch
    end: int  # one past their last token
    num_texts: int
    length: int  # tokens of the longest text
    places: Tensor | None  # int64 [end - begin]: place of each token in [num_texts, length]; None: nothing is padded
    mask: Tensor | None  # bool [num_texts, 1, 1, length]: what is no padding; None: nothing is padded


class EncoderBatch:
    """``texts``: token ids of each, the longest first; ``num_first_tokens``: as `AskedPooling`'s.

    ``tolerance``: the share of the longest that the shortest of a group must have. ``is_compiled``: a CPU's compiled
    kernels attend to all texts in one call.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        num_first_tokens: Sequence[int],
        device: torch.device,
        tolerance: float = 1.0,
        *,
        is_compiled: bool = False,
    ) -> None:
        lengths = np.array([len(text) for text in texts], dtype=np.int64)
        self.lengths = lengths  # host [num_texts]
        ends = lengths.cumsum()
        begins = ends - lengths
        positions = np.arange(ends[-1]) - np.repeat(begins, lengths)
        ids = np.concatenate([np.array(text, dtype=np.int64) for text in texts])
        columns = [ids, positions]
        boundaries = np.array(num_first_tokens, dtype=np.int64)
        has_types = bool(boundaries.any())
        if has_types:
            boundaries = np.where(boundaries, boundaries, lengths)
            columns.append((positions >= np.repeat(boundaries, lengths)).astype(np.int64))
        sent = to_device(np.stack(columns), device)
        self.input_ids, self.positions = sent[0], sent[1]  # int64 [num_tokens]
        self.type_ids = sent[2] if has_types else None  # int64 [num_tokens]; None: all are 0
        self._ends = to_device(np.stack((begins, ends - 1, lengths)), device)
        self.device = device
        self.groups = list(_groups(lengths.tolist(), device, tolerance))
        self.is_compiled = is_compiled
        if is_compiled:
            self.texts = torch.from_numpy(np.repeat(np.arange(len(texts)), lengths))  # int64 [num_tokens]
            self.begins = self._ends[0].int()[:, None]  # int32 [num_texts, 1]
            self.token_counts = self._ends[2]  # int64 [num_texts]

    def first(self, hidden: Tensor) -> Tensor:
        """Return [num_texts, hidden_size]: of each text's first token."""
        return hidden.index_select(0, self._ends[0])

    def last(self, hidden: Tensor) -> Tensor:
        """Return [num_texts, hidden_size]: of each text's last token."""
        return hidden.index_select(0, self._ends[1])

    def mean(self, hidden: Tensor) -> Tensor:
        """Return float32 [num_texts, hidden_size]: over each text's tokens."""
        if self.device.type == "cpu":
            return torch.segment_reduce(hidden.float(), "mean", lengths=self._ends[2])
        owner = torch.repeat_interleave(self._ends[2], output_size=len(hidden))
        sums = hidden.new_zeros((len(self.lengths), hidden.shape[1]), dtype=torch.float32)
        return sums.index_add_(0, owner, hidden.float()) / self._ends[2][:, None]

    def biases(self, make: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return ``make(distances)`` for each group: int64 [length, length], of the key behind the query."""
        found = []
        for group in self.groups:
            places = torch.arange(group.length, device=self.device)
            found.append(make(places[None, :] - places[:, None]))
        return found


def _groups(lengths: list[int], device: torch.device, tolerance: float) -> list[PaddedTexts]:
    groups, first = [], 0
    starts = [0, *accumulate(lengths)]
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or lengths[i] < tolerance * lengths[first]:
            groups.append(_group(starts[first], starts[i], lengths[first:i], device))
            first = i
    return groups


def _group(begin: int, end: int, lengths: list[int], device: torch.device) -> PaddedTexts:
    longest = lengths[0]
    if lengths[-1] == longest:
        return PaddedTexts(begin, end, len(lengths), longest, None, None)
    mask = np.arange(longest) < np.array(lengths)[:, None]
    places = to_device(np.flatnonzero(mask), device)
    return PaddedTexts(begin, end, len(lengths), longest, places, to_device(mask[:, None, None], device))
