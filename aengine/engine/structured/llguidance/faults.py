"""Explains a refusal of llguidance: whose fault it is, in one line, and where in a JSON schema.

The library names no place, so it is asked again. A part of a schema that it refuses by itself holds the fault, and so
on down, until no part of the part is at fault; there, the keyword is the one that the message speaks of.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any, Literal
from urllib.parse import quote

import llguidance

from ....errors import GrammarError
from ..backend import MatcherError, MatcherLimitError
from ..schema_walk import Path, is_pointer, json_path, pointed_at, pointer_to, relocated, subschemas, walk
from ..spec import GrammarSpec
from .json_schema import json_options, readable_text

ErrorKind = Literal["invalid", "unsupported", "unsatisfiable", "too_complex"]

_KINDS: tuple[tuple[ErrorKind, re.Pattern[str]], ...] = (
    ("unsatisfiable", re.compile(r"unsatisfiable|NoExtension", re.IGNORECASE)),
    (
        "too_complex",
        re.compile(r"too (many|complex|large|big|deep)|\bmax is\b|exceed|limit|fuel|size", re.IGNORECASE),
    ),
    (
        "unsupported",
        re.compile(
            r"unimplemented|(not|not yet|only) supported|unsupported|Unknown format|not present in a registry|panic"
            r"|lookaround|Failed to generate regex|not disjoint",
            re.IGNORECASE,
        ),
    ),
)
_ABOUT = {"json_schema": "the JSON schema", "regex": "the regex", "choice": "choice"}
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_ASSERTED = frozenset(
    "additionalProperties allOf anyOf items oneOf patternProperties prefixItems properties".split()  # noqa: SIM905
)
_SMALLER = "; make it smaller or less ambiguous"
_SEARCH_SECONDS = 0.2
"""For the place of a fault. A schema of 1,000 parts takes some 0.1 s."""


def grammar_error(spec: GrammarSpec, message: str, *, may_search: bool = True) -> GrammarError:
    """Return the error of a grammar that the library refused with ``message``.

    ``may_search``: the place of the fault is looked for, which compiles parts of the schema.
    """
    kind = _kind(message)
    path = ""
    if spec.kind == "json_schema" and may_search:
        try:
            path = place_of_fault(spec)
        except (ValueError, RecursionError):  # the spec can't be read at all
            pass
    at = f" at {path}" if path else ""
    cure = ""
    if kind == "too_complex":
        cure = _SMALLER
    elif "registry" in message:
        cure = "; only what lies in the schema itself can be referred to: copy it to $defs"
    elif kind == "unsupported" and spec.kind == "json_schema" and not spec.relax:
        cure = '; on_unsupported="relax" leaves out what can\'t be enforced'
    said = "no text fits it" if "NoExtension" in message else _in_one_line(message, spec.kind)
    return GrammarError(f"{_about(spec)} can't be used{at}: {said}{cure}", kind=kind, path=path)


def too_complex(spec: GrammarSpec, cause: str) -> GrammarError:
    """Return the error of a grammar that was not compiled in the time or memory that it may take."""
    cure = "make it smaller: counted repeats such as {1,1000} above all, multipleOf, and patterns that are joined"
    return GrammarError(f"{_about(spec)} can't be used: {cause}; {cure}", kind="too_complex")


def matcher_error(message: str) -> MatcherError:
    """Return the error of a matcher that failed with ``message`` after it was compiled."""
    kind, cure = (MatcherLimitError, _SMALLER) if _kind(message) == "too_complex" else (MatcherError, "")
    return kind(f"the grammar can't be followed any further: {matcher_message(message)}{cure}")


def _kind(message: str) -> ErrorKind:
    return next((kind for kind, pattern in _KINDS if pattern.search(message)), "invalid")


def matcher_message(message: str) -> str:
    """Return an error of a matcher in one line."""
    return next((line.strip() for line in message.splitlines() if line.strip()), "unknown error")


def _about(spec: GrammarSpec) -> str:
    return _ABOUT.get(spec.kind, "the grammar")


def _in_one_line(message: str, kind: str) -> str:
    """Return the message without its picture; a grammar's fault is worth its place."""
    fault = re.search(r"^error: (.+)$", message, re.MULTILINE)
    place = _PLACE.match(message)
    text = fault[1] if fault else matcher_message(message[place.end() :] if place else message)
    text = re.sub(r"\s*\(in regex\)|;? in regex /.*/$", "", text)
    if place and kind in ("lark", "ebnf"):
        text = f"line {place[1]}, column {place[2]}: {text}"
    return text if len(text) <= 300 else text[:297] + "..."


