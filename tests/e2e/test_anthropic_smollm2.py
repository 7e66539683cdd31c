"""An agent's loop over the real model: Anthropic's client asks, runs the tool, and gives its result back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from aengine import AsyncLLM
from aengine.server.in_process import anthropic_client

if TYPE_CHECKING:
    from anthropic.types import ToolResultBlockParam

TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
    "strict": True,
}


async def test_a_tool_is_used(short_model: str) -> None:
    async with AsyncLLM(short_model, max_model_len=2048) as engine, anthropic_client(engine) as client:
        messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
        ask: dict[str, Any] = {
            "model": Path(short_model).name,
            "max_tokens": 60,
            "extra_body": {"temperature": 0.0},
            "system": "You are a helpful assistant.",
            "tools": [TOOL],
        }
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        async with client.messages.stream(**ask, messages=messages, tool_choice=choice) as stream:
            called = await stream.get_final_message()
        assert called.stop_reason == "tool_use"
        (call,) = [block for block in called.content if block.type == "tool_use"]
        assert call.name == "get_weather" and list(call.input) == ["city"]
        result: ToolResultBlockParam = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"}
        messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        ask["tool_choice"] = {"type": "none"}
        counted = await client.messages.count_tokens(
            model=ask["model"], messages=messages, system=ask["system"], tools=ask["tools"]
        )
        answer = await client.messages.create(**ask, messages=messages)
        assert [block.type for block in answer.content] == ["text"]
        assert answer.stop_reason in ("end_turn", "max_tokens")
        cached = answer.usage.cache_read_input_tokens or 0
        assert counted.input_tokens == answer.usage.input_tokens + cached and cached > 0
        assert engine.statistics().num_running == 0
