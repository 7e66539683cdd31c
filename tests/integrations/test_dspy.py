"""DSPy's own modules over an engine of the same process."""

from __future__ import annotations

import asyncio
import copy
import os
import tempfile
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from aengine import (
    ContextLengthError,
    DeadlineExceededError,
    EngineClosedError,
    EngineOverloadedError,
    InvalidRequestError,
    WorkerDiedError,
)
from aengine.testing import FakeAsyncLLM, FakeLLM, Reply

os.environ["DSPY_CACHEDIR"] = os.path.join(tempfile.gettempdir(), "aengine-dspy")  # not in the home

import dspy  # noqa: E402
from dspy import lm15  # noqa: E402
from dspy.utils import exceptions  # noqa: E402

from aengine.integrations.dspy import AEngine, AsyncAEngine, lm  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_blocking")


class Report(BaseModel):
    city: str
    degrees: int


class Forecast(dspy.Signature):
    """Report the weather."""

    question: str = dspy.InputField()
    report: Report = dspy.OutputField()
    mood: Literal["good", "bad"] = dspy.OutputField()


def weather(city: str) -> str:
    """Weather of a city."""
    return f"21 degrees in {city}"


def fields(**values: object) -> str:
    """An answer as DSPy's ChatAdapter reads it."""
    texts = [f"[[ ## {name} ## ]]\n{value}\n" for name, value in values.items()]
    return "\n".join([*texts, "[[ ## completed ## ]]"])


ANSWER = {"report": {"city": "Paris", "degrees": 21}, "mood": "good"}
USER = (lm15.Message.user("?"),)
TOOL = lm15.FunctionTool(
    "weather", "Weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}}
)


def request(*messages: lm15.Message, tools: Any = (), **config: Any) -> lm15.Request:
    return lm15.Request("aengine/fake", messages=messages or USER, tools=tools, config=lm15.Config(**config))


async def ended(engine: Any) -> None:
    while engine.statistics().num_running or engine.statistics().num_waiting:
        await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def _adapter() -> Iterator[None]:
    with dspy.context(adapter=dspy.ChatAdapter()):
        yield


async def test_typed_signatures_keep_to_their_schema() -> None:
    async with FakeAsyncLLM([ANSWER, {"reasoning": "It is."} | ANSWER, fields(answer="Paris")]) as engine:
        model = lm(engine, cache=False, temperature=0.5, options={"min_p": 0.1, "top_k": 7})
        with dspy.context(lm=model, track_usage=True):
            with dspy.context(adapter=dspy.JSONAdapter()):
                prediction = await dspy.Predict(Forecast).acall(question="?")
                assert prediction.report == Report(city="Paris", degrees=21) and prediction.mood == "good"
                params = engine.requests[0].params
                assert params.structured_output.json_schema["required"] == ["report", "mood"]
                assert (params.temperature, params.min_p, params.top_k) == (0.5, 0.1, 7)
                usage = prediction.get_lm_usage()["aengine/fake"]
                assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 100
                assert (await dspy.ChainOfThought(Forecast).acall(question="?")).reasoning == "It is."
            assert (await dspy.Predict("question -> answer").acall(question="?")).answer == "Paris"
            assert engine.requests[2].params.structured_output is None


async def test_a_react_agent_calls_its_tools() -> None:
    steps = [
        {"next_thought": "I look.", "next_tool_name": "weather", "next_tool_args": {"city": "Paris"}},
        {"next_thought": "I know.", "next_tool_name": "finish", "next_tool_args": {}},
        {"reasoning": "It is.", "answer": 21},
    ]
    async with FakeAsyncLLM(steps) as engine:
        with dspy.context(lm=lm(engine, cache=False), adapter=dspy.JSONAdapter()):
            prediction = await dspy.ReAct("question -> answer: int", tools=[weather]).acall(question="?")
            assert prediction.answer == 21 and prediction.trajectory["observation_0"] == "21 degrees in Paris"


async def test_a_tool_is_called_by_the_model_itself() -> None:
    async with FakeAsyncLLM(Reply(tool_calls=[("weather", {"city": "Paris"})])) as engine:
        with dspy.context(lm=lm(engine, cache=False), adapter=dspy.JSONAdapter()):

            class Ask(dspy.Signature):
                question: str = dspy.InputField()
                tools: list[dspy.Tool] = dspy.InputField()
                calls: dspy.ToolCalls = dspy.OutputField()

            prediction = await dspy.Predict(Ask).acall(question="?", tools=[dspy.Tool(weather)])
            (call,) = prediction.calls.tool_calls
            assert (call.name, call.args) == ("weather", {"city": "Paris"})
            assert [tool.name for tool in engine.requests[0].tools] == ["weather"]


async def test_a_program_streams() -> None:
    async with FakeAsyncLLM(fields(answer="It is fine in Paris today."), token_delay=0.0005) as engine:
        with dspy.context(lm=lm(engine, cache=False)):
            program = dspy.streamify(
                dspy.Predict("question -> answer"),
                stream_listeners=[dspy.streaming.StreamListener(signature_field_name="answer")],
                is_async_program=True,
            )
            pieces = [piece async for piece in program(question="?")]
        assert pieces[-1].answer == "It is fine in Paris today."
        # DSPy's listener knows the end of a field by tokens of some letters, and here they are bytes.
        assert "It is fine in Paris today." in "".join(piece.chunk for piece in pieces[:-1])
        assert len(pieces) > 5


