"""Many matchers at a time: accepted and filled in threads as one by one; several lexers for one grammar."""

from __future__ import annotations

import gc
import random

import llguidance
import numpy as np
import pytest
from grammar_helpers import allowed, allowed_by, schema_spec, smollm2, vocabulary

from aengine.engine.structured.backend import MatcherError, MatcherLimitError, advance_batch
from aengine.engine.structured.llguidance import backend as backend_module
from aengine.engine.structured.llguidance.backend import LLGuidanceBackend
from aengine.engine.structured.llguidance.matcher import LLGuidanceMatcher
from aengine.engine.structured.spec import GrammarSpec
from aengine.engine.structured.vocabulary import Vocabulary
from aengine.engine.tokenizer.tokenizer import Tokenizer

SPECS = [
    GrammarSpec("regex", "[a-z]{1,9}( [0-9]{2,30})?"),
    schema_spec({"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}),
    schema_spec({"type": "array", "items": {"type": "integer", "minimum": 5}, "minItems": 2}),
]


@pytest.fixture
def parallel(tokenizer: Tokenizer) -> LLGuidanceBackend:
    return LLGuidanceBackend(Vocabulary.of(tokenizer, tokenizer.vocab_size), fill_threads=4)


@pytest.mark.parametrize("odd", ["none", "ends", "several"])
def test_advanced_at_once_as_one_by_one(parallel: LLGuidanceBackend, rng: random.Random, odd: str) -> None:
    """With ends, and with several tokens at a time, it goes another way, to the same bits."""
    compiled = [parallel.compile(spec) for spec in SPECS]
    some = [compiled[i % 3].matcher() for i in range(24)]
    others = [compiled[i % 3].matcher() for i in range(24)]
    words = parallel.row_bytes // 4
    eos = parallel.vocabulary.eos_ids[0]
    bitmask, expected = np.zeros((24, words), np.int32), np.zeros((24, words), np.int32)
    chosen: list[list[int]] = [[] for _ in some]
    taken: list[list[int]] = [[] for _ in some]
    ends = set(parallel.vocabulary.eos_ids)
    order = []
    for _ in range(12):
        order.append("begin")
        assert advance_batch(list(zip(some, chosen, strict=True)), memoryview(bitmask), lambda: order.append("f")) == {}
        for i, matcher in enumerate(others):
            assert matcher.accept(chosen[i]) == len(chosen[i])
            matcher.fill(memoryview(expected), i)
        assert (bitmask == expected).all()
        chosen = []
        for i, matcher in enumerate(others):
            may = np.flatnonzero(np.unpackbits(bitmask[i].view(np.uint8), bitorder="little")).tolist()
            ids = [rng.choice([t for t in may if t != eos or odd == "ends"] or [eos])]
            if matcher.is_finished and (ids[0] not in ends or ends & {*taken[i]}):
                ids = []
            taken[i] += ids
            if odd == "several":
                ahead = compiled[i % 3].matcher()
                assert ahead.accept(taken[i]) == len(taken[i])
                more = ahead.forced_tokens()
                ids, taken[i] = ids + more, taken[i] + more
            chosen.append(ids)
        if odd == "none" and not all(len(ids) == 1 and ids != [eos] for ids in chosen):
            break
    assert order.count("f") == order.count("begin") and order[1] == "f"


def test_one_that_is_advanced_by_a_wrong_token_fails_alone(parallel: LLGuidanceBackend, tokenizer: Tokenizer) -> None:
    compiled = parallel.compile(SPECS[0])
    matchers = [compiled.matcher() for _ in range(10)]
    bitmask = memoryview(np.zeros((10, parallel.row_bytes // 4), np.int32))
    good, wrong = tokenizer.encode("a", False), tokenizer.encode("!", False)
    for ids in (wrong, [-1], [parallel.vocabulary.vocab_size], parallel.vocabulary.eos_ids[:1]):
        failed = advance_batch([(m, list(ids) if i == 3 else good) for i, m in enumerate(matchers[:9])], bitmask)
        assert list(failed) == [3] and "not allow" in str(failed[3])
        matchers = [compiled.matcher() for _ in range(10)]
    assert advance_batch([(m, good) for m in matchers], bitmask) == {}


def roots(matchers: list[LLGuidanceMatcher]) -> int:
    # Which matchers share a lexer is to be seen in the time alone.
    return len({id(matcher._root) for matcher in matchers})


def test_many_requests_of_one_grammar_have_several_lexers(parallel: LLGuidanceBackend) -> None:
    compiled = parallel.compile(SPECS[1])
    compiled._may_repeat = True  # also where a busy machine has made a slow compile of it
    few = [compiled.matcher() for _ in range(4)]
    assert roots(few) == 1
    many = few + [compiled.matcher() for _ in range(60)]
    assert roots(many) == 4 == parallel.max_roots
    counts = [sum(m._root is root for m in many) for root in {m._root for m in many}]
    assert max(counts) - min(counts) <= 1
    assert len({frozenset(allowed(parallel, m)) for m in many}) == 1
    del many, few
    gc.collect()
    assert len(compiled._more) == 0 and compiled._first.num_copies == 0


GREEDY_PATTERN = {
    "type": "object",
    "properties": {
        "k": {"enum": [1, 2]},
        "a": {"type": "string", "pattern": r"^(?:\S+\s+){0,99}\S+$", "maxLength": 5000},
        "z": {"type": "string"},
    },
    "required": ["k"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("count", [3, 12])
def test_a_request_that_exceeds_the_limits_harms_no_other(
    count: int,
) -> None:
    """All of one grammar, whose lexer they share; one runs out of fuel."""
    tokenizer = smollm2()
    parallel = LLGuidanceBackend(Vocabulary.of(tokenizer, tokenizer.vocab_size), fill_threads=4)
    compiled = parallel.compile(schema_spec(GREEDY_PATTERN))
    words = parallel.row_bytes // 4
    others = [compiled.matcher() for _ in range(count)]
    started = tokenizer.encode('{"k": 1, "z": "some', False)
    assert all(matcher.accept(started) == len(started) for matcher in others)
    culprit = compiled.matcher()
    begun = tokenizer.encode('{"k": 1, "a": "', False)
    assert culprit.accept(begun) == len(begun)
    everybody = [*others, culprit]
    bitmask = np.zeros((len(everybody), words), np.int32)
    failed: dict[int, MatcherError] = {}
    for _ in range(3):
        failed |= advance_batch([(m, []) for m in everybody if m is not culprit or not failed], memoryview(bitmask))
    assert set(failed) <= {count}, failed
    rest = tokenizer.encode(' text"}', False)
    assert [matcher.accept(rest) for matcher in others] == [len(rest)] * count
    fresh = compiled.matcher()
    whole = tokenizer.encode('{"k": 2}', False)
    for token_id in whole:
        assert advance_batch([(fresh, [])], memoryview(bitmask)) == {}
        assert fresh.accept([token_id]) == 1
    assert fresh.is_accepting


def walked(backend: LLGuidanceBackend, regex: str, num_matchers: int, rng: random.Random) -> list[MatcherError]:
    """Several requests of one regex, each of which samples what its bitmask allows. Returns the failures."""
    compiled = backend.compile(GrammarSpec("regex", regex))
    bitmask = np.zeros((num_matchers, backend.row_bytes // 4), np.int32)
    going: list[tuple[LLGuidanceMatcher, list[int]]] = [(compiled.matcher(), []) for _ in range(num_matchers)]
    failures: list[MatcherError] = []
    for _ in range(40):
        failed = advance_batch(going, memoryview(bitmask))
        failures += failed.values()
        ids = [[int(t) for t in allowed_by(row) if t not in backend.eos_ids] for row in bitmask[: len(going)]]
        going = [
            (matcher, [rng.choice(ids[row])])
            for row, (matcher, _) in enumerate(going)
            if row not in failed and ids[row]
        ]
    return failures


def test_limits_reached_by_another_request_refuse_no_token(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared lexer that is beyond its limits refuses every token without a word; with its own, each one goes on."""
    limits = llguidance.LLParserLimits(max_lexer_states=200)
    monkeypatch.setattr(backend_module, "_limits", lambda: limits)
    backend = LLGuidanceBackend(vocabulary("tiny"), fill_threads=4)
    for _ in range(6):
        assert walked(backend, "(a|b|c)*b(a|b|c){12}", 3, rng) == []


def test_limits_reached_by_a_request_itself_are_told(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = llguidance.LLParserLimits(step_lexer_fuel=3000)
    monkeypatch.setattr(backend_module, "_limits", lambda: limits)
    backend = LLGuidanceBackend(vocabulary("tiny"), fill_threads=4)
    failures = [error for _ in range(6) for error in walked(backend, "(a|b)*c{100}{30}", 3, rng)]
    assert failures
    for error in failures:
        assert isinstance(error, MatcherLimitError) and "too many expressions" in str(error), error
