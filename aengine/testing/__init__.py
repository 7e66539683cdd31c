"""Engines without a model, for the tests of programs that use aengine.

    from aengine.testing import FakeAsyncLLM, Reply

    async with FakeAsyncLLM(["Paris", Reply(tool_calls=[("get_weather", {"city": "Paris"})])]) as engine:
        assert (await engine.generate("The capital of France is")).text == "Paris"

All of the engine is real, but the worker: it says what the script says. No model, no worker process, no torch.
"""

from .fake import FakeAsyncLLM, FakeLLM
from .script import FakeRequest, Reply, ScriptError

__all__ = ["FakeAsyncLLM", "FakeLLM", "FakeRequest", "Reply", "ScriptError"]
