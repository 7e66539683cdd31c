"""Ranks as threads of this process, for tests of what ranks compute together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Meeting:
    """Where the ranks of one group exchange tensors; a rank that leaves by an exception ends the others' waits."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=120)
        self._brought: list[Any] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, by rank; all must be alike."""
        self._brought[rank] = x.clone()
        self._barrier.wait()
        found: list[Tensor] = list(self._brought)
        self._barrier.wait()
        kinds = {(tensor.dtype, tuple(tensor.shape)) for tensor in found}
        assert len(kinds) == 1, f"ranks bring different tensors: {kinds}"
        return found

    def abort(self) -> None:
        self._barrier.abort()


class ThreadGroup:
    """A `TensorGroup` whose ranks are threads; ``calls`` has what was called, with shapes."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.size = meeting.size
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._meeting = meeting
        self._is_rehearsing = False

    def add_sum(self, residual: Tensor, partial: Tensor) -> None:
        assert residual.shape == partial.shape
        self._note("add_sum", partial)
        residual.add_(self._sum(partial))

    def sum(self, partial: Tensor) -> Tensor:
        self._note("sum", partial)
        return self._sum(partial).to(partial.dtype)

    def gather(self, x: Tensor) -> Tensor:
        self._note("gather", x)
        if self._is_rehearsing:
            return x.expand(self.size, *x.shape).clone()
        return torch.stack(self._meeting.exchange(self.rank, x))

    def warm_up(self, hidden_size: int, dtype: torch.dtype) -> None:
        pass

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        self._is_rehearsing = True
        yield
        self._is_rehearsing = False

    def _note(self, method: str, x: Tensor) -> None:
        if not self._is_rehearsing:
            self.calls.append((method, tuple(x.shape)))

    def _sum(self, partial: Tensor) -> Tensor:
        if self._is_rehearsing:
            return partial.float()
        first, *others = self._meeting.exchange(self.rank, partial)
        total = first.float()
        for other in others:
            total = total + other
        return total


def run_ranks(size: int, of_rank: Callable[[ThreadGroup], T]) -> list[T]:
    """What ``of_rank`` returns on each rank of a group; raises what one of them raised first."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = of_rank(ThreadGroup(meeting, rank))
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real: Sequence[BaseException] = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)] or errors
    if real:
        raise real[0]
    return results
