"""Grammars that are composed of parts: what they take, whom a fault is blamed on, and what their cost is judged by."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bombs import ENDLESS
from grammar_helpers import accepts, allowed, backend_of, matcher_of, text_ids, tiny, vocabulary
from hypothesis import given
from hypothesis import strategies as st

from aengine.engine.structured.llguidance.lark import lark_of
from aengine.engine.structured.parts import (
    AnyOf,
    Choice,
    FreeText,
    Json,
    Part,
    Regex,
    Repeat,
    Seq,
    SpecialToken,
    Text,
    TextUpTo,
    any_of,
    leaves,
    seq,
)
from aengine.engine.structured.spec import GrammarSpec, composed_of
from aengine.errors import GrammarError

NUMBER = Json('{"type":"integer"}', "the number")
NOT_THREE = '{"type":"integer","not":{"const":3}}'
BOMB = ENDLESS["large divisor"].text


def takes(part: Part, text: str) -> bool:
    return accepts(matcher_of(backend_of("tiny"), composed_of(part)), tiny(), text)


CASES: list[tuple[Part, list[str], list[str]]] = [
    (Text('a"\\/\n\x01é世{[('), ['a"\\/\n\x01é世{[('], ["", "a"]),
    (seq(Text("x"), Text("y", after_blanks=True)), ["xy", "x \n\t\r y"], ["x", "x\x0by"]),
    (seq(Text("n="), NUMBER, Text(";")), ["n=12;", "n=-3;"], ["n=", "n=1.5;", "n=12"]),
    (any_of(NUMBER, Text("none")), ["7", "none"], ["", "nonenone"]),
    (any_of(seq(Text("a"), any_of(NUMBER, Text("b"))), Text("c")), ["a7", "ab", "c"], ["7", "aa7", "a"]),
    (seq(Repeat(Text("a"), most=1), Repeat(Text("b"), 1), Repeat(Text("c"), 2, 3)), ["bcc", "abbccc"], ["acc", "bc"]),
    (Repeat(Text("a"), 2), ["aa", "aaaa"], ["a", ""]),
    (Repeat(Text("a"), 0, 2), ["", "aa"], ["aaa"]),
    (Repeat(Text("a"), 1, 1), ["a"], ["", "aa"]),
    (Repeat(seq(Text("a"), any_of(Text("b"), Text("c")))), ["", "abac"], ["a", "abc"]),
    (FreeText(), ["x", "any </s>\n text", "\x01"], [""]),
    (FreeText(without=("<t>", "stop")), ["<t", "sto p"], ["<t>", "a<t>b", "non-stop"]),
    (FreeText(not_first=("{",)), ["a{", " {"], ["{", "{a"]),
    (FreeText(not_first=("{",), after_blanks=True), ["a{", "\x0b{"], ["{", " \n{a"]),
    (seq(TextUpTo("</t>"), NUMBER), ["</t>1", "so </t>12"], ["1", "</t></t>1", "a</t"]),
    (seq(TextUpTo("</t>", ("<t>",)), NUMBER), ["a<t></t>1"], ["<t>a</t>1"]),
    (
        seq(TextUpTo("</t>", matching=("[a-z</]+", ".{2,4}")), NUMBER),
        ["ab</t>1"],
        ["a</t>1", "abcde</t>1", "A</t>1", "ab</t></t>1"],
    ),
    (seq(TextUpTo("</t>", matching=("(?s:.{8,20})",)), NUMBER), ["abcdefgh</t>1"], ["ab</t>cdefgh</t>1"]),
    (FreeText(matching=("[a-z]*", "(?s:.{0,3})")), ["", "abc"], ["abcd", "A"]),
    (Regex("a/b\\/c\n\\\t[/]"), ["a/b/c\n\t/"], ["a"]),
    (Regex("[a-z]+", not_first=("no",)), ["yes", "n"], ["no", "nothing"]),
    (Choice(("yes", 'n"\\\n', "no"), not_first=("no",)), ["yes", 'n"\\\n'], ["no", "y"]),
    (Seq((Json("true"), Text("."))), ["null.", '{"a": [1]}.'], ["."]),
    (seq(Json('{"type":"object"}', whitespace="any"), Text(".")), ['{ "a":1}.'], []),
    (seq(Json('{"type":"array","items":{"type":"integer"}}'), Text(".")), ["[1, 2]."], ["[1,2]."]),
]


@pytest.mark.parametrize(("part", "right", "wrong"), CASES, ids=[str(case[0])[:60] for case in CASES])
def test_what_each_part_takes(part: Part, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert takes(part, text), text
    for text in wrong:
        assert not takes(part, text), text


def test_a_special_token_is_no_text() -> None:
    words = vocabulary("tiny")
    token_id = min(words.special_ids - set(words.eos_ids))
    matcher = matcher_of(backend_of("tiny"), composed_of(seq(Text("a"), SpecialToken(token_id), NUMBER)))
    assert matcher.accept(text_ids(tiny(), "a")) == 1
    assert allowed(backend_of("tiny"), matcher) == {token_id}
    assert matcher.accept([token_id, *text_ids(tiny(), "12")]) == 3


def test_parts_are_values() -> None:
    def composed() -> GrammarSpec:
        return composed_of(seq(Text("a"), Text("b"), seq(any_of(NUMBER, any_of(Text("x"), Text("x"))), Text("c"))))

    assert composed() == composed() and len({composed(), composed()}) == 1
    assert composed().root == Seq((Text("ab"), AnyOf((NUMBER, Text("x"))), Text("c")))
    assert [*leaves(composed().root or Text(""))] == [Text("ab"), NUMBER, Text("x"), Text("c")]
    assert composed() != composed_of(seq(Text("ab"), NUMBER))
    assert seq(Text("a"), Text(""), Text("b")) == Text("ab") and any_of(any_of(NUMBER)) is NUMBER
    assert seq(Text("a", after_blanks=True), Text("b")) == Text("ab", after_blanks=True)
    apart = (Text("a"), Text("b", after_blanks=True))
    assert seq(*apart) == Seq(apart)


def test_a_long_chain_of_alternatives_is_written_without_recursion() -> None:
    part: Part = NUMBER
    for i in range(3000):
        part = seq(Text(str(i)), any_of(part, Text("x")))
    assert lark_of(part).count("\n") == 3002  # the start, the number, and each of the alternatives


def test_a_part_alone_is_a_spec_of_its_own_kind() -> None:
    """So it shares its compiled grammar with requests that ask for nothing else."""
    assert composed_of(NUMBER) == GrammarSpec("json_schema", '{"type":"integer"}')
    assert composed_of(Regex("a+")) == GrammarSpec("regex", "a+")
    assert composed_of(Choice(("a", "é"))) == GrammarSpec("choice", '["a","é"]')
    for spec in (GrammarSpec("regex", "a+"), GrammarSpec("json_schema", "true", "any", True)):
        assert composed_of(spec.part("x")) == spec
    with pytest.raises(ValueError, match="no part"):
        GrammarSpec("lark", 'start: "a"').part()


LETTERS = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8)  # `text_ids` cuts there


@given(LETTERS, LETTERS)
def test_no_text_is_read_as_grammar(text: str, other: str) -> None:
    part = seq(Text("<" + text), Repeat(FreeText(without=("(" + other,)), most=1), Text(other + ">"))
    assert takes(part, f"<{text}{other}>")


def refused(part: Part) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        backend_of("tiny").compile(composed_of(part))
    return caught.value


def test_a_fault_is_blamed_on_its_origin() -> None:
    merged = Json('{"anyOf":[{"not":{}},{}]}', made_of=(Json("true", "tool f"), Json(NOT_THREE, "tool g")))
    for bad, kind in ((Json(NOT_THREE, "tool g"), "unsupported"), (merged, "unsupported")):
        error = refused(seq(Text("("), any_of(NUMBER, bad), Text(")")))
        assert error.kind == kind and str(error).startswith("tool g: ") and error.path == "$.not", error
    assert str(refused(seq(Text("("), Regex("(?=a)b", "the regex")))).startswith("the regex: ")
    assert str(refused(seq(NUMBER, Regex("a\\", "the regex", ("b",))))).startswith("the regex: ")
    assert refused(seq(Text("("), Json("false", "the answer"))).kind == "unsatisfiable"


def test_what_takes_too_long_is_blamed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = backend_of("tiny")
    monkeypatch.setattr(backend._trials, "seconds", 0.3)  # the backend is shared, and has 60 s otherwise
    bomb = seq(Text("("), any_of(NUMBER, Json(BOMB, "tool bomb")))
    assert not backend.is_quick(composed_of(bomb))
    error = refused(bomb)
    assert error.kind == "too_complex" and str(error).startswith("tool bomb: ")


def test_what_is_left_out_names_its_origin() -> None:
    counted = json.dumps({"type": "object", "properties": {"a": {}}, "minProperties": 1})
    compiled = backend_of("tiny").compile(
        composed_of(any_of(seq(Text("("), Json(counted, "tool f", relax=True)), Json(NOT_THREE, "tool g", relax=True)))
    )
    assert any(text.startswith("tool f: $.minProperties is not enforced") for text in compiled.warnings)
    assert accepts(compiled.matcher(), tiny(), "3")


def test_ordinary_parts_are_quick() -> None:
    part = seq(TextUpTo("{" * 50), any_of(*(seq(Text(f"f{i}"), Json('{"type":"object"}', f"f{i}")) for i in range(50))))
    assert backend_of("tiny").is_quick(composed_of(part))
    assert backend_of("tiny").is_quick(composed_of(seq(NUMBER, Regex("[a-z]{3}", not_first=("x",)))))
    assert not backend_of("tiny").is_quick(composed_of(seq(NUMBER, Regex("(a{300}){300}"))))
