"""pydantic-ai's own agents over an engine of the same process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.direct import model_request
from pydantic_ai.exceptions import (
    IncompleteToolCall,
    ModelContextWindowExceededError,
    ModelOverloadedError,
    ModelRequestRejectedError,
    ModelServerError,
    ModelTimeoutError,
    ModelUnavailableError,
    UsageLimitExceeded,
    UserError,
)
from pydantic_ai.messages import (
    BinaryContent,
    ModelRequest,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.settings import ToolOrOutput
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import UsageLimits

from aengine import (
    AsyncLLM,
    ContextLengthError,
    DeadlineExceededError,
    EngineOverloadedError,
    InternalError,
    WorkerDiedError,
)
from aengine.integrations.pydantic_ai import AEngineModel
from aengine.remote import connect, serve_engine
from aengine.testing import FakeAsyncLLM, Reply


class Report(BaseModel):
    city: str
    degrees: int = Field(ge=-90, le=60)


def weather(city: str) -> str:
    """Weather of a city."""
    return f"21 degrees in {city}"


def definitions(agent: Agent[None, Any]) -> list[ToolDefinition]:
    return [tool.tool_def for tool in agent._function_toolset.tools.values()]


async def test_a_conversation_is_a_session() -> None:
    """Its KV waits for its tools, and for the next run of it."""
    calls = Reply(tool_calls=[("weather", {"city": "Paris"})])
    async with FakeAsyncLLM([calls, "sunny", "again", "other"]) as engine:
        begun: list[Any] = []
        chat = engine.stream_chat
        engine.stream_chat = lambda *args, **options: begun.append(options) or chat(*args, **options)  # type: ignore
        agent = Agent(AEngineModel(engine), tools=[weather])
        run = await agent.run("Paris?")
        await agent.run("And now?", message_history=run.all_messages(), model_settings={"extra_body": {"keep": 5}})
        await agent.run("Another")
        sessions = [options["session_id"] for options in begun]
        assert sessions[0] == sessions[1] == sessions[2] != sessions[3]
        assert [options["keep"] for options in begun] == [60, 60, 5, 60]


def roles(messages: Any) -> list[str]:
    return [message["role"] for message in messages]


CALL = Reply(tool_calls=[("weather", {"city": "Paris"})])
REPORT = Report(city="Paris", degrees=21)


async def test_an_agent_calls_its_tool_and_returns_its_type() -> None:
    """Tools and the schema of the answer are in one request, in each of the turns."""
    async with FakeAsyncLLM([CALL, REPORT]) as engine:
        agent = Agent(AEngineModel(engine), tools=[weather], output_type=Report, system_prompt="A", instructions="B")
        result = await agent.run("Weather in Paris?")
        assert result.output == REPORT
        first, second = engine.requests
        assert [tool.name for tool in first.tools] == [tool.name for tool in second.tools] == ["weather"]
        assert first.params.structured_output is not None and second.params.structured_output is not None
        assert roles(second.messages) == ["system", "user", "assistant", "tool"]
        assert second.messages[0]["content"].startswith("A\n\nB\n\n") and '"degrees"' in second.messages[0]["content"]
        assert second.messages[3]["content"] == "21 degrees in Paris"
        assert second.messages[3]["tool_call_id"] == second.messages[2]["tool_calls"][0]["id"]
        calling, answer = (message for message in result.all_messages() if isinstance(message, ModelResponse))
        assert (calling.finish_reason, answer.finish_reason) == ("tool_call", "stop")
        assert answer.model_name == "fake" and answer.provider_name == "aengine" and answer.provider_response_id
        assert result.usage.requests == 2 and result.usage.cache_read_tokens > 0
        assert result.usage.output_tokens == sum(r.usage.output_tokens for r in (calling, answer))


@pytest.mark.parametrize("mode", [Report, NativeOutput(Report), PromptedOutput(Report), ToolOutput(Report)])
async def test_the_modes_of_output(mode: Any) -> None:
    in_tool = isinstance(mode, ToolOutput)
    reply = Reply(tool_calls=[("final_result", REPORT.model_dump())]) if in_tool else REPORT
    async with FakeAsyncLLM(reply) as engine:
        assert (await Agent(AEngineModel(engine), output_type=mode).run("?")).output == REPORT
        (request,) = engine.requests
        assert (request.params.structured_output is None) == in_tool
        if in_tool:
            assert request.tool_choice["allowed_tools"]["mode"] == "required"


async def test_types_have_the_keys_that_they_name_and_no_others() -> None:
    class Trip(BaseModel):
        reports: list[Report]

    async with FakeAsyncLLM() as engine:
        await Agent(AEngineModel(engine), output_type=Trip).run("?", model_settings={"max_tokens": 100})
        shape = engine.requests[0].params.structured_output
        assert shape is not None and isinstance(shape.json_schema, dict)
        assert shape.json_schema["additionalProperties"] is False
        assert shape.json_schema["$defs"]["Report"]["additionalProperties"] is False


async def test_what_validation_refuses_is_tried_again() -> None:
    replies = [
        Reply(tool_calls=[("weather", {"city": "Atlantis"})]),
        Reply(tool_calls=[("weather", {"city": "Paris"})]),
        Report(city="Rome", degrees=1),
        REPORT,
    ]
    async with FakeAsyncLLM(replies) as engine:
        agent = Agent(AEngineModel(engine), output_type=Report, retries=2)

        @agent.tool_plain(name="weather")
        def strict_weather(city: str) -> str:
            if city == "Atlantis":
                raise ModelRetry("there is no Atlantis")
            return weather(city)

        @agent.output_validator
        def check(report: Report) -> Report:
            if report.city != "Paris":
                raise ModelRetry("of Paris, please")
            return report

        assert (await agent.run("Weather?")).output == REPORT
        assert "there is no Atlantis" in engine.requests[1].text
        assert "of Paris, please" in engine.requests[3].text


async def test_settings_are_the_engines() -> None:
    settings: Any = {
        "max_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "stop_sequences": ["END"],
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
        "logit_bias": {"65": 3},
        "parallel_tool_calls": False,
        "timeout": 60,
        "extra_body": {"min_p": 0.1, "priority": 3},
    }
    async with FakeAsyncLLM("yes") as engine:
        await Agent(AEngineModel(engine, settings=settings), tools=[weather]).run("?")
        params = engine.requests[0].params
        assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (50, 0.5, 0.9, 7)
        assert (params.presence_penalty, params.frequency_penalty, params.min_p) == (0.25, 0.5, 0.1)
        assert params.stop == ("END",) and params.logit_bias == {65: 3.0}
        with pytest.raises(ModelRequestRejectedError, match="colour"):
            await Agent(AEngineModel(engine)).run("?", model_settings={"extra_body": {"colour": 1}})


async def test_seeds_make_the_same_answer_twice() -> None:
    """A fake engine uses the seed for itself."""
    _, options = AEngineModel(FakeAsyncLLM())._engine_settings({"seed": 5}, ModelRequestParameters())
    params, _ = AEngineModel(FakeAsyncLLM())._engine_settings({"seed": 5}, ModelRequestParameters())
    assert params.seed == 5 and "tools" not in options


CHOICES: list[tuple[Any, tuple[str, set[str]] | str]] = [
    (None, ("auto", {"weather", "other"})),
    ("auto", ("auto", {"weather", "other"})),
    ("none", "none"),
    (["other"], ("required", {"other"})),
    (ToolOrOutput(function_tools=["weather"]), ("auto", {"weather"})),
]


@pytest.mark.parametrize(
    ("choice", "expected"), CHOICES, ids=lambda value: str(value) if isinstance(value, str | list) else ""
)
async def test_tool_choices(choice: Any, expected: Any) -> None:
    def other(x: int) -> int:
        return x

    async with FakeAsyncLLM() as engine:
        agent = Agent(AEngineModel(engine), tools=[weather, other])
        parameters = ModelRequestParameters(function_tools=definitions(agent))
        request = [ModelRequest.user_text_prompt("?")]
        await model_request(
            AEngineModel(engine),
            request,
            model_settings={"tool_choice": choice},
            model_request_parameters=parameters,
        )
        asked = engine.requests[0].tool_choice
        if isinstance(asked, dict):
            allowed = asked["allowed_tools"]
            asked = (allowed["mode"], {tool["function"]["name"] for tool in allowed["tools"]})
        assert asked == expected
        assert len(engine.requests[0].tools) == 2, "the prompt, and so its prefix, stays the same"


async def test_reasoning_is_a_part_and_goes_back_to_the_template() -> None:
    replies = [Reply(reasoning="It may rain.", tool_calls=[("weather", {"city": "Paris"})]), "Fine."]
    async with FakeAsyncLLM(replies, reasoning=True) as engine:
        result = await Agent(AEngineModel(engine), tools=[weather]).run("?", model_settings={"thinking": "high"})
        first = next(m for m in result.all_messages() if isinstance(m, ModelResponse))
        assert [type(part) for part in first.parts] == [ThinkingPart, ToolCallPart]
        assert first.parts[0].content.strip() == "It may rain."
        assert engine.requests[1].messages[1]["reasoning_content"] == first.parts[0].content
    parameters = ModelRequestParameters(thinking=False)
    _, options = AEngineModel(FakeAsyncLLM())._engine_settings({}, parameters)
    assert options["chat_template_kwargs"] == {"enable_thinking": False}


async def test_a_run_streams_its_partial_output() -> None:
    async with FakeAsyncLLM([CALL, REPORT], token_delay=0.001) as engine:
        agent = Agent(AEngineModel(engine), tools=[weather], output_type=Report)
        async with agent.run_stream("?") as run:
            partial = [value async for value in run.stream_output(debounce_by=None)]
        assert len(partial) > 2 and partial[-1] == REPORT
        last = run.all_messages()[-1]
        assert isinstance(last, ModelResponse) and last.finish_reason == "stop" and last.state == "complete"
        assert last.usage.output_tokens > 0 and run.usage.requests == 2


async def test_a_stream_of_parts_is_what_the_whole_answer_is() -> None:
    reply = Reply(
        "I look.", reasoning="Hm.", tool_calls=[("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})]
    )
    async with FakeAsyncLLM(reply, reasoning=True, token_delay=0.0005) as engine:
        model = AEngineModel(engine)
        parameters = ModelRequestParameters(function_tools=definitions(Agent(model, tools=[weather])))
        request: list[Any] = [ModelRequest.user_text_prompt("?")]
        whole = await model.request(request, None, parameters)
        async with model.request_stream(request, None, parameters) as stream:
            events = [event async for event in stream]
        streamed = stream.get()
        assert sum(isinstance(event, PartStartEvent) for event in events) == len(whole.parts) == 4
        assert sum(isinstance(event, PartDeltaEvent) for event in events) > 20
        assert streamed.finish_reason == whole.finish_reason == "tool_call"
        assert streamed.usage.output_tokens == whole.usage.output_tokens
        for one, other in zip(streamed.parts, whole.parts, strict=True):
            assert type(one) is type(other)
            if isinstance(one, ToolCallPart):
                assert (one.tool_name, one.args) == (other.tool_name, other.args)
            else:
                assert one.content.strip() == other.content.strip()
        ids = [part.tool_call_id for part in streamed.parts if isinstance(part, ToolCallPart)]
        assert len(set(ids)) == 2 and all(ids)


async def ended(engine: AsyncLLM) -> None:
    while engine.statistics().num_running or engine.statistics().num_waiting:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["leave", "cancel", "task", "request"])
async def test_who_leaves_ends_the_request(how: str) -> None:
    async with FakeAsyncLLM("word " * 2000, token_delay=0.001) as engine:
        agent = Agent(AEngineModel(engine))
        if how == "request":
            task = asyncio.ensure_future(agent.run("?"))
            while not engine.statistics().num_running:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])
        elif how == "task":
            begun = asyncio.Event()

            async def read() -> None:
                async with agent.run_stream("?") as run:
                    async for _ in run.stream_text(debounce_by=None):
                        begun.set()

            task = asyncio.ensure_future(read())
            await begun.wait()
            task.cancel()
            await asyncio.wait([task])
        else:
            async with agent.run_stream("?") as run:
                async for _ in run.stream_text(debounce_by=None):
                    if how == "cancel":
                        await run.cancel()
                    break
        await ended(engine)
        assert engine.statistics().num_aborted == 1


async def test_a_cancelled_stream_is_interrupted() -> None:
    async with FakeAsyncLLM("word " * 2000, token_delay=0.001) as engine:
        model = AEngineModel(engine)
        async with model.request_stream([ModelRequest.user_text_prompt("?")], None, ModelRequestParameters()) as stream:
            async for _ in stream:
                await stream.cancel()
        response = stream.get()
        assert response.state == "interrupted" and response.finish_reason is None
        assert isinstance(response.parts[0], TextPart) and response.usage.output_tokens > 0


ERRORS = [
    (ContextLengthError(9, 5), ModelContextWindowExceededError),
    (EngineOverloadedError("full", retry_after=2.0), ModelOverloadedError),
    (DeadlineExceededError("late", deadline=1.0), ModelTimeoutError),
    (WorkerDiedError("gone"), ModelUnavailableError),
    (InternalError("bug"), ModelServerError),
]


@pytest.mark.parametrize(("error", "expected"), ERRORS, ids=lambda value: getattr(value, "__name__", ""))
async def test_errors_are_pydantic_ais(error: Exception, expected: type[Exception]) -> None:
    async with FakeAsyncLLM([error, Reply("so f", error=error), error]) as engine:
        model = AEngineModel(engine)
        with pytest.raises(expected) as caught:
            await Agent(model).run("?")
        assert caught.value.__cause__ is error and caught.value.retry_after == getattr(error, "retry_after", None)
        with pytest.raises(expected):
            async with Agent(model).run_stream("?") as run:
                await run.get_output()
        other = FallbackModel(model, TestModel(custom_output_text="other"))
        assert (await Agent(other).run("?")).output == "other"


async def test_what_is_cut_off_is_no_answer() -> None:
    async with FakeAsyncLLM([CALL, CALL, "word " * 2000], token_delay=0.001) as engine:
        agent = Agent(AEngineModel(engine), tools=[weather])
        for num_tokens in (50, 46):  # inside of the arguments, and after their brace
            with pytest.raises(IncompleteToolCall):
                await agent.run("?", model_settings={"max_tokens": num_tokens})
        task = asyncio.ensure_future(agent.run("?"))
        while not engine.statistics().num_running:
            await asyncio.sleep(0.001)
        engine.abort_all()
        with pytest.raises(ModelRequestRejectedError, match="aborted"):
            await task
    with pytest.raises(ModelUnavailableError):
        await agent.run("?")


async def test_what_the_engine_cannot_read_is_said() -> None:
    async with FakeAsyncLLM("yes") as engine:
        agent = Agent(AEngineModel(engine))
        with pytest.raises(UserError, match="reads text only"):
            await agent.run(["look", BinaryContent(b"x", media_type="image/png")])
        assert (await agent.run(["one", "two"])).output == "yes"
        assert engine.requests[0].text == "one\n\ntwo"


async def test_tokens_are_counted_before_the_request() -> None:
    async with FakeAsyncLLM("yes") as engine:
        agent = Agent(AEngineModel(engine), tools=[weather], system_prompt="Be brief.")
        limits = UsageLimits(input_tokens_limit=10_000, count_tokens_before_request=True)
        result = await agent.run("?", usage_limits=limits)
        counted = await AEngineModel(engine).count_tokens(
            result.all_messages()[:1],
            None,
            ModelRequestParameters(function_tools=definitions(agent)),
        )
        assert counted.input_tokens == result.usage.input_tokens
        with pytest.raises(UsageLimitExceeded, match="input_tokens_limit"):
            await agent.run("?", usage_limits=UsageLimits(input_tokens_limit=5, count_tokens_before_request=True))


async def test_an_engine_on_its_own_thread_serves_any_loop() -> None:
    async with FakeAsyncLLM([CALL, "It is fine."], own_thread=True) as engine:
        agent = Agent(AEngineModel(engine), tools=[weather])
        result = await asyncio.to_thread(lambda: asyncio.run(agent.run("?")))
        assert result.output == "It is fine."


async def test_an_engine_in_another_process_is_an_engine(tmp_path: Path) -> None:
    async with (
        FakeAsyncLLM([CALL, REPORT]) as engine,
        serve_engine(engine, tmp_path / "e"),
        connect(tmp_path / "e") as remote,
    ):
        agent = Agent(AEngineModel(remote), tools=[weather], output_type=Report)  # type: ignore[arg-type]
        assert (await agent.run("?")).output == REPORT
