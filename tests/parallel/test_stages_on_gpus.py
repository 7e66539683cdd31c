"""Pipeline stages as on GPUs, without one: what they exchange, and their graphs, which others have no part in.

Kernels run in Triton's interpreter. One process plays all stages, each step on one after the other, so that what a
stage waits for is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import CPU, no_progress, source_of
from test_gpu_path import Launches, LikeGpu, check_tokens, steps
from test_graphs_of_ranks import Again, capture_batch
from torch import Tensor

from aengine.checkpoint.source import ModelSource
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError
from aengine.ipc.messages import GrammarOutput, SchedulerOutput
from aengine.kernels.dispatch import triton_everywhere
from aengine.runner.async_output import AsyncOutput
from aengine.runner.attention.backend import TritonAttention
from aengine.runner.attention.kv_format import KVFormat
from aengine.runner.attention.prefill import TritonPrefill
from aengine.runner.distributed import cuda_link, opening
from aengine.runner.distributed.cuda_link import CudaLink, StageMemory
from aengine.runner.distributed.pipeline import IntermediateTensors, StepSizes
from aengine.runner.distributed.stage import WHOLE, PipelineStage
from aengine.runner.distributed.symmetric_memory import NoPeers
from aengine.runner.exchange.awaited_ids import AwaitedIds
from aengine.runner.graphs.batch_graphs import BatchGraphs
from aengine.runner.graphs.cuda_graphs import CudaGraphManager, PassedOn, _Graphs
from aengine.runner.model_runner import ModelRunner
from aengine.runner.models import build_model, read_config
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.request_state import SCALAR_WORDS, RequestState
from aengine.runner.sampling.sampler import Sampling
from aengine.runner.staged_writes import StagedArena
from aengine.runner.startup.layer_kinds import one_layer_of_each_kind
from aengine.runner.startup.profile import profile
from aengine.runner.startup.setup import RunnerSetup
from aengine.runner.weights.formats import choose_formats
from aengine.runner.weights.sources.loader import load_weights
from aengine.workers.rank import Rank

TinyModel = Callable[..., Path]
NUM_BLOCKS, BLOCK_SIZE, MAX_LEN, MAX_SEQS, BATCHED = 32, 16, 96, 8, 128


# -- the link


def make_links(size: int, sizes: StepSizes) -> list[CudaLink]:
    """Of all stages, over memory of this process."""
    memory = [torch.zeros(StageMemory.num_bytes(sizes), dtype=torch.uint8) for _ in range(size)]
    stages = [StageMemory(part, sizes) for part in memory]
    return [CudaLink(PipelineStage(i, size), sizes, stages, memory) for i in range(size)]


class CountersByCpu:
    """The kernels `signal` and `wait` as functions for threads. ``waits``: how often one had to wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = 0
        self.is_over = False
        monkeypatch.setattr(cuda_link, "signal", self.signal)
        monkeypatch.setattr(cuda_link, "wait", self.wait)

    def signal(self, counter: Tensor, number: int) -> None:
        ctypes.c_int64.from_address(int(counter)).value = number

    def wait(self, counter: Tensor, number: int) -> None:
        while ctypes.c_int64.from_address(int(counter)).value < number:
            assert not self.is_over
            self.waits += 1
            time.sleep(0)


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_stages_side_by_side(size: int, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Each as fast as it can: none overwrites what another has not read."""
    counters = CountersByCpu(monkeypatch)
    depth = size + 1
    links = make_links(size, StepSizes(5, torch.float32, 7, 4, steps_in_flight=depth))
    steps = [(rng.randint(1, 7), rng.choice((0, 0, 2, 3))) for _ in range(200)]  # tokens; ids sampled
    sampling = [number for number, (_, count) in enumerate(steps) if count]
    errors: list[BaseException] = []

    def play(index: int) -> None:
        """What is sent has the number of the step and of the stages that it came through."""
        left = deque(sampling)
        for number, (num_tokens, count) in enumerate(steps):
            if index == 0 and count and sampling.index(number) >= depth:
                step = left.popleft()
                assert links[0].receive_ids(steps[step][1]).eq(step).all()
            hidden = torch.full((num_tokens, 5), number)
            if index:
                hidden = links[index].receive(num_tokens).hidden
                time.sleep(0.0005 * (index == size - 1))  # the others would be quicker
                assert hidden.eq(number + 0.25 * (index - 1)).all()
                hidden.add_(0.25)
            if index < size - 1:
                links[index].send(IntermediateTensors(hidden))
            elif count:
                links[index].send_ids(torch.full((count,), number))

    def run(index: int) -> None:
        try:
            play(index)
        except BaseException as error:
            errors.append(error)
            counters.is_over = True

    threads = [threading.Thread(target=run, args=(i,)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert counters.waits


def test_the_counters_of_kernels() -> None:
    """A wait for a number that has come ends."""
    sizes = StepSizes(8, torch.float16, 4, 3, steps_in_flight=3)
    first, last = make_links(2, sizes)
    for number in range(1, 9):
        hidden = torch.full((number % 4 + 1, 8), number).half()
        first.send(IntermediateTensors(hidden))
        assert last.receive(len(hidden)).hidden.equal(hidden)
        last.send_ids(torch.tensor([number, 2 * number]))
        assert first.receive_ids(1).tolist() == [number]
    for link in (first, last):
        link.warm_up()


def test_ids_that_nobody_needs_are_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage never waits for room, though no step needs a token: each request gets one."""
    counters = CountersByCpu(monkeypatch)
    sizes = StepSizes(8, torch.float32, 8, 4, steps_in_flight=3)
    first, last = make_links(2, sizes)
    arena = StagedArena({"scalars": (4, SCALAR_WORDS), "token_ids": (4, 8)}, CPU)
    awaited = AwaitedIds(RequestState(arena), first)
    for number in range(20):
        rows = np.array([number % 4])
        awaited.note_new_owner(number % 4)
        awaited.receive_for(rows)
        awaited.expect(rows)
        last.send_ids(torch.tensor([number]))
    assert not counters.waits


def test_gpus_without_peers_are_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def open_nothing(*args: Any) -> None:
        raise NoPeers("CUDA driver error: peer access is not supported between these two devices")

    monkeypatch.setattr(opening, "_check_devices", lambda *args, **how: None)
    monkeypatch.setattr(cuda_link, "open_cuda_link", open_nothing)
    platform = CpuPlatform()
    monkeypatch.setattr(platform, "device", torch.device("cuda", 0))
    rank = Rank(0, pp_size=2, rendezvous=str(tmp_path / "meeting"))
    with pytest.raises(ModelLoadError, match="pipeline_parallel_size=2: .*peer access is not supported.*name GPUs"):
        opening.open_link(rank, platform, StepSizes(8, torch.float32, 8, 4, 3))


# -- the stages


def make_setup(source: ModelSource, stage: PipelineStage, link: CudaLink | None, **settings: Any) -> RunnerSetup:
    """As on a GPU if there is a link, or other stages."""
    config = EngineConfig.create(
        source.path, {"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": BATCHED, "dtype": "float32", **settings}
    )
    model_config = read_config(source.hf_config)
    model = build_model(model_config, choose_formats("float32", CPU, source.hf_config), stage=stage)
    load_weights(model, source, 5, no_progress)
    platform = CpuPlatform() if stage is WHOLE else LikeGpu()
    attention = platform.choose_attention(config, model_config, torch.float32)
    if stage is not WHOLE:
        attention = TritonAttention(TritonPrefill())
    where = (platform, attention, KVFormat(torch.float32), BLOCK_SIZE, BATCHED, 0, 1)
    return RunnerSetup(config, model_config, model, *where, link=link)


def make_stages(source: ModelSource, size: int, **settings: Any) -> list[RunnerSetup]:
    config = read_config(source.hf_config)
    links = make_links(size, StepSizes(config.hidden_size, torch.float32, BATCHED, MAX_SEQS, size + 1))
    return [make_setup(source, PipelineStage(i, size), links[i], **settings) for i in range(size)]


def capture_decode(graphs: CudaGraphManager, size: int) -> None:
    """`CudaGraphManager.capture`."""
    step = graphs.step
    step.set_rows(np.empty(0, dtype=np.int64), size)
    half = step.run(size)
    first: Any = Again(lambda: step.run(size), half)
    if isinstance(half, PassedOn):
        graphs._graphs[size] = _Graphs(first, {}, half)
        return
    second = {kind: Again(lambda kind=kind: step.sample(half, kind) or (), ()) for kind in Sampling}
    graphs._graphs[size] = _Graphs(first, second, half)  # type: ignore[arg-type]
    graphs._ends[size] = {kind: Again(lambda kind=kind: step.end(size, kind) or (), ()) for kind in Sampling}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs of a kind."""
    monkeypatch.setattr(BatchGraphs, "capture", capture_batch)
    monkeypatch.setattr(CudaGraphManager, "capture", capture_decode)
    yield


class Stages:
    """All stages as one runner: each phase of a step on one after the other."""

    def __init__(self, runners: list[ModelRunner]) -> None:
        self.runners = runners
        self.vocab_size = runners[-1].vocab_size
        self.graphs = runners[-1].graphs

    def execute_model(self, out: SchedulerOutput) -> None:
        for runner in self.runners:
            runner.execute_model(out)

    def sample_tokens(self, grammar: GrammarOutput | None) -> AsyncOutput:
        *others, last = [runner.sample_tokens(grammar) for runner in self.runners]
        assert not any(answer.get().errors or max(answer.get().token_ids) >= 0 for answer in others)
        return last


@pytest.mark.slow
@pytest.mark.usefixtures("captures", "few_idle_programs")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding is computed with whatever lies in memory
def test_the_same_tokens(tiny_model: TinyModel, rng: random.Random) -> None:
    """Of two stages on which some steps are graphs, and the others run op by op."""
    source = source_of(tiny_model("llama", num_hidden_layers=2))
    with torch.inference_mode():
        plain = make_setup(source, WHOLE, None).make_runner(NUM_BLOCKS, MAX_LEN)
        runners = [setup.make_runner(NUM_BLOCKS, MAX_LEN) for setup in make_stages(source, 2)]
        with triton_everywhere():
            for runner in runners:
                assert runner.graphs is not None
                for size in (2, 4):
                    runner.graphs.capture(size)
        check_tokens(plain, Stages(runners), rng)
    for runner in runners:
        assert runner.batch_graphs is not None and runner.batch_graphs._loaded
        assert runner.requests.num_tokens.tolist() == plain.requests.num_tokens.tolist()
        own, whole = runner.requests.scalars, plain.requests.scalars
        assert own.num_computed_tokens[[2, 5]].equal(whole.num_computed_tokens[[2, 5]]), "rows that are in use"


@pytest.mark.slow
@pytest.mark.usefixtures("few_idle_programs")
def test_what_is_read_before_a_wait_is_written_by_then(
    tiny_model: TinyModel, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on stages that have no lookup of embeddings ahead of their layers: prompts, decodes, both."""
    source = source_of(tiny_model("llama", num_hidden_layers=3))
    with torch.inference_mode():
        runners = [setup.make_runner(NUM_BLOCKS, MAX_LEN) for setup in make_stages(source, 3, enforce_eager=True)]
        for out, wanted in zip(steps(rng), (3, 3, 6)):
            stages = Stages(runners)
            with monkeypatch.context() as patch, triton_everywhere(), Launches(patch) as launches:
                stages.execute_model(out)
                stages.sample_tokens(None)
            products = ("aten.linear.default", "aten.addmm.out")  # in 16 bits these are kernels that overlap others
            launches.log = [launch for launch in launches.log if launch[0] not in products]
            assert launches.check() == wanted


class ProfiledGpu(LikeGpu):
    def peak_of(self, work: Callable[[], None]) -> int:
        work()
        return 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # it computes with whatever lies in memory
@pytest.mark.parametrize("index", [0, 1])
def test_a_stage_starts_by_itself(index: int, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled, here launched, and the largest batch is run, without the other stage."""
    from aengine.kernels.triton import launch

    monkeypatch.setattr(launch, "compiling", lambda num_threads: contextlib.nullcontext())
    source = source_of(tiny_model("llama", num_hidden_layers=2))
    settings = {"enforce_eager": True, "max_model_len": 32, "kv_cache_memory_bytes": 1 << 20}
    with torch.inference_mode(), triton_everywhere():
        setup = replace(make_stages(source, 2, **settings)[index], platform=ProfiledGpu())
        plan = profile(setup, no_progress)
    assert plan.num_blocks and plan.max_model_len == 32


@pytest.mark.parametrize("arch, overrides", [("qwen3_moe", {"num_experts": 4}), ("llama", {})])
def test_layers_of_a_stage_are_alike(arch: str, overrides: dict[str, Any], tiny_model: TinyModel) -> None:
    source = source_of(tiny_model(arch, num_hidden_layers=4, **overrides))
    for index in range(2):
        setup = make_setup(source, PipelineStage(index, 2), None)
        with one_layer_of_each_kind(setup.model, setup.kv_layout.layers):
            assert len(setup.model.layers) == 1
        assert len(setup.model.layers) == 2
