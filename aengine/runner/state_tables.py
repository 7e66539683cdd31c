"""The tables of a step's sequences, for ops that carry states from token to token: made on the host, in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.sequences import ChunkTables, Cut, Sequences
from .transfer import to_device


class TableSizes(NamedTuple):
    """What the tables have room for."""

    tokens: int
    sequences: int
    singles: int  # leading sequences of one token
    chunks: int
    cuts: int

    @property
    def columns(self) -> tuple[int, ...]:
        """Words of each table: of the fields of `Sequences` from ``starts`` on."""
        tokens, m, singles, chunks, cuts = self
        return (m + 1, tokens, m, m, singles, 3 * chunks, m + 1, 2 * cuts, cuts)

    def holds(self, other: TableSizes) -> bool:
        return all(own >= wanted for own, wanted in zip(self, other, strict=True))


class StepTables(NamedTuple):
    """Tables of a step, before they are laid out."""

    lens: npt.NDArray[np.int64]
    num_single: int
    pages: npt.NDArray[np.int64]
    begins: npt.NDArray[np.bool_]
    cuts: Sequence[Cut]
    chunks: ChunkTables

    @property
    def sizes(self) -> TableSizes:
        return TableSizes(
            int(self.lens.sum()), len(self.lens), self.num_single, len(self.chunks.chunks), len(self.cuts)
        )

    def laid_out(self, sizes: TableSizes, spare_page: int) -> npt.NDArray[np.int64]:
        """Return the words of all tables, int64 [sum of sizes.columns]. Sequences that pad have no tokens; they, and
        tokens that pad, keep what they keep in the spare page."""
        m, end = len(self.lens), int(self.lens.sum())
        words = np.zeros(sum(sizes.columns), dtype=np.int64)
        starts, owners, pages, begins, singles, chunks, chunk_starts, cut_places, cut_pages = np.split(
            words, np.cumsum(sizes.columns)[:-1]
        )
        starts[1 : m + 1], starts[m + 1 :] = self.lens.cumsum(), end
        owners[:end], owners[end:] = np.repeat(np.arange(m), self.lens), sizes.sequences - 1
        pages[:m], pages[m:] = self.pages, spare_page
        begins[:m], begins[m:] = self.begins, 1
        singles[: self.num_single], singles[self.num_single :] = self.pages[: self.num_single], -1
        own = self.chunks
        chunks[: own.chunks.size] = own.chunks.ravel()
        chunk_starts[: m + 1], chunk_starts[m + 1 :] = own.chunk_starts, len(own.chunks)
        cut_places.reshape(2, -1)[:, : len(self.cuts)] = own.cut_places
        cut_pages[:] = -1
        cut_pages[: len(self.cuts)] = [cut.page for cut in self.cuts]
        return words


def tables_of(
    lens: Sequence[int] | npt.NDArray[np.int64],
    num_single: int,
    pages: Sequence[int] | npt.NDArray[np.int64],
    begins: Sequence[bool] | npt.NDArray[np.bool_],
    cuts: Sequence[Cut],
) -> StepTables:
    own = np.asarray(lens, dtype=np.int64)
    chunks = ChunkTables.of(own.tolist(), num_single, cuts)
    return StepTables(
        own, num_single, np.asarray(pages, dtype=np.int64), np.asarray(begins, dtype=np.bool_), cuts, chunks
    )


def views_of(words: Tensor, sizes: TableSizes, lens: Sequence[int] = (), cuts: Sequence[Cut] = ()) -> Sequences:
    """Return the tables that `laid_out` made; ``lens``, ``cuts``: what ops read that run on the host."""
    starts, owners, pages, begins, singles, chunks, chunk_starts, cut_places, cut_pages = words.split(
        list(sizes.columns)
    )
    return Sequences(
        tuple(lens),
        tuple(cuts),
        starts,
        owners,
        pages,
        begins,
        singles,
        chunks.view(-1, 3),
        chunk_starts,
        cut_places.view(2, -1),
        cut_pages,
    )


def sequences_of(
    lens: Sequence[int],
    num_single: int,
    pages: Sequence[int] | npt.NDArray[np.int64],
    begins: Sequence[bool],
    cuts: Sequence[Cut],
    device: torch.device,
) -> Sequences:
    """Return the tables of a step on the device, as large as they need be. ``num_single``: leading sequences of one
    token; the others are computed by chunks."""
    tables = tables_of(lens, num_single, pages, begins, cuts)
    words = to_device(tables.laid_out(tables.sizes, -1), device)
    return views_of(words, tables.sizes, tables.lens.tolist(), cuts)
