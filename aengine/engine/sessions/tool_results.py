"""Calls of a session's answers, run by the functions of its tools, and what these return as texts."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InvalidRequestError
from ..chat.functions import bind
from ..chat.tools import Tool, tools_of

Call = Mapping[str, Any]
"""A call, as OpenAI writes it."""


def text_of(result: Any) -> str:
    """Return what a tool has returned as a text for the model. Raises InvalidRequestError for what JSON can't say."""
    if isinstance(result, str):
        return result
    try:
        from pydantic_core import to_json  # pydantic's knows models, dataclasses and dates

        return to_json(result).decode()
    except ImportError:
        return json.dumps(result, ensure_ascii=False, default=str)
    except Exception as error:  # pydantic's own, and whatever the object's code raises
        raise InvalidRequestError(f"the result can't be written as JSON: {error}", param="result") from error


async def results_of(tools: Sequence[Any] | None, calls: Sequence[Call]) -> list[str | BaseException]:
    """Run the calls, all at once. Returns of each its result as a text, or what its function has raised; that arguments
    are wrong is a text for the model.

    Raises InvalidRequestError: there is no such function.
    """
    known = tools_of(tools) if calls else ()
    functions = [_tool_of(known, call) for call in calls]
    runs = [tool.call(call["function"]["arguments"]) for tool, call in zip(functions, calls, strict=True)]
    return [_said(value) for value in await asyncio.gather(*runs, return_exceptions=True)]


def results_here(tools: Sequence[Any] | None, calls: Sequence[Call]) -> list[str | BaseException]:
    """Run the calls in this thread, one after the other; else as `results_of`. Raises InvalidRequestError also for a
    function that is async."""
    known = tools_of(tools) if calls else ()
    functions = [_tool_of(known, call) for call in calls]
    return [_said(_outcome(tool, call)) for tool, call in zip(functions, calls, strict=True)]


def _outcome(tool: Tool, call: Call) -> Any:
    assert tool.function is not None
    try:
        value = tool.function(**bind(tool.name, tool.function, call["function"]["arguments"]))
    except Exception as error:
        return error
    if inspect.iscoroutine(value):
        value.close()
        raise InvalidRequestError(f"the tool {tool.name!r} is async: call it on an event loop", param="tools")
    return value


def _tool_of(tools: Sequence[Tool], call: Call) -> Tool:
    name = call["function"]["name"]
    found = next((tool for tool in tools if tool.name == name and tool.function is not None), None)
    if found is None:
        message = f"no function of the session's tools is called {name!r}: run it, and add_tool_result()"
        raise InvalidRequestError(message, param="tools")
    return found


def _said(value: Any) -> str | BaseException:
    if isinstance(value, InvalidRequestError) and value.param == "arguments":
        return f"Error: {value}"
    return value if isinstance(value, BaseException) else text_of(value)
