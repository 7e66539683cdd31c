"""Lists of modules in a model's files: their patterns mean what they mean to `re.match`, and are never run by it."""

from __future__ import annotations

import random
import re

import pytest

from aengine.checkpoint.name_patterns import NamePatterns
from aengine.errors import ModelLoadError

NAMES = [
    "lm_head",
    "model.lm_head",
    "model.layers.0.mlp.gate",
    "model.layers.17.mlp.gate",
    "model.layers.17.mlp.gate_proj",
    "model.layers.3.mlp.experts.12.down_proj",
    "model.layers.3.self_attn.q_proj",
    "visual.blocks.0.attn.qkv",
    "model.visual.merger.mlp.0",
    "a$",
    "a|b",
    "a]",
]


@pytest.mark.parametrize(
    "pattern",
    [
        ".*lm_head",
        ".*gate$",
        ".*gate",
        "visual.*",
        "^visual.*",
        r"model.layers.\d+.mlp.gate$",
        r"model\.layers\.(0|3)\..*",
        r"model.layers.[0-9].mlp.*",
        r".*\.(q|k|v)_proj$",
        r".*mlp\.(gate|up|gate_up|down)_proj.*",
        "(lm_head$|visual)",
        "lm_head|visual",
        "model.lm|visual$|.*gate$",
        "gate",
        "",
        "|x",
        r"a\$",
        r"a\|b$",
        "a[$|]",
        "a[]]$",
        "(?:model|visual).*attn.*",
        r"[^m\]]\w*$",
        "(.*a.*)+$",
    ],
)
def test_a_pattern_means_what_it_means_to_re(pattern: str) -> None:
    wanted = [name for name in NAMES if re.match(pattern, name)]
    try:
        found = NamePatterns(["b", "re:nothing$", f"re:{pattern}"], "config.json: ignore")
    except ModelLoadError:
        assert pattern == "(lm_head$|visual)", "an end within a group is refused"
    else:
        assert [name for name in NAMES if name in found] == wanted


def test_a_name_is_no_pattern() -> None:
    found = NamePatterns(["lm_head", "model.layers.*"], "config.json: ignore")
    assert [name for name in NAMES if name in found] == ["lm_head"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*b",
        "(.*a){25}b",
        "((a{1000}){1000}){1000}",
        "(?:a?){60}" + "a" * 60 + "b",
        ".*.*.*.*.*.*.*b",
        "(((((a*)*)*)*)*)*b",
    ],
)
def test_work_does_not_grow_by_the_pattern(pattern: str) -> None:
    """`re` needs longer than the universe has for some of these."""
    found = NamePatterns([f"re:{pattern}"], "config.json: ignore")
    names = ["a" * n + "!" for n in range(50, 300)]
    assert not any(name in found for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", "can't read the pattern '\\(': its brackets are not in pairs"),
        ("[a", "can't read the pattern '\\[a'"),
        ("*", "can't read the pattern '\\*'"),
        ("a)(b", "can't read the pattern 'a\\)\\(b': its brackets are not in pairs"),
        ("^(?!.*experts)", "it looks around, sets flags or names a group; write it otherwise"),
        (r"(a)\1", "can't read the pattern"),
        ("(a$|b)c", "can't read the pattern"),
        ("x" * 20_000, "has patterns of more than 16384 letters"),
        ("[" * 16_000, "can't read the pattern '\\[\\["),
        ("(" * 16_000, "can't read the pattern '\\(\\("),
        ("(.*a.{20})|(.*b.{17}c.{20})", "too many states"),
    ],
)
def test_a_pattern_that_can_not_be_read_is_an_error(pattern: str, problem: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^config.json: ignore.*({problem})") as caught:
        found = NamePatterns(["re:b$", f"re:{pattern}"], "config.json: ignore")
        rng = random.Random(1)
        for _ in range(3000):
            _ = "".join(rng.choices("abc", k=60)) in found
    assert len(str(caught.value)) < 400


def test_letters_of_all_patterns_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aengine.checkpoint.name_patterns._MOST_LETTERS", 3)
    assert "b" in NamePatterns(["re:aa", "re:b", "a long name"], "config.json: ignore")
    with pytest.raises(ModelLoadError, match="patterns of more than 3 letters"):
        NamePatterns(["re:aa", "re:bb"], "config.json: ignore")


def test_ten_thousand_patterns_are_one_automaton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one takes some 10 ms; the one that is wrong is found by halves."""
    made = []
    compiled = NamePatterns._compiled

    def counted(self: NamePatterns, patterns: list[str]) -> object:
        made.append(len(patterns))
        return compiled(self, patterns)

    monkeypatch.setattr(NamePatterns, "_compiled", counted)
    patterns = NamePatterns([f"re:{i % 10}" for i in range(10_000)], "config.json: ignore")
    assert "7.x" in patterns and "x" not in patterns and made == [10_000]
    made.clear()
    with pytest.raises(ModelLoadError, match=r"can't read the pattern '\*x'"):
        NamePatterns(["re:a"] * 1000 + ["re:*x"] + ["re:b"] * 1000, "config.json: ignore")
    assert len(made) < 2 * 12
