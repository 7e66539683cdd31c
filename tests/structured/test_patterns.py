"""Patterns of JSON schemas mean what ECMA-262 says, or are refused with their place."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import regex
from grammar_helpers import accepts, backend_of, schema_spec, tiny

from aengine.engine.structured.patterns import UntranslatablePattern, rust_pattern
from aengine.errors import GrammarError


def _accepts(pattern: str, text: str) -> bool:
    compiled = backend_of("tiny").compile(schema_spec({"type": "string", "pattern": pattern}))
    return accepts(compiled.matcher(), tiny(), json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^[^[\]]+$", ["a", "(b)"], ["[", "a]"]),
        ("^[!-/:-@[-`{-~]$", ["!", "[", "~", "@"], ["a", "1"]),
        ("^[a&&b]$", ["a", "&", "b"], ["c"]),
        ("^[--~~]$", ["-", "~", "A"], ["!"]),
        (r"^[\w-x]$", ["-", "x", "_"], ["é"]),
        (r"^[a-\d]$", ["a", "-", "5"], ["b"]),
        (r"^[\]\-\\]$", ["]", "-", "\\"], ["a"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^[^\d\s]$", ["a"], ["1", " "]),
        (r"^[\D]$", ["a"], ["1"]),
        (r"^[^]$", ["a", "\n", "é"], []),
        (r"^[\s\S]$", ["a", "\n", "é"], []),
        (r"^\d$", ["1"], ["٣", "a"]),
        (r"^\D$", ["a", "٣"], ["1"]),
        (r"^\w+$", ["a_1"], ["é"]),
        (r"^\W$", ["é", "-"], ["a"]),
        (r"^\s$", [" ", "\u3000", "\ufeff", "\t"], ["a", "\x85"]),
        (r"^\S$", ["a"], [" ", "\ufeff"]),
        ("^.$", ["a", "é", "😀"], ["\n", "\r"]),
        ("^a{,3}$", ["a{,3}"], ["aa"]),
        ("^a{2,3}$", ["aa", "aaa"], ["a"]),
        ("^a{x}$", ["a{x}"], ["a"]),
        ("^]}$", ["]}"], []),
        (r"^\/a\-b\#\&\~$", ["/a-b#&~"], []),
        (r"^\cJ$", ["\n"], ["J"]),
        (r"^\x41\u00e9\u{1F600}\ud83d\ude00$", ["Aé😀😀"], []),
        (r"^\n\t\v?$", ["\n\t"], ["n"]),
        (r"^(?<year>\d{2})$", ["20"], ["2"]),
        (r"^(?P<year>\d{2})$", ["20"], ["2"]),
        ("^(?:a|b)c$", ["ac", "bc"], ["c"]),
        (r"(?i)^ab\d$", ["AB1"], ["x1", "AB٣"]),
        ("^(?i:a)b$", ["Ab"], ["aB"]),
        (r"^\p{Lu}\P{Lu}$", ["Éé"], ["éé"]),
        (r"^\p{Script=Greek}$", ["α"], ["a"]),
        (r"\Aab\Z", ["ab"], ["xab", "abx"]),
        ("a", ["bab"], ["b"]),
        ("", ["", "a"], []),
    ],
)
def test_a_pattern_means_what_ecma_says(pattern: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not _accepts(pattern, text)] == []
    assert [text for text in wrong if _accepts(pattern, text)] == []


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("(?=a)b", "looking around"),
        ("(?<!a)b", "looking around"),
        (r"(a)\1", "referring back"),
        (r"(?<a>b)\k<a>", "referring back"),
        (r"\bword", "the end of a word"),
        ("(?>a)", "atomic"),
        ("(?m)^a$", "the flags 'm'"),
        ("(?i-s:a)", "the flags 'i-s'"),
        ("(?P<a>b)(?P=a)", "referring back"),
        (r"\ud83d", "surrogate"),
        (r"\012", "octal"),
        ("^[]a]$", "empty"),
        (r"^\p{Unknown}$", "the Unicode property {Unknown}"),
        (r"[\P{Foo=Bar}a]", "the Unicode property {Foo=Bar}"),
        (r"[\1]", "octal"),
        (r"[\07]", "octal"),
        (r"\c1", "without a letter"),
        (r"\c\u00e9", "without a letter"),
        (r"\cé", "without a letter"),
        (r"\c", "without a letter"),
        (r"\G", "another dialect"),
        ("(" * 300 + ")" * 300, "groups"),
    ],
)
def test_what_can_not_be_translated_has_a_place_and_can_be_left_out(pattern: str, fault: str) -> None:
    named = {"patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": False}
    for schema, path in (
        ({"properties": {"e": {"pattern": pattern}}}, "$.properties.e.pattern"),
        ({"properties": {"e": named}}, "$.properties.e.patternProperties["),
    ):
        with pytest.raises(GrammarError, match=fault) as caught:
            backend_of("tiny").compile(schema_spec(schema))
        assert caught.value.kind == "unsupported" and caught.value.path.startswith(path)
        relaxed = backend_of("tiny").compile(schema_spec(schema, relax=True))
        (warning,) = relaxed.warnings
        assert path in warning and fault in warning
    assert accepts(relaxed.matcher(), tiny(), '{"e": {"any": 1}}')


@pytest.mark.slow
def test_a_pattern_is_read_once() -> None:
    """Each of these would take minutes if it were read again for each of its parts."""
    for part in ("[", "(", "\\", "{", "(?", "[^", "[a-", r"\u{", r"\p{", "[\\", "{1,", "{1", "(?i"):
        try:
            assert len(rust_pattern(part * 50_000)) < 2_000_000
        except UntranslatablePattern:
            pass


def test_groups_are_counted() -> None:
    for pattern in ("(?i)", "(?i:a)", "(a)", "((a)(?<n>b))", "(" * 200 + "a" + ")" * 200, "(a)" * 300):
        assert rust_pattern(pattern + r"\/")[-2:] in (")/", "(?i)/"), pattern
    for pattern in (r"(\/", r"\/)", r"(?i:\/", r"(a))\/"):
        assert rust_pattern(pattern) == pattern, "the library says what is wrong with it"
    with pytest.raises(UntranslatablePattern, match="more than 200 groups"):
        rust_pattern("(" * 201 + ")" * 201)


def test_a_control_character_is_not_what_an_escape_leads_into() -> None:
    for pattern in ("^[^x]*$", "^.*$", r"^[\x00-\x7f]*$", r"^\W*$", r"^[\s\S]*$"):
        assert not _accepts(pattern, "\x1b") and _accepts(pattern, "-")
    assert _accepts(r"^\x1b$", "\x1b")  # but one that is asked for


CONTROLS = {*range(8), 0x0B, *range(0x0E, 0x20), 0x7F}
BORDERS = b"\0\7\b\t\n\v\r\x0e\x1f -AZ[]^a~\x7f\x80\xe9"
POINTS = range(0x180)
SETS = {"d": "0123456789", "w": "0123456789_ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"}


def _ways_to_write(code: int) -> list[str]:
    """A character in a class and outside of one."""
    ways = [f"\\x{code:02x}", f"\\u{code:04X}", f"\\u{{{code:x}}}"]
    ways += [f"\\c{chr(code + 64)}", f"\\c{chr(code + 96)}"] * (1 <= code <= 26)
    ways += [f"\\{name}" for name, letter in zip("0tnvfr", "\0\t\n\v\f\r", strict=True) if chr(code) == letter]
    if chr(code).isprintable():
        ways.append(chr(code) if code > 0x7F or chr(code).isalnum() else f"\\{chr(code)}")
    return ways


def _readable(written: str) -> Any:
    """What was written for Rust, for a library that reads classes in classes as Rust does."""
    letters = regex.sub(r"\\x\{(\w+)\}", lambda found: regex.escape(chr(int(found[1], 16))), written)
    return regex.compile(letters, regex.V1)


def test_classes_hold_what_their_members_say() -> None:
    rng = random.Random(1)
    for _ in range(400):
        texts, meant = [], set[int]()
        for _ in range(rng.randint(1, 3)):
            low, high = sorted(rng.choices(BORDERS, k=2))
            name = rng.choice("dwDW")
            letters = {ord(letter) for letter in SETS[name.lower()]}
            first, last = (rng.choice(_ways_to_write(code)) for code in (low, high))
            kind = rng.randrange(3)
            text = (first, f"{first}-{last}", f"\\{name}")[kind]
            points = ({low}, {*range(low, high + 1)}, letters if name in SETS else {*POINTS} - letters)[kind]
            if len(points) > 1:
                points = points - CONTROLS or points
            texts.append(text)
            meant |= points
        for pattern, right in (
            (f"[{''.join(texts)}]", meant),
            (f"[^{''.join(texts)}]", {*POINTS} - meant - CONTROLS),
        ):
            found = _readable(rust_pattern(pattern))
            assert {code for code in POINTS if found.fullmatch(chr(code))} == right, (pattern, found.pattern)


def test_a_character_is_that_one_however_it_is_written() -> None:
    for code in (*POINTS, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF):
        for text in _ways_to_write(code) if code < 0x100 else (f"\\u{{{code:X}}}", chr(code)):
            assert _readable(rust_pattern(text)).fullmatch(chr(code)), text
    for high in (0xD7FF, 0xD800, 0xDBFF, 0xDC00, 0xDFFF, 0xE000):
        for low in (0xDBFF, 0xDC00, 0xDFFF, 0xE000):
            text = f"\\u{high:x}\\u{low:X}"
            try:
                joined = text.encode().decode("unicode-escape").encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                with pytest.raises(UntranslatablePattern, match="surrogate"):
                    rust_pattern(text)
            else:
                assert _readable(rust_pattern(text)).fullmatch(joined)
    assert rust_pattern(r"\u{0000041}") == "A"
    for text in (r"\u{00000041}", r"\u{110000}", r"\u{}", r"\u{41", r"\u00g0", r"\xg0", r"\x4"):
        assert rust_pattern(text).startswith(text[1]), "no escape: the letter means itself"


def test_a_pattern_in_the_midst_of_its_writing_is_read_or_refused() -> None:
    for pattern in (r"a\cJ[^\d-\]x-\x7f]{1,2}(?i:b)\u{1F600}\ud83d\ude00\p{Lu}(?<n>\0)$", r"(?i-i)(?P<a>[\b\-]|\/)+"):
        for end in range(len(pattern) + 1):
            for text in (pattern[:end], pattern[:end] + pattern[end + 1 :]):
                try:
                    assert isinstance(rust_pattern(text), str)
                except UntranslatablePattern as error:
                    assert str(error)


TEXTS = {
    r'"caf\u00e9"': 4,
    r'"\ud83d\ude00"': 1,
    r'"\uD83D\uDE00x"': 2,
    r'"\u001b"': 1,
    r'"\u0041\u007f"': 2,
    r'"\ud83d"': None,
    r'"\ude00"': None,
    r'"\ud83dx"': None,
    r'"\u12"': None,
}
"""Strings and their characters."""


@pytest.mark.parametrize("text", TEXTS)
def test_any_escape_is_one_character_and_half_a_pair_is_none(text: str) -> None:
    length = TEXTS[text]
    for schema in ({"type": "string"}, {}, {"type": "array", "items": {}}):
        compiled = backend_of("tiny").compile(schema_spec(schema))
        written = f"[{text}]" if "items" in schema else text
        assert accepts(compiled.matcher(), tiny(), written) is (length is not None)
    for most in range(5):
        compiled = backend_of("tiny").compile(schema_spec({"type": "string", "maxLength": most}))
        assert accepts(compiled.matcher(), tiny(), text) is (length is not None and length <= most)
