"""`FakeAsyncLLM` and `FakeLLM`: engines whose worker follows a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..async_llm import AsyncLLM
from ..config import EngineConfig
from ..errors import InvalidRequestError
from ..llm import LLM
from .script import FakeRequest, Script

if TYPE_CHECKING:
    from os import PathLike
    from typing import Unpack

    from ..engine.handles.start import EngineStart
    from ..settings import Settings
    from .executor import ScriptedExecutor

_SETTINGS = {"preload_grammars": False, "max_leased_steps": 0, "max_step_seconds": None, "hang_timeout": 1e6}


class FakeAsyncLLM(AsyncLLM):
    """An `AsyncLLM` without a model: what it says is scripted, all else is real.

    Args:
        script: what the completions are, each a text, a `Reply`, an error to be raised, data for JSON (a pydantic
            object, a dict), or None: whatever the request's grammar allows, the shortest. A list has one for each
            completion, in order, and no more; a function gets the `FakeRequest`, on the engine's loop; anything else is
            for all of them.
        token_delay: seconds between two tokens, each of which is a byte.
        reasoning: the model may reason before it answers.
        config: settings, as of `AsyncLLM`.
    """

    def __init__(
        self, script: Any = None, *, token_delay: float = 0.0, reasoning: bool = False, **config: Unpack[Settings]
    ) -> None:
        if isinstance(token_delay, bool) or not isinstance(token_delay, int | float) or not token_delay >= 0:
            raise InvalidRequestError("token_delay must be a number of seconds, 0 or more", param="token_delay")
        self._script = Script(script)
        self._token_delay = token_delay
        self._reasoning = reasoning
        settings: Any = {**_SETTINGS, **config}
        super().__init__("fake", **settings)

    @property
    def requests(self) -> list[FakeRequest]:
        """The completions that were asked for so far, in order; without those that were refused."""
        return self._script.requests

    def _start_class(self) -> type[EngineStart]:
        from .core import ReasoningStart, ScriptedStart

        return ReasoningStart if self._reasoning else ScriptedStart

    def _make_executor(self, config: EngineConfig) -> ScriptedExecutor:
        from .executor import ScriptedExecutor

        return ScriptedExecutor(config, self._script, token_delay=self._token_delay, reasoning=self._reasoning)


class FakeLLM(LLM):
    """An `LLM` without a model. Arguments as of `FakeAsyncLLM`."""

    def __init__(self, script: Any = None, **settings: Any) -> None:
        self._script = script
        super().__init__("fake", **settings)

    @property
    def requests(self) -> list[FakeRequest]:
        """See `FakeAsyncLLM.requests`."""
        return self._fake.requests

    def _make_engine(self, model: str | PathLike[str] | EngineConfig, settings: dict[str, Any]) -> AsyncLLM:
        self._fake = FakeAsyncLLM(self._script, **settings)
        return self._fake
