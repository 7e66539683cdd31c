"""Drafts of families whose layers keep a state, rejected at every place, in every scenario of an engine."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import some
from scenarios import Engine, Judge, Reference, check_scenarios, reference_of, settings_of_torch_kept
from test_hybrids import MODELS
from tiny import load_reference

from aengine.engine.scheduler.request import Request, RequestStatus
from aengine.engine.speculation.drafts import Drafts

TinyModel = Callable[..., Path]


class DraftingEngine(Engine):
    """An engine whose requests have drafts of which the first few are right."""

    reference: Reference

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, speculation="suffix", **settings)
        self.most = min(group.num_ahead for group in self.groups if group.kind == "state")
        self.rejected: Counter[tuple[int, int]] = Counter()  # (drafts of a request in a step, those that were right)
        self._rng = random.Random(3)
        self._texts: dict[tuple[int, ...], list[int]] = {}  # greedy ones, by prompt

    def begin(self, **settings: Any) -> None:
        super().begin(**settings)
        rows = self.scheduler.rows
        rows.lookahead = Drafts(rows)
        plan, settle = self.scheduler.schedule, rows.lookahead.settle

        def schedule(*args: Any, **how: Any) -> Any:
            for request in list(rows.running):
                if request.status is RequestStatus.DECODING and self._rng.random() < 0.7:
                    rows.lookahead.propose(request, self._draft(request))
            return plan(*args, **how)

        def note(request: Request, ahead: Any, count: int) -> None:
            self.rejected[len(ahead.token_ids), count - 1] += 1
            settle(request, ahead, count)

        self.scheduler.schedule, rows.lookahead.settle = schedule, note  # type: ignore[method-assign]

    def _draft(self, request: Request) -> list[int]:
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        if prompt not in self._texts:
            ids = list(prompt)
            for _ in range(request.max_num_tokens - len(prompt)):
                ids.append(int(self.reference(torch.tensor(ids))[-1].argmax()))
            self._texts[prompt] = ids
        first = request.num_computed_tokens + 1  # behind the token that the step computes, which may be in flight
        num_right, count = self._rng.randint(0, self.most), self._rng.randint(1, self.most + 2)
        if self._rng.random() < 0.3:  # the ends of the range are drawn more often: all are right, or none
            num_right, count = self._rng.choice((0, self.most)), self.most
        ids = (self._texts[prompt][first:] + [0] * count)[:count]
        return [*ids[:num_right], *(token_id ^ 1 for token_id in ids[num_right:])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_bytes"),
    some(
        itertools.product(MODELS, [0, 1 << 24]),
        ("lfm2-biases", 0),  # short convolutions
        ("qwen3.5", 1 << 24),  # the gated delta rule
    ),
)
def test_every_scenario(name: str, num_bytes: int, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """``num_bytes``: of the host's memory for the pages of preempted requests."""
    arch, overrides = MODELS[name]
    folder = tiny_model(arch, seed=7, **overrides)
    reference = reference_of(load_reference(folder, arch))
    monkeypatch.setattr(DraftingEngine, "reference", staticmethod(reference), raising=False)
    engine = check_scenarios(
        folder, reference, engine_class=DraftingEngine, swap_space_bytes=num_bytes, max_model_len=256
    )
    assert isinstance(engine, DraftingEngine)
    every = {*range(engine.most + 1)}
    assert {right for _, right in engine.rejected} == every == {count - right for count, right in engine.rejected}
    with settings_of_torch_kept():
        engine.begin(num_blocks=2 * engine.fewest_blocks(203, 16) - 1, max_num_batched_tokens=16)
        prompts = [[5, 6, 7], [8, 9, 4], [5, 6, 7]]
        Judge(reference).check("preempted", prompts, engine.generate(prompts, 200))
    assert engine.scheduler.rows.num_preemptions and (engine.num_restored or not num_bytes)
