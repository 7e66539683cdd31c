"""An agent over a session: it calls tools until it can answer, and a fork of it thinks of something else meanwhile.

python examples/agent_session.py [question]
"""

import asyncio
import sys

from aengine import AsyncLLM, SamplingParams

SYSTEM = "You help travellers. Call get_weather before you speak of the weather."


async def get_weather(city: str) -> str:
    """Today's weather in a city.

    Args:
        city: Its name, as "Paris".
    """
    await asyncio.sleep(0.1)  # a service that takes its time; what was computed waits for it
    return f"{city}: sunny, 21 degrees"


async def main() -> None:
    question = " ".join(sys.argv[1:]) or "What is the weather in Paris?"
    params = SamplingParams(max_tokens=200, temperature=0)
    async with (
        AsyncLLM("smollm2-135m") as engine,
        engine.session(SYSTEM, tools=[get_weather], params=params, keep=60) as session,
    ):
        # A model this small rarely calls by itself, so one call is required. Larger ones need no tool_choice.
        answer = await session.chat(question, tool_choice="required", parallel_tool_calls=False)
        while await session.call_tools():
            answer = await session.chat(tool_choice="none")
        print("answer:", answer.message.content)

        async with session.fork() as fork:
            other, more = await asyncio.gather(
                fork.chat("Say it as a poem.", tool_choice="none"),
                session.chat("What should I pack?", tool_choice="none"),
            )
        print("packing:", more.message.content)
        print("poem:", other.message.content)
        for name, one in (("session", session), ("fork", fork)):
            for turn in one.usage.turns:
                print(f"{name}: {turn.prompt_tokens} prompt tokens, {turn.cached_tokens} of them were there")


if __name__ == "__main__":
    asyncio.run(main())
