"""Inputs of a step against loops over tokens."""

from __future__ import annotations

import random

import torch

from aengine.kernels.dispatch import torch_reference as plain
from aengine.kernels.input_prep import (
    ScalarColumns,
    advance_rows,
    append_tokens,
    commit_decode,
    gather_block_table,
    prepare_decode,
    prepare_inputs,
    state_pages,
)

COLUMNS = ScalarColumns(seed=0, temperature=2, num_tokens=10, num_computed_tokens=11)


def test_against_loops(rng: random.Random, gen: torch.Generator) -> None:
    for _ in range(30):
        rows, width, block_size = rng.randint(1, 12), rng.randint(8, 60), rng.choice([1, 4, 16])
        token_ids = torch.randint(0, 1000, (rows, width), generator=gen, dtype=torch.int32)
        sizes = [block_size, *rng.choice([[], [2 * block_size], [block_size, 8 * block_size]])]  # of each KV group
        shape = (len(sizes), rows, -(-width // block_size))
        blocks = torch.randint(0, 500, shape, generator=gen, dtype=torch.int32)
        computed = torch.tensor([rng.randint(0, width - 4) for _ in range(rows)], dtype=torch.int32)
        batch = rng.sample(range(rows), rng.randint(1, rows))
        decode = rng.random() < 0.3
        scheduled = [1 if decode else rng.randint(1, width - int(computed[r])) for r in batch]
        got = prepare_inputs(
            token_ids,
            computed,
            blocks,
            torch.tensor(batch),
            torch.tensor(scheduled),
            torch.tensor(sizes, dtype=torch.int32),
            sum(scheduled),
        )
        ids, positions, starts = [], [], [0]
        slots: list[list[int]] = [[] for _ in sizes]
        for row, count in zip(batch, scheduled):
            for position in range(int(computed[row]), int(computed[row]) + count):
                ids.append(int(token_ids[row, position]))
                positions.append(position)
                for group, size in enumerate(sizes):
                    slots[group].append(int(blocks[group, row, position // size]) * size + position % size)
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
    first = torch.tensor([1, 0, 2])  # of a window
    assert gather_block_table(table, rows, seq_lens, 4, 3, first).tolist() == [
        [t[3][1]] * 3,
        [t[0][0]] * 3,
        [t[4][2], t[4][3], t[4][2]],
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


def persistent_rows(gen: torch.Generator, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids = torch.randint(0, 1000, (rows, width), generator=gen, dtype=torch.int32)
    scalars = torch.zeros(rows, 16, dtype=torch.int32)
    scalars[:, :2] = torch.randint(-(2**31), 2**31 - 1, (rows, 2), generator=gen).int()
    scalars[:, 2] = torch.rand(rows, generator=gen).view(torch.int32)
    scalars[:, 11] = torch.randint(0, width - 1, (rows,), generator=gen).int()
    scalars[:, 10] = scalars[:, 11] + 1
    return token_ids, scalars


def test_triton_prepare_inputs(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    for _ in range(6):
        rows, width, block_size = rng.randint(1, 9), rng.randint(8, 300), rng.choice([1, 4, 16])
        token_ids = torch.randint(0, 1000, (rows, width), generator=gen, dtype=torch.int32)
        sizes = [block_size, *rng.choice([[], [2 * block_size], [block_size, 8 * block_size]])]  # of each KV group
        shape = (len(sizes), rows, -(-width // block_size))
        blocks = torch.randint(0, 500, shape, generator=gen, dtype=torch.int32)
        scalars = torch.zeros(rows, 16, dtype=torch.int32)
        scalars[:, 11] = torch.tensor([rng.randint(0, width - 4) for _ in range(rows)], dtype=torch.int32)
        batch = rng.sample(range(rows), rng.randint(1, rows))
        scheduled = [rng.randint(1, width - int(scalars[r, 11])) for r in batch]
        padding, extra = rng.randint(0, 3), rng.randint(0, 200)
        total = sum(scheduled)
        block_sizes = torch.tensor(sizes, dtype=torch.int32)
        on = [t.to(triton_device) for t in (token_ids, scalars, blocks, block_sizes)]
        got = prepare_inputs(
            on[0],
            on[1][:, 11],
            on[2],
            torch.tensor(batch + [-1] * padding).to(triton_device),
            torch.tensor(scheduled + [0] * padding).to(triton_device),
            on[3],
            total + extra,
        )
        got = type(got)(*(t.cpu() for t in got))
        was = torch.tensor(batch), torch.tensor(scheduled)
        with plain():
            expected = prepare_inputs(token_ids, scalars[:, 11], blocks, *was, block_sizes, total)
        for name in ("input_ids", "positions", "slot_mapping"):
            assert torch.equal(getattr(got, name)[..., :total], getattr(expected, name)), name
        assert (got.input_ids[total:] == 0).all() and (got.positions[total:] == 0).all()
        assert (got.slot_mapping[:, total:] == -1).all()
        n = len(batch)
        assert torch.equal(got.query_start_loc[: n + 1], expected.query_start_loc)
        assert (got.query_start_loc[n:] == total).all()
        assert torch.equal(got.seq_lens[:n], expected.seq_lens) and (got.seq_lens[n:] == 0).all()


def test_triton_decode_step(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    for _ in range(6):
        num_rows, width = rng.randint(2, 9), rng.randint(8, 60)
        token_ids, scalars = persistent_rows(gen, num_rows, width)
        rows = rng.sample(range(num_rows), rng.randint(1, num_rows)) + [-1] * rng.randint(0, 3)
        n, num_slots = len(rows), 3
        sampled = torch.randint(0, 1000, (n,), generator=gen)
        checks = torch.randn(n, generator=gen)
        checks[0] = torch.nan
        both = []
        for device in (triton_device, None):
            own = [t.clone() for t in (token_ids, scalars, torch.tensor(rows), sampled, checks)]
            published = torch.full((num_slots, 2, n + 2), -5, dtype=torch.int32)
            cursor = torch.tensor([2], dtype=torch.int32)
            if device is None:
                with plain():
                    inputs = prepare_decode(own[0], own[1], COLUMNS, own[2])
                    commit_decode(own[0], own[1], COLUMNS, *own[2:], published, cursor)
            else:
                own = [t.to(device) for t in own]
                published, cursor = published.to(device), cursor.to(device)
                inputs = prepare_decode(own[0], own[1], COLUMNS, own[2])
                commit_decode(own[0], own[1], COLUMNS, *own[2:], published, cursor)
            both.append([t.cpu() for t in (*inputs, *own[:2], published, cursor)])
        for i, (got, expected) in enumerate(zip(*both)):
            assert got.dtype == expected.dtype and torch.equal(got, expected), i
        assert both[0][-1].item() == 0


def test_triton_append_tokens(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    token_ids, scalars = persistent_rows(gen, 7, 20)
    rows, sampled = torch.tensor([4, 2, 1]), torch.tensor([70, 80, 90])
    on = [t.clone().to(triton_device) for t in (token_ids, scalars, rows, sampled)]
    append_tokens(on[0], on[1][:, 10], *on[2:])
    with plain():
        append_tokens(token_ids, scalars[:, 10], rows, sampled)
    assert torch.equal(on[0].cpu(), token_ids) and torch.equal(on[1].cpu(), scalars)


def test_advance_rows(gen: torch.Generator, triton_device: torch.device) -> None:
    """Of more rows than a program takes; rows of -1 are left out."""
    rows = torch.randperm(300, generator=gen)[:200]
    rows[[0, 7, -1]] = -1
    seq_lens = torch.randint(1, 1000, (200,), generator=gen, dtype=torch.int32)
    scalars = torch.zeros(300, 16, dtype=torch.int32)
    wanted = scalars.clone()
    for row, length in zip(rows.tolist(), seq_lens.tolist()):
        if row >= 0:
            wanted[row, 11] = length
    on = scalars.clone().to(triton_device)
    advance_rows(on[:, 11], rows.to(triton_device), seq_lens.to(triton_device))
    with plain():
        advance_rows(scalars[:, 11], rows, seq_lens)
    assert torch.equal(on.cpu(), wanted) and torch.equal(scalars, wanted)


def test_state_pages(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    table = torch.randint(0, 500, (40, 3), generator=gen, dtype=torch.int32)
    for n in (1, 17):
        rows = torch.tensor(rng.sample(range(40), n - 1) + [-1])
        lens = torch.randint(0, 4, (n,), generator=gen, dtype=torch.int32)
        pages, begins = state_pages(table.to(triton_device), rows.to(triton_device), lens.to(triton_device), 777)
        assert pages.tolist() == [777 if row < 0 else int(table[row, 0]) for row in rows]
        assert begins.tolist() == (lens <= 1).tolist() and begins.dtype == torch.bool
