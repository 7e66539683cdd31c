"""Bounds of what llguidance takes to compile a grammar, told from their structure by crude upper bounds.

The others are tried in a process first, which costs that process and a second compile, so an error on that side costs
little. The limits are measured: a pattern of 100,000 atoms takes 0.1 s and 40 MB, a constant of 200,000 letters 0.5 s,
an object with 3,500 properties that may be left out 2 s, ``{"multipleOf": 99991}`` 0.5 s, an ``allOf`` of 20 patterns
``.*a.*`` more than 6 GB, 900 ``patternProperties`` more than 6 s.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from ..parts import Choice, FreeText, Json, Part, Regex, TextUpTo, leaves
from ..spec import MAX_DEPTH, GrammarSpec, num_levels

_MAX_LETTERS = 200_000
_MAX_WEIGHT = 5_000
"""Letters of a pattern, repeats counted."""
_MAX_DIVISOR = 20_000
"""Product of all ``multipleOf``: a state machine of that many states."""
_MAX_PROPERTIES = 1_250
"""Properties of one object."""
_MAX_NAME_PATTERNS = 30
"""``patternProperties`` of one object: each is compared with each."""
_MAX_WIDTH = 50_000
"""Ways in which patterns that may be intersected can go on at once."""
_MAX_LOOSE = 6
"""Operators of a pattern that is intersected with what a text may not begin with: states may double with each."""
_MAX_LEVELS = 1_000
"""Levels of nesting, references followed: the library goes down all of them in one recursion, and 1,800 are more than a
thread's stack takes, which ends the host's process."""
_MAX_GRAMMAR_LETTERS = 2_000
_MAX_TERMINALS = 24
"""Names of terminals in a grammar: a terminal of terminals of terminals may double with each."""

_MAX_FORCED_LETTERS = 1_000_000
"""Letters that must follow one after the other, which are all written out before a mask: 1 us and 270 bytes each."""
_MAX_LITERALS = 12_000
"""Literals one after the other: more of them exceed the library's limit of items."""
_TELLING = re.compile(r'"(?:pattern|patternProperties|multipleOf|minItems|\$ref|\$dynamicRef)"')
"""No JSON schema without one of these is at risk, unless it is long."""
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef)"\s*+:\s*+"((?:[^"\\]|\\.)*+)"')
# A search holds the GIL until it ends, and callers write what is searched: no part gives back what it took.
_COUNT = re.compile(r"(?P<again>(?<=[)}?*+]))?\{\s*+([0-9]*+)[\s,]*+([0-9]*+)\s*+\}")
_LENGTH = re.compile(r"\(\?s:\.\{[0-9]*+,[0-9]*+\}\)")
"""A length alone: its state machine is a chain, which the library's fuel bounds."""
_VERBOSE = re.compile(r"\(\?[A-Za-wyz]*+x")
_LOOSE = re.compile(r"[.*+?\[{|\\]")
_NOT_PLAIN = re.compile(r"[&~%{]|::(?!=)")
_TERMINAL = re.compile(r"\b_?[A-Z]")
_JOINING = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if")
_ANNOTATIONS = frozenset({"$comment", "$defs", "$id", "$schema", "default", "definitions", "description", "title"})


def is_quick(spec: GrammarSpec) -> bool:
    """Return whether the library takes no more than some 0.3 s. Takes microseconds for most schemas."""
    if spec.root is not None:
        return _are_quick(spec.root)
    if len(spec.text) > _MAX_LETTERS:
        return False
    if spec.kind == "json_schema":
        return _is_quick_schema(spec.text)
    if spec.kind == "regex":
        return _weight(spec.text) <= _MAX_WEIGHT
    return spec.kind == "choice" or _is_plain_grammar(spec.text)


def _are_quick(root: Part) -> bool:
    num_letters = weight = 0.0
    for leaf in leaves(root):
        if isinstance(leaf, Json):
            num_letters += len(leaf.schema)
            if not _is_quick_schema(leaf.schema):
                return False
        elif isinstance(leaf, Choice):
            num_letters += sum(map(len, leaf.options))
        elif isinstance(leaf, Regex):
            weight += _weight(leaf.pattern)
            if leaf.not_first and len(_LOOSE.findall(leaf.pattern)) > _MAX_LOOSE:
                return False
        elif isinstance(leaf, FreeText | TextUpTo):
            weight += sum(_weight(pattern) for pattern in leaf.matching if not _LENGTH.fullmatch(pattern))
            if math.prod(map(_width, leaf.matching)) > _MAX_WIDTH:
                return False
    return num_letters <= _MAX_LETTERS and weight <= _MAX_WEIGHT


def _is_plain_grammar(text: str) -> bool:
    """Return whether a Lark or EBNF text is short, and has neither repeats, intersections nor schemas."""
    if len(text) > _MAX_GRAMMAR_LETTERS or _NOT_PLAIN.search(text):
        return False
    return len(_TERMINAL.findall(text)) <= _MAX_TERMINALS


def _weight(pattern: str) -> float:
    """Return at least how many letters a regex has, repeats counted: a repeat of a group multiplies all of them."""
    if _VERBOSE.search(pattern):
        return math.inf  # blanks and comments of verbose mode may hide a repeat
    letters, times = float(len(pattern)), 1.0
    for count in _COUNT.finditer(pattern):
        most = float(count[3] or count[2] or "1")
        if count["again"] is not None:
            times *= max(1.0, most)
        else:
            letters += most
    return letters * times


def _is_quick_schema(text: str) -> bool:
    if _most_levels(text) > _MAX_LEVELS:
        return False
    if not _TELLING.search(text) and text.count(":") <= _MAX_PROPERTIES:
        return True
    divisor = 1.0
    joins = False  # whether schemas, and with them their patterns, may be merged
    patterns: set[str] = set()
    try:
        schema = json.loads(text)
        if _forced_letters(schema) > _MAX_FORCED_LETTERS:
            return False
        for part in _objects(schema):
            name_patterns = _mapping(part.get("patternProperties"))
            if len(name_patterns) > _MAX_NAME_PATTERNS or len(_mapping(part.get("properties"))) > _MAX_PROPERTIES:
                return False
            patterns.update(name_patterns)
            if isinstance(part.get("pattern"), str):
                patterns.add(part["pattern"])
            divisor *= _divisor(part.get("multipleOf"))
            if any(keyword in part for keyword in _JOINING):
                listed = part.get("allOf")
                joins |= len(part.keys() - _ANNOTATIONS) > 1 or (isinstance(listed, list) and len(listed) > 1)
    except (ValueError, RecursionError):
        return False
    if sum(map(_weight, patterns)) > _MAX_WEIGHT or divisor > _MAX_DIVISOR:
        return False
    return not joins or math.prod(map(_width, patterns)) <= _MAX_WIDTH


def _forced_letters(schema: Any) -> float:
    """Return a bound of the letters that must follow one after the other somewhere in a value: those of the longest
    literal, as each reference may lead to two others and each array repeats what is in it."""
    longest = times = 1.0
    for part in _objects(schema):
        literals = [part.get("const"), *_mapping(part.get("properties")), *_mapping(part.get("$defs"))]
        for key in ("enum", "required"):
            literals += part[key] if isinstance(part.get(key), list) else ()
        longest = max(longest, *(len(json.dumps(literal)) for literal in literals))
        least = part.get("minItems")
        times *= max(1.0, min(least, _MAX_LITERALS)) if isinstance(least, int | float) else 1.0
        times = min(_MAX_LITERALS, times * 2 ** any(key in part for key in ("$ref", "$dynamicRef")))
    return longest * times


def _most_levels(text: str) -> int:
    """Return at least how many levels deep a schema is when its references are followed: each is on the way once."""
    num_places = len(set(_REFERENCE.findall(text))) + 1
    if num_places * MAX_DEPTH <= _MAX_LEVELS:
        return num_places * MAX_DEPTH
    return num_places * num_levels(text)


def _width(pattern: str) -> float:
    """Return in how many ways a pattern can go on at once, at most, at its start."""
    return 1.0 + len(re.findall(r"[|*+?{]", pattern)) + (not pattern.startswith("^"))


def _divisor(number: object) -> float:
    """Return the digits of a ``multipleOf``: 250 for 250, 25 for 0.25 (moving the point costs nothing)."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return 1.0
    digits = re.sub(r"[^0-9]", "", repr(number).partition("e")[0])
    return float((digits.strip("0") if isinstance(number, float) else digits) or "1") or 1.0


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object, wherever it is: "$ref" may point to any place."""
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            yield part
            rest += part.values()
        elif isinstance(part, list):
            rest += part
