"""Models divided into pipeline stages against the whole: the same tokens, whatever is in flight."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import shutil
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from driver import CPU, no_progress, source_of
from pairs import some
from scheduler_invariants import check_scheduler
from test_divided_models import MODELS
from test_weight_formats import KINDS, quantise
from torch import Tensor

from aengine.checkpoint.source import ModelSource
from aengine.config import EngineConfig
from aengine.engine.scheduler.request import Request
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.engine.speculation.drafts import Drafts
from aengine.outputs import FinishReason
from aengine.params import SamplingParams
from aengine.runner.attention.kv_format import KVFormat
from aengine.runner.distributed.pipeline import GlooLink, IntermediateTensors, StepSizes
from aengine.runner.distributed.stage import WHOLE, PipelineStage
from aengine.runner.model_runner import ModelRunner
from aengine.runner.models import build_model, read_config
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.startup.setup import RunnerSetup
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.plain import PlainWeight
from aengine.runner.weights.quantised.scaled import ScaledWeight
from aengine.runner.weights.sources.loader import load_weights
from aengine.telemetry.metrics import DraftStatistics

TinyModel = Callable[..., Path]
NUM_BLOCKS, BLOCK_SIZE, MAX_LEN, ROWS, BATCHED = 96, 4, 64, 6, 24


class Lines:
    """What is on its way between the stages of a pipeline in one process."""

    def __init__(self, size: int) -> None:
        self.hidden: list[deque[Tensor]] = [deque() for _ in range(size)]  # to each stage
        self.token_ids: deque[Tensor] = deque()


class Link:
    """A `PipelineLink` over `Lines`: what is received must have been sent."""

    def __init__(self, lines: Lines, index: int) -> None:
        self.sizes = StepSizes(0, torch.float32, BATCHED, ROWS, len(lines.hidden) + 1)
        self._lines = lines
        self._index = index

    def send(self, tensors: IntermediateTensors) -> None:
        self._lines.hidden[self._index + 1].append(tensors.hidden.clone())

    def receive(self, num_tokens: int) -> IntermediateTensors:
        hidden = self._lines.hidden[self._index].popleft()
        assert len(hidden) == num_tokens
        return IntermediateTensors(hidden)

    def send_ids(self, token_ids: Tensor) -> None:
        self._lines.token_ids.append(token_ids.clone())

    def receive_ids(self, count: int) -> Tensor:
        token_ids = self._lines.token_ids.popleft()
        assert token_ids.shape == (count,)
        return token_ids

    def warm_up(self) -> None:
        pass


def make_setup(source: ModelSource, stage: PipelineStage, link: Link | None) -> RunnerSetup:
    config = EngineConfig.create(
        source.path, {"max_num_seqs": ROWS, "max_num_batched_tokens": BATCHED, "dtype": "float32"}
    )
    model_config = read_config(source.hf_config)
    model = build_model(model_config, choose_formats("float32", CPU, source.hf_config), stage=stage)
    load_weights(model, source, 5, no_progress)
    platform = CpuPlatform()
    attention = platform.choose_attention(config, model_config, torch.float32)
    return RunnerSetup(
        config,
        model_config,
        model,
        platform,
        attention,
        KVFormat(torch.float32),
        BLOCK_SIZE,
        BATCHED,
        0,
        1,
        link=link,
    )


def random_requests(vocab_size: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    common = [rng.randrange(vocab_size) for _ in range(24)]
    requests = []
    for i in range(9):
        prompt = common[: rng.choice([0, 8, 21])] + [rng.randrange(vocab_size) for _ in range(rng.randint(1, 14))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            top_p=rng.choice([1.0, 0.8]),
            repetition_penalty=rng.choice([1.0, 1.3]),
        )
        length = len(prompt) + rng.randint(1, 16)
        requests.append(
            Request(str(i), prompt, params, seed=i, max_num_tokens=length, stop_token_ids=frozenset({3, 4, 5}))
        )
    return requests


def propose(scheduler: Scheduler, requests: list[Request], expected: dict[str, list[int]], rng: random.Random) -> None:
    """Drafts of all kinds for some of the requests that decode: right, wrong, certain, found by the worker."""
    for request in requests:
        begin = request.num_output_tokens + request.num_pending
        right = expected.get(request.request_id, [])[begin : begin + rng.randint(1, 4)]
        kind = rng.choice(["none", "right", "wrong", "certain", "found"])
        if kind == "found":
            scheduler.rows.lookahead.propose(request, [-1] * rng.randint(1, 4))
        elif right and kind != "none":
            wrong = [rng.randrange(50)] * (kind == "wrong")
            scheduler.rows.lookahead.propose(
                request, right[: -1 if wrong else None] + wrong, are_certain=kind == "certain"
            )


def run(
    setups: list[RunnerSetup],
    requests: list[Request],
    seed: int,
    expected: list[list[int]] | None = None,
) -> list[list[int]]:
    """Output ids of the requests, one of which is aborted; ``setups``: the stages in order. ``expected``: the ids, of
    which drafts are made, while some requests are preempted; None: none are."""
    rng = random.Random(seed)
    runners: list[ModelRunner] = [setup.make_runner(NUM_BLOCKS, MAX_LEN) for setup in setups]
    depth = len(setups) + 1
    groups = setups[0].kv_layout.groups
    assert all(setup.kv_layout.groups == groups for setup in setups)
    scheduler = Scheduler(
        num_blocks=NUM_BLOCKS,
        kv_groups=groups,
        max_num_seqs=ROWS,
        max_num_batched_tokens=BATCHED,
        max_model_len=MAX_LEN,
        max_in_flight_steps=depth,
        vocab_size=setups[0].model_config.vocab_size,
        num_batches=len(setups),
    )
    scheduler.rows.lookahead = drafts = Drafts(scheduler.rows)
    waiting, answers, gone = deque(requests), deque[Any](), requests[4]
    known = dict(zip([one.request_id for one in requests if one is not gone], expected or [], strict=False))
    while waiting or answers or scheduler.num_running or scheduler.num_waiting:
        if waiting and rng.random() < 0.5:
            scheduler.add_request(waiting.popleft())
        if gone.num_output_tokens >= 2:
            scheduler.finish(gone, FinishReason.ABORT)
        if known:
            propose(scheduler, requests, known, rng)
            if scheduler.num_running > 1 and rng.random() < 0.05:
                scheduler.rows.preempt_for(min(scheduler.rows.running, key=lambda one: one.sort_key))
        out = scheduler.schedule() if len(answers) < depth else None
        if out is not None:
            for runner in runners:
                runner.execute_model(out)
                answer = runner.sample_tokens(None)
            answers.append(answer)
        if answers and (out is None or rng.random() < 0.4):
            scheduler.update(answers.popleft().get())
            check_scheduler(scheduler)
    (counts,) = drafts.statistics() or [DraftStatistics("", 0, 0, 0, ())]
    assert not known or (0 < counts.accepted_tokens < counts.drafted_tokens and scheduler.rows.num_preemptions)
    return [list(request.token_ids[request.num_prompt_tokens :]) for request in requests if request is not gone]


@pytest.mark.parametrize(
    ("name", "size"),
    some(
        itertools.product(MODELS, (2, 3)),
        ("llama-biases", 2),
        ("llama-tied-one-kv-head", 3),
        ("gemma2", 3),
        ("gpt-oss", 2),
        ("qwen3-next", 3),
        ("lfm2", 2),
    ),
)
def test_families(name: str, size: int, tiny_model: TinyModel) -> None:
    arch, overrides = MODELS[name]
    if overrides.get("num_hidden_layers", 3) < size:
        overrides = {**overrides, "num_hidden_layers": 4, "layer_types": 2 * overrides["layer_types"]}
    source = source_of(tiny_model(arch, seed=7, **overrides))
    vocab_size = source.hf_config["vocab_size"]
    with torch.inference_mode():
        wanted = run([make_setup(source, WHOLE, None)], random_requests(vocab_size, 11), 1)
        lines = Lines(size)
        stages = [make_setup(source, PipelineStage(i, size), Link(lines, i)) for i in range(size)]
        found = run(stages, random_requests(vocab_size, 11), 2)
    assert found == wanted
    assert not any(lines.hidden)


@pytest.mark.parametrize(("name", "size"), [("qwen2", 2), ("qwen2", 3), ("gemma2", 3)])
def test_drafts_pass_through_all_stages(name: str, size: int, tiny_model: TinyModel) -> None:
    """The first stage verifies what it gets of the last, those between are told by the host; some requests are
    preempted meanwhile."""
    arch, overrides = MODELS[name]
    source = source_of(tiny_model(arch, seed=7, **overrides))
    vocab_size = source.hf_config["vocab_size"]
    with torch.inference_mode():
        wanted = run([make_setup(source, WHOLE, None)], random_requests(vocab_size, 11), 1)
        for seed in range(4):
            lines = Lines(size)
            stages = [make_setup(source, PipelineStage(i, size), Link(lines, i)) for i in range(size)]
            assert run(stages, random_requests(vocab_size, 11), seed, wanted) == wanted
            assert not any(lines.hidden)


def test_stages_have_their_layers_alone(tiny_model: TinyModel) -> None:
    source = source_of(tiny_model("qwen3", num_hidden_layers=5, tie_word_embeddings=False))
    whole = make_setup(source, WHOLE, None)
    stages = [make_setup(source, PipelineStage(i, 3), None) for i in range(3)]
    names = [set(stage.model.weights.places) for stage in stages]
    assert set.union(*names) == set(whole.model.weights.places)
    assert sum(map(len, names)) == len(whole.model.weights.places)
    assert "model.embed_tokens.weight" in names[0] and "lm_head.weight" in names[2]
    assert sum(stage.kv_layout.page_bytes for stage in stages) == whole.kv_layout.page_bytes


@pytest.mark.parametrize("tied", [True, False])
def test_a_parameter_is_counted_once(tied: bool, tiny_model: TinyModel) -> None:
    source = source_of(tiny_model("llama", tie_word_embeddings=tied))
    config, formats = read_config(source.hf_config), choose_formats("float32", CPU, source.hf_config)
    whole, *stages = (
        load_weights(build_model(config, formats, stage=stage), source, 5, no_progress).num_parameters
        for stage in (WHOLE, PipelineStage(0, 2), PipelineStage(1, 2))
    )
    assert sum(stages) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_of_a_tied_model_is_plain_on_every_stage(kind: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    """An int8 checkpoint leaves its embeddings plain; the last stage has them as its output matrix alone."""
    folder = Path(shutil.copytree(tiny_model("llama", tie_word_embeddings=True), tmp_path / "model"))
    quantise(folder, kind)
    source = source_of(folder)
    config, formats = read_config(source.hf_config), choose_formats("float32", CPU, source.hf_config)
    for index in range(2):
        model: Any = build_model(config, formats, stage=PipelineStage(index, 2))
        load_weights(model, source, 5, no_progress)
    assert isinstance(model.lm_head.weight, PlainWeight) and isinstance(model.layers[0].mlp.down.weight, ScaledWeight)


@pytest.mark.parametrize("stage", [WHOLE, PipelineStage(0, 2)])
def test_other_stages_tensors_are_not_reported_as_unused(
    stage: PipelineStage, tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of(tiny_model("llama", tie_word_embeddings=False))
    config, formats = read_config(source.hf_config), choose_formats("float32", CPU, source.hf_config)
    with caplog.at_level(logging.WARNING, logger="aengine"):
        load_weights(build_model(config, formats, stage=stage), source, 5, no_progress)
    assert not caplog.records


@pytest.mark.parametrize(("size", "num_layers"), [(1, 3), (2, 7), (3, 8), (4, 4), (5, 31)])
def test_layers_are_divided_evenly(size: int, num_layers: int) -> None:
    own = [PipelineStage(i, size).layers(num_layers) for i in range(size)]
    assert [layer for layers in own for layer in layers] == list(range(num_layers))
    assert max(map(len, own)) - min(map(len, own)) <= 1


def test_what_was_sent_is_not_kept() -> None:
    """Gloo reads a tensor as long as it is on its way."""
    store, sizes = dist.HashStore(), StepSizes(8, torch.float32, BATCHED, ROWS, 3)
    with ThreadPoolExecutor(2) as pool:
        stages = [PipelineStage(index, 2) for index in range(2)]
        first, last = pool.map(lambda stage: GlooLink(store, stage, sizes, timedelta(seconds=60)), stages)
    sent: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    for _ in range(30):
        hidden, token_ids = torch.rand(4, 8), torch.arange(3)
        sent.update((hidden, token_ids))
        first.send(IntermediateTensors(hidden))
        assert torch.equal(last.receive(4).hidden, hidden)
        last.send_ids(token_ids)
        assert torch.equal(first.receive_ids(3), token_ids)
    gc.collect()
    assert len(sent) <= 2 * (2 * 2 + 2)
