"""Replicas that share experts: one executor for the ranks of all, which live and die together.

    StepLoop 0 ─> ReplicaExecutor 0 ─┐                              ┌─> ranks of replica 0
                                     ├─> Rounds ─> JointExecutor ───┤
    StepLoop 1 ─> ReplicaExecutor 1 ─┘                              └─> ranks of replica 1

Each rank has some experts of each layer; attention, KV, scheduler and step loop belong to a replica. See rounds.py for
what is computed when, runner/distributed/experts_group.py for what is exchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...checkpoint.early_checks import has_experts
from ...config import EngineConfig
from ...errors import EngineClosedError, EngineError
from ...ipc.liveness import Liveness
from ...ipc.messages import GrammarOutput, Kind, SchedulerOutput, int32, pack
from ...outputs import StartupProgress
from ...workers.host.answers import AnswerFuture, PendingAnswers
from ..executor import FailureCallback, ProcessExecutor, ProgressCallback, call_ranks
from ..recovery import Watchdog, hang_error
from .rounds import RoundPeers, Rounds


def shares_experts(config: EngineConfig, hf_config: Mapping[str, Any]) -> bool:
    """Return whether the settings, and config.json, ask for experts that are divided among replicas."""
    if not config.enable_expert_parallel or config.data_parallel_size == 1 or config.worker != "default":
        return False
    return has_experts(hf_config)


class Joint:
    """Makes the executors of all replicas, and new ones after their ranks have died."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._ranks: JointExecutor | None = None  # the ranks that were made last
        watchdog = Watchdog(
            asyncio.get_running_loop(),
            config.hang_timeout,
            lambda: Liveness(0) if self._ranks is None else self._ranks.liveness(),
            self._on_hang,
        )
        self._rounds = Rounds(config.data_parallel_size, config.steps_in_flight, watchdog)

    def peers(self, index: int) -> RoundPeers:
        """Return the peers of a replica in the rounds, which its step loop asks; they stay the same over restarts."""
        return self._rounds.peers[index]

    def executor(self, index: int) -> ReplicaExecutor:
        """Make a replica's executor. The first replica that asks after a failure has new ranks made for all."""
        if self._ranks is None or self._ranks.failure is not None:
            self._ranks = JointExecutor(self._config, self._rounds)
        return ReplicaExecutor(self._ranks, index)

    def _on_hang(self, fault: str) -> None:
        if self._ranks is not None:
            self._ranks.fail(hang_error(fault))


class JointExecutor(ProcessExecutor):
    """One executor for the ranks of all replicas."""

    def __init__(self, config: EngineConfig, rounds: Rounds) -> None:
        super().__init__(config)
        self.rounds = rounds
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._failure_callbacks: list[FailureCallback] = []
        self._given: set[tuple[int, int]] = set()  # (replica, step id) of each step that is in no round yet
        self._bitmasks: dict[tuple[int, int], bytes] = {}  # GRAMMAR frames of these steps

    def answers(self, index: int) -> PendingAnswers:
        """Return the pending answers of the replica ``index``."""
        return self._all_answers[index]

    def ranks(self, index: int) -> range:
        """Return the indices of the ranks of the replica ``index``."""
        size = self._config.num_ranks
        return range(index * size, (index + 1) * size)

    async def start_replica(
        self, index: int, load: dict[str, Any], on_progress: ProgressCallback, on_failure: FailureCallback
    ) -> dict[str, Any]:
        """Start all ranks, if that is not under way, and wait until they are ready. See `Executor.start`."""
        self.workers.check()
        self._failure_callbacks.append(on_failure)
        if self._starting is None:
            loop = asyncio.get_running_loop()
            self._starting = loop.create_task(self._start(load, on_progress), name="aengine-ranks-start")
            # each caller gets the error by its own await
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._starting)
        self.workers.check()
        assert self._handshake is not None
        return await self._handshake.ready(index)

    async def _start(self, load: dict[str, Any], on_progress: Callable[[StartupProgress], None]) -> None:
        await self.start(load, on_progress, self._tell_failure)
        for index, answers in enumerate(self._all_answers):
            answers.on_answer = partial(self.rounds.note_answer, index)
        self.rounds.begin(self._publish_round)

    def _tell_failure(self) -> None:
        self.rounds.end()
        for tell in self._failure_callbacks:
            tell()

    async def close_all(self, timeout: float) -> None:
        """Close the ranks of all replicas, once, whoever asks first; ranks that have not started are killed at once."""
        if self._starting is None or not self._starting.done():
            self.terminate()
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.aclose(timeout), name="aengine-ranks-end")
        await asyncio.shield(self._closing)

    def give(self, index: int, out: SchedulerOutput) -> AnswerFuture:
        """Queue a replica's next step for a round. Returns the future of its answer. Raises the executor's failure, if
        it has failed."""
        self.workers.check()
        future = self.answers(index).expect_answer(out.step_id)
        self._given.add((index, out.step_id))
        self.rounds.give(index, out)
        return future

    async def send_bitmask(self, index: int, out: GrammarOutput) -> None:
        """See `Executor.send_grammar`: of a replica's step. It comes behind its step."""
        self.workers.check()
        if (index, out.step_id) in self._given:
            self._bitmasks[index, out.step_id] = pack(out)
        else:
            await self.workers.broadcast(Kind.GRAMMAR, out.step_id, pack(out), self.ranks(index))

    def _publish_round(self, outs: Sequence[SchedulerOutput | None]) -> None:
        sizes = int32(0 if out is None else sum(out.num_scheduled_tokens) for out in outs)
        has_prompts = sum(sizes) > sum(len(out.req_idx) for out in outs if out is not None)
        try:
            for index, out in enumerate(outs):
                if out is not None:
                    out.round_sizes, out.round_has_prompts = sizes, has_prompts
                    self._given.discard((index, out.step_id))
                    self.workers.follow(Kind.STEP, out.step_id, pack(out), self.ranks(index))
                    bitmask = self._bitmasks.pop((index, out.step_id), None)
                    if bitmask is not None:
                        self.workers.follow(Kind.GRAMMAR, out.step_id, bitmask, self.ranks(index))
                elif any(sizes):
                    self.workers.follow(Kind.JOIN, 0, pack([list(sizes), has_prompts]), self.ranks(index))
        except EngineError:  # the ranks have died, and every future has the cause
            pass


