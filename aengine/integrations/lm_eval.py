"""`AEngineLM`: a model of lm-eval's over an engine in the same process.

with LLM("smollm2-135m") as llm:
    results = lm_eval.simple_evaluate(model=AEngineLM(llm), tasks=["arc_easy", "gsm8k"])
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

from ..llm import LLM
from ..params import SamplingParams

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(f"{__name__} needs lm-eval: pip install lm-eval ({error})") from error

__all__ = ["AEngineLM"]

R = TypeVar("R")
_MAX_NEW_TOKENS = 256  # lm-eval's own, of a task that does not say


class AEngineLM(TemplateLM):
    """Answers lm-eval's requests by an engine that is borrowed: nobody closes it here.

    Args:
        llm: running. Errors are those of its `score_completions` and `generate`.
        num_concurrent: requests that the engine has at once.
    """

    def __init__(self, llm: LLM, *, num_concurrent: int = 256) -> None:
        super().__init__()
        self._engine, self._num_concurrent = llm.as_async(), num_concurrent
        self._max_len = int(llm.describe()["max_model_len"])

    @property
    def tokenizer_name(self) -> str:
        """A name of it for lm-eval's cache of prompts."""
        return self._engine.config.model_name

    @property
    def eot_token_id(self) -> int:
        return min(self._engine.tokenizer.eos_token_ids)

    @property
    def prefix_token_id(self) -> int:
        begin = self._engine.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return list(self._engine.tokenizer.encode(string, add_special_tokens=add_special_tokens is not False))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self._engine.tokenizer.render(chat_history, add_generation_prompt=add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score each continuation behind the end of its context for which there is room."""
        return self._all(self._score(context, continuation) for _, context, continuation in requests)

    async def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        kept = context[max(0, len(context) + len(continuation) - self._max_len) :]
        (scored,) = await self._engine.score_completions(kept, [continuation])
        return scored.logprob, scored.is_greedy

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        return self._all(self._score_text(request.args[0]) for request in requests)

    async def _score_text(self, text: str) -> float:
        """Return the log-likelihood of a text, in windows of the engine's length."""
        ids = self.tok_encode(text, add_special_tokens=False)
        windows = map(make_disjoint_window, get_rolling_token_windows(ids, self.prefix_token_id, self._max_len - 1, 1))
        return sum([(await self._score(list(context), list(own)))[0] for context, own in windows])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return self._all(self._generate(*request.args) for request in requests)

    async def _generate(self, context: str, how: dict[str, Any]) -> str:
        until = how.get("until") or []
        max_tokens = min(how.get("max_gen_toks", _MAX_NEW_TOKENS), self._max_len - 1)
        params = SamplingParams(
            temperature=how.get("temperature", 0.0) if how.get("do_sample", True) else 0.0,
            top_p=how.get("top_p", 1.0),
            max_tokens=max_tokens,
            stop=[until] if isinstance(until, str) else until,
        )
        ids = self.tok_encode(context)
        return (await self._engine.generate(ids[max(0, len(ids) + max_tokens - self._max_len) :], params)).text

    def _all(self, calls: Iterable[Awaitable[R]]) -> list[R]:
        """Return what the calls return, some of them at once."""

        async def run() -> list[R]:
            turn = asyncio.Semaphore(self._num_concurrent)

            async def one(call: Awaitable[R]) -> R:
                async with turn:
                    return await call

            return await asyncio.gather(*map(one, calls))

        return asyncio.run(run())
