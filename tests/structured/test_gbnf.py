"""GBNF's own escapes, in texts and in classes; and what is said of a reference to elsewhere."""

from __future__ import annotations

import pytest
from grammar_helpers import accepts, backend_of, schema_spec, tiny

from aengine import StructuredOutput
from aengine.engine.structured.spec import spec_of
from aengine.errors import GrammarError


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (r'root ::= "\u00e9" [\[\]x]', ["é[", "é]", "éx"], ["éy"]),
        (r'root ::= "\[a\]" # "\ud83d', ["[a]"], ["a"]),
        (r'root ::= [\u00e0-\u00ff] "\x41\U0001F600\n\"\\"', ['éA😀\n"\\'], []),
        (r"root ::= [\x41-\x43]+ [a-z\]]", ["ABz", "C]"], ["D]"]),
        (r'root ::= "\u0022\u005c"', ['"\\'], []),
        (r'root ::= "\x7f\x80\ud7ff\ue000\U0010ffff"', ["\x7f\x80\ud7ff\ue000\U0010ffff"], []),
    ],
)
def test_escapes_stand_for_their_characters(grammar: str, right: list[str], wrong: list[str]) -> None:
    compiled = backend_of("tiny").compile(spec_of(StructuredOutput(grammar=grammar + "\n")))
    assert [text for text in right if not accepts(compiled.matcher(), tiny(), text)] == []
    assert [text for text in wrong if accepts(compiled.matcher(), tiny(), text)] == []


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= ("a"{2} ){2} "b"', ["aaaab"], ["aab", "aaab"]),
        ('root ::= (("a")+)? (("b"*)) +', ["", "aab", "bb"], ["ba"]),
        ('root ::= (x | [)]+)* "+)*" # a+)*\nx ::= ("c"?){3}', ["+)*", "cc))c+)*"], ["a+)*"]),
    ],
)
def test_groups_of_one_repeated_item_are_repeated(grammar: str, right: list[str], wrong: list[str]) -> None:
    compiled = backend_of("tiny").compile(spec_of(StructuredOutput(grammar=grammar)))
    assert [text for text in right if not accepts(compiled.matcher(), tiny(), text)] == []
    assert [text for text in wrong if accepts(compiled.matcher(), tiny(), text)] == []


@pytest.mark.parametrize("escape", ["ud800", "udfff", "U00110000"])
def test_an_escape_that_is_no_character_is_named(escape: str) -> None:
    with pytest.raises(GrammarError, match=escape):
        backend_of("tiny").compile(spec_of(StructuredOutput(grammar=f'root ::= "a\\{escape}"')))


@pytest.mark.parametrize("relax", [False, True])
def test_a_reference_to_elsewhere_promises_no_cure_that_is_none(relax: bool) -> None:
    with pytest.raises(GrammarError, match=r"copy it to \$defs") as caught:
        backend_of("tiny").compile(schema_spec({"properties": {"a": {"$ref": "http://x/y"}}}, relax=relax))
    assert "relax" not in str(caught.value)