class ReplicaExecutor:
    """The `Executor` of one replica, over ranks that are started, fail and end with those of all other replicas."""

    def __init__(self, joint: JointExecutor, index: int) -> None:
        self._joint = joint
        self._index = index
        self._ranks = joint.ranks(index)

    @property
    def failure(self) -> EngineError | None:
        """See `Executor`."""
        return self._joint.failure

    @property
    def workers(self) -> list[Any]:
        """The worker processes of this replica."""
        return [self._joint.workers[rank] for rank in self._ranks]

    async def start(
        self, load: dict[str, Any], on_progress: ProgressCallback, on_failure: FailureCallback
    ) -> dict[str, Any]:
        """See `Executor`. A failure of the start ends all ranks."""
        return await self._joint.start_replica(self._index, load, on_progress, on_failure)

    async def execute_model(self, out: SchedulerOutput) -> AnswerFuture:
        """See `Executor`."""
        return self._joint.give(self._index, out)

    def try_execute_model(self, out: SchedulerOutput) -> AnswerFuture | None:
        """See `Executor`."""
        return self._joint.give(self._index, out)

    def try_revoke(self, on_revoked: Callable[[int], None]) -> bool:
        """See `Executor`. No step is leased: the other replicas would have to drop theirs."""
        return False

    def bitmask(self, num_bytes: int) -> memoryview | None:
        """See `Executor`."""
        return None

    async def send_grammar(self, out: GrammarOutput) -> None:
        """See `Executor`."""
        await self._joint.send_bitmask(self._index, out)

    async def call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        """See `Executor`."""
        return await self._call([method, True, *args], timeout)

    async def call_all(self, method: str, args: Sequence[Any], *, timeout: float) -> list[Any]:
        """See `Executor`."""
        return await self._call([method, False, *args], timeout)

    async def _call(self, message: list[Any], timeout: float) -> list[Any]:
        return await call_ranks(self._joint.workers, self._joint.answers(self._index), message, timeout, self._ranks)

    def liveness(self) -> Liveness:
        """See `Executor`. They are those of all ranks: one that stands still stops all."""
        return self._joint.liveness()

    def memory(self) -> tuple[int | None, int | None]:
        """See `Executor`. Of this replica's ranks."""
        if self.failure is not None:
            return None, None
        try:
            resident = sum(worker.resident_bytes() for worker in self.workers)
            on_devices = sum(worker.channel.device_bytes for worker in self.workers)
        except (EngineClosedError, ValueError):  # the workers are being ended by another thread
            return None, None
        return resident or None, on_devices or None

    def fail(self, error: EngineError) -> None:
        """See `Executor`. All ranks end."""
        self._joint.fail(error)

    async def aclose(self, timeout: float) -> None:
        """See `Executor`. All ranks end."""
        await self._joint.close_all(timeout)

    def terminate(self) -> None:
        """See `Executor`. All ranks end."""
        self._joint.terminate()
