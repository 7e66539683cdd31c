"""Two engines of one model that share KV: one computes prompts, the other one goes on from there.

    python examples/prefill_decode.py                               # they share a folder
    python examples/prefill_decode.py redis://localhost:6379/0      # they share a Redis server

On a machine with GPUs each engine would have its own: device="cuda:0", device="cuda:1".
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time

from aengine import AsyncLLM, DiskTier, HostTier, SamplingParams, StoreTier

MODEL = "smollm2-135m"


async def until_saved(engine: AsyncLLM, num_blocks: int) -> None:
    """Blocks are saved a moment after they are computed."""
    while engine.statistics().kv_tiers[-1].num_saved < num_blocks:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def main(url: str | None) -> None:
    shared = StoreTier("redis", url=url) if url else DiskTier(tempfile.mkdtemp(), "2GB")
    tiers = [HostTier("500MB"), shared]
    prompt = "A long story: " + "the fox went on through the snow. " * 100
    async with (
        AsyncLLM(MODEL, kv_tiers=tiers, kv_cache_memory_bytes=400 << 20) as prefill,
        AsyncLLM(MODEL, kv_tiers=tiers, kv_cache_memory_bytes=400 << 20) as decode,
    ):
        begun = time.perf_counter()
        completion = await prefill.generate(prompt, SamplingParams(max_tokens=1))
        print(f"one engine has computed the prompt in {time.perf_counter() - begun:.2f} s")
        num_blocks = completion.usage.prompt_tokens // prefill.describe()["block_size"]
        await until_saved(prefill, num_blocks)

        begun = time.perf_counter()
        stream = decode.stream(prompt, SamplingParams(max_tokens=24, temperature=0.0))
        async for token in stream:
            if begun:
                print(f"the other one has its first token after {time.perf_counter() - begun:.2f} s:", end=" ")
                begun = 0.0
            print(token.text, end="", flush=True)
        usage = stream.completion.usage
        print(f"\nof {usage.prompt_tokens} tokens it has taken over {usage.cached_tokens}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
