"""Rows that are used again, and what the host keeps of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runner_fakes import ConstantModel, make_runner, request, step

from aengine.ipc.messages import KVCacheGroup, NewRequest, int32
from aengine.runner.block_tables import BlockTables, table_shape
from aengine.runner.request_state import SCALAR_WORDS, RequestState
from aengine.runner.staged_writes import StagedArena

CPU = torch.device("cpu")


def test_a_row_is_settled_as_often_as_it_is_named() -> None:
    """Two answers with rejected drafts of one request may be told with one step."""
    requests = RequestState(StagedArena({"scalars": (4, SCALAR_WORDS), "token_ids": (4, 30)}, CPU))
    requests.in_use[2:] = True
    requests.num_tokens[:] = requests.num_computed_tokens[:] = 20
    requests.num_unsettled[:] = 5
    requests.settle(np.array([2, 3, 2]), np.array([1, 4, 2]))
    assert requests.num_tokens.tolist() == requests.num_computed_tokens.tolist() == [20, 20, 17, 16]
    assert requests.num_unsettled.tolist() == [5, 5, 3, 4]


@pytest.mark.parametrize(
    ("spans", "block_ids", "num_computed", "fresh"),
    [
        ((), [7, 8, 9], 0, [7, 8, 9]),
        ((), [7, 8, 9], 4, [8, 9]),
        ((), [7, 8, 9], 5, [9]),  # the second holds a token that was computed before
        ((), [7, 8, 9], 12, []),
        ((1, 3), [7, 8, 9], 8, [8, 9]),  # the first block has left the window
        ((3, 1), [9], 4, [9]),
    ],
)
def test_blocks_that_hold_nothing_of_the_request_yet(
    spans: tuple[int, ...], block_ids: list[int], num_computed: int, fresh: list[int]
) -> None:
    groups = [KVCacheGroup("full", 4)]
    arena = StagedArena({"block_table": table_shape(groups, 4, 40)}, CPU)
    tables = BlockTables(arena, num_blocks=20, groups=groups)
    new = NewRequest(1, int32([1] * 13), 13, num_computed, int32(block_ids), block_spans=int32(spans))
    tables.replace(new)
    assert tables.take_fresh().tolist() == fresh and tables.take_fresh().tolist() == []


def test_a_row_has_nothing_of_the_request_before() -> None:
    """Its biases and banned tokens, while another row has some, so that the step applies them."""
    runner = make_runner(ConstantModel(torch.arange(20.0)), 20)
    others = request(1, [1], [4, 5, 6, 7], logit_bias={3: 100.0})
    first = request(0, [1], [0, 1], logit_bias={5: 100.0})
    assert list(step(runner, {0: 1, 1: 1}, new=[first, others]).token_ids) == [5, 3]
    plain = request(0, [1], [0, 1])
    assert list(step(runner, {1: 1, 0: 1}, removed=[0], new=[plain]).token_ids) == [3, 19]
    banning = request(0, [1], [0, 1], min_tokens=9, stop_token_ids=[19])
    assert list(step(runner, {1: 1, 0: 1}, removed=[0], new=[banning]).token_ids) == [3, 18]
    assert list(step(runner, {1: 1, 0: 1}, removed=[0], new=[request(0, [1], [0, 1])]).token_ids) == [3, 19]
