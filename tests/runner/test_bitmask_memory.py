"""Which row of logits each of a frame's bitmasks belongs to, and the memory in which a graph reads them."""

from __future__ import annotations

import random
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aengine.errors import InternalError, InvalidRequestError
from aengine.ipc.messages import GrammarOutput, int32
from aengine.runner.sampling.bitmask_memory import HostBitmasks, MaskMemory
from aengine.runner.sampling.features.feature import check_token_ids

ROW_BYTES = 4


def grammar_of(positions: list[int]) -> GrammarOutput:
    """Bitmasks whose bytes are their number."""
    return GrammarOutput(1, int32(positions), b"".join(bytes([i] * ROW_BYTES) for i in range(len(positions))))


def test_each_bitmask_finds_its_row_of_logits(rng: random.Random) -> None:
    """Positions have one row or several, some of them no bitmask; a bitmask's position may have no row at all."""
    host, num_absent = HostBitmasks(ROW_BYTES), 0
    for _ in range(100):
        order = rng.sample(range(5), rng.randint(1, 5))
        rows_of = {position: rng.randint(1, 4) for position in order}
        batch_idx = np.array([position for position in order for _ in range(rows_of[position])])
        masked = [position for position in rng.sample(range(6), rng.randint(1, 6)) if rng.random() < 0.8] or [0]
        positions = [position for position in masked for _ in range(rows_of.get(position, 1))]
        begins = {position: order.index(position) for position in order}
        first = {p: sum(rows_of[one] for one in order[: begins[p]]) for p in order}
        wanted = [
            (first[position] + k, number)
            for position, numbers in groupby(range(len(positions)), key=positions.__getitem__)
            for k, number in enumerate(numbers)
            if position in first
        ]
        rows, bits = host.of_batch(grammar_of(positions), batch_idx)
        assert bits is not None and [*zip(rows.tolist(), bits[:, 0].tolist(), strict=True)] == wanted
        num_absent += len(positions) - len(wanted)
    assert num_absent
    assert host.of_batch(None, np.arange(3))[1] is None and host.of_batch(grammar_of([]), np.arange(3))[1] is None
    with pytest.raises(InternalError, match="has 3 bytes, but 1 rows of 4"):
        host.of_batch(GrammarOutput(1, int32([0]), bytes(3)), np.arange(1))


def new_memory(count: int, *, shared: int = 0) -> tuple[MaskMemory, Any]:
    """``shared``: bytes that the host shares with the device."""
    host, region = HostBitmasks(ROW_BYTES), memoryview(bytearray(shared))
    host.register(region, SimpleNamespace(is_accelerator=True, share=lambda tensor: True))  # type: ignore[arg-type]
    return MaskMemory(count, host, torch.device("cpu")), region


@pytest.mark.parametrize("shared", [0, 3 * ROW_BYTES - 1])
def test_bitmasks_are_copied_where_no_memory_is_shared(shared: int) -> None:
    memory, _ = new_memory(3, shared=shared)
    assert memory.rows.tolist() == [-1, -1, -1] and memory.bits is memory.bits and not memory.bits.any()
    bits = np.full((2, ROW_BYTES), 7, dtype=np.uint8)
    memory.set(np.array([2, 0]), bits, 3)
    assert memory.rows.tolist() == [2, 0, -1]
    assert memory.bits.tolist() == [[7] * ROW_BYTES] * 2 + [[0] * ROW_BYTES]
    memory.set(np.array([1]), None, 2)
    assert memory.rows.tolist() == [1, -1, -1] and memory.bits[0].tolist() == [7] * ROW_BYTES


def test_bitmasks_are_read_where_the_host_writes_them() -> None:
    memory, region = new_memory(3, shared=3 * ROW_BYTES)
    region[:ROW_BYTES] = bytes([9] * ROW_BYTES)
    assert memory.bits[0].tolist() == [9] * ROW_BYTES and memory.bits.shape == (3, ROW_BYTES)
    memory.set(np.array([1]), np.frombuffer(region, dtype=np.uint8).reshape(3, ROW_BYTES)[:1], 1)
    assert memory.rows.tolist() == [1, -1, -1] and bytes(region[:ROW_BYTES]) == bytes([9] * ROW_BYTES)


def test_ids_that_the_model_does_not_have() -> None:
    for ids in ([], [0], [0, 22], [22]):
        check_token_ids("bad_words", ids, 23)
    for wrong in (-1, 23):
        with pytest.raises(
            InvalidRequestError, match=f"bad_words names token id {wrong}, but this model's are 0 to 22"
        ):
            check_token_ids("bad_words", [0, 22, wrong], 23)
