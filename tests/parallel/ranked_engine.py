"""An engine of several ranks in one process: `scenarios.Engine` with a thread for each rank's model and runner."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import numpy as np
from ranks_as_threads import Meeting, ThreadGroup
from scenarios import Engine

from aengine.config import EngineConfig
from aengine.ipc.messages import ModelRunnerOutput
from aengine.runner.startup import load
from aengine.workers.rank import Rank


class RankThreads:
    """Calls of all ranks side by side."""

    def __init__(self, size: int) -> None:
        self.meeting = Meeting(size)
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"rank-{i}") for i in range(size)]

    def call(self, of_rank: Callable[[int], Any]) -> list[Any]:
        """What each returns; raises what the first to fail has raised."""

        def run(rank: int) -> Any:
            try:
                return of_rank(rank)
            except BaseException:
                self.meeting.abort()
                raise

        futures = [thread.submit(run, rank) for rank, thread in enumerate(self._threads)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise min(errors, key=lambda error: type(error).__name__ == "BrokenBarrierError")
        return [future.result() for future in futures]

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.shutdown()


class RankedAnswer:
    """The answers of all ranks, which are the same."""

    def __init__(self, ranks: RankThreads, answers: list[Any]) -> None:
        self._ranks = ranks
        self._answers = answers

    def get(self) -> ModelRunnerOutput:
        first, *others = self._ranks.call(lambda rank: self._answers[rank].get())
        for other in others:
            assert other.token_ids == first.token_ids and other.errors == first.errors
            assert np.array_equal(other.logprobs, first.logprobs) or other.logprobs == first.logprobs
        return first


class RankedRunner:
    def __init__(self, ranks: RankThreads, runners: list[Any]) -> None:
        self._ranks = ranks
        self.runners = runners

    def execute_model(self, out: Any) -> None:
        copies = [deepcopy(out) for _ in self.runners]
        self._ranks.call(lambda rank: self.runners[rank].execute_model(copies[rank]))

    def sample_tokens(self, grammar: Any) -> RankedAnswer:
        answers = self._ranks.call(lambda rank: self.runners[rank].sample_tokens(deepcopy(grammar)))
        return RankedAnswer(self._ranks, answers)


class RankedModel:
    """`LocalModel` of all ranks."""

    def __init__(self, config: EngineConfig, source: dict[str, Any]) -> None:
        size = config.tensor_parallel_size
        self._ranks = RankThreads(size)
        self.groups: dict[int, ThreadGroup] = {}
        ranks = [Rank(index=i, tp_rank=i, tp_size=size, device="cpu") for i in range(size)]
        opened, load.open_group = load.open_group, self._open_group
        try:
            self.models = self._ranks.call(lambda i: load.load_model(config, deepcopy(source), ranks[i], _no_progress))
        finally:
            load.open_group = opened
        offers = [model.offer for model in self.models]
        self.offer = offers[0] | {"num_blocks": min(offer["num_blocks"] for offer in offers)}
        assert all(offer | self.offer == self.offer for offer in offers)

    def _open_group(self, rank: Rank, platform: Any) -> ThreadGroup:
        group = self.groups[rank.tp_rank] = ThreadGroup(self._ranks.meeting, rank.tp_rank)
        return group

    def allocate(self, plan: dict[str, int]) -> tuple[RankedRunner, dict[str, Any]]:
        made = self._ranks.call(lambda rank: self.models[rank].allocate(plan))
        return RankedRunner(self._ranks, [runner for runner, _ in made]), made[0][1]

    def __del__(self) -> None:
        self._ranks.shutdown()


class RankedEngine(Engine):
    """The setting ``tensor_parallel_size`` says how many ranks."""

    def _load(self, source: dict[str, Any]) -> RankedModel:
        return RankedModel(self.config, source)


def _no_progress(stage: str, done: int, total: int, unit: str) -> None:
    pass