def place_of_fault(spec: GrammarSpec) -> str:
    """Return the JSON path of the keyword at fault in a schema that is refused; "" if not found. Raises ValueError."""
    root = json.loads(readable_text(spec.text, relax=spec.relax))
    alone = json.dumps({"$ref": "#/$defs/root", "$defs": {"root": relocated(root, "#/$defs/root"), "any": {}}})
    options: Any = json_options(spec.whitespace, relax=spec.relax)
    grammar = llguidance.LLMatcher.grammar_from_json_schema(alone, overrides=options)
    before, _, after = grammar.partition('"$ref":"#/$defs/root"')
    deadline = time.monotonic() + _SEARCH_SECONDS

    def refusal(ref: str) -> str:
        return llguidance.LLMatcher.validate_grammar(f'{before}"$ref":"{ref}"{after}')

    def fault(path: Path) -> str:
        """Return what is said of a part by itself, with everything that it may refer to."""
        return refusal("#/$defs/root" + quote(pointer_to(path)))

    path: Path = ()
    found = fault(path)
    if not found:  # no keyword is at fault
        return ""
    if refusal("#/$defs/any"):  # all schemas are refused: a reference leads nowhere
        return _reference(root, found)
    seen = {path}
    while True:
        at_fault = None
        for part in _parts(root, path):
            if part not in seen and time.monotonic() < deadline and _is_same(said := fault(part), found):
                at_fault, found = part, said
                break
        if at_fault is None:
            break
        path = at_fault
        seen.add(path)
    keys = path + _keyword(_at(root, path), found)
    return json_path(keys) if keys else ""


def _parts(root: Any, path: Path) -> list[Path]:
    """Return the schemas that a part of ``root`` asserts: not those that are only defined in it, or negated."""
    part = _at(root, path)
    found = [path + keys for keys, member in subschemas(part) if keys[0] in _ASSERTED and isinstance(member, dict)]
    target = pointed_at(root, part["$ref"]) if isinstance(part, dict) and is_pointer(part.get("$ref")) else None
    return [target[0], *found] if target else found


def _is_same(said: str, found: str) -> bool:
    """Return whether a part is refused for what the whole is; or whatever makes it unsatisfiable."""
    if "nsatisfiable" in found:
        return "nsatisfiable" in said
    return said.partition("\n")[0] == found.partition("\n")[0]


def _reference(root: Any, message: str) -> str:
    """Return the path of the reference or the name that the message shows."""
    for path, part in walk(root):
        for key in ("$ref", "$id", "$schema", "$dynamicRef", "id") if isinstance(part, dict) else ():
            if isinstance(part.get(key), str) and part[key] and part[key].partition("#")[0] in message:
                return json_path((*path, key))
    return ""


def _keyword(part: Any, message: str) -> Path:
    """Return the keyword of ``part`` that the message names first, or whose value it shows."""
    if not isinstance(part, dict):
        return ()
    for pattern in part["patternProperties"] if isinstance(part.get("patternProperties"), dict) else ():
        if pattern in message:
            return ("patternProperties", pattern)
    named = [(match.start(), key) for key in part if (match := re.search(rf"(?<![\w$]){re.escape(key)}\b", message))]
    if not named:  # the message shows a pattern only as the library has rewritten it
        return ("pattern",) if isinstance(part.get("pattern"), str) else ()
    return (min(named)[1],)


def _at(root: Any, path: Path) -> Any:
    for key in path:
        root = root[key]
    return root
