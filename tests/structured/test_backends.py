"""What a backend promises, on a real vocabulary and on a tiny one; then what it refuses."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest_api import encoder_of
from grammar_helpers import (
    accepts,
    allowed,
    allowed_by,
    backend_of,
    bitmask,
    matcher_of,
    schema_spec,
    smollm2,
    text_ids,
    tiny,
    vocabulary,
    wide,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.engine.structured.backend import Backend, Matcher, MatcherError, advance_batch
from aengine.engine.structured.backends import load_backend
from aengine.engine.structured.spec import GrammarSpec
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.errors import GrammarError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a b", "</tool_call>", "é"]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON_TEXT = '{"name": "Zoë <|im_end|>", "age": 12, "tags": ["a b", "</tool_call>"]}'
SPECS = {
    "schema": (schema_spec(PERSON), PERSON_TEXT, '{"name": 1}'),
    "any blanks": (schema_spec(PERSON, whitespace="any"), '{\n  "name" : "x", "age": -1}', '{"name" "x"}'),
    "regex": (GrammarSpec("regex", r"[a-c]+( \d{2})?"), "abcab 42", "abd"),
    "choice": (GrammarSpec("choice", json.dumps(["yes", "yes!", 'n"o\\\n', "世界"])), 'n"o\\\n', "ye"),
    "lark": (GrammarSpec("lark", 'start: "a" start "b" | "-"\n'), "aaa-bbb", "aa-b"),
    "ebnf": (GrammarSpec("ebnf", 'root ::= "(" root ")" | [0-9]+\n'), "((17))", "((17)"),
}


@pytest.fixture(params=list(SPECS))
def case(request: pytest.FixtureRequest) -> tuple[GrammarSpec, str, str]:
    return SPECS[request.param]


def test_right_texts_are_accepted_and_wrong_ones_are_not(
    backend: Backend, tokenizer: Tokenizer, case: tuple[GrammarSpec, str, str]
) -> None:
    spec, right, wrong = case
    compiled = backend.compile(spec)
    assert compiled.spec == spec
    assert compiled.warnings == ()
    assert compiled.num_bytes > 0
    assert accepts(compiled.matcher(), tokenizer, right)
    assert not accepts(compiled.matcher(), tokenizer, wrong)
    assert not accepts(compiled.matcher(), tokenizer, right + "x")
    assert not accepts(compiled.matcher(), tokenizer, "")


@pytest.mark.slow
def test_mask_says_exactly_what_is_accepted(
    backend: Backend, tokenizer: Tokenizer, case: tuple[GrammarSpec, str, str], rng: random.Random
) -> None:
    """Along a right text and at its end: every allowed token is accepted, refused ones are not, nothing else is set."""
    spec, right, _ = case
    matcher = matcher_of(backend, spec)
    words = backend.vocabulary  # type: ignore[attr-defined]
    taken: list[int] = []
    for token_id in [*text_ids(tokenizer, right), None]:
        may = allowed(backend, matcher)
        complete = mask_is_complete(matcher)
        assert max(may) < words.vocab_size
        assert matcher.is_accepting == bool(may & set(words.eos_ids))
        assert all(words.token_bytes[i] for i in may - set(words.eos_ids))
        others = sorted(set(range(words.vocab_size)) - may)
        for one, wanted in [(i, 1) for i in rng.sample(sorted(may), min(6, len(may)))] + [
            (i, 0) for i in rng.sample(others, 12) if complete
        ]:
            other = matcher_of(backend, spec)
            assert other.accept([*taken, one]) == len(taken) + wanted, f"{one} {words.token_bytes[one]!r}"
        if token_id is not None:
            taken.append(token_id)
            assert token_id in may or not complete
            assert matcher.accept([token_id]) == 1


def mask_is_complete(matcher: Matcher) -> bool:
    """Whether a mask has all that `accept` takes. Where text is forced, llguidance's have only the token that the
    tokenizer would write."""
    return not matcher.forced_tokens()


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("words_name", ["tiny", "smollm2"])
def test_random_walks(words_name: str, data: st.DataObject) -> None:
    """At each step the mask is the same whether the place was reached straight or by going back; refusals change
    nothing; what is allowed is accepted; what is forced is accepted."""
    backend = backend_of(words_name)
    words = vocabulary(words_name)
    spec = data.draw(st.sampled_from([spec for spec, _, _ in SPECS.values()]))
    compiled = backend.compile(spec)
    matcher = compiled.matcher()
    taken: list[int] = []
    for _ in range(data.draw(st.integers(1, 12))):
        may = allowed(backend, matcher)
        refused = data.draw(st.integers(0, words.vocab_size - 1))
        if refused not in may and mask_is_complete(matcher):
            assert matcher.accept([refused]) == 0
            assert allowed(backend, matcher) == may
        straight = compiled.matcher()
        assert straight.accept(taken) == len(taken)
        assert allowed(backend, straight) == may
        forced = matcher.forced_tokens()
        assert straight.accept(forced) == len(forced)
        taken.append(data.draw(st.sampled_from(sorted(may))))
        assert matcher.accept(taken[-1:]) == 1
        if taken[-1] in words.eos_ids:
            assert matcher.is_finished
            break
        if data.draw(st.booleans()):
            back = data.draw(st.integers(0, len(taken)))
            matcher.rollback(back)
            del taken[len(taken) - back :]


def test_end_of_sequence_is_one_token(backend: Backend, tokenizer: Tokenizer) -> None:
    matcher = matcher_of(backend, GrammarSpec("regex", "ab?"))
    ends = set(vocabulary_ends(backend))
    end = min(ends)
    assert matcher.accept([end]) == 0
    assert matcher.accept([*tokenizer.encode("a", False), end, end]) == 2
    assert matcher.is_finished
    assert matcher.is_accepting
    assert allowed(backend, matcher) == ends
    assert matcher.accept(tokenizer.encode("b", False)) == 0
    matcher.rollback(1)
    assert not matcher.is_finished
    assert matcher.is_accepting
    assert matcher.accept(tokenizer.encode("b", False)) == 1
    assert matcher.is_finished  # nothing but the end can come
    assert allowed(backend, matcher) == ends
    assert matcher.accept([max(ends)]) == 1
    matcher.rollback(3)
    assert allowed(backend, matcher) == allowed(backend, matcher_of(backend, GrammarSpec("regex", "ab?")))
    with pytest.raises(MatcherError, match="1 tokens"):
        matcher.rollback(1)
    assert accepts(matcher, tokenizer, "a")


def test_a_matcher_that_fails_as_it_is_rolled_back_says_so(
    backend: Backend, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's next mask would allow the end alone, and say nothing."""
    matcher: Any = matcher_of(backend, GrammarSpec("regex", "a+"))
    assert matcher.accept(tokenizer.encode("aa", False)) > 0
    said = iter((False, True))
    failing = {"is_error": lambda: next(said), "get_error": lambda: "no such state", "rollback": lambda number: None}
    monkeypatch.setattr(matcher, "_inner", SimpleNamespace(**failing))
    with pytest.raises(MatcherError, match="no such state"):
        matcher.rollback(1)


