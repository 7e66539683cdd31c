"""LangChain's agents, which are graphs of LangGraph's, over an engine of the same process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from aengine.integrations.langchain import ChatAEngine
from aengine.testing import FakeAsyncLLM, FakeLLM, FakeRequest, Reply

agents = pytest.importorskip("langchain.agents")


class Report(BaseModel):
    """A report of the weather."""

    city: str
    degrees: int


REPORT = Report(city="Rome", degrees=21)
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "How warm is it in Paris and in Rome?"}]}


def weather(city: str) -> str:
    """Weather of a city."""
    return f"21 degrees in {city}"


def answer(request: FakeRequest) -> Any:
    """Call the tool for two cities, then report, by a tool of the report's or as JSON."""
    has_shape = request.params.structured_output is not None
    has_report_tool = any(tool.name == "Report" for tool in request.tools)
    if not any(message["role"] == "tool" for message in request.messages or ()):
        text = "" if has_shape or has_report_tool else "I look."  # beside a value there is none
        return Reply(text, tool_calls=[("weather", {"city": city}) for city in ("Paris", "Rome")])
    if has_report_tool:
        return Reply(tool_calls=[("Report", REPORT.model_dump())])
    return REPORT if has_shape else "It is 21 degrees in both."


async def test_an_agent_calls_tools_and_answers() -> None:
    async with FakeAsyncLLM(answer) as engine:
        agent = agents.create_agent(ChatAEngine(engine=engine), [weather], system_prompt="Be brief.")
        messages = (await agent.ainvoke(ASK))["messages"]
        assert [message.type for message in messages] == ["human", "ai", "tool", "tool", "ai"]
        assert [message.content for message in messages[2:4]] == ["21 degrees in Paris", "21 degrees in Rome"]
        assert messages[-1].content == "It is 21 degrees in both."
        roles = [message["role"] for message in engine.requests[-1].messages]
        assert roles == ["system", "user", "assistant", "tool", "tool"]


@pytest.mark.parametrize("strategy", ["AutoStrategy", "ProviderStrategy", "ToolStrategy"])
async def test_an_agent_returns_a_value_of_a_type(strategy: str) -> None:
    strategies = pytest.importorskip("langchain.agents.structured_output")
    shape = getattr(strategies, strategy)(Report)
    async with FakeAsyncLLM(answer) as engine:
        agent = agents.create_agent(ChatAEngine(engine=engine), [weather], response_format=shape)
        assert (await agent.ainvoke(ASK))["structured_response"] == REPORT


async def test_an_agents_tokens_stream() -> None:
    async with FakeAsyncLLM(answer, token_delay=0.0005) as engine:
        agent = agents.create_agent(ChatAEngine(engine=engine), [weather])
        texts: dict[str, list[str]] = {}
        async for chunk, _ in agent.astream(ASK, stream_mode="messages"):
            texts.setdefault(chunk.type, []).append(chunk.text)
        assert len(texts["AIMessageChunk"]) > 20, "they come in pieces"
        assert "".join(texts["AIMessageChunk"]) == "I look.It is 21 degrees in both."
        assert texts["tool"] == ["21 degrees in Paris", "21 degrees in Rome"]


async def test_an_agent_that_is_cancelled_ends_its_request() -> None:
    async with FakeAsyncLLM("a" * 1000, token_delay=0.01) as engine:
        agent = agents.create_agent(ChatAEngine(engine=engine), [weather])
        run = asyncio.create_task(agent.ainvoke(ASK))
        while not engine.statistics().num_running:
            await asyncio.sleep(0.001)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        while engine.statistics().num_running:
            await asyncio.sleep(0.001)
        assert engine.statistics().num_aborted == 1


def test_an_agent_blocks_its_thread() -> None:
    with FakeLLM(answer) as llm:
        agent = agents.create_agent(ChatAEngine(engine=llm), [weather], response_format=Report)
        assert agent.invoke(ASK)["structured_response"] == REPORT
