"""Facts out of texts, as objects: python examples/extract.py"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from aengine import AsyncLLM, SamplingParams

REVIEWS = [
    "The soup was cold and the waiter rude. Never again.",
    "Lovely garden, fresh fish, fair prices. We will be back.",
    "It was fine. Nothing special, but the cake was good.",
]


class Review(BaseModel):
    mood: Literal["good", "bad", "mixed"]
    dishes: list[Annotated[str, Field(max_length=20)]] = Field(max_length=3)
    stars: Literal[1, 2, 3, 4, 5]


async def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=100)
    async with AsyncLLM("smollm2-135m") as engine:
        chats = [[{"role": "user", "content": f"Describe this review as JSON: {text}"}] for text in REVIEWS]
        for completion in await asyncio.gather(*(engine.generate(chat, params, output_type=Review) for chat in chats)):
            print(repr(completion.parsed) if completion.parsed else f"({completion.finish_reason}) {completion.text}")


asyncio.run(main())