def vocabulary_ends(backend: Backend) -> tuple[int, ...]:
    return backend.vocabulary.eos_ids  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("wrong", [[-1], [10**6], [2**40], []])
def test_ids_that_do_not_exist_are_refused(backend: Backend, wrong: list[int]) -> None:
    matcher = matcher_of(backend, GrammarSpec("regex", "[ab]*"))
    before = allowed(backend, matcher)
    assert matcher.accept(wrong) == 0
    assert allowed(backend, matcher) == before


def test_a_batch_in_threads_is_as_one_by_one() -> None:
    from aengine.engine.structured.llguidance.backend import LLGuidanceBackend

    backend = LLGuidanceBackend(vocabulary("smollm2"), fill_threads=2)
    matchers = [matcher_of(backend, spec) for spec, _, _ in SPECS.values()]
    matchers += [matcher_of(backend, spec) for spec, _, _ in SPECS.values()]
    ended = matcher_of(backend, GrammarSpec("regex", "a?"))
    assert ended.accept([vocabulary_ends(backend)[0]]) == 1
    matchers.append(ended)
    mask = bitmask(backend, len(matchers))
    assert advance_batch([(matcher, []) for matcher in matchers], mask) == {}
    for i, matcher in enumerate(matchers):
        assert set(allowed_by(mask[i])) == allowed(backend, matcher)
    assert advance_batch([], mask) == {}
    backend.close()


