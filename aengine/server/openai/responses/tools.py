"""Tools of a response as the engine takes them: functions, those of namespaces included.

functions                              ──>  as they are
namespace {name: N, tools: [{name: F}]} ──>  a function named N__F; its calls have the name F and the namespace N
web_search, file_search, ...           ──>  left out beside functions, with a warning
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....limits.bounds import MAX_NAME_CHARACTERS, MAX_TOOLS
from ...http import HTTPError

_RUN_BY_OPENAI = ("web_search", "file_search", "code_interpreter", "image_generation")
"""How types of tools begin that OpenAI's own server runs, and that a model need not call."""


def name_in_prompt(name: str, namespace: object) -> str:
    """Return the name under which the model knows a function."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The functions of a response."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """Functions in the form that the engine takes."""
    left_out: list[str] = field(default_factory=list)
    """Types of the tools that can't be called here."""
    shown: list[dict[str, Any]] = field(default_factory=list)
    """What the answer repeats: the tools that can be called, which the context bounds."""
    _places: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]] | None) -> ResponseTools:
        """Read a body's tools. Raises HTTPError 400."""
        read = cls()
        for i, tool in enumerate(tools or ()):
            kind = tool.get("type")
            if kind == "namespace":
                read._add_namespace(tool, f"tools[{i}]")
            elif isinstance(kind, str) and kind.startswith(_RUN_BY_OPENAI):
                read.left_out.append(kind[:80])
            else:
                read.functions.append(dict(tool))  # the engine checks its parameters
                read.shown.append(dict(tool))
        if read.left_out and not read.functions:
            message = f"this server runs no tools such as {read.left_out[0]!r}: give it functions, which you run"
            raise HTTPError(400, message, param="tools")
        return read

    def fields(self, name: str) -> dict[str, str]:
        """Return the fields of a call that say which function it calls."""
        return self._places.get(name, {"name": name})

    @property
    def warnings(self) -> list[str]:
        """What the caller should know about tools that are left out."""
        return [f"the tool {kind} is left out: this server runs no tools" for kind in dict.fromkeys(self.left_out)]

    def _add_namespace(self, tool: Mapping[str, Any], where: str) -> None:
        namespace, inner = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str) or not namespace:
            raise HTTPError(400, f"{where}.name is wrong: a namespace needs a name", param=f"{where}.name")
        if not isinstance(inner, list):
            raise HTTPError(400, f"{where}.tools is wrong: it must be a list of functions", param=f"{where}.tools")
        if len(self.functions) + len(inner) > MAX_TOOLS:
            raise HTTPError(400, f"{where}.tools is wrong: there may be {MAX_TOOLS} functions in all", param="tools")
        description = str(tool.get("description") or "")[:MAX_NAME_CHARACTERS]  # the model is not shown it
        self.shown.append({"type": "namespace", "name": namespace, "description": description, "tools": inner})
        for j, function in enumerate(inner):
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str):
                param = f"{where}.tools[{j}].name"
                raise HTTPError(400, f"{param} is wrong: a function needs a name", param=param)
            known = name_in_prompt(name, namespace)
            self.functions.append({**function, "name": known})
            self._places[known] = {"name": name, "namespace": namespace}