async def test_requests_and_responses_of_all_parts() -> None:
    reply = Reply(
        "I look.", reasoning="Hm.", tool_calls=[("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})]
    )
    async with FakeAsyncLLM(reply, reasoning=True, token_delay=0.0005) as engine:
        calls = AsyncAEngine(engine)
        choice = lm15.ToolChoice("auto", allowed=("weather",))
        asked = request(tools=(TOOL,), tool_choice=choice, logprobs=1)
        whole = await calls.complete(asked)
        events = [event async for event in calls.stream(request(tools=(TOOL,)))]
        for response in (whole, lm15.materialize_response(iter(events), asked)):
            kinds = [part.type for part in response.message.parts]
            assert kinds == ["thinking", "text", "tool_call", "tool_call"]
            assert (
                response.message.parts[0].text.strip() == "Hm." and response.message.parts[1].text.strip() == "I look."
            )
            assert [part.input for part in response.message.parts[2:]] == [{"city": "Paris"}, {"city": "Rome"}]
            assert response.finish_reason == "tool_call" and response.usage.output_tokens > 50
            assert response.id.startswith("req-")
        assert whole.logprobs is not None and len(whole.logprobs) == whole.usage.output_tokens
        assert engine.requests[0].tool_choice["allowed_tools"]["mode"] == "auto"
        first = whole.message.parts[2]
        results = lm15.Message("tool", (lm15.ToolResultPart(first.id, (lm15.TextPart("21"),)),))
        again = request(lm15.Message.user("?"), whole.message, results, reasoning=lm15.Reasoning("off"))
        await calls.complete(again)
        written = engine.requests[-1].messages
        assert [message["role"] for message in written] == ["user", "assistant", "tool"]
        assert written[1]["reasoning_content"].strip() == "Hm." and len(written[1]["tool_calls"]) == 2


async def test_what_an_engine_does_not_have_is_said() -> None:
    async with FakeAsyncLLM("yes") as engine:
        calls = AsyncAEngine(engine)
        image = lm15.Message("user", (lm15.ImagePart(url="http://x/y.png"),))
        for asked, feature in [
            (request(image), "messages.parts.image"),
            (request(tools=(lm15.BuiltinTool("web_search"),)), r"tools\[web_search\]"),
            (request(probabilities="required"), "config.probabilities"),
            (request(reasoning=lm15.Reasoning("low", thinking_budget=5)), "thinking_budget"),
        ]:
            with pytest.raises(lm15.UnsupportedFeatureError, match=feature):
                await calls.complete(asked)
        with pytest.raises(lm15.InvalidRequestError, match="colour"):
            await calls.complete(request(extensions={"colour": "red"}))
        with pytest.raises(lm15.InvalidRequestError, match="own_thread=True"):
            AEngine(engine).complete(request())
        with pytest.raises(exceptions.LMInvalidRequestError, match="own_thread=True"):
            lm(engine, cache=False)("?")


ERRORS = [
    (ContextLengthError(9, 5), exceptions.ContextWindowExceededError),
    (EngineOverloadedError("full", retry_after=2.0), exceptions.LMRateLimitError),
    (DeadlineExceededError("late", deadline=1.0), exceptions.LMTimeoutError),
    (InvalidRequestError("wrong"), exceptions.LMInvalidRequestError),
    (EngineClosedError("closed"), exceptions.LMConfigurationError),
    (WorkerDiedError("gone"), exceptions.LMServerError),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=lambda value: getattr(value, "__name__", ""))
async def test_errors_are_dspys(error: Exception, expected: type[Exception]) -> None:
    async with FakeAsyncLLM(error) as engine:
        with pytest.raises(expected) as caught:
            await lm(engine, cache=False, num_retries=0).acall("?")
        assert caught.value.__cause__.__cause__ is error
        assert getattr(caught.value, "retry_after", None) == getattr(error, "retry_after", None)


async def test_an_overloaded_engine_is_asked_again() -> None:
    async with FakeAsyncLLM([EngineOverloadedError("full", retry_after=0.01), "yes"]) as engine:
        assert await lm(engine, cache=False).acall("?") == ["yes"]


@pytest.mark.parametrize("how", ["close", "task", "abort"])
async def test_who_leaves_ends_the_request(how: str) -> None:
    async with FakeAsyncLLM("word " * 2000, token_delay=0.001) as engine:
        if how == "close":
            stream = AsyncAEngine(engine).stream(request())
            async for event in stream:
                if event.type == "delta":
                    break
            await stream.aclose()
        else:
            task = asyncio.ensure_future(lm(engine, cache=False, num_retries=0).acall("?"))
            while not engine.statistics().num_running:
                await asyncio.sleep(0.001)
            if how == "task":
                task.cancel()
                await asyncio.wait([task])
            else:
                engine.abort_all()
                with pytest.raises(exceptions.LMInvalidRequestError, match="aborted"):
                    await task
        await ended(engine)
        assert engine.statistics().num_aborted == 1


def test_blocking_calls_over_a_thread_of_its_own() -> None:
    with FakeLLM([ANSWER, "yes", "yes"], token_delay=0.0002) as engine:
        model = lm(engine, cache=False)
        with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
            program = dspy.Predict(Forecast)
            program.set_lm(model)
            assert copy.deepcopy(program)(question="?").report.degrees == 21
        assert model("?") == ["yes"]
        events = list(AEngine(engine).stream(request()))
        assert [event.type for event in events] == ["start", "delta", "delta", "delta", "end"]
