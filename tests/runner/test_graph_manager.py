"""Which steps run as graphs: decodes from the start on; with prompts, those that idle times had room to capture, and
the second of each shape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aengine.limits.graphs import GRAPH_MODES
from aengine.runner.graphs.batch_graphs import BatchGraphs, BatchOutputs, BatchShape
from aengine.runner.graphs.cuda_graphs import CudaGraphManager, HalfDone
from aengine.runner.sampling.sampler import Sampling

ROWS = np.arange(3)
SHAPE = BatchShape(16, 8)


class Logits(str):
    is_cuda = False


class Log:
    """A step, a platform and graphs that tell what was done."""

    samples = True

    def __init__(self) -> None:
        self.done: list[str] = []
        self.has_memory = True
        self.is_capturing = False

    def set_rows(self, rows: Any, size: int) -> Any:
        return rows

    def set_bitmasks(self, rows: Any, bits: Any, size: int) -> None:
        self.done.append("bitmasks")

    def run(self, size: int) -> Any:
        self._note(f"run {size}")
        return HalfDone(Logits(f"half {size}"), None)  # type: ignore[arg-type]

    def prepare(self, size: int) -> int:
        return size

    def forward(self, inputs: int, size: int) -> np.ndarray:
        self._note(f"layers of {size}")
        return np.zeros(size)

    def sample(self, half: Any, sampling: Sampling) -> None:
        self._note(f"{half.logits} {sampling.name}")

    def _note(self, what: str) -> None:
        self.done.append(f"capture {what}" if self.is_capturing else what)

    def hold(self, hidden: Any, places: Any, rows: Any, size: int) -> None:
        self.done.append(f"hold {size}")

    def end(self, size: int, sampling: Sampling) -> None:
        self._note(f"end {size} {sampling.name}")

    def run_padded(self, size: int, *, has_end: bool) -> None:
        self.done.append("padding alone" + " with an end" * has_end)

    def graph_pool(self) -> None:
        return None

    @contextlib.contextmanager
    def capture(self, pool: None) -> Iterator[Any]:
        if not self.has_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        begin, self.is_capturing = len(self.done), True
        yield SimpleNamespace(replay=lambda: self.done.append(f"replay {captured}"))
        self.is_capturing = False
        captured = self.done[begin].removeprefix("capture ")

    def release_cached(self) -> None:
        self.done.append("release")


def make(**how: bool) -> tuple[Log, CudaGraphManager]:
    log = Log()
    return log, CudaGraphManager(log, [1, 2, 4], log, **{"enforce_eager": False} | how)  # type: ignore[arg-type]


def test_the_second_half_is_the_one_that_the_batch_asks_for() -> None:
    log, manager = make()
    manager.capture_all(lambda done, total: None)
    log.done.clear()
    for sampling in Sampling:
        manager.run(ROWS, manager.size_for(len(ROWS)))
        manager.sample(ROWS[:0], None, sampling)
    assert log.done == [
        *["replay run 4", "replay half 4 PLAIN"],
        *["replay run 4", "bitmasks", "replay half 4 MASKED"],
        *["replay run 4", "bitmasks", "replay half 4 CUT"],
        *["replay run 4", "bitmasks", "replay half 4 ANY"],
    ]


def test_an_end_that_no_graph_holds_is_behind_the_graph_of_the_layers() -> None:
    """It gets the logits that the graph leaves."""
    log, manager = make()
    manager.capture_all(lambda done, total: None)
    log.done.clear()
    for rows, size in (ROWS, 4), (ROWS[:1], 1):
        places, half = manager.run_to_logits(rows, size)
        assert (list(places), half.logits) == (list(rows), f"half {size}")
    assert log.done == ["replay run 4", "replay run 1"]


def test_the_end_of_a_step_with_prompts_is_one_launch() -> None:
    """In any size from 1, 4, 16, ... that holds the batch, also where no decode has it."""
    log, manager = make()
    manager.capture_all(lambda done, total: None)
    log.done.clear()
    for rows, size in (ROWS[:1], 1), (ROWS[:2], 4), (ROWS, 4):
        for sampling in Sampling:
            manager.hold("hidden", None, rows)  # type: ignore[arg-type]
            manager.end(rows[:0], None, sampling)
        bitmasks = [[], ["bitmasks"], ["bitmasks"], ["bitmasks"]]
        for sampling, before in zip(Sampling, bitmasks, strict=True):
            wanted = [f"hold {size}", *before, f"replay end {size} {sampling.name}"]
            assert log.done[: len(wanted)] == wanted
            del log.done[: len(wanted)]
    assert not log.done


def test_an_eager_manager_captures_nothing() -> None:
    log, manager = make(enforce_eager=True)
    manager.capture_all(lambda done, total: None)
    manager.run(ROWS, manager.size_for(len(ROWS)))
    manager.sample(ROWS[:0], None, Sampling.CUT)
    manager.hold("hidden", None, ROWS[:2])  # type: ignore[arg-type]
    manager.end(ROWS[:0], None, Sampling.PLAIN)
    assert log.done == ["run 4", "bitmasks", "half 4 CUT", "hold 4", "end 4 PLAIN"] and manager.num_captured == 0


def test_ends_alone_are_graphs_where_layers_can_not_be() -> None:
    """Of decodes and of steps with prompts, in any size that holds the batch; layers run op by op, padded."""
    log, manager = make(enforce_eager=True, captures_ends=True)
    manager.capture_all(lambda done, total: None)
    assert [what for what in log.done if what.startswith("capture")] == [
        f"capture end {size} {sampling.name}" for size in (4, 1) for sampling in Sampling
    ]
    log.done.clear()
    for rows, size in (ROWS[:2], 2), (ROWS[:1], 1):
        assert manager.run(rows, size) is None
        manager.sample(rows, None, Sampling.CUT)
    manager.hold("hidden", None, ROWS)  # type: ignore[arg-type]
    manager.end(ROWS[:0], None, Sampling.PLAIN)
    assert log.done == [
        *["layers of 2", "hold 4", "bitmasks", "replay end 4 CUT"],
        *["layers of 1", "hold 1", "bitmasks", "replay end 1 CUT"],
        *["hold 4", "replay end 4 PLAIN"],
    ]
    assert manager.num_captured == 2


def test_launches_are_told_by_their_parts() -> None:
    """And what pads them: rows of the layers, whatever their end is padded to."""
    for how, mode in ({}, "FULL"), ({"captures_ends": True}, "PIECEWISE"), ({"enforce_eager": True}, "NONE"):
        _, manager = make(**{"enforce_eager": mode != "FULL"} | how)
        manager.capture_all(lambda done, total: None)
        manager.run(ROWS, 4)
        manager.sample(ROWS, None, Sampling.PLAIN)
        assert manager.launches.take() == (GRAPH_MODES.index(mode), 1)  # type: ignore[arg-type]
        assert manager.launches.take() == (0, 0)
    log, graphs = make_for_prompts()
    run_three(graphs)
    assert graphs.launches.take() == (GRAPH_MODES.index("PIECEWISE"), 30), "three steps of 6 tokens in 16"
    run_three(graphs)
    assert graphs.launches.take() == (GRAPH_MODES.index("FULL"), 30)


def test_the_graphs_of_a_start_find_what_loading_took_given_back() -> None:
    log, manager = make()
    manager.capture_all(lambda done, total: None)
    captured = [what for what in log.done if "run" in what]
    padded = ["padding alone with an end", "padding alone", "padding alone with an end"]
    assert log.done[:5] == [*padded, "release", "capture run 4"]
    assert captured == [f"capture run {size}" for size in (4, 2, 1)]


def make_for_prompts() -> tuple[Log, BatchGraphs]:
    log = Log()
    requests: Any = SimpleNamespace(token_ids=torch.zeros(1))
    graphs = BatchGraphs(requests, SimpleNamespace(has_states=False), None, 8, 32, log)  # type: ignore[arg-type]

    def step(shape: BatchShape) -> BatchOutputs:
        log._note("step")
        return BatchOutputs(*[torch.zeros(shape.num_reqs)] * 4)

    graphs._step = step  # type: ignore[method-assign]
    return log, graphs


def run_three(graphs: BatchGraphs) -> None:
    plan: Any = SimpleNamespace(rows=ROWS, query_lens=np.array([4, 1, 1]), num_tokens=6, num_reqs=3)
    for _ in range(3):
        shape = graphs.shape_for(plan, 16)
        if shape is not None:
            graphs.run(plan, shape)


def test_the_second_step_of_a_shape_captures_it() -> None:
    log, graphs = make_for_prompts()
    run_three(graphs)
    assert log.done == ["step", "capture step", "replay step", "replay step"]
    assert SHAPE not in graphs.missing()


def test_small_shapes_are_ready_after_the_start() -> None:
    log, graphs = make_for_prompts()
    graphs.prepare_first()
    assert log.done == ["step", "capture step"] * 2 and not graphs.missing()


def test_what_is_prepared_is_replayed_at_once() -> None:
    log, graphs = make_for_prompts()
    graphs.prepare(SHAPE)
    assert graphs.missing()[0] == SHAPE, "it is half done"
    graphs.prepare(SHAPE)
    run_three(graphs)
    assert log.done == ["step", "capture step", *["replay step"] * 3]


def test_shapes_of_steps_that_ran_are_prepared_first() -> None:
    _, graphs = make_for_prompts()
    first = graphs.missing()
    assert first[0] == SHAPE and len(first) > 1
    graphs.prepare(first[-1])
    assert graphs.missing()[0] == first[-1]


def test_without_memory_for_a_graph_its_steps_run_op_by_op(caplog: pytest.LogCaptureFixture) -> None:
    log, graphs = make_for_prompts()
    log.has_memory = False
    run_three(graphs)
    assert log.done == ["step", "release", "release"], "later steps are the runner's, op by op"
    assert caplog.text.count("op by op") == 1 and SHAPE not in graphs.missing()
