"""Agents as they ask: turns with a growing prompt, and waiting for tools in between. Drawn with a seed from the
published quantiles of real traffic: 43 turns (median), 142,000 tokens in and 444 out a turn, gaps of 5 s (median) and
81 s (p99).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

MEDIAN_TURNS = 43
MEDIAN_GAP, LONG_GAP = 5.0, 81.0  # seconds: the median, and the 99th percentile
_Z99 = 2.326  # standard deviations from the median to the 99th percentile of a normal distribution


@dataclass
class Turn:
    """What is asked, and what comes after it."""

    num_new: int  # tokens that are added to the prompt before the turn: a tool's result, a user's question
    num_out: int  # tokens of the answer
    gap: float  # seconds from the answer's end to the next turn
    hint: float = 1.0  # how many times longer than others the tool takes, as its caller knows


@dataclass
class Agent:
    """One session."""

    name: str
    start: float  # seconds from the begin of all
    prefix: list[int]  # its prompt's first tokens; the first ones are those of all agents
    turns: list[Turn]


def lognormal(rng: random.Random, median: float, p99: float) -> float:
    return float(median * math.exp(rng.gauss(0, 1) * math.log(p99 / median) / _Z99))


def draw_agents(
    num_agents: int,
    *,
    seed: int,
    num_turns: int | None,
    least: int = 2000,
    most: int = 16_000,
    mean: int = 5000,
    shared: int = 1000,
    num_out: int = 64,
    vocab_size: int = 10_000,
    gap_scale: float = 1.0,
    spread: float = 5.0,
) -> list[Agent]:
    """Draw agents whose prompts end at ``least`` to ``most`` tokens, ``mean`` of all.

    ``num_turns``: of each; None: drawn around the published median. ``shared``: tokens with which all begin;
    ``num_out``: median tokens of an answer; ``spread``: seconds within which the first turns come. Gaps and spread are
    multiplied by ``gap_scale``.
    """
    rng = random.Random(seed)
    sizes = [lognormal(rng, mean * 0.85, mean * 3.2) for _ in range(num_agents)]
    for _ in range(8):
        factor = mean * num_agents / sum(sizes)
        sizes = [min(max(size * factor, least), most) for size in sizes]
    low = min(100, vocab_size // 4)
    beginning = [rng.randrange(low, vocab_size) for _ in range(shared)]
    agents = []
    for index, size in enumerate(sizes):
        count = num_turns or max(2, round(lognormal(rng, MEDIAN_TURNS, MEDIAN_TURNS * 5)))
        first = max(shared + 64, round(size * 0.5))
        growth = max(16.0, (size - first) / count)
        turns = []
        for _ in range(count):
            out = min(max(8, round(lognormal(rng, num_out, num_out * 6))), max(8, round(growth * 0.75)))
            gap = min(lognormal(rng, MEDIAN_GAP, LONG_GAP), LONG_GAP * 1.5) * gap_scale
            turns.append(Turn(max(8, round(growth - out)), out, gap))
        own = [rng.randrange(low, vocab_size) for _ in range(first - shared)]
        agents.append(Agent(f"agent-{index}", rng.random() * spread * gap_scale, beginning + own, turns))
    return agents
