"""A model whose logits show every wrong slot, position and token, and what it should have said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aengine.engine.sampling_extras import extras_of
from aengine.ipc.messages import KVCacheGroup, ModelRunnerOutput, NewRequest, SchedulerOutput, int32
from aengine.params import SamplingParams
from aengine.runner.block_tables import BlockTables
from aengine.runner.input_batch import InputBatch
from aengine.runner.model_runner import ModelRunner
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.request_state import RequestState
from aengine.runner.weights.step_rows import StepRows

PRIME = 1_000_003


class FakeModel:
    """ "Hidden" is a hash of what attention sees: the (token, position) pairs in the slots up to a query's own."""

    def __init__(self, vocab_size: int, num_blocks: int, block_size: int) -> None:
        self.vocab_size, self.block_size = vocab_size, block_size
        self.kv = torch.full((num_blocks * block_size,), -7)
        self.nan_tokens: set[int] = set()
        self.has_drafts = False  # what a rejected one left behind a request's last token is its own
        self.clears_blocks = True

    def watch_rows(self, first_lens: Tensor) -> None:
        pass

    def decode_kinds(self, requests: RequestState, tables: BlockTables, step_rows: StepRows) -> StepRows:
        return step_rows

    def bind(self, batch: InputBatch) -> InputBatch:
        return batch

    def preparations(self) -> list[Any]:
        return []

    def clear_blocks(self, block_ids: Tensor) -> None:
        self.kv.view(-1, self.block_size)[block_ids] = -7

    def copy_blocks(self, pairs: Sequence[int]) -> None:
        raise AssertionError("it has no states")

    def check_tails(self, attn: InputBatch) -> None:
        """Nothing of others where a masked gather would read: own blocks only, clean past the own tokens."""
        if self.has_drafts:
            return
        for table, seq_len in zip(attn.groups()[0].block_table.tolist(), attn.inputs.seq_lens.tolist()):
            own = -(-seq_len // self.block_size)
            assert set(table[own:]) <= {table[0]}
            begin = table[own - 1] * self.block_size
            tail = self.kv[begin : begin + self.block_size][(seq_len - 1) % self.block_size + 1 :]
            assert (tail == -7).all(), "another request's KV behind the last token"

    def forward(self, input_ids: Tensor, positions: Tensor, attn: Any) -> Tensor:
        self.kv[attn.inputs.slot_mapping[0]] = pair(input_ids, positions)
        self.check_tails(attn)
        hidden = torch.empty(len(input_ids), 2, dtype=torch.int64)
        for i in range(attn.num_reqs):
            slots = torch.arange(int(attn.inputs.seq_lens[i]))
            slots = (
                attn.groups()[0].block_table[i].long()[slots // self.block_size] * self.block_size
                + slots % self.block_size
            )
            begin, end = int(attn.inputs.query_start_loc[i]), int(attn.inputs.query_start_loc[i + 1])
            seen = weighted(self.kv[slots]).cumsum(0) % PRIME
            hidden[begin:end, 0] = seen[len(seen) - (end - begin) :]
        hidden[:, 1] = input_ids
        return hidden

    def final_hidden(self, hidden: Tensor) -> Tensor:
        return hidden.clone()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = logits_of_hash(hidden[:, 0], self.vocab_size)
        for row in range(len(hidden)):
            if int(hidden[row, 1]) in self.nan_tokens:
                logits[row, 3] = torch.nan
        return logits


def pair(token_ids: Tensor, positions: Tensor) -> Tensor:
    return (token_ids * 7919 + positions * 104_729 + 1) % PRIME


def weighted(pairs: Tensor) -> Tensor:
    return pairs * (torch.arange(len(pairs)) + 3)


def logits_of_hash(hashes: Tensor, vocab_size: int) -> Tensor:
    """float32 [n, vocab_size], between -5 and 5, without ties worth speaking of."""
    return ((hashes[:, None] * (torch.arange(vocab_size) * 48_271 + 11)) % PRIME).float() / PRIME * 10 - 5


def expected_logits(token_ids: Sequence[int], vocab_size: int) -> Tensor:
    """float32 [vocab_size], what FakeModel says after these tokens."""
    ids = torch.tensor(token_ids)
    return logits_of_hash((weighted(pair(ids, torch.arange(len(ids)))).sum() % PRIME)[None], vocab_size)[0]


class ConstantModel:
    """The same logits whatever the tokens: for distributions."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.clears_blocks = False

    def watch_rows(self, first_lens: Tensor) -> None:
        pass

    def decode_kinds(self, requests: RequestState, tables: BlockTables, step_rows: StepRows) -> StepRows:
        return step_rows

    def bind(self, batch: InputBatch) -> None:
        return None

    def preparations(self) -> list[Any]:
        return []

    def clear_blocks(self, block_ids: Tensor) -> None:
        pass

    def copy_blocks(self, pairs: Sequence[int]) -> None:
        raise AssertionError("it has no states")

    def forward(self, input_ids: Tensor, positions: Tensor, attn: Any) -> Tensor:
        return input_ids[:, None]

    def final_hidden(self, hidden: Tensor) -> Tensor:
        return hidden.clone()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.logits.expand(len(hidden), -1).clone()


POOLED = {"pooling": [b"", bytes(4)]}
"""The extras of a request that gets a vector."""


def make_runner(model: FakeModel | ConstantModel, vocab_size: int, **limits: Any) -> ModelRunner:
    settings = {"max_num_seqs": 8, "max_model_len": 64, "num_blocks": 40, "block_size": 4, **limits}
    groups = [KVCacheGroup("full", settings.pop("block_size"))]
    return ModelRunner(model, model, vocab_size=vocab_size, platform=CpuPlatform(), kv_groups=groups, **settings)


def request(row: int, token_ids: Sequence[int], blocks: Sequence[int], **fields: Any) -> NewRequest:
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = int32(fields["stop_token_ids"])
    asked = {name: fields.pop(name) for name in ("logit_bias", "allowed_token_ids") if name in fields}
    of_sampling = extras_of(SamplingParams(**asked), fields.pop("bad_words", ()))  # these as sequences of tokens
    fields["extras"] = fields.get("extras", {}) | of_sampling
    values = {"num_prompt_tokens": len(token_ids), "num_computed_tokens": 0, "temperature": 0.0, **fields}
    return NewRequest(req_idx=row, token_ids=int32(token_ids), block_ids=int32(blocks), **values)


def step(
    runner: ModelRunner,
    batch: dict[int, int] | None = None,
    *,
    new: Sequence[NewRequest] = (),
    removed: Sequence[int] = (),
    more_blocks: Sequence[tuple[int, int]] = (),
    step_id: int = 0,
) -> ModelRunnerOutput:
    """Both phases; batch: row to number of tokens."""
    batch = batch or {}
    out = SchedulerOutput(
        step_id,
        removed=int32(removed),
        new_requests=list(new),
        block_rows=int32(row for row, _ in more_blocks),
        block_ids=int32(block for _, block in more_blocks),
        req_idx=int32(batch.keys()),
        num_scheduled_tokens=int32(batch.values()),
    )
    runner.execute_model(out)
    return runner.sample_tokens(None).get()
