"""Products that differ from request to request: each token gets what belongs to its own row, in steps of every kind."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from test_gpu_path import MAX_SEQS, make_runner, write_model
from torch import Tensor

from aengine.ipc.messages import DraftColumns, NewRequest, SchedulerOutput, int32
from aengine.kernels.dispatch import triton_everywhere
from aengine.runner.distributed.shares import Share
from aengine.runner.model_runner import ModelRunner
from aengine.runner.weights.step_rows import TokenRows
from aengine.runner.weights.weight import Weight

pytestmark = [
    pytest.mark.usefixtures("wide_programs"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="its kernels run in Triton's interpreter"),
]
HIDDEN_SIZE = 48  # tiny.py's


class ByRow(Weight):
    def __init__(self, inner: Weight, own: AddsByRow) -> None:
        self.inner, self.own, self.bias = inner, own, inner.bias

    def multiply(self, x: Tensor) -> Tensor:
        assert len(self.own.of_tokens) == len(x)
        return self.inner.multiply(x) + self.own.table.index_select(0, self.own.of_tokens)  # the last row is padding's


class AddsByRow(TokenRows):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table  # float32 [rows, hidden_size]

    def begin(self, rows: Tensor, query_start_loc: Tensor | None = None, num_tokens: int = 0) -> None:
        super().begin(rows, query_start_loc, num_tokens)
        self.of_tokens = self.of_tokens.remainder(len(self.table))

    def wrap(self, parts: Mapping[str, Sequence[Share]], columns: Sequence[Share]) -> Callable[[Weight], Weight]:
        is_down = all(name.endswith("down_proj") for name in parts)
        return partial(ByRow, own=self) if is_down else super().wrap(parts, columns)


class AddsByAdapter(AddsByRow):
    """What is added is that of the adapter that the row's request names."""

    extras = frozenset({"adapter"})

    def __init__(self, table: Tensor) -> None:
        """``table``: float32 [adapters + 1, hidden_size], the last one's for rows without a request."""
        super().__init__(table)
        self.adapters = torch.full((MAX_SEQS,), len(table) - 1)

    def add_request(self, request: NewRequest) -> tuple[str, str] | None:
        adapter = int.from_bytes(request.extras["adapter"][0], "little")
        if adapter >= len(self.table):
            return "InvalidRequestError", f"there is no adapter {adapter}"
        self.adapters[request.req_idx] = adapter
        return None

    def remove_request(self, row: int) -> None:
        self.adapters[row] = len(self.table) - 1

    def begin(self, rows: Tensor, query_start_loc: Tensor | None = None, num_tokens: int = 0) -> None:
        TokenRows.begin(self, rows, query_start_loc, num_tokens)
        self.of_tokens = self.adapters.index_select(0, self.of_tokens.clamp(min=0))


def tokens_of(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], adapters: Sequence[int] = (), removed: Sequence[int] = ()
) -> list[list[int]]:
    """The first prompt, the second one's end beside a decode, decodes alone, then beside drafts that are wrong."""
    new = {
        i: NewRequest(i, int32(ids), len(ids), 0, int32(range(6 * i, 6 * i + 6)), temperature=0.0)
        for i, ids in enumerate(prompts)
    }
    for i, adapter in enumerate(adapters):
        new[i].extras = {"adapter": [adapter.to_bytes(1, "little")]}
    tokens: list[list[int]] = [[], []]
    batches = [{0: len(prompts[0]), 1: 4}, {0: 1, 1: len(prompts[1]) - 4}, {1: 1, 0: 1}, {0: 1, 1: 3}]
    for step_id, batch in enumerate(batches):
        out = SchedulerOutput(step_id, req_idx=int32(batch), num_scheduled_tokens=int32(batch.values()))
        out.new_requests = [new.pop(row) for row in batch if row in new]
        out.removed = int32(removed if step_id == 0 else ())
        if step_id == 3:
            out.drafts = DraftColumns(int32([0, 2]), int32([5, 6]), int32([0, 0]))
        runner.execute_model(out)
        answer = runner.sample_tokens(None).get()
        assert answer.errors == []
        token_ids = list(answer.token_ids)
        for row, count in zip(batch, answer.num_tokens(), strict=True):
            tokens[row] += token_ids[:count]
            del token_ids[: count if answer.counts is not None else 1]
    return tokens


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is computed with whatever lies in memory
@pytest.mark.parametrize("how", ["torch", "layers", "graphs"])
def test_each_token_gets_what_is_its_rows(tmp_path: Path, rng: random.Random, gen: torch.Generator, how: str) -> None:
    """As it would if what is its row's were everybody's."""
    folder = write_model(tmp_path, "qwen3")
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (40, 30)]  # each step has a shape of its own
    first = torch.randn(HIDDEN_SIZE, generator=gen) * 3
    table = torch.stack((first, -first))  # what the one makes likely, the other makes unlikely
    expected = [
        tokens_of(make_runner(folder, like_gpu=False, step_rows=AddsByRow(row.expand(3, -1))), prompts)[i]
        for i, row in enumerate(table)
    ]
    own = AddsByRow(torch.cat((table, torch.full((1, HIDDEN_SIZE), torch.nan))))
    sizes = (4, 8, 16) if how == "graphs" else ()
    runner = make_runner(
        folder, like_gpu=how != "torch", enforce_eager=how != "layers", position_sizes=sizes, step_rows=own
    )
    with contextlib.nullcontext() if how == "torch" else triton_everywhere():
        assert tokens_of(runner, prompts) == expected
    assert expected[0] != expected[1]


def test_rows_are_told_what_their_requests_ask_for(tmp_path: Path, rng: random.Random, gen: torch.Generator) -> None:
    """Also when others get them, in the step in which they are free; what is wrong concerns its own request."""
    folder = write_model(tmp_path, "qwen3")
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (40, 30)]
    first = torch.randn(HIDDEN_SIZE, generator=gen) * 3
    table = torch.stack((first, -first, torch.full_like(first, torch.nan)))
    expected = [
        tokens_of(make_runner(folder, like_gpu=False, step_rows=AddsByRow(row.expand(3, -1))), prompts)
        for row in table[:2]
    ]
    runner = make_runner(folder, like_gpu=False, step_rows=AddsByAdapter(table))
    assert tokens_of(runner, prompts, [1, 0]) == [expected[1][0], expected[0][1]]
    assert tokens_of(runner, prompts, [0, 1], removed=[0, 1]) == [expected[0][0], expected[1][1]]
    wrong = NewRequest(2, int32([1]), 1, 0, int32([13]), extras={"adapter": [b"\7"]})
    runner.execute_model(SchedulerOutput(9, new_requests=[wrong], req_idx=int32([2]), num_scheduled_tokens=int32([1])))
    (error,) = runner.sample_tokens(None).get().errors
    assert (error.type, error.message) == ("InvalidRequestError", "there is no adapter 7")
