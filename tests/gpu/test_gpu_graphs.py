"""Graphs against the same kernels launched one by one; and a NaN beside them. Runners in this process."""

from __future__ import annotations

import gzip
import json
import mmap
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from gpu_models import DEVICE, MIB, SETTINGS, Batch, Checkpoint, make_runner
from tiny import VOCAB_SIZE

from aengine import LLM, InvalidRequestError, ModelLoadError, SamplingParams
from aengine.engine.sampling_extras import extras_of
from aengine.ipc.messages import ModelRunnerOutput, float32, int32
from aengine.limits.graphs import GRAPH_MODES

pytestmark = pytest.mark.gpu

MakeCheckpoint = Callable[..., Checkpoint]
SIZES = (1, 2, 3, 8, 20, 64)
EVERYTHING: dict[str, Any] = {
    "top_k": 60,
    "min_p": 0.001,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.1,
    "extras": {"logit_bias": [int32([3, 7]).tobytes(), float32([2.0, -2.0]).tobytes()]},
    "min_tokens": 4,
    "stop_token_ids": int32(range(0, VOCAB_SIZE, 5)),
}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
needs_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="the settings of graphs are refused on a CPU")
SHARED: list[memoryview] = []
"""Memory that CUDA knows is that for as long as the process lives."""


