"""What the setting ``speculation`` chooses. Proposers are imported only where one is chosen: they need numpy, which the
rest of the host does without."""

from __future__ import annotations

from typing import Any

from ...config import EngineConfig
from ..pacing.steps_in_flight import StepsInFlight
from ..scheduler.scheduler import Scheduler
from .budget import CostBudget, DraftBudget
from .drafts import Speculation

_MOST_ON_GPU, _MOST_ON_CPU = 256, 64
"""Rows of logits of a step with drafts: a GPU has graphs for so many, if it may have as many rows."""

_GROWTH_ON_GPU, _GROWTH_ON_CPU = 0.01, 0.15
"""Share of a step of one row that a further row adds to it, as long as none was measured."""


def import_speculation(config: EngineConfig) -> None:
    """Import what `new_speculation` needs, so that it can be called on a loop. Blocking. Raises ModelLoadError."""
    if config.speculation != "none":
        from .proposer import import_proposer

        import_proposer(config.speculation_settings.method)


def new_speculation(
    config: EngineConfig, ready: dict[str, Any], scheduler: Scheduler, in_flight: StepsInFlight, *, steps_alone: bool
) -> Speculation:
    """Return what proposes drafts for the requests of a scheduler. ``ready``: what its worker told of itself;
    ``steps_alone``: what a step takes is its own, as it waits for no other's. Raises ModelLoadError."""
    if config.speculation == "none" or not scheduler.rows.kv.most_ahead:
        return Speculation()
    from .proposer import new_history
    from .proposing import Proposing

    is_gpu = bool(ready.get("is_accelerator"))
    most = min(_MOST_ON_GPU if is_gpu else _MOST_ON_CPU, config.max_logits)
    budget = DraftBudget(min(most, 64 if is_gpu else 16))
    if steps_alone:
        budget = CostBudget(most, _GROWTH_ON_GPU if is_gpu else _GROWTH_ON_CPU)
    chosen = config.speculation_settings
    return Proposing(scheduler, in_flight, budget, chosen.method, new_history(chosen, ready["vocab_size"]))
