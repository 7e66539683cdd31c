"""benchmarks/agent_traces.py and eviction.py: what is drawn, and that the rules are compared at all."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import eviction
from agent_traces import draw_agents


def test_agents_have_the_published_quantiles() -> None:
    agents = draw_agents(64, seed=1, num_turns=None)
    gaps = sorted(turn.gap for agent in agents for turn in agent.turns)
    assert 4.5 < statistics.median(gaps) < 5.5 and 60 < gaps[len(gaps) * 99 // 100] < 100
    assert 30 < statistics.median(len(agent.turns) for agent in agents) < 60
    sizes = [len(agent.prefix) + sum(turn.num_new + turn.num_out for turn in agent.turns) for agent in agents]
    assert 4500 < statistics.mean(sizes) < 6000 and min(sizes) >= 1900 and max(sizes) <= 17_000
    assert len({tuple(agent.prefix[:1000]) for agent in agents}) == 1 < len({tuple(agent.prefix) for agent in agents})
    assert draw_agents(64, seed=1, num_turns=None) == agents


def test_the_oracle_finds_most_and_kept_sessions_more_than_the_last_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--agents 24 --least 400 --most 3000 --mean 1000 --shared 100 --seconds 40 --singles 0.5"
    policies = "lru,kept 0.9,segmented 0.5,survival,oracle"
    given = [*sizes.split(), "--pools", "0.4", "--mixes", "mixed", "--policies", policies, "--json"]
    monkeypatch.setattr(sys, "argv", ["eviction.py", *given])
    eviction.main()
    hits = {run["policy"]: run["hit"] for run in json.loads(capsys.readouterr().out)["runs"]}
    assert 0 < hits["lru"] < hits["kept 0.9"] < hits["oracle"] <= 1, hits
    assert hits.keys() == set(policies.split(","))
