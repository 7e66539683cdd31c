"""The start of one rank, in its process: load and profile, then, when all ranks have agreed, allocate and capture."""

from __future__ import annotations

import ctypes
import gc
import inspect
import logging
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

from ..config import EngineConfig
from ..errors import AEngineError, ModelLoadError, NotEnoughMemoryError
from ..ipc.channel import WorkerChannel
from ..ipc.messages import Kind, pack
from ..limits.ulimits import is_out_of_memory, limit_hint, memory_ulimit_hint
from .calls import Extension, extension_class
from .loaded import LoadedModel, Runner, WorkerContext
from .logs import WorkerLogs
from .rank import Rank

_PROGRESS_PERIOD = 0.05  # seconds between two reports of the same stage


class Loading:
    """Answers LOAD with PROFILED and ALLOCATE with READY. ``target``: the ``module:function`` that loads the model."""

    def __init__(self, channel: WorkerChannel, rank: int, target: str, logs: WorkerLogs) -> None:
        self._channel = channel
        self._target = target
        self._logs = logs
        self.rank = Rank(index=rank)
        self.config: EngineConfig | None = None
        self.model: LoadedModel | None = None
        self.extension: Extension | None = None  # None before `allocate`
        self._begun = 0.0
        self._last_report = ("", 0.0)

    def load(self, message: Mapping[str, Any]) -> EngineConfig:
        """Handle a LOAD message: load the model and publish what this rank offers. Returns the engine's config."""
        self._begun = time.monotonic()
        self._logs.show_from(message.get("log_level", logging.INFO))
        config = self.config = EngineConfig.from_wire(message["config"])
        self.rank = Rank.from_wire(message["rank"])
        self._set_title(config.model)
        self._report_progress("import", 0, 0, "")
        with self._limits_explained():
            load = _imported(self._target)
            extension_class(config.worker_extension)  # errors of the import are raised before the weights are loaded
            model: LoadedModel = load(config, message["source"], self.rank, self._report_progress)
            if not hasattr(model, "allocate"):
                raise _not_a_loader(self._target, f"returned {type(model).__name__}")
        self.model = model
        self._channel.publish(Kind.PROFILED, 0, pack(dict(model.offer)))
        return config

    def allocate(self, plan: Mapping[str, int]) -> Runner:
        """Handle an ALLOCATE message: allocate memory by the agreed ``plan``, and publish READY. Returns the runner."""
        if self.model is None or self.config is None:
            raise ValueError("ALLOCATE came before LOAD")
        with self._limits_explained():
            runner, facts = self.model.allocate(plan, self._channel.bitmask())
            context = WorkerContext(self.config, self.rank, self.model, runner)
            self.extension = Extension(extension_class(self.config.worker_extension), context)
        gc.collect()
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # glibc keeps what loading has freed: tens of megabytes
        gc.freeze()  # these objects live until the end; scanning them would hold up steps
        seconds = round(time.monotonic() - self._begun, 3)
        self._channel.publish(Kind.READY, 0, pack({**facts, "pid": os.getpid(), "seconds": seconds}))
        return runner

    @contextmanager
    def _limits_explained(self) -> Iterator[None]:
        """Convert a library's error about the system's memory, or about a limit of files or threads, to a
        ModelLoadError with its cure."""
        try:
            yield
        except Exception as error:
            if isinstance(error, AEngineError):
                raise
            assert self.config is not None
            text = "".join(traceback.format_exception_only(error)).strip()
            hint = "" if memory_ulimit_hint() else limit_hint(text)
            if hint:
                raise ModelLoadError(f"{self.config.model} can't be loaded ({text}){hint}") from error
            may_be_memory = isinstance(error, ImportError) and memory_ulimit_hint()  # numpy's names another cause
            if not is_out_of_memory(error) and not may_be_memory:
                raise
            cure = memory_ulimit_hint() or ": take a smaller model, lower kv_cache_memory_bytes, or free memory"
            raise NotEnoughMemoryError(
                f"there is not enough memory to load {self.config.model} ({text}){cure}"
            ) from error

    def _set_title(self, model: str) -> None:
        from setproctitle import setproctitle

        setproctitle(f"aengine worker {self.rank.index}: {os.path.basename(model)}")

    def _report_progress(self, stage: str, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        last_stage, last_time = self._last_report
        if stage == last_stage and done < total and now - last_time < _PROGRESS_PERIOD:
            return
        self._last_report = (stage, now)
        report = {"stage": stage, "done": done, "total": total, "unit": unit}
        self._channel.publish(Kind.PROGRESS, 0, pack(report))
        self._logs.publish()  # logs of threads that load are published here, since the main thread may be busy for long


def _imported(target: str) -> Any:
    """Import ``target``. Raises ModelLoadError if there is no such function or it takes other arguments."""
    try:
        load = resolve_name(target)
    except (AttributeError, ModuleNotFoundError) as error:
        raise ModelLoadError(f"worker={target!r} can't be imported here: {error}") from error
    try:
        inspect.signature(load).bind("config", "source", "rank", "progress")
    except TypeError as error:  # it is not callable, or does not take these arguments
        raise _not_a_loader(target, str(error)) from error
    except ValueError:  # some functions in C have no signature
        pass
    return load


def _not_a_loader(target: str, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"worker={target!r} does not load a model ({why}): it must be a function of (config, source, rank, progress) "
        "that returns a LoadedModel, see https://github.com/aengine/aengine/blob/main/docs/extending.md#your-own-worker"
    )
