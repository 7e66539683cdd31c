"""Stream one answer. Run: python examples/stream.py "Your question" """

import asyncio
import sys

from aengine import AsyncLLM, SamplingParams


async def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?"
    async with AsyncLLM("smollm2-135m") as engine:
        messages = [{"role": "user", "content": question}]
        stream = engine.stream(messages, SamplingParams(max_tokens=64, temperature=0))
        async for token in stream:
            print(token.text, end="", flush=True)
        usage = stream.completion.usage
        print(f"\n[{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated]")


asyncio.run(main())
