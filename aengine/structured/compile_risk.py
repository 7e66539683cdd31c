"""Which grammars llguidance may take long over, told from their text.

Its limits ("fuel") bound most of a compile, but what a unit of fuel costs differs by powers of ten, and some steps pay
none. So a grammar is one of

    safe   nothing in it grows: compiled at once, in the host's thread
    costly it is long, has counted repeats, or terminals of terminals: first with small limits, which bound it
    wild   limits don't bound it: intersections of patterns, large ``multipleOf``, many ``patternProperties``,
           many optional properties of one object or optional items of Lark rules

Measured with limits of a fortieth: ``{"multipleOf": 99999989}`` takes more than 6 s, an ``allOf`` of 20 patterns
``.*a.*`` more than 6 GB, 900 ``patternProperties`` more than 6 s. The estimates here are upper bounds and crude: an
error on the wrong side costs a compile in a process.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from .parts import Choice, Json, Part, Regex, leaves
from .spec import GrammarSpec

__all__ = ["Risk", "is_hopeless", "risk_of"]

Risk = Literal["safe", "costly", "wild"]
_RISKS: tuple[Risk, ...] = ("safe", "costly", "wild")

_MAX_LETTERS = 200_000
"""Of a text: a constant of so many takes 0.5 s, of five times as many 3.7 s and 350 MB."""
_MAX_WEIGHT = 5_000
"""Atoms of a pattern, repeats counted: 100,000 take 0.1 s and 40 MB."""
_MOST_LETTERS = 10_000_000
"""Letters of a regex, repeats counted, from which on it is not even tried: a million take 2 s. (RE2 allows repeats of
repeats up to 1,000 in all.)"""
_MAX_DIVISOR = 20_000
"""Of all ``multipleOf``: each is a state machine of that many states; 65,536 take 0.04 s, 99,991 take 0.5 s."""
_MAX_OPTIONAL = 1_250
"""Properties of one object that may be left out: 3,500 take 2 s, 8,000 take 12 s."""
_MAX_WIDTH = 50_000
"""Ways in which patterns that may be intersected can go on at once."""
_MAX_NAME_PATTERNS = 30
"""``patternProperties``: each is compared with each."""
_MAX_OPERATORS = 8
"""Of a Lark terminal's ``&`` and ``~``: each may double its states."""
_MAX_LOOSE = 6
"""Parts of such a terminal that are no plain letters: states may double with each."""
_MAX_REPEATED = 100_000
"""The letters of a Lark grammar, times all its repeats; and terminals in terminals."""
_MAX_QUANTIFIERS = 500
"""Of a Lark grammar's rules: 9,000 items that may be left out take 1.8 s, with small limits too."""
_HUGE = 10**20
"""More than any limit. What grows is cut there, as sums and products of longer numbers take time themselves."""

_TELLING = re.compile(r'"(?:pattern|patternProperties|multipleOf)"|\\u00[2-7]')
"""No JSON schema without one of these is at risk. Lark may hold JSON whose keys are written in escapes."""
# A search holds the GIL until it ends, and callers write what is searched. So no part of these patterns gives back what
# it took, and what is never closed is one match to the end of the text: each letter is looked at a few times at most.
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)|\{\s*+([0-9]*+)\s*+,?\s*+([0-9]*+)\s*+\}|.", re.DOTALL)
_INNER_CLASS = re.compile(r"\\.|(\[)", re.DOTALL)
_VERBOSE = re.compile(r"\(\?[A-Za-wyz]*+x")
"""A pattern with comments."""
_COUNT = re.compile(r"\{\s*+([0-9]*+)[\s,]*+([0-9]*+)\s*+\}|~\s*+([0-9]++)(?:\s*+\.\.\s*+([0-9]++))?")
_LARK_TOKEN = re.compile(
    r"(?P<json>%json|%llguidance)\s*+(?=\{)"
    r"|(?P<regex>/(?:\\.|[^/\\])++(?:/[imslux]*+|(?P<open_regex>\\?\Z)))"
    r'|"(?:\\.|[^"\\\n])*+(?:"i?|(?P<open_string>(?=\n)|\\?\Z))'
    r"|(?P<comment>(?:#|//)[^\n]*+)",
    re.DOTALL,
)
_EMPTY = re.compile(r"\|\s*+[)|]|[(:]\s*+\|")
"""An alternative of nothing."""
_STATEMENT = re.compile(r"\s*+(?:%|[!?_]*+[A-Za-z][^:\n]*+:)")
_TERMINAL_NAME = re.compile(r"\b_?[A-Z]\w*")
_ANY_TEXT = re.compile(r"\(\?s:\.[*+]\)")
_LOOSE = re.compile(r"\\[dDwWsSpP]|(?<!\\)[.*+?\[{|]")
_ANNOTATIONS = frozenset({"$comment", "$defs", "$id", "$schema", "default", "definitions", "description", "title"})
_JOINING = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if")


