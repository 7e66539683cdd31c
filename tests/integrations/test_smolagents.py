"""smolagents' own agents over an engine of the same process."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from smolagents import CodeAgent, Tool, ToolCallingAgent, tool
from smolagents.models import CODEAGENT_RESPONSE_FORMAT, ChatMessage, MessageRole, agglomerate_stream_deltas
from smolagents.monitoring import LogLevel
from smolagents.utils import AgentGenerationError

from aengine import EngineOverloadedError, InvalidRequestError, RequestError
from aengine.integrations.smolagents import AEngineModel
from aengine.testing import FakeAsyncLLM, FakeLLM, Reply


@tool
def weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name
    """
    return f"21 degrees in {city}"


CALL = Reply(tool_calls=[("weather", {"city": "Paris"})])
FINAL = Reply(tool_calls=[("final_answer", {"answer": "It is fine."})])
USER: list[Any] = [{"role": "user", "content": "?"}]
QUIET: Any = {"verbosity_level": LogLevel.OFF}


def ended(engine: Any) -> None:
    while engine.statistics().num_running or engine.statistics().num_waiting:
        time.sleep(0.001)


@pytest.mark.parametrize("streams", [True, False])
def test_an_agent_calls_tools_until_its_final_answer(streams: bool) -> None:
    with FakeLLM([CALL, FINAL]) as engine:
        agent = ToolCallingAgent(model=AEngineModel(engine), tools=[weather], stream_outputs=streams, **QUIET)
        result = agent.run("Weather in Paris?", return_full_result=True)
        assert result.output == "It is fine." and result.state == "success"
        first, second = engine.requests
        assert {tool.name for tool in first.tools} == {"weather", "final_answer"} and first.tool_choice == "required"
        assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "user"]
        assert "21 degrees in Paris" in second.text
        usage = result.token_usage
        assert usage.output_tokens > 20 and usage.input_tokens > usage.output_tokens


@pytest.mark.parametrize("streams", [True, False])
def test_a_code_agent_runs_what_the_model_writes(streams: bool) -> None:
    replies = [
        'Thought: I ask.\n<code>\nanswer = weather("Paris")\nprint(answer)\n</code>and more that never comes',
        "Thought: done.\n<code>\nfinal_answer(answer)\n</code>",
    ]
    with FakeLLM(replies) as engine:
        agent = CodeAgent(model=AEngineModel(engine), tools=[weather], stream_outputs=streams, **QUIET)
        assert agent.run("Weather in Paris?") == "21 degrees in Paris"
        assert "</code>" in engine.requests[0].params.stop
        assert "never comes" not in engine.requests[1].text


def test_a_code_agents_structured_steps_keep_to_their_schema() -> None:
    step = {"thought": "I know.", "code": 'final_answer("21")'}
    with FakeLLM([step]) as engine:
        agent = CodeAgent(model=AEngineModel(engine), tools=[weather], use_structured_outputs_internally=True, **QUIET)
        assert agent.run("Weather in Paris?") == "21"
        shape = engine.requests[0].params.structured_output
        assert shape.json_schema == CODEAGENT_RESPONSE_FORMAT["json_schema"]["schema"]


def test_a_stream_of_pieces_is_what_the_whole_answer_is() -> None:
    reply = Reply("I look.", tool_calls=[("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})])
    with FakeLLM(reply) as engine:
        model = AEngineModel(engine)
        whole = model.generate(USER, tools_to_call_from=[weather], tool_choice="auto")
        pieces = list(model.generate_stream(USER, tools_to_call_from=[weather], tool_choice="auto"))
        assert len(pieces) > 20
        streamed = agglomerate_stream_deltas(pieces)
        assert streamed.content == whole.content and streamed.token_usage == whole.token_usage
        for message in (whole, streamed):
            calls = model.parse_tool_calls(message).tool_calls
            assert [call.function.arguments for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
            assert len({call.id for call in calls}) == 2


def test_settings_messages_and_tools_are_the_engines() -> None:
    class Look(Tool):
        name = "look"
        description = "Looks at an image."
        inputs = {
            "image": {"type": "image", "description": "it"},
            "where": {"type": "any", "description": "there", "nullable": True},
        }
        output_type = "string"

        def forward(self, image: Any, where: Any = None) -> str:
            return "seen"

    with FakeLLM([Reply(tool_calls=[("look", {"image": "first"})]), "yes"]) as engine:
        model = AEngineModel(engine, temperature=0.5, top_k=7, chat_template_kwargs={"enable_thinking": False})
        model.generate(USER, tools_to_call_from=[Look()])
        parameters = engine.requests[0].tools[0].parameters
        assert parameters["properties"]["image"]["type"] == "string" and parameters["required"] == ["image"]
        messages = [
            ChatMessage(role=MessageRole.SYSTEM, content="Be brief."),
            ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
            ChatMessage(role=MessageRole.TOOL_RESPONSE, content=[{"type": "text", "text": "c"}]),
        ]
        assert model(messages, max_tokens=10, stop_sequences=["END"]).content == "yes"
        request = engine.requests[1]
        assert request.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb\nc"}]
        params = request.params
        assert (params.temperature, params.top_k, params.max_tokens, params.stop) == (0.5, 7, 10, ("END",))
        assert model.model_id == "fake" and model.to_dict()["temperature"] == 0.5
        with pytest.raises(InvalidRequestError, match="colour"):
            model.generate(USER, colour="red")
        image = [{"role": "user", "content": [{"type": "image", "image": "not even looked at"}]}]
        with pytest.raises(InvalidRequestError, match="text only"):
            model.generate(image)


@pytest.mark.parametrize("how", ["close", "drop", "abort"])
def test_who_leaves_ends_the_request(how: str) -> None:
    with FakeLLM("word " * 2000, token_delay=0.001) as engine:
        stream = AEngineModel(engine).generate_stream(USER)
        next(stream)
        if how == "close":
            stream.close()
        elif how == "drop":
            del stream
        else:
            engine.abort_all()
            with pytest.raises(RequestError, match="aborted"):
                list(stream)
        ended(engine)
        assert engine.statistics().num_aborted == 1


def test_what_is_cut_off_or_refused_is_no_answer() -> None:
    error = EngineOverloadedError("full", retry_after=1.0)
    with FakeLLM([CALL, CALL, error]) as engine:
        model = AEngineModel(engine, max_tokens=50)
        with pytest.raises(InvalidRequestError, match="larger max_tokens"):
            model.generate(USER, tools_to_call_from=[weather])
        with pytest.raises(InvalidRequestError, match="larger max_tokens"):
            list(model.generate_stream(USER, tools_to_call_from=[weather]))
        with pytest.raises(AgentGenerationError, match="full"):
            ToolCallingAgent(model=model, tools=[], **QUIET).run("?")


async def test_an_engine_on_the_loop_names_the_cure() -> None:
    async with FakeAsyncLLM("yes") as engine:
        with pytest.raises(InvalidRequestError, match="own_thread=True"):
            AEngineModel(engine)


def test_agents_of_many_threads_share_an_engine() -> None:
    with FakeLLM(FINAL, token_delay=0.0005) as engine:
        barrier = threading.Barrier(4)

        def run(_: int) -> Any:
            barrier.wait()
            return ToolCallingAgent(model=AEngineModel(engine.as_async()), tools=[weather], **QUIET).run("?")

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(run, range(4))) == ["It is fine."] * 4