def test_a_memoryview_is_a_bitmask_too(backend: Backend) -> None:
    matcher = matcher_of(backend, GrammarSpec("regex", "[ab]+"))
    words = backend.vocabulary.row_bytes // 4  # type: ignore[attr-defined]
    raw = bytearray(8 * words)
    matcher.fill(memoryview(raw).cast("i", (2, words)), 1)
    assert set(allowed_by(np.frombuffer(raw, np.int32)[words:])) == allowed(backend, matcher)
    assert not any(raw[: 4 * words])


@pytest.mark.parametrize("shape", ["narrow", "wide", "int64", "read-only", "strided", "flat"])
def test_bitmasks_that_do_not_fit_are_refused(backend: Backend, shape: str) -> None:
    words = backend.vocabulary.row_bytes // 4  # type: ignore[attr-defined]
    frozen = np.zeros((2, words), np.int32)
    frozen.flags.writeable = False
    masks = {
        "narrow": np.zeros((2, words - 1), np.int32),
        "wide": np.zeros((2, words + 1), np.int32),
        "int64": np.zeros((2, words), np.int64),
        "read-only": frozen,
        "strided": np.zeros((4, words), np.int32)[::2],
        "flat": np.zeros(words, np.int32),
    }
    matcher = matcher_of(backend, GrammarSpec("regex", "a"))
    for row in (0, 1):
        with pytest.raises(ValueError, match="bitmask"):
            matcher.fill(masks[shape], row)
    for row in (-1, 2):
        with pytest.raises(ValueError, match="no row"):
            matcher.fill(np.zeros((2, words), np.int32), row)


def test_every_added_token_can_be_forced_as_text(backend: Backend, tokenizer: Tokenizer) -> None:
    """llguidance locked itself out of a text that is an added token's; control tokens never stand for their text."""
    added = sorted(encoder_of(tokenizer).get_added_tokens_decoder().items())
    for token_id, token in added:
        matcher = matcher_of(backend, schema_spec({"enum": [token.content]}))
        taken: list[int] = []
        while not matcher.is_finished:
            assert len(taken) < 40
            taken.append(min(allowed(backend, matcher), key=lambda i: -len(vocabulary_bytes(backend)[i])))
            assert matcher.accept(taken[-1:]) == 1
        assert b"".join(vocabulary_bytes(backend)[i] for i in taken).decode() == json.dumps(token.content)
        assert (token_id in taken) <= (not token.special)


def vocabulary_bytes(backend: Backend) -> tuple[bytes, ...]:
    return backend.vocabulary.token_bytes  # type: ignore[attr-defined, no-any-return]


def test_a_control_token_by_its_id_in_lark() -> None:
    backend, tokenizer = backend_of("smollm2"), smollm2()
    start = tokenizer.token_id("<|im_start|>")
    assert start is not None
    matcher = matcher_of(backend, GrammarSpec("lark", f"start: <[{start}]> /[a-z]+/ <[{start}]>"))
    assert allowed(backend, matcher) == {start}
    ids = [start, *tokenizer.encode("abc", False), start]
    assert matcher.accept(ids) == len(ids)
    assert matcher.is_finished


