"""A thousand prompts through one engine, with a progress bar. Run: python examples/batch.py [NUMBER]

All are submitted at once: the engine batches as many as fit and queues the rest.
"""

import asyncio
import sys

from tqdm import tqdm

from aengine import AsyncLLM, SamplingParams


async def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    prompts = [f"{i} plus {i} equals" for i in range(number)]
    params = SamplingParams(max_tokens=8, temperature=0, stop="\n")
    async with AsyncLLM("smollm2-135m") as engine:
        with tqdm(total=number, unit="prompt") as bar:

            async def answer(prompt: str) -> str:
                completion = await engine.generate(prompt, params)
                bar.update()
                return completion.text

            texts = await asyncio.gather(*map(answer, prompts))
    for prompt, text in list(zip(prompts, texts))[:5]:
        print(prompt + text)
    print(f"{len(texts)} completions")


asyncio.run(main())