@functools.lru_cache(maxsize=4)  # of those in the works: it is asked for twice
def risk_of(spec: GrammarSpec) -> Risk:
    """Takes microseconds for most schemas."""
    risk: Risk = "costly" if len(spec.text) > _MAX_LETTERS or spec.kind == "ebnf" else "safe"
    if spec.kind == "regex" and _weight(spec.text) > _MAX_WEIGHT:
        risk = "costly"
    elif spec.kind == "json_schema" and _is_telling(spec.text):
        risk = max(risk, _risk_of_schemas([spec.text]), key=_RISKS.index)
    elif spec.root is not None:
        risk = _risk_of_parts(spec.root)
    elif spec.kind == "lark":
        risk = max(risk, _risk_of_lark(spec.text), key=_RISKS.index)
    return risk


def _risk_of_parts(root: Part) -> Risk:
    """Told from the structure: of each schema, regex and choice by itself, and of how much they are together."""
    risk: Risk = "safe"
    num_letters = weight = 0
    for leaf in leaves(root):
        if isinstance(leaf, Json):
            num_letters += len(leaf.schema)
            if _is_telling(leaf.schema):
                risk = max(risk, _risk_of_schemas([leaf.schema]), key=_RISKS.index)
        elif isinstance(leaf, Choice):
            num_letters += sum(map(len, leaf.options))
        elif isinstance(leaf, Regex):
            weight += _weight(leaf.pattern)
            if leaf.not_first and len(_LOOSE.findall(_ANY_TEXT.sub("", leaf.pattern))) > _MAX_LOOSE:
                return "wild"
    return "costly" if risk == "safe" and (num_letters > _MAX_LETTERS or weight > _MAX_WEIGHT) else risk


def is_hopeless(spec: GrammarSpec) -> bool:
    """Whether one that is costly need not be tried: it would take longer than anyone waits."""
    patterns: Iterable[Any] = ()
    if spec.kind == "regex":
        patterns = [spec.text]
    elif spec.kind == "json_schema" and "pattern" in spec.text:
        patterns = (part.get("pattern") for part in _objects(json.loads(spec.text)))
    return any(isinstance(text, str) and _weight(text, loose=0) > _MOST_LETTERS for text in patterns)


def _is_telling(schema: str) -> bool:
    """Whether it may be at risk: only then it is read."""
    return _TELLING.search(schema) is not None or schema.count(":") > _MAX_OPTIONAL


def _weight(pattern: str, loose: int = 1) -> int:
    """The atoms of a regex, each as often as it is repeated at most; one that is no single letter counts ``loose``."""
    if _VERBOSE.search(pattern):
        return _MAX_WEIGHT + 1  # its parts are not where they seem to be
    outer: list[int] = []
    total = last = 0
    for atom in _ATOM.finditer(pattern):
        text = atom[0]
        if text == "(":
            outer.append(total)
            total = 0
        elif text == ")":
            last = total
            total += outer.pop() if outer else 0
        elif atom[1] is not None:
            times = max(1, _number(atom[2] or atom[1] or "1"))
            total = min(_HUGE, total + last * (times - 1))
            last = min(_HUGE, last * times)
        elif text in "?*+":  # also the "?" of a lazy repeat, after which another may come
            total += 1
        else:
            if text[0] == "[" and any(inner[1] for inner in _INNER_CLASS.finditer(text, 1)):
                # a class in a class: where it ends is not told here
                return loose * max(len(pattern), _repeats(pattern))
            last = loose if _LOOSE.match(text) else 1
            total += last
    return total + sum(outer)


def _number(digits: str) -> int:
    """Right up to 19 digits: Python refuses to read thousands."""
    return int(digits.lstrip("0")[:20] or 0)


def _width(pattern: str) -> int:
    """In how many ways it can go on at once, at most, at its start."""
    return 1 + len(re.findall(r"[|*+?{]", pattern)) + (not pattern.startswith("^"))


# -- JSON schemas


@dataclass(slots=True)
class _Found:
    """What JSON schemas hold."""

    patterns: set[str] = field(default_factory=set)
    weight: int = 0
    divisors: list[int] = field(default_factory=list)
    num_name_patterns: int = 0
    num_optional: int = 0
    joins: bool = False  # schemas may be merged, and their patterns with them

    def add(self, part: dict[str, Any]) -> None:
        pattern = part.get("pattern")
        names = part.get("patternProperties")
        here = [pattern] if isinstance(pattern, str) else []
        if isinstance(names, dict):
            here += names
            self.num_name_patterns = max(self.num_name_patterns, len(names))
        properties = part.get("properties")
        if isinstance(properties, dict) and len(properties) > _MAX_OPTIONAL:
            required = part.get("required")
            needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
            self.num_optional = max(self.num_optional, len(properties.keys() - needed))
        self.patterns.update(here)
        self.weight += sum(map(_weight, here))
        self.divisors += _divisor(part.get("multipleOf"))
        if not self.joins and any(keyword in part for keyword in _JOINING):
            listed = part.get("allOf")
            self.joins = len(part.keys() - _ANNOTATIONS) > 1 or (isinstance(listed, list) and len(listed) > 1)

    @property
    def risk(self) -> Risk:
        if sum(self.divisors) > _MAX_DIVISOR or self.num_name_patterns > _MAX_NAME_PATTERNS:
            return "wild"
        if self.num_optional > _MAX_OPTIONAL:
            return "wild"
        if self.joins and _exceeds(set(self.divisors), _MAX_DIVISOR):
            return "wild"
        if self.joins and len(self.patterns) > 1 and _exceeds(map(_width, self.patterns), _MAX_WIDTH):
            return "wild"
        return "safe" if self.weight <= _MAX_WEIGHT else "costly"


