"""`LLM`: the engine for programs without an event loop.

    with LLM("smollm2-135m") as llm:
        completions = llm.generate(["1 2 3", "a b c"], SamplingParams(max_tokens=8))
        for token in llm.stream("The capital of France is"):
            print(token.text, end="")

It is an `AsyncLLM` with a thread of its own that is started at once; its methods are those of `SyncLLM`.
"""

from __future__ import annotations

from os import PathLike
from typing import Any, Unpack

from .async_llm import AsyncLLM
from .config import EngineConfig
from .engine.handles.local import StartAdvice
from .engine.handles.on_thread import ThreadHandle
from .engine.handles.sync_llm import SyncLLM
from .engine.threads.loop_ownership import check_may_block
from .errors import InvalidRequestError
from .settings import Settings, described

__all__ = ["LLM"]

_ADVICE = StartAdvice("LLM", "`llm.start()` starts it", "`llm.start()` starts it again, or make another LLM")


class LLM(SyncLLM):
    """An engine in a synchronous program. It is ready when its constructor returns.

    Args:
        model: as of `AsyncLLM`.
        block_running_loop: calls may block a thread whose event loop runs, as a notebook's: the loop stands still
            meanwhile.
        settings: as listed below. Unless ``admission`` is given here, callers wait when the queue is full.

    Raises:
        InvalidRequestError: a wrong setting; or you are on an event loop: use AsyncLLM there.
        ModelLoadError, WorkerDiedError: as of `AsyncLLM.start`.

    Every method that blocks raises InvalidRequestError on the thread of a running event loop, unless
    ``block_running_loop`` allows it; all of them raise EngineClosedError after `close`.
    """

    def __init__(
        self,
        model: str | PathLike[str] | EngineConfig,
        *,
        block_running_loop: bool = False,
        **settings: Unpack[Settings],
    ) -> None:
        check_may_block(None, any_thread=block_running_loop)
        if settings.setdefault("own_thread", True) is not True:
            raise InvalidRequestError("an LLM has a thread of its own: own_thread can't be False", param="own_thread")
        engine = self._make_engine(model, {"admission": "wait", **settings})
        handle = engine._handle
        assert isinstance(handle, ThreadHandle)
        handle.local.advice = _ADVICE
        super().__init__(engine, handle, block_running_loop=block_running_loop)
        self._async = engine
        try:
            self.start()
        except BaseException:  # Ctrl-C, at the moment that it was ready, too
            engine.terminate()
            raise

    def _make_engine(self, model: str | PathLike[str] | EngineConfig, settings: dict[str, Any]) -> AsyncLLM:
        """Make the engine behind; tests replace this method."""
        return AsyncLLM(model, **settings)

    def as_async(self) -> AsyncLLM:
        """Return the `AsyncLLM` behind, for coroutines on any loop: the same engine, requests and worker."""
        return self._async


LLM.__doc__ = described(LLM.__doc__, EngineConfig)