def test_forced_tokens_are_as_the_tokenizer_writes_them() -> None:
    backend, tokenizer = backend_of("smollm2"), smollm2()
    matcher = matcher_of(backend, schema_spec({"const": {"temperature": 21, "unit": "celsius"}}))
    forced = matcher.forced_tokens()
    whole = tokenizer.encode('{"temperature": 21, "unit": "celsius"}', False)
    assert forced
    assert forced == whole[: len(forced)]
    assert matcher.accept(forced) == len(forced)


def test_many_tokens_without_masks_between() -> None:
    """As when a request is prefilled again: the answer is the same as with a mask before each token."""
    backend, tokenizer = backend_of("smollm2"), smollm2()
    text = json.dumps(" ".join(["word"] * 50))
    spec = schema_spec({"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$"})
    assert accepts(matcher_of(backend, spec), tokenizer, text)
    assert not accepts(matcher_of(backend, spec), tokenizer, json.dumps(" ".join(["word"] * 51)))


def test_a_failed_matcher_says_so_and_the_others_go_on() -> None:
    """A grammar that runs into the library's limit while it is followed: never a silent row of ends."""
    backend, tokenizer = backend_of("smollm2"), smollm2()
    many = schema_spec({"type": "object", "properties": {"x": {"type": "object", "properties": wide(1500)}}})
    bad, good = matcher_of(backend, many), matcher_of(backend, GrammarSpec("regex", "a+"))
    start = text_ids(tokenizer, '{"x": {"')
    mask = bitmask(backend, 2)
    try:
        assert bad.accept(start) == len(start)
        failed = advance_batch([(bad, []), (good, [])], mask)
        assert set(failed) == {0}
        assert isinstance(failed[0], MatcherError)
    except MatcherError as error:
        assert "\n" not in str(error)
    with pytest.raises(MatcherError):
        bad.fill(mask, 0)
    with pytest.raises(MatcherError):
        bad.accept(start[:1])
    assert not bad.is_finished
    assert advance_batch([(good, [])], mask) == {}


# -- refusals

STRICT = [
    ({"not": {"type": "string"}}, "unsupported"),
    ({"type": "array", "uniqueItems": True}, "unsupported"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "unsupported"),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "unsupported"),
    ({"type": "string", "format": "no-such-format"}, "unsupported"),
    ({"$ref": "https://example.com/schema.json"}, "unsupported"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "unsatisfiable"),
    ({"enum": []}, "unsatisfiable"),
    (False, "unsatisfiable"),
    ({"type": "string", "pattern": "["}, "invalid"),
    ({"type": "text"}, "invalid"),
]


@pytest.mark.parametrize(("schema", "kind"), STRICT, ids=[json.dumps(schema)[:40] for schema, _ in STRICT])
def test_schemas_that_can_not_be_held_are_refused(schema: Any, kind: str) -> None:
    with pytest.raises(GrammarError) as caught:
        backend_of("tiny").compile(schema_spec(schema))
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_true_is_any_json(backend: Backend, tokenizer: Tokenizer) -> None:
    for text in ("null", '{"a": [1, {}]}', '"<|im_end|>"'):
        assert accepts(matcher_of(backend, schema_spec(True)), tokenizer, text)
    assert not accepts(matcher_of(backend, schema_spec(True)), tokenizer, "{a}")


