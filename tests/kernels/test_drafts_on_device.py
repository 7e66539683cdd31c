"""Drafts on the device, found and accepted: torch against a loop, Triton against torch."""

from __future__ import annotations

import random
from contextlib import nullcontext

import numpy as np
import torch

from aengine.kernels.commit_drafts import commit_drafts, following_drafts
from aengine.kernels.dispatch import torch_reference as plain
from aengine.kernels.find_drafts import find_drafts
from aengine.kernels.input_prep import ScalarColumns, prepare_decode

COLUMNS = ScalarColumns(seed=0, temperature=2, num_tokens=10, num_computed_tokens=11)
WIDTH = 60


def a_step(rng: random.Random, gen: torch.Generator) -> list[torch.Tensor]:
    """token_ids, scalars, rows, places, sampled, checks. Few ids, so that many drafts are accepted."""
    num_rows = rng.randint(2, 9)
    token_ids = torch.randint(0, 3, (num_rows, WIDTH), generator=gen, dtype=torch.int32)
    scalars = torch.zeros(num_rows, 16, dtype=torch.int32)
    scalars[:, 11] = torch.randint(0, WIDTH - 20, (num_rows,), generator=gen).int()
    scalars[:, 10] = scalars[:, 11] + 1
    rows: list[int] = []
    places: list[int] = []
    for row in rng.sample(range(num_rows), rng.randint(1, num_rows)):
        length = rng.choice([1, 1, 2, 5, 17])
        rows += [row] * length
        places += range(length)
    padding = rng.randint(0, 3)
    n = len(rows) + padding
    sampled = torch.randint(0, 3, (n,), generator=gen)
    columns = torch.tensor(rows + [-1] * padding), torch.tensor(places + [0] * padding)
    return [token_ids, scalars, *columns, sampled, torch.randn(n, generator=gen)]


def new_drafts(places: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    """Ids that the step writes; -1: the row has the draft already."""
    return torch.where(places > 0, torch.randint(-1, 3, places.shape, generator=gen), -1)


def test_against_a_loop(rng: random.Random, gen: torch.Generator) -> None:
    for _ in range(20):
        step = a_step(rng, gen)
        was, scalars, rows, places, sampled, checks = (t.clone().numpy() for t in step)
        n = len(rows)
        published, cursor = torch.full((3, 2, n + 1), -5, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        new = new_drafts(step[3], gen)
        for row, place, draft in zip(rows, places, new.tolist(), strict=True):
            if draft >= 0:
                was[row, scalars[row, 11] + place] = draft
        inputs = prepare_decode(*step[:2], COLUMNS, *step[2:4], new)
        drafts = following_drafts(step[0], step[1][:, 10], *step[2:4])
        commit_drafts(*step[:2], COLUMNS, *step[2:], published, cursor)
        ids = np.full(n, -1)
        for i in range(n):
            row, place = rows[i], places[i]
            end = scalars[row, 10]
            has_draft = i + 1 < n and rows[i + 1] == row >= 0
            assert drafts[i] == (was[row, end + place] if has_draft else -1)
            position = scalars[row, 11] + place if row >= 0 else 0
            assert inputs.positions[i] == position and inputs.seq_lens[i] == (position + 1 if row >= 0 else 0)
            if row >= 0:
                assert inputs.sample_positions[i] == end + place and inputs.input_ids[i] == was[row, position]
                if (sampled[i - place : i] == was[row, end : end + place]).all():
                    ids[i] = sampled[i]
        for row in range(len(was)):
            own = ids[(rows == row) & (ids >= 0)]
            end = scalars[row, 10] + len(own)
            assert step[1][row, 10] == end and step[1][row, 11] == (end - 1 if len(own) else scalars[row, 11])
            assert step[0][row, scalars[row, 10] : end].tolist() == own.tolist()
        assert published[2, 0, :n].tolist() == ids.tolist() and cursor.item() == 0
        assert torch.equal(published[2, 1, :n], torch.from_numpy(checks).view(torch.int32))


def test_triton(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    for _ in range(8):
        step, both = a_step(rng, gen), []
        n, new = len(step[2]), new_drafts(step[3], gen) if rng.random() < 0.8 else None
        for device in (triton_device, None):
            own = [t.clone() if device is None else t.clone().to(device) for t in step]
            published = torch.full((3, 2, n + 2), -5, dtype=torch.int32, device=device)
            cursor = torch.tensor([1], dtype=torch.int32, device=device)
            with plain() if device is None else nullcontext():
                drafts = None if new is None else new.to(own[0].device)
                inputs = prepare_decode(*own[:2], COLUMNS, *own[2:4], drafts)
                commit_drafts(*own[:2], COLUMNS, *own[2:], published, cursor)
            both.append([t.cpu() for t in (*inputs, *own[:2], published[:, 0], cursor)])
            real = own[2].cpu() >= 0
            assert torch.equal(published[1, 1, :n].cpu()[real], step[5].view(torch.int32)[real])
        for i, (got, expected) in enumerate(zip(*both)):
            assert got.dtype == expected.dtype and torch.equal(got, expected), i


def test_what_came_after_the_last_three() -> None:
    texts = [[1, 2, 3, 4, 5, 6, 1, 2, 3], [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], [7, 5, 5, 5, 5], [1, 2, 3, 4], [6]]
    expected = [[4, 5, 6, 1, 2, 3, 4], [8, 1], [5, 5, 5], [4, 4], [6]]
    token_ids = torch.full((len(texts), 30), 77, dtype=torch.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = torch.tensor(text)
    num_tokens = torch.tensor([len(text) for text in texts], dtype=torch.int32)
    counts = torch.tensor([len(ids) for ids in expected])
    find_drafts(token_ids, num_tokens, torch.arange(len(texts)), counts, 7)
    for row, (text, ids) in enumerate(zip(texts, expected, strict=True)):
        assert token_ids[row, : len(text) + len(ids) + 1].tolist() == [*text, *ids, 77]


def test_triton_finds_the_same(rng: random.Random, gen: torch.Generator, triton_device: torch.device) -> None:
    for _ in range(6):
        width = rng.choice([30, 3000])
        ids = torch.randint(0, rng.choice([2, 5, 12]), (6, width), generator=gen, dtype=torch.int32)
        scalars = torch.zeros(6, 16, dtype=torch.int32)
        scalars[:, 10] = torch.tensor([1, 2, 3, 4, width - 17, rng.randint(5, width - 17)], dtype=torch.int32)
        rows = torch.tensor(rng.sample(range(6), rng.randint(1, 6)))
        counts = torch.randint(1, 17, rows.shape, generator=gen)
        with plain():
            find_drafts(expected := ids.clone(), scalars[:, 10], rows, counts, 16)
        on = [t.to(triton_device) for t in (ids, scalars, rows, counts)]
        find_drafts(on[0], on[1][:, 10], *on[2:], 16)
        assert torch.equal(on[0].cpu(), expected)
