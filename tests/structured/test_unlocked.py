"""The library's tables, built through its C interface without the GIL, are those that its Python constructor builds."""

from __future__ import annotations

import logging

import llguidance
import numpy as np
import pytest
from grammar_helpers import allowed, matcher_of, schema_spec, text_ids, vocabulary

from aengine.engine.structured.llguidance import unlocked
from aengine.engine.structured.llguidance.backend import LLGuidanceBackend
from aengine.engine.structured.spec import GrammarSpec
from aengine.engine.tokenizer.tokenizer import Tokenizer

SPECS = [
    (
        schema_spec({"properties": {"städte": {"type": "string", "maxLength": 9}}, "required": ["städte"]}),
        '{"städte": "ab',
    ),
    (GrammarSpec("regex", "(a b|<tool_call>|</s>)[0-9]+"), "<tool_call>1"),
    (GrammarSpec("lark", "start: <[1]> /[^x]+/"), ""),
]


def test_the_installed_version_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change of the pinned version: see `KNOWN_VERSIONS`. Python's constructor would hold the GIL."""
    monkeypatch.setattr(llguidance, "TokenizerWrapper", None)
    LLGuidanceBackend(vocabulary("tiny"), fill_threads=1).close()


def test_both_ways_to_build_give_the_same_masks(
    vocabulary_name: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = LLGuidanceBackend(vocabulary(vocabulary_name), fill_threads=1)
    monkeypatch.setattr(unlocked, "KNOWN_VERSIONS", frozenset())
    with caplog.at_level(logging.INFO, "aengine.structured"):
        theirs = LLGuidanceBackend(vocabulary(vocabulary_name), fill_threads=1)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert ours.tokenizer.eos_tokens == theirs.tokenizer.eos_tokens
    assert ours.tokenizer.vocab_size == theirs.tokenizer.vocab_size
    for spec, text in SPECS:
        one, other = matcher_of(ours, spec), matcher_of(theirs, spec)
        ids = text_ids(tokenizer, text) if text else [1]
        for token_id in ids:
            assert one.forced_tokens() == other.forced_tokens()
            assert allowed(ours, one) == allowed(theirs, other)
            assert one.accept([token_id]) == other.accept([token_id]) == 1
        assert allowed(ours, one) == allowed(theirs, other)


def test_what_the_library_refuses_is_said() -> None:
    with pytest.raises(ValueError, match="EOS token ID 9 is out of range"):
        unlocked.build([b"a", b"b"], [], [9], [], lambda text: [])


def test_counts_that_are_others_than_expected_are_left_alone() -> None:
    """One of the two would be freed while somebody else uses it."""
    counts = np.array([[1, 1], [2, 1]], np.uintp)
    pointers = np.array([counts[0].ctypes.data, counts[1].ctypes.data], np.uintp)
    before = pointers.copy()
    with pytest.raises(ValueError, match=r"\[2, 1\]"):
        unlocked.exchange(pointers.ctypes.data, pointers.ctypes.data + pointers.itemsize)
    assert (pointers == before).all()
