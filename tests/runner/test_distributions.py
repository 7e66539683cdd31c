"""What the runner samples, against a naive float64 pipeline: chi-square, each parameter alone and together; the Triton
kernels together against the CPU's."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from runner_fakes import ConstantModel, make_runner, request
from scipy import stats

from aengine.ipc.messages import GrammarOutput, NewRequest, SchedulerOutput, int32
from aengine.kernels.dispatch import triton_everywhere
from aengine.runner.input_batch import SampleBatch
from aengine.runner.model_runner import ModelRunner
from aengine.runner.request_state import SCALAR_WORDS, RequestState
from aengine.runner.sampling.bitmask_memory import HostBitmasks
from aengine.runner.sampling.sampler import Sampler, SamplerOutput, Sampling
from aengine.runner.staged_writes import StagedArena

VOCAB, ROWS, DRAWS, P_MIN = 40, 500, 5_000, 1e-7
PROMPT, GENERATED = [1, 2, 3, 2], [3, 4, 4, 4]
BAD_WORDS = [[7], [4, 8], [3, 4, 4, 4, 9], [4, 4, 10], [3, 4, 11], [2, 3, 4, 4, 4, 12], [9, 4, 4, 13], [8, 4]]
"""The token 12 would complete a sequence that begins in the prompt, which is not forbidden."""
ALLOWED = [t for t in range(VOCAB) if t % 3]


def distribution(logits: np.ndarray, p: dict[str, Any], allowed: list[int] | None) -> np.ndarray:
    """The definition in SamplingParams' docstring, step by step; float64 [VOCAB]."""
    x = logits.astype(np.float64)
    for token, value in p.get("logit_bias", {}).items():
        x[token] += value
    if len(GENERATED) < p.get("min_tokens", 0):
        x[p["stop_token_ids"]] = -np.inf
    for *before, last in p.get("bad_words", []):
        if GENERATED[len(GENERATED) - len(before) :] == before:
            x[last] = -np.inf
    allowed = p.get("allowed_token_ids", allowed)
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
    "logit_bias": {"logit_bias": {5: 2.0, 6: -100.0, 39: 1.0}},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [0, 3, 9]},
    "min_tokens reached": {"min_tokens": 4, "stop_token_ids": [0, 3, 9]},
    "allowed_token_ids": {"allowed_token_ids": [3, 39, 8, 4, 5]},
    "bad_words": {"bad_words": BAD_WORDS},
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
        "logit_bias": {2: 1.5, 4: -1.0},
        "min_tokens": 9,
        "stop_token_ids": [11, 12],
        "bad_words": BAD_WORDS,
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
    fields = {"temperature": 1.0, **CASES[case]}
    allowed = ALLOWED if fields.pop("bitmask", False) else None
    logits = torch.randn(VOCAB, generator=gen) * 1.5
    while (distribution(logits.numpy(), fields, allowed) * DRAWS >= 5).sum() < 3:  # nothing to compare
        logits = torch.randn(VOCAB, generator=gen) * 1.5
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


def new_sampler(
    requests: list[NewRequest], vocab_size: int, device: torch.device
) -> tuple[Sampler, RequestState, SampleBatch]:
    """Rows on ``device`` for all the requests, and the batch in which all of them sample."""
    n = len(requests)
    arena = StagedArena({"token_ids": (n + 2, 16), "scalars": (n + 2, SCALAR_WORDS)}, device)
    state = RequestState(arena)
    sampler = Sampler(state, vocab_size, HostBitmasks(4 * ((vocab_size + 31) // 32)))
    for new in requests:
        state.add_request(new)
        sampler.add_request(new)
    arena.apply()
    sampler.apply_staged_writes()
    rows = np.array([new.req_idx for new in requests], dtype=np.int64)
    rows_device = torch.from_numpy(rows).to(device)
    return sampler, state, SampleBatch(rows, np.arange(n), rows_device, state.scalars.select(rows_device), None)


def some_requests(rng: random.Random, count: int, vocab_size: int) -> list[NewRequest]:
    """Each asks for a few things at random."""
    offers: list[dict[str, Any]] = [
        {"top_k": rng.randint(2, 50)},
        {"top_p": rng.uniform(0.3, 0.99)},
        {"min_p": 0.01},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
        {"logit_bias": dict(zip(rng.sample(range(vocab_size), 4), [1.5, -1.0, 3.0, 0.5], strict=True))},
        {"min_tokens": 9, "stop_token_ids": list(range(0, vocab_size, 2))},
        {"logprobs": 3},
        {"allowed_token_ids": rng.sample(range(vocab_size), 50)},
        {"bad_words": [[4, t] for t in rng.sample(range(vocab_size), 50)]},
    ]
    new = []
    for row in rng.sample(range(count), count):
        fields: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.3])}
        for offer in rng.sample(offers, rng.randint(0, 4)):
            fields |= offer
        seed = rng.randrange(-(2**63), 2**63)
        new.append(request(row, PROMPT + GENERATED, [0], num_prompt_tokens=len(PROMPT), seed=seed, **fields))
    return new


