"""Parses docstrings: the description of a function and of its parameters, in the three common styles."""

from __future__ import annotations

import re

_GOOGLE = re.compile(r"(?:Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments):\s*")
_UNDERLINE = re.compile(r"-{3,}\s*")
_GOOGLE_ITEM = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_NUMPY_ITEM = re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?")
_REST_ITEM = re.compile(r":(?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)")
_REST_FIELD = re.compile(r":\w[^:]*:(?:\s|$)")
_RESULTS = re.compile(r"(?:Returns?|Yields?|Raises):\s*")
_LAID_OUT = re.compile(r"\s|[-*+>|#`]|\d+[.)]\s")
"""A line of a list, a table, code, ...: its paragraph keeps its lines."""


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description, and what is said of each parameter. ``text``: as `inspect.getdoc` gives it."""
    lines = text.splitlines()
    found = _rest(lines)
    for index, line in enumerate(lines):
        if line.strip() in ("Parameters", "Other Parameters") and _is_underlined(lines, index):
            found |= _numpy(lines[index + 2 :])
        elif _GOOGLE.fullmatch(line):
            found |= _google(lines[index + 1 :])
    return _description(lines), found


def _description(lines: list[str]) -> str:
    """Return the paragraphs before the parameters, results, errors or any underlined title."""
    paragraphs: list[list[str]] = [[]]
    for index, line in enumerate(lines):
        if any(section.fullmatch(line) for section in (_GOOGLE, _RESULTS)) or _REST_FIELD.match(line):
            break
        if line.strip() and _is_underlined(lines, index):
            break
        if line.strip():
            paragraphs[-1].append(line.rstrip())
        else:
            paragraphs.append([])
    return "\n\n".join(_unfolded(paragraph) for paragraph in paragraphs if paragraph)


def _is_underlined(lines: list[str], index: int) -> bool:
    return _UNDERLINE.fullmatch("".join(lines[index + 1 : index + 2]).strip()) is not None


def _unfolded(paragraph: list[str]) -> str:
    return ("\n" if any(map(_LAID_OUT.match, paragraph)) else " ").join(paragraph)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _google(lines: list[str]) -> dict[str, str]:
    """Read ``name (type): text`` for each parameter, further lines deeper."""
    found: dict[str, list[str]] = {}
    level, current = 0, None
    for line in lines:
        if not line.strip():
            continue
        if not _indent(line):
            break
        level = level or _indent(line)
        item = _GOOGLE_ITEM.match(line.strip()) if _indent(line) <= level else None
        if item:
            current = item[1]
            found[current] = [item[2]]
        elif current:
            found[current].append(line)
    return _joined(found)


def _numpy(lines: list[str]) -> dict[str, str]:
    """Read ``name : type`` at the margin and the text below it, deeper, until another line at the margin: an underline
    at the latest, below a title, of which nothing is said."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in lines:
        if not line.strip():
            continue
        if _indent(line):
            current.append(line)
            continue
        item = _NUMPY_ITEM.fullmatch(line.strip())
        if not item:
            break
        current = []
        for name in item[1].split(","):
            found[name.strip().lstrip("*")] = current
    return _joined(found)


def _rest(lines: list[str]) -> dict[str, str]:
    """Read ``:param name: text``, further lines deeper."""
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in lines:
        item = _REST_ITEM.match(line.strip())
        if item:
            current = found[item[1]] = [item[2]]
        elif current is not None and line.strip() and _indent(line):
            current.append(line)
        else:
            current = None
    return _joined(found)


def _joined(found: dict[str, list[str]]) -> dict[str, str]:
    texts = {name: " ".join(line.strip() for line in lines).strip() for name, lines in found.items()}
    return {name: text for name, text in texts.items() if text}
