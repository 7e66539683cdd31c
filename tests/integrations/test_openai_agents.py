"""The runner of OpenAI's Agents SDK over an engine of the same process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from agents import (
    Agent,
    ModelBehaviorError,
    ModelRetryAdviceRequest,
    ModelSettings,
    ModelTracing,
    RunConfig,
    Runner,
    UserError,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import ModelTimeoutError
from agents.items import ReasoningItem, ToolCallItem
from openai.types.shared import Reasoning
from pydantic import BaseModel

from aengine import AsyncLLM, EngineOverloadedError, InvalidRequestError, RequestError, WorkerDiedError
from aengine.integrations.openai_agents import AEngineModel, AEngineProvider
from aengine.remote import connect, serve_engine
from aengine.testing import FakeAsyncLLM, Reply


class Report(BaseModel):
    city: str
    sunny: bool


@function_tool
def weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


CALL = Reply(tool_calls=[("weather", {"city": "Paris"})])
REPORT = Report(city="Paris", sunny=True)
SCRIPT = [Reply(tool_calls=[("transfer_to_meteorologist", {})]), CALL, REPORT]


@pytest.fixture(autouse=True)
def _no_tracing() -> None:
    set_tracing_disabled(True)


def desk_of(engine: AsyncLLM) -> Agent[Any]:
    """An agent that hands over to one with a tool and a type."""
    model = AEngineModel(engine)
    meteorologist: Agent[Any] = Agent(name="meteorologist", model=model, tools=[weather], output_type=Report)
    return Agent(name="desk", model=model, instructions="Hand over.", handoffs=[meteorologist])


async def run(agent: Agent[Any], *, streamed: bool, **options: Any) -> Any:
    if not streamed:
        return await Runner.run(agent, "Weather in Paris?", **options)
    result = Runner.run_streamed(agent, "Weather in Paris?", **options)
    async for _ in result.stream_events():
        pass
    return result


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_handoff_a_tool_and_a_type(streamed: bool) -> None:
    async with FakeAsyncLLM(SCRIPT) as engine:
        result = await run(desk_of(engine), streamed=streamed)
        assert result.final_output == REPORT and result.last_agent.name == "meteorologist"
        first, second, third = engine.requests
        assert [tool.name for tool in first.tools] == ["transfer_to_meteorologist"]
        assert first.params.structured_output is None
        for request in (second, third):
            assert [tool.name for tool in request.tools] == ["weather"]
            assert request.params.structured_output is not None, "the schema goes with every turn, beside the tools"
        assert [m["role"] for m in third.messages] == ["user", "assistant", "tool", "assistant", "tool"]
        assert third.messages[-1]["content"] == "sunny in Paris"
        ids = [item.raw_item.call_id for item in result.new_items if isinstance(item, ToolCallItem)]
        assert all(ids) and third.messages[-1]["tool_call_id"] == ids[-1]
        usage = result.context_wrapper.usage
        assert usage.requests == 3 and usage.input_tokens_details.cached_tokens > 0
        assert usage.output_tokens == sum(
            len(r.written(q)) + 1 for r, q in zip(replies(), engine.requests, strict=True)
        )


def replies() -> list[Reply]:
    return [reply if isinstance(reply, Reply) else Reply(value=reply) for reply in SCRIPT]


async def test_a_run_is_a_session() -> None:
    """The SDK names it, so that its KV waits for its tools; another run is another one."""
    async with FakeAsyncLLM([CALL, "sunny", CALL, "sunny"]) as engine:
        begun: list[Any] = []
        chat = engine.stream_chat
        engine.stream_chat = lambda *args, **options: begun.append(options) or chat(*args, **options)  # type: ignore
        agent: Agent[Any] = Agent(name="meteorologist", model=AEngineModel(engine), tools=[weather])
        for _ in range(2):
            await Runner.run(agent, "Paris?")
        sessions = [options["session_id"] for options in begun]
        assert sessions[0] == sessions[1] != sessions[2] == sessions[3]
        assert {options["keep"] for options in begun} == {300}


async def test_reasoning_goes_back_to_the_template() -> None:
    reply = Reply("I look.", reasoning="Hm.", tool_calls=[("weather", {"city": city}) for city in ("Paris", "Rome")])
    async with FakeAsyncLLM([reply, "Fine."], reasoning=True, token_delay=0.0005) as engine:
        agent: Agent[Any] = Agent(name="a", model=AEngineModel(engine), tools=[weather])
        result = await run(agent, streamed=True)
        assert result.final_output == "Fine."
        assert any(isinstance(item, ReasoningItem) for item in result.new_items)
        assert engine.requests[1].messages[1]["reasoning_content"].strip() == "Hm."
        assert len(engine.requests[1].messages[1]["tool_calls"]) == 2


async def test_settings_are_the_engines() -> None:
    settings = ModelSettings(
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        max_tokens=100,
        tool_choice="weather",
        parallel_tool_calls=False,
        reasoning=Reasoning(effort="low"),
        extra_body={"min_p": 0.1},
        extra_args={"priority": 3, "stop": ["END"]},
        store=False,
    )
    async with FakeAsyncLLM([CALL, "Fine."]) as engine:
        model = AEngineModel(engine)
        agent: Agent[Any] = Agent(name="a", model=model, tools=[weather], model_settings=settings)
        assert (await Runner.run(agent, "?")).final_output == "Fine."
        first, second = engine.requests
        params = first.params
        assert (params.temperature, params.top_p, params.min_p, params.max_tokens) == (0.5, 0.9, 0.1, 100)
        assert (params.frequency_penalty, params.presence_penalty, params.stop) == (0.25, 0.5, ("END",))
        assert first.tool_choice == {"type": "function", "function": {"name": "weather"}}
        assert second.tool_choice is None, "the runner asks for the tool once"
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"extra_args": {"colour": 1}}, InvalidRequestError),
        ({"extra_body": "colour"}, UserError),
    ]
    async with FakeAsyncLLM("Fine.") as engine:
        for change, expected in wrong:
            agent = Agent(name="a", model=AEngineModel(engine), model_settings=ModelSettings(**change))
            with pytest.raises(expected):
                await Runner.run(agent, "?")
        with pytest.raises(UserError, match="previous_response_id"):
            await Runner.run(Agent(name="a", model=AEngineModel(engine)), "?", previous_response_id="resp_1")


async def test_a_provider_gives_its_model_to_agents_that_name_none() -> None:
    async with FakeAsyncLLM("Fine.") as engine:
        config = RunConfig(model_provider=AEngineProvider(engine))
        for name in (None, "fake"):
            assert (await Runner.run(Agent(name="a", model=name), "?", run_config=config)).final_output == "Fine."
        with pytest.raises(UserError, match="there is no model 'other'"):
            await Runner.run(Agent(name="a", model="other"), "?", run_config=config)


async def ended(engine: AsyncLLM) -> None:
    while engine.statistics().num_running or engine.statistics().num_waiting:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["cancel", "task", "close", "timeout"])
async def test_who_leaves_ends_the_request(how: str) -> None:
    async with FakeAsyncLLM("word " * 5000, token_delay=0.001) as engine:
        model = AEngineModel(engine)
        agent: Agent[Any] = Agent(name="a", model=model)
        if how == "task":
            task = asyncio.ensure_future(Runner.run(agent, "?"))
            while not engine.statistics().num_running:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])
        elif how == "timeout":
            agent.model_settings = ModelSettings(timeout=0.05)
            with pytest.raises(ModelTimeoutError):
                await Runner.run(agent, "?")
        elif how == "cancel":
            result = Runner.run_streamed(agent, "?")
            async for event in result.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    result.cancel()
        else:
            events = model.stream_response(None, "?", ModelSettings(), [], None, [], ModelTracing.DISABLED)
            async for event in events:
                if event.type == "response.output_text.delta":
                    break
            await events.aclose()
        await ended(engine)
        assert engine.statistics().num_aborted == 1


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_errors_are_typed_and_traced(streamed: bool) -> None:
    full = EngineOverloadedError("full", retry_after=2.0)
    async with FakeAsyncLLM([full, Reply("so f", error=WorkerDiedError("gone"))]) as engine:
        model = AEngineModel(engine)
        agent: Agent[Any] = Agent(name="a", model=model)
        with pytest.raises(EngineOverloadedError) as caught:
            await run(agent, streamed=streamed)
        advice = model.get_retry_advice(ModelRetryAdviceRequest(caught.value, 1, streamed))
        assert advice is not None and advice.suggested and advice.retry_after == 2.0
        with pytest.raises(WorkerDiedError):
            await run(agent, streamed=streamed)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_what_is_cut_off_is_no_answer(streamed: bool) -> None:
    replies = [CALL, "It failed.", Reply("yes", reasoning="Hm, " * 100), "word " * 5000]
    async with FakeAsyncLLM(replies, reasoning=True, token_delay=1e-4) as engine:
        agent: Agent[Any] = Agent(name="a", model=AEngineModel(engine), tools=[weather])
        agent.model_settings = ModelSettings(max_tokens=50)  # inside of arguments, which the SDK tells the model
        assert (await run(agent, streamed=streamed)).final_output == "It failed."
        assert "error occurred" in engine.requests[1].messages[-1]["content"]
        agent.model_settings = ModelSettings(max_tokens=40)  # in the reasoning
        with pytest.raises(ModelBehaviorError, match="finish_reason='length'"):
            await run(agent, streamed=streamed)
        agent.model_settings = ModelSettings()
        task = asyncio.ensure_future(run(agent, streamed=streamed))
        while not engine.statistics().num_running:
            await asyncio.sleep(0.001)
        engine.abort_all()
        with pytest.raises(RequestError, match="was aborted"):
            await task


async def test_an_engine_on_its_own_thread_serves_any_loop() -> None:
    async with FakeAsyncLLM(SCRIPT, own_thread=True) as engine:
        result = await asyncio.to_thread(lambda: asyncio.run(run(desk_of(engine), streamed=True)))
        assert result.final_output == REPORT


async def test_an_engine_in_another_process_is_an_engine(tmp_path: Path) -> None:
    async with (
        FakeAsyncLLM([CALL, REPORT]) as engine,
        serve_engine(engine, tmp_path / "e"),
        connect(tmp_path / "e") as remote,
    ):
        model = AEngineModel(remote)  # type: ignore[arg-type]
        agent: Agent[Any] = Agent(name="a", model=model, tools=[weather], output_type=Report)
        assert (await run(agent, streamed=True)).final_output == REPORT
