"""An agent's two turns: the model calls a function, gets its result, and answers with a value of a type.

python examples/agent.py [question]
"""

import asyncio
import json
import sys

from pydantic import BaseModel, Field

from aengine import AsyncLLM, SamplingParams
from aengine.chat import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart, tools_of


class Report(BaseModel):
    city: str = Field(max_length=30)
    sunny: bool
    degrees: int = Field(ge=-50, le=60)


async def get_weather(city: str) -> str:
    """Today's weather in a city.

    Args:
        city: Its name, as "Paris".
    """
    return json.dumps({"city": city, "sunny": True, "degrees": 21})


async def answer(engine: AsyncLLM, messages: list[dict], params: SamplingParams, **options) -> tuple:
    """One turn, shown as it comes. Returns its message and, if it did not call a tool, its `Report`."""
    stream = engine.stream_chat(messages, params, output_type=Report, **options)
    async for delta in stream:
        match delta:
            case ReasoningDelta(text=text):
                print(f"\033[2m{text}\033[0m", end="", flush=True)
            case TextDelta():
                print("\rso far:", stream.partial, end="\033[K", flush=True)
            case ToolCallStart(name=name):
                print(f"calls {name}(", end="", flush=True)
            case ToolCallDelta(arguments=piece):
                print(piece, end="", flush=True)
            case ToolCallEnd():
                print(")")
    return stream.message, stream.completion.parsed


async def main() -> None:
    question = " ".join(sys.argv[1:]) or "What is the weather in Paris?"
    params = SamplingParams(max_tokens=200, temperature=0)
    tools = tools_of([get_weather])
    async with AsyncLLM("smollm2-135m") as engine:
        messages: list[dict] = [{"role": "user", "content": question}]
        # A model this small rarely calls by itself, so one call is required. For larger ones use "auto", in a loop.
        message, _ = await answer(
            engine, messages, params, tools=tools, tool_choice="required", parallel_tool_calls=False
        )
        messages.append(message.to_dict())
        for call in message.tool_calls:
            result = await next(tool for tool in tools if tool.name == call.name).call(call.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        _, report = await answer(engine, messages, params, tools=tools, tool_choice="none")
        print(f"\n{report!r}")


if __name__ == "__main__":
    asyncio.run(main())
