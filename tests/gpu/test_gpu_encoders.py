"""Vectors on the GPU, of encoders and of decoders, against transformers; in 16 bits as near as its own are."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_models import DEVICE, Batch, Checkpoint, make_runner
from runner_fakes import POOLED, request
from test_encoders import VARIANTS, expected_mean, load, some_texts, vectors, write

pytestmark = pytest.mark.gpu

WORST = 1.6  # ours to theirs: both are rounding alone


def some_more_texts(longest: int) -> list[list[int]]:
    """Also of like lengths, which are padded to the longest of them."""
    rng = random.Random(6)
    lengths = [3, longest, 17, 17, 1, 29, 16, longest, longest - 1, longest - 3, 15, 14, 2]
    return [[rng.randrange(6, 96) for _ in range(n)] for n in lengths]


def texts_for(variant: str) -> list[list[int]]:
    return some_more_texts(140 if variant == "mpnet" else 70)


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    texts = texts_for(variant)
    expected = expected_mean(write(tmp_path, variant).to(DEVICE), texts)
    found = vectors(load(tmp_path, device=DEVICE), texts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_classifier(variant: str, tmp_path: Path) -> None:
    model, texts = write(tmp_path, variant, "ForSequenceClassification", num_labels=3).to(DEVICE), some_texts()
    with torch.no_grad():
        expected = np.array([model(torch.tensor([ids], device=DEVICE)).logits[0].cpu().numpy() for ids in texts])
    found = vectors(load(tmp_path, device=DEVICE), texts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5 * np.abs(expected).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16(variant: str, tmp_path: Path) -> None:
    texts, model = texts_for(variant), write(tmp_path, variant).to(DEVICE)
    wanted = expected_mean(model, texts)
    theirs = expected_mean(model.to(torch.bfloat16), texts)
    ours = vectors(load(tmp_path, device=DEVICE, dtype="bfloat16"), texts)
    off, their_off = (np.linalg.norm(found - wanted) / np.linalg.norm(wanted) for found in (ours, theirs))
    print(f"{variant}: relative error {off:.2e}, of transformers {their_off:.2e}")
    assert off <= WORST * their_off


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_of_a_decoder(checkpoint: Callable[..., Checkpoint], pooling: str, rng: random.Random) -> None:
    """In chunks, the last of one token, beside a request that decodes; in one step; alone."""
    model = checkpoint("qwen3")
    texts = [[rng.randrange(model.vocab_size) for _ in range(n)] for n in (21, 1, 40, 9)]
    body = model.reference("float32").base_model
    with torch.inference_mode():
        states = [body(torch.tensor([text], device=DEVICE), use_cache=False).last_hidden_state[0] for text in texts]
    expected = [(of_text[-1] if pooling == "last" else of_text.mean(0)).cpu().numpy() for of_text in states]
    runner = make_runner(model.folder, pooling=pooling)
    batch = Batch(runner)
    blocks = sum(batch._widths)

    def new(row: int, text: list[int]) -> object:
        return request(row, text, range(row * blocks, (row + 1) * blocks), extras=POOLED)

    rows = [1, 2, 3, 4]
    batch.start([[5, 6, 7]])
    requests = [new(row, text) for row, text in zip(rows, texts, strict=True)]
    first, _ = batch._step([0, *rows], [1, 20, 1, 20, 9], new_requests=requests)
    last, _ = batch._step([0, 1, 3], [1, 1, 20])
    assert first.results is not None and last.results is not None
    found = {rows[i - 1]: vector for i, vector in first.results.items()}
    found |= {(1, 3)[i - 1]: vector for i, vector in last.results.items()}
    batch.end([0, *rows])
    for row, wanted in zip(rows, expected, strict=True):
        np.testing.assert_allclose(found[row], wanted, rtol=0, atol=1e-4)
    for i, (text, wanted) in enumerate(zip(texts, expected, strict=True)):
        alone, _ = batch._step([i], [len(text)], new_requests=[new(i, text)])
        assert alone.results is not None and list(alone.token_ids) == [-1]
        np.testing.assert_allclose(alone.results.items()[0][1], wanted, rtol=0, atol=1e-4)
        batch.end([i])
