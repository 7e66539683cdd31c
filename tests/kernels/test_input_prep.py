"""Inputs of a step against loops over tokens."""

from __future__ import annotations

import random

import torch

from aengine.kernels.input_prep import append_tokens, gather_block_table, prepare_inputs


def test_against_loops(rng: random.Random, gen: torch.Generator) -> None:
    for _ in range(30):
        rows, width, block_size = rng.randint(1, 12), rng.randint(8, 60), rng.choice([1, 4, 16])
        token_ids = torch.randint(0, 1000, (rows, width), generator=gen, dtype=torch.int32)
        blocks = torch.randint(0, 500, (rows, -(-width // block_size)), generator=gen, dtype=torch.int32)
        computed = torch.tensor([rng.randint(0, width - 4) for _ in range(rows)], dtype=torch.int32)
        batch = rng.sample(range(rows), rng.randint(1, rows))
        decode = rng.random() < 0.3
        scheduled = [1 if decode else rng.randint(1, width - int(computed[r])) for r in batch]
        got = prepare_inputs(
            token_ids, computed, blocks, torch.tensor(batch), torch.tensor(scheduled), block_size, sum(scheduled)
        )
        ids, positions, slots, starts = [], [], [], [0]
        for row, count in zip(batch, scheduled):
            for position in range(int(computed[row]), int(computed[row]) + count):
                ids.append(int(token_ids[row, position]))
                positions.append(position)
                slots.append(int(blocks[row, position // block_size]) * block_size + position % block_size)
            starts.append(len(ids))
        assert got.input_ids.tolist() == ids
        assert got.positions.tolist() == positions
        assert got.slot_mapping.tolist() == slots
        assert got.query_start_loc.tolist() == starts
        assert got.seq_lens.tolist() == [int(computed[r]) + c for r, c in zip(batch, scheduled)]
        assert got.query_start_loc.dtype == got.seq_lens.dtype == torch.int32


def test_block_table_shows_own_blocks_only(gen: torch.Generator) -> None:
    table = torch.randint(0, 99, (5, 6), generator=gen, dtype=torch.int32)
    rows, seq_lens = torch.tensor([3, 0, 4]), torch.tensor([8, 1, 13], dtype=torch.int32)
    t = table.tolist()
    assert gather_block_table(table, rows, seq_lens, 4, 4).tolist() == [
        [t[3][0], t[3][1], t[3][0], t[3][0]],
        [t[0][0]] * 4,
        t[4][:4],
    ]


def test_append_tokens(rng: random.Random) -> None:
    token_ids = torch.zeros(6, 9, dtype=torch.int32)
    scalars = torch.zeros(6, 16, dtype=torch.int32)
    num_tokens = scalars[:, 10]  # a strided column, as the runner's
    num_tokens[:] = torch.tensor([3, 0, 8, 2, 5, 1])
    append_tokens(token_ids, num_tokens, torch.tensor([4, 2, 1]), torch.tensor([70, 80, 90]))
    assert num_tokens.tolist() == [3, 1, 9, 2, 6, 1]
    assert token_ids.nonzero().tolist() == [[1, 0], [2, 8], [4, 5]]
    assert (token_ids[4, 5], token_ids[2, 8], token_ids[1, 0]) == (70, 80, 90)
    assert scalars.sum() == num_tokens.sum()
