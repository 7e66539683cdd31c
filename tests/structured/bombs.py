"""Grammars that llguidance takes seconds, gigabytes or for ever over, measured when they were found."""

from __future__ import annotations

from grammar_helpers import schema_spec

from aengine.engine.structured.spec import GrammarSpec


def any_of(count: int, letters: str = "a") -> str:
    return f"/.*{letters}.{{{count}}}/"


COUNTED = {  # not beyond the limits: 4 to 9 s in the host's thread while each forced token had a mask
    "twice": GrammarSpec("regex", "(a{300}){300}"),
    "once": GrammarSpec("regex", "a{100000}"),
    "thrice": GrammarSpec("regex", "((a{50}){50}){50}"),
    "in a schema": schema_spec({"type": "string", "pattern": "^(a{300}){300}$"}),
    "in Lark": GrammarSpec("lark", 'start: A\nA: (("a"{300}){300})\n'),
    "a long literal": GrammarSpec("regex", "abcdefghij" * 6000),
    "a long string": schema_spec({"const": "x" * 300_000}),
}
ENDLESS = {  # 5 s and 0.8 GB, to many GB
    "four times": GrammarSpec("regex", "(((a{100}){100}){100}){100}"),
    "four times in a schema": schema_spec({"type": "string", "pattern": "^(((a{100}){100}){100}){100}$"}),
    "doubled terminals": GrammarSpec(
        "lark", 'start: A30\nA0: "a"\n' + "".join(f"A{i + 1}: A{i} A{i}\n" for i in range(30))
    ),
    "intersection": GrammarSpec("lark", f"start: A\nA: {any_of(20)} & {any_of(19, 'b')} & ~{any_of(22, 'c')}\n"),
    "intersection of names": GrammarSpec(
        "lark", f"start: A\nA: B & C & ~D\nB: {any_of(20)}\nC: {any_of(19, 'b')}\nD: {any_of(22, 'c')}\n"
    ),
    "allOf": schema_spec(
        {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrst"]}
    ),
    "large divisor": schema_spec({"type": "integer", "multipleOf": 99_999_989}),
    "divisors": schema_spec(
        {"allOf": [{"type": "integer", "multipleOf": p} for p in (2, 3, 5, 7, 11, 13, 17, 19, 23)]}
    ),
    "references": schema_spec(  # ends the process that compiles it
        {
            "$defs": {f"d{i}": {"prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(3000)} | {"d3000": {}},
            "$ref": "#/$defs/d0",
        }
    ),
    "repeated literals": schema_spec({"type": "array", "minItems": 10_000, "items": {"const": "x" * 1000}}),
    "name patterns": schema_spec(
        {"type": "object", "patternProperties": {f"^{i}.*a.{{20}}b$": {} for i in range(100, 999)}}
    ),
}
BOMBS = COUNTED | ENDLESS
