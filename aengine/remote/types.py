"""Functions as tools, which stay in the process that asks: the engine's gets their schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..chat import Tool, ToolChoice

__all__ = ["plain_options"]


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's options as plain data. Raises InvalidRequestError and GrammarError for tools."""
    plain = dict(options)
    if isinstance(tools := plain.get("tools"), list | tuple):
        plain["tools"] = [tool if isinstance(tool, Mapping) else _definition(Tool.of(tool)) for tool in tools]
    if isinstance(choice := plain.get("tool_choice"), ToolChoice):
        plain["tool_choice"] = _choice(choice)
    return plain


def _definition(tool: Tool) -> dict[str, Any]:
    definition = tool.for_template()
    definition["function"]["strict"] = tool.strict
    return definition


def _choice(choice: ToolChoice) -> Any:
    named = [{"type": "function", "function": {"name": name}} for name in choice.names]
    if choice.mode == "named":
        return named[0]
    if named:
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": named}}
    return choice.mode
