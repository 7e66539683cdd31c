"""The end of a step with drafts: torch against a loop, Triton against torch."""

from __future__ import annotations

import random
from contextlib import nullcontext

import numpy as np
import torch

from aengine.kernels.commit_drafts import commit_drafts, following_drafts
from aengine.kernels.dispatch import torch_reference as plain
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


def test_against_a_loop(rng: random.Random, gen: torch.Generator) -> None:
    for _ in range(20):
        step = a_step(rng, gen)
        was, scalars, rows, places, sampled, checks = (t.clone().numpy() for t in step)
        n = len(rows)
        published, cursor = torch.full((3, 2, n + 1), -5, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        inputs = prepare_decode(*step[:2], COLUMNS, *step[2:4])
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
        n = len(step[2])
        for device in (triton_device, None):
            own = [t.clone() if device is None else t.clone().to(device) for t in step]
            published = torch.full((3, 2, n + 2), -5, dtype=torch.int32, device=device)
            cursor = torch.tensor([1], dtype=torch.int32, device=device)
            with plain() if device is None else nullcontext():
                inputs = prepare_decode(*own[:2], COLUMNS, *own[2:4])
                commit_drafts(*own[:2], COLUMNS, *own[2:], published, cursor)
            both.append([t.cpu() for t in (*inputs, *own[:2], published[:, 0], cursor)])
            real = own[2].cpu() >= 0
            assert torch.equal(published[1, 1, :n].cpu()[real], step[5].view(torch.int32)[real])
        for i, (got, expected) in enumerate(zip(*both)):
            assert got.dtype == expected.dtype and torch.equal(got, expected), i
