"""Log-probabilities of prompts beside transformers', in every situation that an engine brings a request into."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from scenarios import (
    MAX_TOKENS,
    Engine,
    Reference,
    reference_of,
    settings_of_torch_kept,
    some_prompts,
    states_kept_often,
)
from test_hybrids import DELTA, NO_EXPERTS
from tiny import load_reference

from aengine.engine.sampling_extras import extras_of
from aengine.engine.scheduler.request import Request
from aengine.engine.streams.prompt_logprobs import of_pieces
from aengine.params import SamplingParams
from aengine.runner.results import prompt_logprobs

TinyModel = Callable[..., Path]
MODELS = {"llama": {}, "qwen3": {"sliding_window": 9, "use_sliding_window": True}, "qwen3_next": DELTA | NO_EXPERTS}


class Scores:
    """Requests for the log-probabilities of prompts, and what transformers' model says of them."""

    def __init__(self, engine: Engine, reference: Reference) -> None:
        self.engine = engine
        self._reference = reference
        self._asked: list[tuple[Request, int, int]] = []

    def add(self, prompt: Sequence[int], num_asked: int, max_tokens: int, first: int = 0) -> Request:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=num_asked)
        request = Request(
            "r",
            prompt,
            params,
            seed=0,
            max_num_tokens=len(prompt) + max(1, max_tokens),
            stop_token_ids=frozenset(),
            samples=max_tokens > 0,
            extras=extras_of(params),
            results_from=first,
        )
        self._asked.append((request, num_asked, first))
        self.engine.scheduler.add_request(request)
        return request

    def check(self) -> None:
        """Compare every entry, and forget the requests."""
        for request, num_asked, first in self._asked:
            assert request.num_output_tokens == (request.params.max_tokens or 0)
            prompt = request.token_ids[: request.num_prompt_tokens]
            entries = of_pieces(self.engine.numbers.get(request, array("f")), len(prompt))
            logprobs = torch.log_softmax(self._reference(torch.tensor(prompt)), -1)
            assert [entry is None for entry in entries] == [place <= first for place in range(len(prompt))]
            for place, entry in enumerate(entries):
                if entry is not None:
                    (own, *best), expected = entry, logprobs[place - 1]
                    values = pytest.approx(expected.topk(num_asked).values.tolist(), abs=1e-3)
                    assert own.token_id == prompt[place] and len(best) == num_asked
                    assert own.logprob == pytest.approx(float(expected[own.token_id]), abs=1e-3)
                    assert [one.logprob for one in best] == values
                    assert [float(expected[one.token_id]) for one in best] == values
        self._asked.clear()


@pytest.mark.parametrize("arch", MODELS)
def test_every_scenario(arch: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "_LOGITS", 1 << 12)  # a chunk's rows are several pieces
    folder = tiny_model(arch, seed=7, **MODELS[arch])
    with settings_of_torch_kept(), states_kept_often():
        engine = Engine(folder)
        scores = Scores(engine, reference_of(load_reference(folder, arch)))
        texts = some_prompts(engine.offer["vocab_size"])
        engine.begin()
        engine.generate(texts)  # what the prefix cache has is computed again
        for text in texts:
            scores.add(text, 3, 0)
            engine.run()
        scores.check()
        for place, text in enumerate(texts):  # beside others, and from some token on
            scores.add(text, place, place % 3, first=min(7 * place, len(text) - 1))
            engine.add([text])
        engine.run()
        scores.check()
        budget, longest = 16, max(map(len, texts)) + MAX_TOKENS
        engine.begin(num_blocks=engine.fewest_blocks(longest, budget) + 2, max_num_batched_tokens=budget)
        for text in texts * 2:
            scores.add(text, 2, MAX_TOKENS)
        engine.run()
        scores.check()
        assert arch == "qwen3_next" or engine.scheduler.rows.num_preemptions > 0
        engine.begin(max_num_batched_tokens=32)
        for text in texts:
            scores.add(text, 1, MAX_TOKENS)
        engine.run(most_steps=4)
        engine.die()
        engine.run()
        scores.check()


def test_what_was_given_is_not_computed_again(tiny_model: TinyModel) -> None:
    """A request that lost its KV goes on after its prompt's log-probabilities, of which each comes once."""
    with settings_of_torch_kept():
        engine = Engine(tiny_model("llama", seed=7))
        prompt = some_prompts(engine.offer["vocab_size"])[4]
        scores = Scores(engine, lambda _: torch.empty(0))
        for most_steps in (2, 6):  # within the prompt, and after it
            engine.begin(max_num_batched_tokens=16)
            request = scores.add(prompt, 2, MAX_TOKENS)
            engine.run(most_steps)
            engine.die()
            engine.run()
            num_pieces = 4
            assert len(engine.numbers[request]) == 3 * num_pieces + (len(prompt) - 1) * (2 + 2 * 2)


def test_a_shared_prompt_is_computed_once(tiny_model: TinyModel) -> None:
    with settings_of_torch_kept():
        engine = Engine(tiny_model("llama", seed=7))
        engine.begin()
        scores, prompt = Scores(engine, lambda _: torch.empty(0)), some_prompts(engine.offer["vocab_size"])[4]
        for token_id in (5, 6, 7):
            request = scores.add([*prompt, token_id, 9], 1, 0, first=len(prompt) - 1)
            engine.run()
            entries = of_pieces(engine.numbers[request], len(prompt) + 2)
            assert [entry is None for entry in entries] == [True] * len(prompt) + [False] * 2
        assert request.num_cached_tokens >= len(prompt) - 1 - engine.offer["block_size"]
