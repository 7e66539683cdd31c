"""Phi-3 against transformers, on both sides of longrope's border, and across it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, load, source_of
from pairs import some
from scenarios import Engine, Reference, check_scenarios, reference_of, settings_of_torch_kept
from tiny import VOCAB_SIZE, load_reference
from torch import Tensor

from aengine.engine.speculation.drafts import Drafts

TinyModel = Callable[..., Path]
BORDER = 32
HALF = 6  # pairs of a head that turn, of 8
RNG = random.Random(5)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [RNG.uniform(1, 1.5) for _ in range(HALF)],
    "long_factor": [RNG.uniform(1.5, 6) for _ in range(HALF)],
    "original_max_position_embeddings": BORDER,
}
PHI4: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "original_max_position_embeddings": BORDER,
    "rope_parameters": LONGROPE,
    "partial_rotary_factor": 0.75,
}
OVERRIDES: list[dict[str, Any]] = [{}, {"sliding_window": 9, "tie_word_embeddings": True}]


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    with settings_of_torch_kept():
        yield


def by_length(model: Any) -> Reference:
    """transformers' numbers of each prefix alone: of a whole sequence it takes the factors by the last position."""
    logits = reference_of(model)

    def alone(token_ids: Tensor) -> Tensor:
        return torch.cat((logits(token_ids[:BORDER]), logits(token_ids)[BORDER:]))

    return alone


@pytest.mark.parametrize(
    ("overrides", "model_impl"),
    some(
        itertools.product(OVERRIDES, ["native", "transformers"]),
        (OVERRIDES[0], "transformers"),
        (OVERRIDES[1], "native"),
    ),
    ids=lambda value: value if isinstance(value, str) else ("full", "window")[OVERRIDES.index(value)],
)
def test_every_scenario(overrides: dict[str, Any], model_impl: str, tiny_model: TinyModel) -> None:
    """Prompts of up to 60 tokens and completions of 12: below the border of 32, beyond it, and across it."""
    folder = tiny_model("phi3", seed=7, **PHI4, **overrides)
    engine = check_scenarios(folder, by_length(load_reference(folder, "phi3")), model_impl=model_impl)
    assert engine.offer["rope_border"] == BORDER


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_generate_of_transformers_across_the_border(model_impl: str, tiny_model: TinyModel) -> None:
    """It computes the whole sequence anew when the first token beyond the border comes; so do we."""
    folder = tiny_model("phi3", seed=7, **PHI4)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in (20, 31, 32, 33)]
    reference = load_reference(folder, "phi3")
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=None,
            pad_token_id=0,
        )
        wanted.append(out[0, len(prompt) :].tolist())
    engine = Engine(folder, model_impl=model_impl)
    engine.begin()
    assert engine.generate(prompts, 24) == wanted
    assert engine.scheduler.rows.num_preemptions == 0


def test_prefixes_are_shared_on_each_side_of_the_border_alone(tiny_model: TinyModel) -> None:
    folder = tiny_model("phi3", seed=7, **PHI4)
    engine = Engine(folder)
    engine.begin()
    rng = random.Random(2)
    text = [rng.randrange(3, 250) for _ in range(BORDER + 20)]
    hits = []
    for length in (BORDER - 4, BORDER - 3, BORDER + 10, BORDER + 11, BORDER - 3):
        before = engine.scheduler.prefix_cache_hits
        engine.generate([text[:length]], 1)
        hits.append(engine.scheduler.prefix_cache_hits - before)
    assert hits == [0, BORDER - 4, 0, BORDER + 8, BORDER - 4]


def test_drafts_stop_at_the_border(tiny_model: TinyModel) -> None:
    """What a request drafts does not change its tokens, whichever side they are on."""
    folder = tiny_model("phi3", seed=7, **PHI4)
    engine = Engine(folder)
    engine.begin()
    prompts = [[5, 9, 11] * 8, [3, 4] * 13]
    wanted = engine.generate(prompts, 30)
    engine.begin()
    rows = engine.scheduler.rows
    rows.lookahead = drafts = Drafts(rows)
    requests = engine.add(prompts, 30)
    rng = random.Random(4)
    while any(request.finish_reason is None for request in requests):
        engine.run(most_steps=1)
        for request, tokens in zip(requests, wanted, strict=True):
            place = request.num_computed_tokens + 1 - request.num_prompt_tokens
            guess = tokens[place : place + rng.randint(1, 5)]
            drafts.propose(request, [*guess[:-1], rng.randrange(VOCAB_SIZE)] if rng.random() < 0.5 else guess)
    assert [request.output_token_ids for request in requests] == wanted


def test_yarn_of_the_first_release_is_longrope(tiny_model: TinyModel) -> None:
    """As its config.json says it: ``rope_scaling`` of type "su", the original context and the share beside."""
    folder = tiny_model("phi3", seed=7, **PHI4)
    ids = [RNG.randrange(VOCAB_SIZE) for _ in range(20)]
    source = source_of(folder)
    wanted = Driver(load(source)[0], random.Random(0)).step({"a": ids})["a"]
    scaling = source.hf_config.pop("rope_parameters")
    scaling = {"type": "su", "short_factor": scaling["short_factor"], "long_factor": scaling["long_factor"]}
    source.hf_config.update(rope_theta=10000.0, rope_scaling=scaling, partial_rotary_factor=0.75)
    assert torch.equal(Driver(load(source)[0], random.Random(0)).step({"a": ids})["a"], wanted)
