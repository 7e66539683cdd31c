"""`ArgumentSyntax`: how the arguments of a call are written; `JSON_OBJECT`, for most families.

Each kind has two sides that can't differ: the part of a grammar that holds what is written to a tool's schema, and the
reader that makes JSON of it as it streams.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum
from typing import Any, Protocol

from ....params import StructuredOutput
from ...structured.parts import Json, Part
from ...structured.spec import spec_of
from .markers import Markers
from .scan import ObjectScanner


class ToolSchema(Protocol):
    """The attributes of a `Tool` that syntaxes read."""

    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> Mapping[str, Any]: ...
    @property
    def argument_schema(self) -> Mapping[str, Any]: ...


class Progress(Enum):
    """How far an `ArgumentReader` has come."""

    MORE = "more"
    """The arguments go on. What was not taken may be the beginning of something."""
    WHOLE = "whole"
    """The arguments have ended; what was not taken follows them."""
    BROKEN = "broken"
    """What was not taken can't be a part of the arguments."""


class ArgumentReader(ABC):
    """Reads the arguments of one call."""

    @property
    @abstractmethod
    def is_in_string(self) -> bool:
        """Whether any text may come next, so that the name of a marker would be text."""

    @abstractmethod
    def read(self, text: str) -> tuple[int, str, Progress]:
        """Read on. Return how many characters were taken, the JSON that is certain with them, and the progress.

        ``text`` begins with what was not taken before.
        """


class PiecewiseReader(ArgumentReader):
    """A reader of arguments that consist of pieces, names and values in turn."""

    def read(self, text: str) -> tuple[int, str, Progress]:
        taken, written = 0, ""
        while True:
            num_taken, piece, progress = self._read_piece(text[taken:])
            taken, written = taken + num_taken, written + piece
            if progress is not None:
                return taken, written, progress

    @abstractmethod
    def _read_piece(self, text: str) -> tuple[int, str, Progress | None]:
        """Read the next piece, as of `read`; the progress is None if another piece may follow at once."""


class ArgumentSyntax(ABC):
    """A way to write arguments."""

    opening = ""
    """The first letters of all arguments."""
    marks: tuple[str, ...] = ()
    """Texts that separate arguments."""

    def in_vocabulary(self, markers: Markers) -> ArgumentSyntax:
        """Return the syntax with its strings encoded."""
        return self

    @abstractmethod
    def part(self, tool: ToolSchema, relax: bool) -> Part:
        """Return the grammar of this tool's arguments. ``relax``: leave out what can't be enforced of its schema.

        Raises GrammarError for a schema that can't be enforced, and one that is larger than any grammar's may be.
        """

    @abstractmethod
    def write(self, arguments: Mapping[str, Any]) -> str:
        """Return arguments as the model would write them."""

    @abstractmethod
    def reader(self, tool: ToolSchema) -> ArgumentReader:
        """Return a reader of arguments of this tool."""


class _JsonObject(ArgumentSyntax):
    """A JSON object: ``{"city": "Paris", "days": 3}``."""

    opening = "{"

    def part(self, tool: ToolSchema, relax: bool) -> Part:
        return json_arguments(tool, relax)

    def write(self, arguments: Mapping[str, Any]) -> str:
        return json.dumps(arguments, ensure_ascii=False)

    def reader(self, tool: ToolSchema) -> ArgumentReader:
        return _JsonReader()


class _JsonReader(ArgumentReader):
    def __init__(self) -> None:
        self._scanner = ObjectScanner()

    @property
    def is_in_string(self) -> bool:
        return self._scanner.is_in_string

    def read(self, text: str) -> tuple[int, str, Progress]:
        end, is_whole = self._scanner.scan(text)
        if is_whole:
            return end, text[:end], Progress.WHOLE
        return end, text[:end], Progress.MORE if end == len(text) else Progress.BROKEN


JSON_OBJECT = _JsonObject()


def json_arguments(tool: ToolSchema, relax: bool) -> Json:
    """Return the tool's arguments as a JSON object. Raises GrammarError as of `ArgumentSyntax.part`."""
    spec = spec_of(StructuredOutput(json_schema=tool.argument_schema))
    return Json(spec.text, f"the parameters of the tool {tool.name!r}", relax=relax, tool=tool.name)


def closed_schema(tool: ToolSchema) -> dict[str, Any]:
    """Return the schema of the tool's arguments, whose objects are closed. Raises GrammarError."""
    schema: dict[str, Any] = json.loads(json_arguments(tool, relax=False).schema)
    return schema
