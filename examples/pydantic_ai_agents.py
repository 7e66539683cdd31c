"""Agents of pydantic-ai, all at once, over one engine in their process: they share its batches.

python examples/pydantic_ai_agents.py [city ...]
"""

import asyncio
import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent, RunUsage
from pydantic_ai.settings import ModelSettings

from aengine import AsyncLLM
from aengine.integrations.pydantic_ai import AEngineModel

CITIES = ["Paris", "London", "Rome", "Madrid", "Berlin", "Vienna", "Oslo", "Athens"]


class City(BaseModel):
    country: str = Field(max_length=30)
    is_capital: bool
    inhabitants: int = Field(ge=1000, le=50_000_000)


async def main() -> None:
    cities = sys.argv[1:] or CITIES
    engine = AsyncLLM("smollm2-135m")
    agent = Agent(
        AEngineModel(engine, settings=ModelSettings(temperature=0, max_tokens=200)),
        output_type=City,
        instructions="You know the cities of the world.",
    )
    usage = RunUsage()
    async with engine:
        answers = await asyncio.gather(*[agent.run(f"Describe the city {city}.", usage=usage) for city in cities])
    for city, answer in zip(cities, answers, strict=True):
        print(f"{city}: {answer.output!r}")
    print(f"[{usage.requests} requests, {usage.input_tokens} prompt tokens, {usage.output_tokens} written]")


if __name__ == "__main__":
    asyncio.run(main())