def _divisor(number: object) -> list[int]:
    """Its digits, without zeros at the end of a fraction or a power of ten: moving the point there costs nothing. But
    604,800 takes 1.6 s, which 6,048 does not."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return []
    if isinstance(number, float) and not number.is_integer():
        digits = repr(number).partition("e")[0].replace(".", "").strip("-0")
        return [int(digits)] if digits.isdecimal() else [10**100] if digits else []
    digits = repr(int(number)).strip("-")
    if digits.strip("0") in ("", "1"):
        return [1] if digits != "0" else []
    return [int(digits)] if len(digits) < 100 else [10**100]


def _exceeds(numbers: Any, limit: int) -> bool:
    """Whether their product does."""
    product = 1
    for number in numbers:
        product *= number
        if product > limit:
            return True
    return False


def _risk_of_schemas(texts: list[str]) -> Risk:
    found = _Found()
    try:
        for text in texts:
            for part in _objects(json.loads(text)):
                found.add(part)
    except (ValueError, RecursionError):
        return "wild"
    return found.risk


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every one, wherever it is: "$ref" may point to any place."""
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            yield part
            rest += part.values()
        elif isinstance(part, list):
            rest += part


# -- Lark


def _risk_of_lark(text: str) -> Risk:
    """Of a grammar, and of the JSON schemas inside."""
    try:
        rules, statements, schemas, num_quantifiers = _read_lark(text)
    except (ValueError, RecursionError):  # what can't be read here, the library may read otherwise
        return "wild"
    if num_quantifiers > _MAX_QUANTIFIERS or not all(map(_is_tame, statements)):
        return "wild"
    risk = _risk_of_schemas(schemas) if any(map(_is_telling, schemas)) else "safe"
    is_long = _repeats(rules) > _MAX_REPEATED or _references(statements) > _MAX_REPEATED
    return "costly" if risk == "safe" and is_long else risk


def _read_lark(text: str) -> tuple[str, list[str], list[str], int]:
    """It without JSON and comments; its statements, each a line without strings, with so many quotes for a regex as
    that has loose parts; its JSON schemas; and how many parts of its rules may be left out or repeated. Raises
    ValueError or RecursionError for what is no JSON, or not closed."""
    rules: list[str] = []
    kept: list[str] = []
    schemas: list[str] = []
    start = 0
    while (token := _LARK_TOKEN.search(text, start)) is not None:
        if token["open_regex"] is not None or token["open_string"] is not None:
            raise ValueError("not closed")
        kept.append(text[start : token.start()])
        rules.append(text[start : token.start()])
        if not token["json"] and not token["comment"]:
            rules.append(token[0])
        start = token.end()
        if token["json"]:
            _, start = json.JSONDecoder().raw_decode(text, start)
            schemas.append(text[token.end() : start])
        elif token["regex"]:
            kept.append("'" * len(_LOOSE.findall(_ANY_TEXT.sub("", token["regex"]))))
    rules.append(text[start:])
    kept.append(text[start:])
    plain = "".join(kept)
    statements: list[list[str]] = []
    for line in plain.split("\n"):
        if _STATEMENT.match(line) or not statements:
            statements.append([line])
        else:
            statements[-1].append(line)
    num_quantifiers = sum(map(plain.count, "?*+[")) + len(_EMPTY.findall(plain))
    return "".join(rules), list(map("".join, statements)), schemas, num_quantifiers


def _is_tame(statement: str) -> bool:
    """Whether its intersections and negations, if any, are few and of texts that are all but plain."""
    if re.search(r"%(?:regex|lark|if)|::", statement):
        return False
    operators = len(re.findall(r"&|~(?! *\d)", statement))
    if not operators:
        return True
    said = statement.partition(":")[2]
    return operators <= _MAX_OPERATORS and not re.search(r"\w", said) and said.count("'") <= _MAX_LOOSE


def _repeats(text: str) -> int:
    """The length times all repeats."""
    product = 1
    for count in _COUNT.finditer(text):
        product *= max(1, *(_number(number or "1") for number in count.groups()))
        if product > _MAX_REPEATED:
            break
    return product * len(text) if product > 1 else 0


def _references(statements: list[str]) -> int:
    """How often a terminal may come to stand in another, through others: what doubles thirty times is a bomb."""
    product = 1
    for statement in statements:
        name, _, said = statement.partition(":")
        if name.strip(" _")[:1].isupper():
            product *= max(1, len(_TERMINAL_NAME.findall(said)))
            if product > _MAX_REPEATED:
                break
    return product