def test_relaxed_schemas_say_what_they_leave_out() -> None:
    spec = schema_spec({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, relax=True)
    compiled = backend_of("tiny").compile(spec)
    assert any("uniqueItems" in warning for warning in compiled.warnings)
    assert accepts(compiled.matcher(), tiny(), "[1, 1]")
    assert not accepts(compiled.matcher(), tiny(), '["1"]')


def test_a_schema_can_not_change_the_options() -> None:
    """The key "x-guidance" is options for the library, not a keyword."""
    guidance = {"lenient": True, "whitespace_flexible": True, "item_separator": ";", "whitespace_pattern": "x*"}
    backend = backend_of("tiny")
    schema = {"x-guidance": guidance, "type": "array", "items": {"type": "integer"}}
    for text, right in (("[1, 2]", True), ("[1;2]", False), ("[1,2]", False), ("[ 1, 2]", False), ("[1, x2]", False)):
        assert accepts(matcher_of(backend, schema_spec(schema)), tiny(), text) == right
    with pytest.raises(GrammarError):
        backend.compile(schema_spec({**schema, "uniqueItems": True}))
    for odd in (5, [], None, {"nonsense": 1}):
        assert accepts(matcher_of(backend, schema_spec({**schema, "x-guidance": odd})), tiny(), "[1, 2]")


def test_blanks_only_where_json_dumps_writes_them() -> None:
    backend = backend_of("tiny")
    schema = {"type": "array", "items": {"type": "integer"}}
    loose = "[ 1,\n 2 ]"
    assert accepts(matcher_of(backend, schema_spec(schema, whitespace="any")), tiny(), loose)
    assert not accepts(matcher_of(backend, schema_spec(schema)), tiny(), loose)
    assert accepts(matcher_of(backend, schema_spec(schema)), tiny(), json.dumps([1, 2]))


@pytest.mark.parametrize(
    ("more", "left_out"),
    [({}, True), ({"additionalProperties": False}, False), ({"required": ["a", "b"]}, False)],
)
def test_counts_of_properties_that_can_not_be_held_are_left_out(more: dict, left_out: bool) -> None:
    """Relaxed. The library would not count those that are named and optional, and ask for others."""
    backend = load_backend("llguidance", vocabulary("smollm2"))
    properties = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    spec = schema_spec({"type": "object", "properties": properties, "minProperties": 1, **more}, relax=True)
    compiled = backend.compile(spec)
    assert (compiled.warnings != ()) == left_out
    if left_out:
        assert compiled.warnings[0].startswith("$.minProperties is not enforced")
    assert accepts(compiled.matcher(), smollm2(), '{"a": 1, "b": 2}')
    if "required" not in more:
        assert accepts(compiled.matcher(), smollm2(), '{"b": 2}')
        assert accepts(compiled.matcher(), smollm2(), "{}") == left_out


def test_a_long_run_of_forced_text_is_not_made_into_tokens() -> None:
    """That would hold the GIL: 50 ms for 90,000 bytes."""
    backend = load_backend("llguidance", vocabulary("smollm2"))
    mask = bitmask(backend)
    for length, is_forced in ((1000, True), (6000, False)):
        matcher = backend.compile(GrammarSpec("choice", json.dumps(["x" + "ab" * (length // 2), "y"]))).matcher()
        matcher.fill(mask, 0)
        (x,) = (i for i in allowed_by(mask[0]) if smollm2().token_bytes(int(i)) == b"x")
        assert matcher.accept([int(x)]) == 1
        matcher.fill(mask, 0)
        assert bool(matcher.forced_tokens()) == is_forced


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [
        ("regex", "[", "invalid"),
        ("regex", r"(a)\1", "unsupported"),
        ("regex", r"(?=a)b", "unsupported"),
        ("lark", "start: nowhere", "invalid"),
        ("lark", 'start: "a', "invalid"),
        ("ebnf", "root ::= nowhere", "invalid"),
    ],
)
def test_grammars_with_a_fault(kind: Any, text: str, error: str) -> None:
    with pytest.raises(GrammarError) as caught:
        backend_of("tiny").compile(GrammarSpec(kind, text))
    assert caught.value.kind in (error, "invalid")
    assert "\n" not in str(caught.value)


def test_no_text_at_all_is_unsatisfiable() -> None:
    for spec in (GrammarSpec("regex", r"[^\s\S]"), GrammarSpec("lark", "start: start"), schema_spec({"$ref": "#"})):
        with pytest.raises(GrammarError) as caught:
            backend_of("tiny").compile(spec)
        assert caught.value.kind == "unsatisfiable"
