"""Models of frameworks that were made for a server ask no network."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from agents import Agent, Runner
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from aengine.integrations.langchain import AEngineEmbeddings, ChatAEngine
from aengine.integrations.openai_agents import AEngineModel
from aengine.testing import FakeAsyncLLM, FakeLLM, Reply


@pytest.fixture(autouse=True)
def _refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"the network was asked: {args}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setenv("OPENAI_API_KEY", "a key that nobody is to see")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere.invalid/v1")


@tool
def weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def test_langchain_asks_no_network() -> None:
    with FakeLLM(lambda request: Reply(tool_calls=[("weather", {"city": "Paris"})]) if request.tools else "yes") as llm:
        model = ChatAEngine(engine=llm)
        assert model.invoke("?").text == "yes"
        assert "".join(chunk.text for chunk in model.stream("?")) == "yes"
        assert model.bind_tools([weather]).invoke("?").tool_calls
        assert model.get_num_tokens("four") == 4, "by the engine's tokenizer, of which a token is a byte"
        assert model.get_num_tokens_from_messages([HumanMessage("four")]) > 4
        assert len(AEngineEmbeddings(llm).embed_query("four")) > 1


async def test_the_agents_sdk_asks_no_network() -> None:
    async with FakeAsyncLLM("yes") as engine:
        agent: Agent[Any] = Agent(name="a", model=AEngineModel(engine))
        assert (await Runner.run(agent, "?")).final_output == "yes"
