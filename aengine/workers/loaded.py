"""Interface of the setting ``worker``: a function that loads the model of one rank, and what it returns.

    load(config, source, rank, progress) -> LoadedModel ──allocate(plan)──> Runner

``config``: EngineConfig; ``source``: a mapping, `ModelSource.to_wire`; ``rank``: Rank; ``progress``: Progress. It may
raise ModelLoadError, whose message the host's caller sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ..config import EngineConfig
from ..errors import InvalidRequestError
from ..ipc.messages import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from .rank import Rank

Progress = Callable[[str, int, int, str], None]
"""Gets stage, done, total (0: not known) and their unit."""


@runtime_checkable
class Later(Protocol):
    """What a collective call returns whose value is not known yet: it is replied when it is, and steps go on."""

    def ready(self) -> bool: ...

    def get(self) -> Any: ...


class Answer(Protocol):
    """The result of `Runner.sample_tokens`."""

    def ready(self) -> bool: ...

    def get(self) -> ModelRunnerOutput: ...


class Runner(Protocol):
    """Interface of what computes steps on a worker. Its methods are called by one thread."""

    def execute_model(self, out: SchedulerOutput) -> None: ...

    def sample_tokens(self, grammar: GrammarOutput | None) -> Answer: ...

    @property
    def prepares_after(self) -> float | None:
        """Seconds without work after which `prepare_more` may be called; None: it has nothing to do."""

    def prepare_more(self) -> None:
        """Prepare, for some 10 ms as a rule, something that the first steps of some kinds would have to wait for."""


@runtime_checkable
class JoiningRunner(Runner, Protocol):
    """A `Runner` for experts that are divided among replicas, which compute their steps in rounds."""

    def join(self, sizes: Sequence[int], has_prompts: bool) -> None:
        """Take part in a round in which this replica has no step. ``sizes``: tokens of each replica; ``has_prompts``:
        whether a request of the round computes several tokens."""


class LoadedModel(Protocol):
    """A model on its device, before it has memory for sequences."""

    @property
    def offer(self) -> Mapping[str, Any]:
        """Plain data: of each PLAN_LIMITS the most that this rank can keep; whatever else is in it must be equal on all
        ranks, ``block_size`` and ``vocab_size`` at least."""

    def allocate(self, plan: Mapping[str, int], bitmasks: memoryview | None = None) -> tuple[Runner, dict[str, Any]]:
        """Allocate the memory for ``plan`` (PLAN_LIMITS). Returns the runner, and what the host should know of this
        rank beside its offer. ``bitmasks``: memory shared with the host, in which the bitmasks of GRAMMAR frames will
        lie; None: they are part of the frames."""

    def reload_weights(self, path: str | None = None) -> int:
        """Read the weights again, into the memory that they have: from the files of the start, or from ``path``, a
        model of the same shapes. Returns the number of parameters. Raises InvalidRequestError; weights that came
        before the one that was wrong have been replaced then."""

    def device_bytes(self) -> int:
        """Return the bytes that this process has taken on the device; called by another thread, at any time."""

    def start_profile(self, folder: str | None) -> str:
        """Begin to record a trace of the device's work. Returns the folder. Raises InvalidRequestError."""

    def stop_profile(self) -> str:
        """End it, and write it. Returns the file's path. Raises InvalidRequestError."""


@dataclass(frozen=True)
class WorkerContext:
    """What a worker extension (the setting ``worker_extension``) is made with, when the worker is ready."""

    config: EngineConfig
    rank: Rank
    model: LoadedModel
    runner: Runner


class FixedModel:
    """A `LoadedModel` whose runner is there already, whatever is agreed: for workers that keep no KV."""

    def __init__(self, runner: Runner, offer: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> None:
        self._runner = runner
        self.offer = offer
        self._facts = facts or {}

    def allocate(self, plan: Mapping[str, int], bitmasks: memoryview | None = None) -> tuple[Runner, dict[str, Any]]:
        return self._runner, dict(self._facts)

    def reload_weights(self, path: str | None = None) -> int:
        raise InvalidRequestError("this worker can't load weights again")

    def device_bytes(self) -> int:
        return 0

    def start_profile(self, folder: str | None) -> str:
        raise InvalidRequestError("this worker can't be profiled")

    def stop_profile(self) -> str:
        raise InvalidRequestError("no profile is being recorded: start_profile begins one")
