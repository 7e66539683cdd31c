"""`EngineStart`: the start of an engine, from its settings to its core.

    resolve the model ─> start the workers ──────────────────────────────────────────> ready ─> EngineCore
                         meanwhile: import the core, load the tokenizer, warm up its grammars and templates

The workers take longest, so nothing that they can do without comes before them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from ...checkpoint.pooling import PoolingConfig
from ...checkpoint.sampling_defaults import SamplingDefaults
from ...checkpoint.source import ModelSource, resolve_model
from ...config import EngineConfig
from ...outputs import StartupProgress
from ...telemetry.listeners import Listeners
from ...telemetry.summary import summary_of
from ..adapters.adapters import NoAdapters
from ..replicas.start import ExecutorFactory, ProgressCallback, ReplicasStart
from ..threads.pools import run_in_thread

if TYPE_CHECKING:
    from ..adapters.adapters import AdaptersOf
    from ..core import EngineCore
    from ..structured.service import GrammarService
    from ..tokenizer.tokenizer import Tokenizer

logger = logging.getLogger("aengine")


class EngineStart:
    """Starts one core on the running loop."""

    def __init__(self, config: EngineConfig, report: ProgressCallback, make_executor: ExecutorFactory) -> None:
        self._config = config
        self._report = report
        self._make_executor = make_executor

    async def run(self, listeners: Listeners) -> EngineCore:
        """Resolve the model; then start the workers, and load what the host needs beside them. Undone when it fails."""
        begun = time.monotonic()
        config, report = self._config, self._report
        report(StartupProgress("resolve", detail=config.model))
        source = await self._resolve()
        config, adapters_of = await run_in_thread("resolve", _adapters_of, config)
        report(StartupProgress("worker", detail=source.path))
        workers = ReplicasStart(self._make_executor, report)
        grammars: GrammarService | None = None
        try:
            await workers.begin(config, source)
            core_class = await run_in_thread("import", self._core_class)
            await run_in_thread("import", _import_speculation, config)
            tokenizer, eos_token_ids = await self._load_tokenizer(source)
            if tokenizer is not None and config.preload_grammars:
                from ..structured.service import GrammarService

                grammars = GrammarService(tokenizer, source.vocab_size or tokenizer.vocab_size)
                grammars.begin_warm_up()
            started = await workers.ready()
            new_adapters = await run_in_thread("resolve", adapters_of, started[0].ready)
            sampling = SamplingDefaults(source.generation_config if config.generation_config == "auto" else {})
            pooling = PoolingConfig.from_wire(source.pooling)
            core = core_class(
                config, started, tokenizer, eos_token_ids, grammars, sampling, listeners, pooling, new_adapters
            )
        except BaseException:
            workers.terminate()
            if grammars is not None:
                await grammars.aclose()
            await workers.undo()
            raise
        seconds = time.monotonic() - begun
        report(StartupProgress("ready", detail=f"{seconds:.1f} s"))
        method = config.speculation_settings.method
        for replica in core.replicas:
            name = config.model if len(started) == 1 else f"{config.model}, replica {replica.index},"
            logger.info("%s is ready after %.1f s: %s", name, seconds, summary_of(replica.worker.ready, method))
        return core

    # The following methods are overridden by `aengine.testing`.

    def _core_class(self) -> type[EngineCore]:
        """Import the class of cores. Blocking."""
        from ..core import EngineCore

        return EngineCore

    async def _resolve(self) -> ModelSource:
        """Find the model's files and settings."""
        loop, report = asyncio.get_running_loop(), self._report

        def report_from_thread(progress: StartupProgress) -> None:
            loop.call_soon_threadsafe(report, progress)

        return await run_in_thread("resolve", resolve_model, self._config, report_from_thread)

    async def _load_tokenizer(self, source: ModelSource) -> tuple[Tokenizer | None, frozenset[int]]:
        """Load the tokenizer, unless the settings skip it. Returns it, and the ids that end a completion."""
        config = self._config
        if config.skip_tokenizer:
            return None, frozenset(source.eos_token_ids)
        tokenizer = await run_in_thread("tokenizer", _tokenizer_of, source, config)
        if config.allow_special_tokens:
            tokenizer = tokenizer.allowing_special_tokens()
        return tokenizer, tokenizer.eos_token_ids


def _adapters_of(config: EngineConfig) -> tuple[EngineConfig, AdaptersOf]:
    """Find the adapters of the settings. Returns the settings as workers need them, and what makes the engine's
    adapters. Blocking. Raises ModelLoadError."""
    if not config.num_lora_slots:
        return config, lambda _: lambda _: NoAdapters()
    from ..adapters.registry import compared, find_given

    config, given = find_given(config)
    return config, partial(compared, config, given)


def _tokenizer_of(source: ModelSource, config: EngineConfig) -> Tokenizer:
    from ..tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(source, config.tokenizer, config.revision)
    tokenizer.compile_chat_templates()
    return tokenizer


def _import_speculation(config: EngineConfig) -> None:
    from ..speculation.choice import import_speculation

    import_speculation(config)
