"""Python types and functions of a request, which stay in the process that asks: the engine's gets their schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..chat import Tool, ToolChoice
from ..engine.structured.asked_type import AskedType, with_output_type
from ..params import OnUnsupported, SamplingParams

if TYPE_CHECKING:
    from ..engine.structured.output_type import OutputType

__all__ = ["asked_and_params", "plain_options"]


def asked_and_params(
    params: SamplingParams | None, output_type: Any, on_unsupported: OnUnsupported
) -> tuple[SamplingParams | None, OutputType | None, AskedType | None]:
    """Return the parameters, with the schema of the type if it is known; the type if it is; else what is to be
    described. Raises InvalidRequestError."""
    if output_type is None:
        return params, None, None
    params, options = with_output_type(params, output_type, on_unsupported)
    return params, options.get("output_type"), options.get("asked_type")


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
