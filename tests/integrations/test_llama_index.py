"""LlamaIndex' own agents and programs over an engine of the same process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import (
    ChatMessage,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel, Field, ValidationError, field_validator

from aengine import EngineOverloadedError, InvalidRequestError, RequestError
from aengine.integrations.llama_index import AEngine
from aengine.testing import FakeAsyncLLM, FakeLLM, Reply

pytestmark = [
    pytest.mark.usefixtures("no_blocking"),  # of its workflows and its StructuredLLM
    pytest.mark.filterwarnings("ignore:The `.*` (attribute|method) is deprecated:pydantic.PydanticDeprecatedSince20"),
    pytest.mark.filterwarnings("ignore:is_running called from within a step:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the .* attribute on the instance:pydantic.PydanticDeprecatedSince211"),
]

CALL = Reply(tool_calls=[("weather", {"city": "Paris"})])
PROMPT = PromptTemplate("Weather in {city}?")
KINDS = ("prompt", "completion")
USER = [ChatMessage(role="user", content="?")]


class Report(BaseModel):
    city: str
    degrees: int = Field(ge=-90, le=60)

    @field_validator("city")
    @classmethod
    def exists(cls, city: str) -> str:
        if city == "Atlantis":
            raise ValueError("there is no Atlantis")
        return city


REPORT = Report(city="Paris", degrees=21)


def weather(city: str) -> str:
    """Weather of a city."""
    return f"21 degrees in {city}"


TOOL = FunctionTool.from_defaults(fn=weather)


async def ended(engine: Any) -> None:
    while engine.statistics().num_running or engine.statistics().num_waiting:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_function_agent_calls_tools_and_answers(streaming: bool) -> None:
    async with FakeAsyncLLM([CALL, "It is fine."], token_delay=0.0005) as engine:
        agent = FunctionAgent(llm=AEngine(engine), tools=[weather], system_prompt="Be brief.", streaming=streaming)
        handler = agent.run("Weather in Paris?")
        events = [event async for event in handler.stream_events()]
        assert str(await handler) == "It is fine."
        first, second = engine.requests
        assert [tool.name for tool in first.tools] == ["weather"]
        assert [m["role"] for m in second.messages] == ["system", "user", "assistant", "tool"]
        assert second.messages[3]["content"] == "21 degrees in Paris"
        assert second.messages[3]["tool_call_id"] == second.messages[2]["tool_calls"][0]["id"]
        if streaming:
            streamed = [event for event in events if isinstance(event, AgentStream)]
            assert "".join(event.delta for event in streamed) == "It is fine."
            calls = [call.tool_kwargs for event in streamed for call in event.tool_calls]
            assert {"city": None} in calls and calls[-1] == {"city": "Paris"}, "arguments stream"


async def test_an_agents_structured_answer_and_a_react_agent() -> None:
    replies = [CALL, "Fine.", REPORT, 'Thought: look.\nAction: weather\nAction Input: {"city": "Rome"}\n']
    replies.append("Thought: I can answer without using any more tools.\nAnswer: 21")
    async with FakeAsyncLLM(replies) as engine:
        agent = FunctionAgent(llm=AEngine(engine), tools=[weather], output_cls=Report)
        assert (await agent.run("?")).get_pydantic_model(Report) == REPORT
        assert engine.requests[2].output_type is Report and not engine.requests[2].tools
        react = ReActAgent(llm=AEngine(engine, is_function_calling_model=False), tools=[weather])
        assert str(await react.run("Weather in Rome?")) == "21"
        assert "Observation: 21 degrees in Rome" in engine.requests[4].text


async def test_structured_answers_keep_to_their_schema() -> None:
    replies = [REPORT, REPORT, REPORT, Report.model_construct(city="Atlantis", degrees=1), REPORT]
    async with FakeAsyncLLM(replies, token_delay=0.0005) as engine:
        llm = AEngine(engine, system_prompt="Be brief.")
        assert await llm.astructured_predict(Report, PROMPT, city="Paris") == REPORT
        request = engine.requests[0]
        assert request.output_type is Report and '"degrees"' in request.text and "Weather in Paris?" in request.text
        assert request.messages[0] == {"role": "system", "content": "Be brief."}
        partial = [value async for value in await llm.astream_structured_predict(Report, PROMPT, city="Paris")]
        assert len(partial) > 3 and partial[-1] == REPORT
        assert any(getattr(value, "city", None) == "Par" for value in partial)
        structured = llm.as_structured_llm(Report)
        assert (await structured.achat(USER)).raw == REPORT
        with pytest.raises(ValidationError, match="Atlantis"):
            await llm.astructured_predict(Report, PROMPT, city="?")
        with pytest.raises(ValueError, match="cut off by max_tokens"):
            await llm.astructured_predict(Report, PROMPT, {"max_tokens": 5}, city="?")


async def test_a_program_of_function_calls_is_held_too() -> None:
    replies = [Reply(tool_calls=[("Report", {"city": "Paris", "degrees": 21})])] * 2
    async with FakeAsyncLLM(replies, token_delay=0.0005) as engine:
        llm = AEngine(engine, pydantic_program_mode=PydanticProgramMode.FUNCTION)
        assert await llm.astructured_predict(Report, PROMPT, city="Paris") == REPORT
        assert engine.requests[0].tool_choice == "required"
        partial = [value async for value in await llm.astream_structured_predict(Report, PROMPT, city="Paris")]
        assert partial[-1] == REPORT


async def test_chat_streams_reasoning_text_and_calls() -> None:
    reply = Reply(
        "I look.", reasoning="Hm.", tool_calls=[("weather", {"city": "Paris"}), ("weather", {"city": "Rome"})]
    )
    async with FakeAsyncLLM(reply, reasoning=True, token_delay=0.0005) as engine:
        llm = AEngine(engine)
        whole = await llm.achat_with_tools([TOOL], "?", allow_parallel_tool_calls=True)
        streamed = await llm.astream_chat_with_tools([TOOL], "?", allow_parallel_tool_calls=True)
        responses = [response async for response in streamed]
        assert len(responses) > 20
        for last in (whole, responses[-1]):
            thinking, text, *calls = last.message.blocks
            assert isinstance(thinking, ThinkingBlock) and thinking.content.strip() == "Hm."
            assert isinstance(text, TextBlock) and text.text.strip() == "I look."
            assert [call.tool_kwargs for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
            assert len({call.tool_call_id for call in calls}) == 2
            assert last.additional_kwargs["finish_reason"] == "tool_calls"
            assert last.raw["usage"]["total_tokens"] == sum(last.additional_kwargs[f"{kind}_tokens"] for kind in KINDS)
        assert "".join(response.delta for response in responses).strip() == "I look."
        thoughts = [response.additional_kwargs.get("thinking_delta", "") for response in responses]
        assert "".join(thoughts).strip() == "Hm."
        await llm.achat([*USER, whole.message, ChatMessage(role="tool", content="21", additional_kwargs={})])
        written = engine.requests[-1].messages[1]
        assert written["reasoning_content"].strip() == "Hm." and len(written["tool_calls"]) == 2


async def test_completions_go_through_the_chat_template_unless_formatted() -> None:
    async with FakeAsyncLLM("yes", token_delay=0.0005) as engine:
        llm = AEngine(engine, max_tokens=50)
        assert (await llm.acomplete("A?")).text == "yes"
        assert (await llm.acomplete("B?", formatted=True)).text == "yes"
        assert (await AEngine(engine, is_chat_model=False).acomplete("C?")).text == "yes"
        parts = [part async for part in await llm.astream_complete("D?")]
        assert "".join(part.delta for part in parts) == parts[-1].text == "yes"
        parts = [part async for part in await llm.astream_complete("E?", formatted=True)]
        assert parts[-1].text == "yes" and parts[-1].additional_kwargs["completion_tokens"] == 4
        assert [request.messages is not None for request in engine.requests] == [True, False, False, True, False]


async def test_settings_metadata_and_tokens_counted() -> None:
    async with FakeAsyncLLM("yes", max_model_len=2048) as engine:
        counter = TokenCountingHandler(tokenizer=str.split)
        llm = AEngine(
            engine, temperature=0.5, additional_kwargs={"top_k": 7}, callback_manager=CallbackManager([counter])
        )
        assert (llm.metadata.context_window, llm.metadata.model_name) == (2048, "fake")
        assert llm.metadata.is_chat_model and llm.metadata.is_function_calling_model
        await llm.achat(USER, min_p=0.1, stop=["END"], timeout=60)
        params = engine.requests[0].params
        assert (params.temperature, params.top_k, params.min_p, params.stop) == (0.5, 7, 0.1, ("END",))
        assert counter.completion_llm_token_count == 4 and counter.prompt_llm_token_count > 10
        with pytest.raises(InvalidRequestError, match="colour"):
            await llm.achat(USER, colour="red")
        with pytest.raises(InvalidRequestError, match="text only"):
            await llm.achat([ChatMessage(role="user", blocks=[ImageBlock(image=b"x")])])
        rules = [ChatMessage(role=MessageRole.DEVELOPER, content=text) for text in ("Be brief.", "Be kind.")]
        await llm.achat([*rules, *USER])
        assert engine.requests[-1].messages[0] == {"role": "system", "content": "Be brief.\n\nBe kind."}
        assert AEngine(engine).to_dict()["model_name"] == "fake"


@pytest.mark.parametrize("how", ["close", "task", "agent"])
async def test_who_leaves_ends_the_request(how: str) -> None:
    async with FakeAsyncLLM("word " * 2000, token_delay=0.001) as engine:
        llm = AEngine(engine)
        if how == "close":
            stream = await llm.astream_chat(USER)
            await anext(stream)
            await stream.aclose()
        elif how == "task":
            task = asyncio.ensure_future(llm.achat(USER))
            while not engine.statistics().num_running:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])
        else:
            handler = FunctionAgent(llm=llm, tools=[weather]).run("?")
            while not engine.statistics().num_running:
                await asyncio.sleep(0.001)
            await handler.cancel_run()
            await asyncio.wait([asyncio.ensure_future(asyncio.wait_for(handler, 10))])
        await ended(engine)
        assert engine.statistics().num_aborted == 1


async def test_what_is_cut_off_or_refused_is_no_answer() -> None:
    error = EngineOverloadedError("full", retry_after=1.0)
    async with FakeAsyncLLM([CALL, error, "word " * 2000], token_delay=0.001) as engine:
        llm = AEngine(engine)
        response = await llm.achat_with_tools([TOOL], "?", max_tokens=50)
        assert isinstance(response.message.blocks[-1], ToolCallBlock)
        with pytest.raises(InvalidRequestError, match="larger max_tokens"):
            llm.get_tool_calls_from_response(response)
        with pytest.raises(EngineOverloadedError):
            await llm.achat(USER)
        task = asyncio.ensure_future(llm.achat(USER))
        while not engine.statistics().num_running:
            await asyncio.sleep(0.001)
        engine.abort_all()
        with pytest.raises(RequestError, match="aborted"):
            await task
        with pytest.raises(InvalidRequestError, match="own_thread=True"):
            llm.chat(USER)
        with pytest.raises(InvalidRequestError, match="own_thread=True"):
            llm.stream_complete("?")


def test_blocking_calls_over_a_thread_of_its_own() -> None:
    call = Reply(tool_calls=[("weather", {"city": "Paris"})])
    with FakeLLM(["yes", "yes", "yes", "yes", REPORT, REPORT, call, "word " * 2000], token_delay=0.0002) as engine:
        llm = AEngine(engine)
        assert llm.chat(USER).message.content == llm.complete("?").text == "yes"
        assert [response.message.content for response in llm.stream_chat(USER)][-1] == "yes"
        assert [part.text for part in llm.stream_complete("?", formatted=True)][-1] == "yes"
        assert llm.structured_predict(Report, PROMPT, city="Paris") == REPORT
        assert list(llm.stream_structured_predict(Report, PROMPT, city="Paris"))[-1] == REPORT
        assert llm.predict_and_call([TOOL], "?").response == "21 degrees in Paris"
        stream = llm.stream_chat(USER)
        next(stream)
        stream.close()
        while engine.statistics().num_running:
            pass
        assert engine.statistics().num_aborted == 1
