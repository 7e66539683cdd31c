"""Requests whose tokens and log-probabilities are to be the same alone and in any batch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from aengine import AsyncLLM, Completion, SamplingParams

Outcome = tuple[tuple[int, ...], list[Any], list[Any] | None]


def params(rng: random.Random, most: int = 16, **how: Any) -> SamplingParams:
    given = {"max_tokens": rng.randint(1, most), "temperature": rng.choice([0.0, 1.0]), "seed": rng.getrandbits(60)}
    return SamplingParams(ignore_eos=True, **given | how)


def outcome(completion: Completion) -> Outcome:
    choice, prompt = completion.choices[0], completion.prompt_logprobs
    assert choice.logprobs is not None
    return choice.token_ids, list(choice.logprobs), None if prompt is None else list(prompt)


class Targets:
    """Requests, and their outcomes alone."""

    def __init__(self, rng: random.Random, lengths: list[int], vocab_size: int) -> None:
        self._rng, self._vocab_size = rng, vocab_size
        self.work = [
            (self.ids(n), params(rng, 24, logprobs=2, prompt_logprobs=[None, None, 1][i % 3], max_tokens=24))
            for i, n in enumerate(lengths)
        ]
        self.alone: list[Outcome] = []

    def ids(self, length: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(length)]

    async def run_alone(self, engine: AsyncLLM) -> None:
        self.alone = [outcome(await engine.generate(*one)) for one in self.work]

    async def check_batches(
        self, engine: AsyncLLM, count: int, longest: int, sizes: Sequence[int] = (0, 1, 3, 7, 15, 31, 61)
    ) -> None:
        """Each with some of the targets, beside as many others as one of the ``sizes``."""
        rng = self._rng
        for number in range(count):
            chosen = rng.sample(range(len(self.work)), rng.randint(1, min(3, len(self.work))))
            calls = [(i, *self.work[i]) for i in chosen]
            for _ in range(rng.choice(sizes)):
                shared = rng.choice(self.work)[0]
                begin = shared[: rng.randrange(len(shared) + 1)] if rng.random() < 0.2 else []
                ids = begin[: longest - 1] + self.ids(
                    rng.choice([1, 1, rng.randint(1, 30), rng.randint(1, longest // 4)])
                )
                calls.append((-1, ids, params(rng, logprobs=rng.choice([None, 0, 3]))))
            rng.shuffle(calls)
            done = await asyncio.gather(*(engine.generate(*call[1:]) for call in calls))
            for (i, *_), completion in zip(calls, done, strict=True):
                if i >= 0:
                    assert outcome(completion) == self.alone[i], f"batch {number} of {len(calls)}, request {i}"
