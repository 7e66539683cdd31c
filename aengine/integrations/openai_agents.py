"""`AEngineModel`: a model of OpenAI's Agents SDK over an engine in the same process.

agent = Agent(name="assistant", model=AEngineModel(engine), tools=[...], output_type=Report)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ..async_llm import AsyncLLM
from ..errors import EngineError, EngineOverloadedError, RequestError
from ..llm import LLM
from .clients import async_client, engine_errors
from .openai_style import async_side

try:
    from agents import (
        ModelProvider,
        ModelRetryAdvice,
        ModelRetryAdviceRequest,
        ModelSettings,
        OpenAIChatCompletionsModel,
        UserError,
    )
except ImportError as error:
    raise ImportError(f"{__name__} needs openai-agents: pip install openai-agents ({error})") from error

__all__ = ["AEngineModel", "AEngineProvider"]


class AEngineModel(OpenAIChatCompletionsModel):
    """The SDK's own model for chat completions, whose requests an engine answers.

    ``extra_body`` and ``extra_args`` of `ModelSettings` have other parameters of `SamplingParams` and `ChatOptions` by
    their names. What is kept on OpenAI's servers (prompt, previous_response_id, conversation_id) is a `UserError`.

    The engine's errors are raised as they are; the retry policies of a runner get advice about them.
    """

    def __init__(self, engine: AsyncLLM | LLM, *, model_name: str | None = None) -> None:
        """
        Args:
            engine: running when a request is made; on the runner's event loop, with ``own_thread=True``, or an `LLM`.
            model_name: in traces. None: the name the engine was made with.
        """
        name = model_name or async_side(engine).config.model_name
        super().__init__(
            name,
            async_client(engine, name),
            should_replay_reasoning_content=lambda context: True,
            strict_feature_validation=True,
        )

    async def get_response(
        self, system_instructions: Any, input: Any, model_settings: ModelSettings, *args: Any, **kwargs: Any
    ) -> Any:
        with engine_errors():
            settings = _in_body(model_settings)
            return await super().get_response(system_instructions, input, settings, *args, **kwargs)

    async def stream_response(
        self, system_instructions: Any, input: Any, model_settings: ModelSettings, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        settings = _in_body(model_settings)
        stream: Any = super().stream_response(system_instructions, input, settings, *args, **kwargs)
        async with aclosing(stream) as events:
            with engine_errors():
                async for event in events:
                    yield event

    def _supports_default_prompt_cache_key(self) -> bool:
        """Have the SDK name its runs, which are sessions then: the KV of one is kept while it waits for tools."""
        return True

    def get_retry_advice(self, request: ModelRetryAdviceRequest) -> ModelRetryAdvice | None:
        """Say that another try may help when the engine was full or has failed, and not when the request is wrong."""
        error = request.error
        if isinstance(error, EngineOverloadedError):
            return ModelRetryAdvice(True, retry_after=error.retry_after, replay_safety="safe", reason=str(error))
        if isinstance(error, EngineError | RequestError):
            return ModelRetryAdvice(isinstance(error, EngineError), replay_safety="safe", reason=str(error))
        return None


def _in_body(settings: ModelSettings) -> ModelSettings:
    """Return the settings with all that OpenAI's client may not know in ``extra_body``."""
    body: Any = settings.extra_body or {}
    if not isinstance(body, dict):
        raise UserError("extra_body must be a dict of parameters of aengine's SamplingParams and ChatOptions")
    body = {**body, **(settings.extra_args or {})}
    include_usage = settings.include_usage is not False
    return replace(settings, extra_args=None, extra_body=body or None, include_usage=include_usage)


class AEngineProvider(ModelProvider):
    """A provider of one engine's model: ``RunConfig(model_provider=AEngineProvider(engine))``."""

    def __init__(self, engine: AsyncLLM | LLM, *, model_name: str | None = None) -> None:
        """Arguments as of `AEngineModel`."""
        self._model = AEngineModel(engine, model_name=model_name)

    def get_model(self, model_name: str | None) -> AEngineModel:
        """Return the engine's model. None: of agents that name none.

        Raises:
            UserError: the model has another name.
        """
        if model_name not in (None, self._model.model):
            raise UserError(f"there is no model {model_name!r}: this provider has {self._model.model!r}")
        return self._model
