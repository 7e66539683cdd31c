"""A chat that remembers: each turn sends the whole conversation, and its beginning comes from the prefix cache.

Run: python examples/chat.py   (an empty line ends it)
"""

import asyncio

from aengine import AsyncLLM, SamplingParams


async def main() -> None:
    messages = [{"role": "system", "content": "You are a helpful assistant. Answer briefly."}]
    async with AsyncLLM("smollm2-135m") as engine:
        while question := (await asyncio.to_thread(input, "you: ")).strip():
            messages.append({"role": "user", "content": question})
            print("model: ", end="")
            stream = engine.stream(messages, SamplingParams(max_tokens=100, temperature=0))
            async for token in stream:
                print(token.text, end="", flush=True)
            completion = stream.completion
            print(f"  [{completion.usage.cached_tokens} of {completion.usage.prompt_tokens} prompt tokens cached]")
            messages.append({"role": "assistant", "content": completion.text})


asyncio.run(main())
