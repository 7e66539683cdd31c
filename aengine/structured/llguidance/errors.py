"""What llguidance's messages mean: whose fault, and where, in one line without the library's picture of it."""

from __future__ import annotations

import re
from typing import Literal

from ...errors import GrammarError
from ..spec import GrammarSpec

__all__ = ["grammar_error", "matcher_message", "trial_error"]

ErrorKind = Literal["invalid", "unsupported", "unsatisfiable", "too_complex"]

_KINDS: tuple[tuple[ErrorKind, re.Pattern[str]], ...] = (
    ("unsatisfiable", re.compile(r"unsatisfiable|NoExtension", re.IGNORECASE)),
    (
        "too_complex",
        re.compile(r"too (many|complex|large|big|deep)|\bmax is\b|exceed|limit|fuel|TooComplex|size", re.IGNORECASE),
    ),
    (
        "unsupported",
        re.compile(
            r"unimplemented|not (yet )?supported|unsupported|Unknown format|not present in a registry|panic"
            r"|lookaround|Failed to generate regex",
            re.IGNORECASE,
        ),
    ),
)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_ABOUT = {"json_schema": "the JSON schema", "regex": "the regex", "choice": "choice"}
_CURE: dict[ErrorKind, str] = {
    "invalid": "",
    "unsupported": "",
    "unsatisfiable": "",
    "too_complex": "; make it smaller or less ambiguous",
}


def grammar_error(spec: GrammarSpec, message: str) -> GrammarError:
    """The error of a grammar that the library refused with ``message``."""
    kind, path = _kind_of(message), ""
    if spec.kind == "json_schema":
        kind, path = _explained(spec.text, message, kind)
    about = _ABOUT.get(spec.kind, "the grammar")
    at = f" at {path}" if path else ""
    cure = _CURE[kind]
    if kind == "unsupported" and spec.kind == "json_schema" and not spec.relax:
        cure = '; on_unsupported="relax" leaves out what can\'t be enforced'
    said = "no text fits it" if "NoExtension" in message else _short(message, spec.kind)
    return GrammarError(f"{about} can't be used{at}: {said}{cure}", kind=kind, path=path)


def trial_error(spec: GrammarSpec, cause: str) -> GrammarError:
    """The error of a grammar that was not compiled in the time or memory that it may take."""
    about = _ABOUT.get(spec.kind, "the grammar")
    cure = "make it smaller or less ambiguous"
    if spec.kind == "regex":
        cure = "make counted repeats such as {1,1000} smaller, above all those inside of others"
    elif spec.kind == "json_schema":
        cure = "make counted repeats in patterns and multipleOf smaller, or join fewer patterns by allOf and $ref"
    elif spec.kind in ("lark", "ebnf"):
        cure = "make counted repeats smaller, or join fewer patterns by & and ~"
    return GrammarError(f"{about} can't be used: {cause}; {cure}", kind="too_complex")


def matcher_message(message: str) -> str:
    """An error of a matcher, in one line."""
    return _first_line(message) or "unknown error"


def _kind_of(message: str) -> ErrorKind:
    return next((kind for kind, pattern in _KINDS if pattern.search(message)), "invalid")


def _explained(schema: str, message: str, kind: ErrorKind) -> tuple[ErrorKind, str]:
    from .. import schema as schemas

    explain = getattr(schemas, "explain", None)
    return (kind, "") if explain is None else explain(schema, message)


def _short(message: str, kind: str) -> str:
    """A regex's fault stands after its picture; a grammar's fault is worth its place."""
    fault = re.search(r"^error: (.+)$", message, re.MULTILINE)
    place = _PLACE.match(message)
    text = fault[1] if fault else _first_line(message[place.end() :] if place else message)
    text = re.sub(r"\s*\(in regex\)|;? in regex /.*/$", "", text)
    if place and kind in ("lark", "ebnf"):
        text = f"line {place[1]}, column {place[2]}: {text}"
    return text if len(text) <= 300 else text[:297] + "..."


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "")