@pytest.mark.slow
def test_triton_kernels_sample_the_same(rng: random.Random, gen: torch.Generator) -> None:
    vocab_size, count = 600, 16
    requests = some_requests(rng, count, vocab_size)
    logits = torch.randn(count, vocab_size, generator=gen) * 3
    grammar = GrammarOutput(1, int32([3, 7]), rng.randbytes(2 * 4 * ((vocab_size + 31) // 32)))
    has_gpu = torch.cuda.is_available()

    def sampled(device: torch.device, where: contextlib.AbstractContextManager[None]) -> list[SamplerOutput]:
        with where:
            sampler, state, batch = new_sampler(requests, vocab_size, device)
            batch.grammar = grammar
            first = sampler.sample(logits.to(device, copy=True), batch)
            state.append_sampled(batch.rows_device, first.token_ids)
            batch.grammar, batch.scalars = None, state.scalars.select(batch.rows_device)
            return [first, sampler.sample(logits.to(device, copy=True), batch)]

    wanted = sampled(torch.device("cpu"), contextlib.nullcontext())
    where = contextlib.nullcontext() if has_gpu else triton_everywhere()
    for ours, theirs in zip(sampled(torch.device("cuda" if has_gpu else "cpu"), where), wanted):
        assert torch.equal(ours.token_ids.cpu(), theirs.token_ids)
        assert ours.checks.isfinite().all()
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            asked = [i for i, new in enumerate(requests) if new.logprobs >= 0]
            got, expected = ours.logprobs.cpu()[asked], theirs.logprobs[asked]
            assert torch.equal(got[:, 1:4], expected[:, 1:4])
            values = [words[:, [0, 4, 5, 6]].contiguous().view(torch.float32) for words in (got, expected)]
            torch.testing.assert_close(*values, atol=1e-4, rtol=1e-5)


def test_logprobs_are_those_of_the_model(gen: torch.Generator) -> None:
    """Nothing that a request asks of the logits shows in them; whether all rows want them or some."""
    logits = torch.randn(3, VOCAB, generator=gen)
    asked: dict[str, Any] = {"logprobs": 2, "logit_bias": {5: 9.0}, "temperature": 0.3}
    for fields in (
        [asked] * 3,
        [asked, {}, {"logprobs": 2, "temperature": 0.3}],
        [{"logprobs": 2, "top_k": 3}, {}, {}],
    ):
        requests = [request(i, PROMPT, [0], seed=i, **f) for i, f in enumerate(fields)]
        sampler, _, batch = new_sampler(requests, VOCAB, torch.device("cpu"))
        out = sampler.sample(logits.clone(), batch).logprobs
        whose = sampler.logprob_rows(batch.rows, batch.batch_idx)
        assert out is not None and whose is not None
        rows = [i for i, f in enumerate(fields) if f]
        wanted = logits[rows].log_softmax(1).topk(2)
        assert whose.batch_idx.tolist() == whose.rows.tolist() == rows
        assert torch.equal(out[rows, 1:3].long(), wanted.indices)
        torch.testing.assert_close(out[rows, 3:].contiguous().view(torch.float32), wanted.values)


PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
    {"top_k": 1, "top_p": 0.5},
    {"top_k": VOCAB},
    {"min_tokens": 4, "stop_token_ids": [1]},
    {"min_tokens": 9, "stop_token_ids": [VOCAB]},
]
CUT: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}]
SPECIAL: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"temperature": 0.0, "presence_penalty": 0.1},
    {"logit_bias": {1: 1.0}},
    {"min_tokens": 5, "stop_token_ids": [1]},
]


def test_what_a_batch_asks_of_the_sampler() -> None:
    def rows_of(cases: list[dict[str, Any]], begin: int) -> list[NewRequest]:
        ids = PROMPT + GENERATED
        return [
            request(begin + i, ids, [0], num_prompt_tokens=len(PROMPT), **{"temperature": 1.0, **f})
            for i, f in enumerate(cases)
        ]

    new = rows_of(PLAIN, 0) + rows_of(CUT, len(PLAIN)) + rows_of(SPECIAL, len(PLAIN) + len(CUT))
    sampler, state, batch = new_sampler(new, VOCAB, torch.device("cpu"))
    plain, cut, special = np.split(batch.rows, [len(PLAIN), len(PLAIN) + len(CUT)])
    assert sampler.asks(plain) is Sampling.PLAIN
    for i, row in enumerate(cut):
        assert sampler.asks(np.append(plain, row)) is Sampling.CUT, CUT[i]
    for i, row in enumerate(special):
        assert sampler.asks(np.append(cut, row)) is Sampling.ANY, SPECIAL[i]
    row = special[-1:]  # its min_tokens are reached by one token more
    state.append(row)
    assert sampler.asks(row) is Sampling.PLAIN
    for r in [*cut.tolist(), *special.tolist()]:  # the row's next request asks for nothing
        sampler.remove_request(r)
        state.remove_request(r)
        again = request(r, PROMPT, [0])
        state.add_request(again)
        sampler.add_request(again)
    assert sampler.asks(batch.rows) is Sampling.PLAIN