def random_prompts(rng: random.Random, count: int, longest: int = 40) -> list[list[int]]:
    return [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_decode_graphs_give_the_same_bits(
    checkpoint: MakeCheckpoint, arch: str, dtype: str, rng: random.Random
) -> None:
    """Every batch size that graphs pad or hold exactly, sampled inside a graph and outside, log-probabilities too.
    With bitmasks that are copied and such that are read in place."""
    work: list[tuple[list[list[int]], dict[str, Any], bytes | None]] = []
    bitmask = rng.randbytes(64 * VOCAB_SIZE)
    for size in SIZES:
        prompts, seeds = random_prompts(rng, size), [rng.getrandbits(60) for _ in range(size)]
        greedy = [rng.choice((0.0, 0.7, 1.0)) for _ in range(size)]
        work.append((prompts, {"seed": seeds, "temperature": greedy}, None))
        work.append((prompts, {"seed": seeds, "temperature": greedy}, bitmask))
        work.append((prompts, {"seed": seeds, "temperature": greedy, "logprobs": 5}, rng.choice((None, bitmask))))
        how = {"seed": seeds, "temperature": 1.0, "top_p": 0.9, "logprobs": [3] + [-1] * (size - 1)}
        work.append((prompts, how, None))
        work.append((prompts, EVERYTHING | how, rng.choice((None, bitmask))))
    answers: list[list[ModelRunnerOutput]] = []
    for how_run in ("eager", "graphs", "graphs, shared"):
        shared = memoryview(mmap.mmap(-1, 64 * 4 * ((VOCAB_SIZE + 31) // 32))) if "shared" in how_run else None
        runner = make_runner(
            checkpoint(arch).folder,
            bitmasks=shared,
            dtype=dtype,
            enforce_eager=how_run == "eager",
            kv_cache_memory_bytes=32 * MIB,
            max_num_seqs=64,
        )
        batch, given = Batch(runner), []
        batch.shared = shared
        if shared is not None:
            SHARED.append(shared)
        runner.batch_graphs = None  # prompts one way, so that the decodes begin alike to the bit
        for prompts, how, batch.bitmask in work:
            rows = list(range(len(prompts)))
            given.append(batch.start(prompts, **how)[0])
            given += [batch.decode(rows)[0] for _ in range(6)]
            given += [batch.decode(rows[::-1])[0], batch.decode(rows[: max(1, len(rows) // 2)])[0]]
            batch.end(rows)
        answers.append(given)
        if "shared" in how_run:
            assert not runner.graphs.step._masks.bits.is_cuda  # type: ignore[union-attr]
        del runner, batch
    for of_a_step in zip(*answers, strict=True):
        assert all(answer == of_a_step[0] for answer in of_a_step)
    assert all(not answer.errors for answer in answers[0])


def test_a_processor_in_graphs(checkpoint: MakeCheckpoint, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the caller's: graphs hold what it queues, whose rows and numbers change between replays."""
    prompts, wanted = random_prompts(rng, 7), [rng.randrange(3, VOCAB_SIZE) for _ in range(7)]
    asked = [extras_of(SamplingParams(extra_args={"raised": [token_id, 1e4]})) for token_id in wanted]
    runner = make_runner(checkpoint("llama").folder, logits_processors=["callers_processors:Raised"])
    batch, rows = Batch(runner), list(range(7))
    sample = Mock(wraps=runner.sampler.sample)
    monkeypatch.setattr(runner.sampler, "sample", sample)
    for asking in (rows[::2], rows[1::2], []):
        answers = [batch.start(prompts, extras=[asked[row] if row in asking else {} for row in rows])[0]]
        sample.reset_mock()
        answers += [batch.decode(rows[::-1])[0] for _ in range(3)]
        assert sample.called == (DEVICE == "cpu"), "a step with it was sampled op by op"
        batch.end(rows)
        for order, answer in zip((rows, *[rows[::-1]] * 3), answers, strict=True):
            assert all(answer.token_ids[order.index(row)] == wanted[row] for row in asking) and not answer.errors
        others = [row for row in rows if row not in asking]
        assert any(answers[0].token_ids[row] != wanted[row] for row in others)


def test_the_layers_are_a_graph_where_rows_are_sampled_op_by_op(
    checkpoint: MakeCheckpoint, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what no graph holds, the tokens are those of a run without graphs, for all rows of such steps and of others
    between them; the logits are found where the graph of this size has left them."""
    prompts, rows = random_prompts(rng, 7), list(range(7))
    extras = [extras_of(SamplingParams(extra_args={"residues": {"modulus": 2 + row}})) for row in rows]
    extras[1], extras[3] = {"allowed_token_ids": [int32(range(3, VOCAB_SIZE, 2)).tobytes()]}, {}
    extras[5] = extras[6] = {}
    how: dict[str, Any] = {"seed": [rng.getrandbits(60) for _ in rows], "temperature": [0.0, 1.0] * 3 + [0.0]}
    how |= {"frequency_penalty": [0.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0], "logprobs": [-1, -1, 2, -1, -1, 2, -1]}
    batches = [rng.sample(rows, rng.choice([1, 2, 3, 5, 7])) for _ in range(14)] + [[3, 5, 6], rows, [5], rows]
    answers: list[list[tuple[list[int], Any]]] = []
    for eager in (True, False):
        runner = make_runner(
            checkpoint("llama").folder, enforce_eager=eager, logits_processors=["callers_processors:Residues"]
        )
        batch = Batch(runner)
        given = [batch.start(prompts, extras=extras, **how)[0]]
        assert runner.graphs is not None
        run, replayed = Mock(wraps=runner.graphs.step.run), Mock(wraps=runner.graphs.run_to_logits)
        monkeypatch.setattr(runner.graphs.step, "run", run)
        monkeypatch.setattr(runner.graphs, "run_to_logits", replayed)
        given += [batch.decode(some)[0] for some in batches]
        assert not any(answer.errors for answer in given)
        answers.append([(list(answer.token_ids), answer.logprobs) for answer in given])
        assert DEVICE == "cpu" or (run.called == eager and 2 <= replayed.call_count < len(batches))
        del runner, batch
    assert answers[0] == answers[1]


def test_prompt_graphs_stay_within_rounding(checkpoint: MakeCheckpoint, arch: str, rng: random.Random) -> None:
    """They pad to another number of tokens, for which the libraries may sum in another order."""
    work = [random_prompts(rng, size) for size in (1, 2, 5, 9, 30)]
    outcomes: list[list[tuple[list[list[int]], torch.Tensor]]] = []
    for eager in (True, False):
        runner = make_runner(checkpoint(arch).folder, enforce_eager=eager, kv_cache_memory_bytes=32 * MIB)
        outcomes.append([Batch(runner).tokens_and_logits(prompts, 3) for prompts in work])
        del runner
    for (tokens, logits), (wanted_tokens, wanted) in zip(*outcomes, strict=True):
        assert tokens == wanted_tokens
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("logprobs", [-1, 2])
def test_a_nan_stays_in_its_row(checkpoint: MakeCheckpoint, eager: bool, logprobs: int, rng: random.Random) -> None:
    """Its KV is NaN too, and whoever gets its blocks must not see it. The others are the same to the bit."""
    rows, others = list(range(7)), [0, 1, 3, 4, 5, 6]
    how: dict[str, Any] = {"seed": [rng.getrandbits(60) for _ in rows], "temperature": [0.0, 1.0] * 3 + [0.0]}
    runner = make_runner(checkpoint("llama").folder, enforce_eager=eager)
    batch = Batch(runner)

    def run(prompts: list[list[int]]) -> list[ModelRunnerOutput]:
        answers = [batch.start(prompts, logprobs=logprobs, **how)[0], *(batch.decode(rows)[0] for _ in range(5))]
        batch.end([2])
        answers.append(batch.start([prompts[1]], rows=[2])[0])  # in the blocks of the one that left
        answers += [batch.decode([2])[0] for _ in range(4)]
        batch.end(rows)
        return answers

    for poison in rng.sample(range(VOCAB_SIZE), 20):
        prompts = [
            [t for t in prompt if t != poison] + [(poison + 1) % VOCAB_SIZE] for prompt in random_prompts(rng, 7)
        ]
        prompts[2] = [(poison + 1) % VOCAB_SIZE, poison, (poison + 2) % VOCAB_SIZE]
        clean = run(prompts)
        emitted = {answer.token_ids[i] for answer in clean[:6] for i in others}
        if poison not in emitted | {answer.token_ids[0] for answer in clean[6:]}:
            break  # nobody else comes upon it
    table = runner.model.embed.table  # type: ignore[attr-defined]
    table[poison] = torch.nan
    spoilt = run(prompts)
    for answer, wanted in zip(spoilt[:6], clean[:6], strict=True):
        assert [error.batch_idx for error in answer.errors] == [2] and "NaN" in answer.errors[0].message
        assert answer.token_ids[2] == -1
        assert [answer.token_ids[i] for i in others] == [wanted.token_ids[i] for i in others]
        if logprobs >= 0:
            assert answer.logprobs is not None and wanted.logprobs is not None
            assert list(answer.logprobs.token_idx) == others
            kept = [float(wanted.logprobs.sampled[i]) for i in others]
            assert list(answer.logprobs.sampled) == kept
    assert spoilt[6:] == clean[6:]
    assert not any(answer.errors for answer in clean)


@needs_a_gpu
def test_modes_give_the_same_tokens(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    """As the answers count them, steps are launched as the mode says, padded to the sizes that were asked for."""
    prompts, seeds = random_prompts(rng, 7), [rng.getrandbits(60) for _ in range(7)]
    how: dict[str, Any] = {"seed": seeds, "temperature": [0.0, 1.0] * 3 + [0.0], "top_p": [1.0] * 5 + [0.9, 0.9]}
    batches = [(list(range(count)), size) for count, size in ((7, 20), (5, 5), (3, 5), (2, 2), (1, 2))]
    given: dict[str, list[list[int]]] = {}
    for place, mode in enumerate(GRAPH_MODES):
        sizes = None if mode == "NONE" else [5, 2, 20]
        runner = make_runner(checkpoint("llama").folder, cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
        assert runner.graphs is not None
        assert runner.graphs.num_captured == [0, 1, 3][place] and (runner.batch_graphs is None) == (mode != "FULL")
        batch = Batch(runner)
        answers = [batch.start(prompts, **how)[0], *(batch.decode(rows)[0] for rows, _ in batches)]
        given[mode] = [list(answer.token_ids) for answer in answers]
        assert [answer.graph_mode for answer in answers[1:]] == [place] * len(batches)
        if sizes:
            assert [answer.num_paddings for answer in answers[1:]] == [size - len(rows) for rows, size in batches]
        assert not any(answer.errors for answer in answers)
        del runner, batch
    assert given["FULL"] == given["PIECEWISE"] == given["NONE"]


@needs_a_gpu
def test_an_op_that_no_graph_may_hold(checkpoint: MakeCheckpoint, rng: random.Random) -> None:
    """Ends the start, with the mode that runs it."""
    settings: dict[str, Any] = {**SETTINGS, "worker": "uncapturable:load_model", "skip_tokenizer": True}
    folder, prompts = str(checkpoint("llama").folder), random_prompts(rng, 5)
    with pytest.raises(ModelLoadError, match="^cudagraph_mode='FULL': a graph .* 'PIECEWISE' launches the layers"):
        LLM(folder, **settings).start()
    outcomes = []
    for mode in ("PIECEWISE", "NONE"):
        with LLM(folder, cudagraph_mode=mode, **settings) as llm:
            outcomes.append([completion.token_ids for completion in llm.generate(prompts, GREEDY)])
            told = llm.describe()
            assert told["cudagraph_mode"] == mode and bool(told["num_graphs"]) == (mode == "PIECEWISE")
            assert {each.mode for each in llm.statistics().graphs if not each.has_prompts} == {mode}
    assert outcomes[0] == outcomes[1]


@needs_a_gpu
def test_the_profilers_range(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """One at a time, a trace or the range; phases have names in a trace."""
    with LLM(str(checkpoint("llama").folder), skip_tokenizer=True, **SETTINGS) as llm:
        wanted = llm.generate([3, 4, 5], GREEDY).token_ids
        assert llm.start_profile("cuda") == "cuda"
        for folder in ("cuda", str(tmp_path), None):
            with pytest.raises(InvalidRequestError, match="already, for cuda: stop_profile"):
                llm.start_profile(folder)
        assert llm.generate([3, 4, 5], GREEDY).token_ids == wanted
        assert llm.stop_profile() == "cuda"
        with pytest.raises(InvalidRequestError, match="no profile is being recorded"):
            llm.stop_profile()
        llm.start_profile(str(tmp_path))
        assert llm.generate([3, 4, 5], GREEDY).token_ids == wanted
        with gzip.open(llm.stop_profile(), "rt") as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert names >= {"execute_model", "sample_tokens"}
        sizes = llm.describe()["cudagraph_capture_sizes"]
        assert sizes[:4] == [1, 2, 4, 8] and sizes[-1] == SETTINGS["max_num_seqs"]
