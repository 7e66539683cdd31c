"""What the runner samples, against a naive float64 pipeline: chi-square, each parameter alone and together."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from runner_fakes import ConstantModel, make_runner, request
from scipy import stats

from aengine.ipc.messages import GrammarOutput, SchedulerOutput, int32
from aengine.runner.model_runner import ModelRunner

VOCAB, ROWS, DRAWS, P_MIN = 40, 500, 10_000, 1e-6
PROMPT, GENERATED = [1, 2, 3, 2], [3, 4, 4, 4]
ALLOWED = [t for t in range(VOCAB) if t % 3]


def distribution(logits: np.ndarray, p: dict[str, Any], allowed: list[int] | None) -> np.ndarray:
    """The definition in SamplingParams' docstring, step by step; float64 [VOCAB]."""
    x = logits.astype(np.float64)
    for token, value in zip(p.get("bias_token_ids", []), p.get("bias_values", [])):
        x[token] += value
    if len(GENERATED) < p.get("min_tokens", 0):
        x[p["stop_token_ids"]] = -np.inf
    if allowed is not None:
        x[[t for t in range(VOCAB) if t not in allowed]] = -np.inf
    for token in set(PROMPT + GENERATED):
        r, count = p.get("repetition_penalty", 1.0), GENERATED.count(token)
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
        x[token] -= p.get("frequency_penalty", 0.0) * count + p.get("presence_penalty", 0.0) * (count > 0)
    weights = np.exp((x - x.max()) / p["temperature"])
    order = sorted(range(VOCAB), key=lambda t: -weights[t])
    if p.get("top_k", 0):
        weights[order[p["top_k"] :]] = 0
    probs = weights / weights.sum()
    top_p, reached = p.get("top_p", 1.0), 0.0
    for place, token in enumerate(order):
        reached += probs[token]
        if reached >= top_p:
            probs[order[place + 1 :]] = 0
            break
    probs[probs < p.get("min_p", 0.0) * probs.max()] = 0
    return probs / probs.sum()


CASES: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 3": {"temperature": 3.0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.07},
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": -1.5},
    "logit_bias": {"bias_token_ids": [5, 6, 39], "bias_values": [2.0, -100.0, 1.0]},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [0, 3, 9]},
    "min_tokens reached": {"min_tokens": 4, "stop_token_ids": [0, 3, 9]},
    "bitmask": {"bitmask": True},
    "top_k and top_p": {"top_k": 12, "top_p": 0.7},
    "all": {
        "temperature": 1.4,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 0.8,
        "frequency_penalty": -0.3,
        "presence_penalty": 0.4,
        "bias_token_ids": [2, 4],
        "bias_values": [1.5, -1.0],
        "min_tokens": 9,
        "stop_token_ids": [11, 12],
        "bitmask": True,
    },
}


def draw(runner: ModelRunner, fields: dict[str, Any], seeds: list[int], allowed: list[int] | None) -> list[int]:
    """One token of each of ROWS requests that had been preempted after GENERATED; the rows are then free again."""
    rows = range(len(seeds))
    ids = PROMPT + GENERATED
    new = [request(i, ids, [0], num_prompt_tokens=len(PROMPT), seed=s, **fields) for i, s in enumerate(seeds)]
    runner.execute_model(
        SchedulerOutput(1, new_requests=new, req_idx=int32(rows), num_scheduled_tokens=int32([8] * len(rows)))
    )
    grammar = None
    if allowed is not None:
        bits = sum(1 << t for t in allowed).to_bytes(8, "little")
        grammar = GrammarOutput(1, int32(rows), bits * len(rows))
    tokens = list(runner.sample_tokens(grammar).get().token_ids)
    runner.execute_model(SchedulerOutput(2, removed=int32(rows)))
    runner.sample_tokens(None)
    return tokens


@pytest.mark.parametrize("case", CASES)
def test_distribution(rng: random.Random, gen: torch.Generator, case: str) -> None:
    logits = torch.randn(VOCAB, generator=gen) * 1.5
    fields = {"temperature": 1.0, **CASES[case]}
    allowed = ALLOWED if fields.pop("bitmask", False) else None
    model = ConstantModel(logits)
    runner = make_runner(model, VOCAB, max_num_seqs=ROWS, max_model_len=16, num_blocks=1, block_size=16)
    counts = np.zeros(VOCAB)
    for _ in range(DRAWS // ROWS):
        seeds = [rng.randrange(-(2**63), 2**63) for _ in range(ROWS)]
        np.add.at(counts, draw(runner, fields, seeds, allowed), 1)
    expected = distribution(logits.numpy(), fields, allowed) * DRAWS
    assert counts[expected == 0].sum() == 0
    rare = (expected > 0) & (expected < 5)
    observed, wanted = counts[expected >= 5], expected[expected >= 5]
    if expected[rare].sum() >= 5:
        observed, wanted = np.append(observed, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    assert len(wanted) > 2
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > P_MIN


def test_greedy_ignores_the_cutoffs_and_takes_the_lowest_id() -> None:
    logits = torch.zeros(VOCAB)
    logits[[7, 30]] = 2.0
    runner = make_runner(ConstantModel(logits), VOCAB, max_num_seqs=ROWS, max_model_len=16, num_blocks=1, block_size=16)
    for fields in ({"temperature": 0.0, "top_k": 5, "top_p": 0.1, "min_p": 0.9}, {"temperature": 1.0, "top_k": 1}):
        assert set(draw(runner, fields, list(range(50)), None)) == {7}


@pytest.mark.parametrize("temperature", [1e-300, 1e-7, 1e4])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.linspace(-80, 80, VOCAB)
    runner = make_runner(ConstantModel(logits), VOCAB, max_num_seqs=ROWS, max_model_len=16, num_blocks=1, block_size=16)
    tokens = draw(runner, {"temperature": temperature}, list(range(400)), None)
    assert set(tokens) == {VOCAB - 1} if temperature < 1 else len(set(tokens)) > 30
