"""batch_invariant=True on a CPU, a whole engine: tokens and log-probabilities of requests alone, and in any batch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from invariant_targets import Targets
from tiny import VOCAB_SIZE

from aengine import AsyncLLM
from aengine.kernels.cpu.compiler.target import unavailable

needs_compiler = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("llama", "auto"), ("qwen3", "bfloat16"), pytest.param("qwen3_moe", "auto", marks=needs_compiler)],
)
def test_one_result_alone_and_in_any_batch(
    arch: str, dtype: str, tiny_model: Callable[..., Path], rng: random.Random
) -> None:
    """In steps of at most 48 tokens, so that prompts are cut; what has run before is in the prefix cache, but for
    prompts whose log-probabilities are asked for."""
    targets = Targets(rng, [3, 40, 90], VOCAB_SIZE)
    limits = {"max_model_len": 160, "max_num_batched_tokens": 48, "block_size": 8, "kv_cache_memory_bytes": 1 << 23}

    async def run() -> None:
        how = {"device": "cpu", "dtype": dtype, "num_threads": 2, "batch_invariant": True}
        async with AsyncLLM(str(tiny_model(arch, seed=7)), **how, **limits) as engine:
            await targets.run_alone(engine)
            await targets.check_batches(engine, 4, 100, (0, 3, 12))
            await targets.run_alone(engine)  # whatever the batches were, these have run before
            assert engine.statistics().prefix_cache_hits > 0

    asyncio.run(run())
