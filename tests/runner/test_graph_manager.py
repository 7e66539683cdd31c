"""Which steps run as graphs: those that idle times had room to capture, and the second of each shape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from aengine.runner.graphs.cuda_graphs import BatchDescriptor, CudaGraphManager, GraphKind

ROWS = np.arange(3)
SHAPE = BatchDescriptor(4, GraphKind.SAMPLED)  # of three rows


class Log:
    """A step, a platform and graphs that tell what was done."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.has_memory = True

    def set_rows(self, rows: Any, size: int) -> None:
        pass

    def run(self, descriptor: BatchDescriptor) -> None:
        if self.done[-1:] != ["capture"]:
            self.done.append("op by op")

    def run_padded(self, descriptor: BatchDescriptor) -> None:
        self.done.append("padding alone")

    def graph_pool(self) -> None:
        return None

    @contextlib.contextmanager
    def capture(self, pool: None) -> Iterator[Log]:
        if not self.has_memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.done.append("capture")
        yield self

    def replay(self) -> None:
        self.done.append("replay")

    def release_cached(self) -> None:
        self.done.append("release")


def make(**how: bool) -> tuple[Log, CudaGraphManager]:
    log = Log()
    return log, CudaGraphManager(log, [1, 2, 4], log, enforce_eager=how.get("enforce_eager", False))  # type: ignore[arg-type]


def run_three(manager: CudaGraphManager) -> None:
    for _ in range(3):
        manager.run(ROWS, GraphKind.SAMPLED)


def test_the_second_step_of_a_shape_captures_it() -> None:
    log, manager = make()
    run_three(manager)
    assert log.done == ["op by op", "capture", "replay", "replay"]
    assert SHAPE not in manager.missing()


def test_what_is_prepared_is_replayed_at_once() -> None:
    log, manager = make()
    manager.prepare(SHAPE)
    assert manager.missing()[0] == SHAPE, "it is half done"
    manager.prepare(SHAPE)
    run_three(manager)
    assert log.done == ["padding alone", "capture", *["replay"] * 3]


def test_shapes_of_steps_that_ran_are_prepared_first() -> None:
    _, manager = make()
    first = manager.missing()
    assert [one.size for one in first] == sorted(one.size for one in first) and first[0].size == 1
    manager.run(ROWS, GraphKind.SAMPLED)
    assert manager.missing()[0] == SHAPE


def test_without_memory_for_a_graph_its_steps_run_op_by_op(caplog: pytest.LogCaptureFixture) -> None:
    log, manager = make()
    log.has_memory = False
    run_three(manager)
    assert log.done == ["op by op", "release", "release", "op by op", "op by op"]
    assert caplog.text.count("op by op") == 1 and SHAPE not in manager.missing()


def test_an_eager_manager_captures_nothing() -> None:
    log, manager = make(enforce_eager=True)
    run_three(manager)
    assert log.done == ["op by op"] * 3 and manager.missing() == []


def test_the_graphs_of_a_start_find_what_loading_took_given_back() -> None:
    log, manager = make()
    manager.capture_all(lambda done, total: None)
    assert log.done == [*["padding alone"] * 3, "release", *["capture"] * 3]
