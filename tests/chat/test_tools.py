"""`Tool`, `tools_of` and `ToolChoice`: functions and schemas as tools, and what is refused."""

from __future__ import annotations

import threading
from enum import Enum
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from aengine.chat import Tool, ToolChoice, tools_of
from aengine.errors import GrammarError, InvalidRequestError


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


class Place(BaseModel):
    city: str
    country: str = "FR"


def google(city: str, days: int = 3, *, unit: Unit = Unit.C, note=None) -> str:
    """Weather of a city,
    as forecast.

    Longer talk, over
    two lines.

    Args:
        city (str): Where: the city's
            name.
        days: How many.

    Returns:
        text: the weather.
    """
    return f"{city} {days} {unit.value} {note}"


def numpy_style(place: Place, level: Literal["low", "high"] | None = None):
    """Look up a place.

    Parameters
    ----------
    place : Place
        The place
        meant.
    level : str, optional
        How hard.

    Returns
    -------
    str
        Nothing of note.
    """
    return place


def rest_style(a: float, b: Annotated[int, Field(ge=1, description="from Field")]):
    """Add numbers.

    :param float a: the first
        of them
    :param b: not this
    :returns: a sum
    """
    return a + b


def test_a_function_with_a_google_docstring():
    tool = Tool.of(google)
    assert (tool.name, tool.description) == (
        "google",
        "Weather of a city, as forecast.\n\nLonger talk, over two lines.",
    )
    assert tool.parameters["type"] == "object" and tool.parameters["additionalProperties"] is False
    assert tool.parameters["required"] == ["city"]
    properties = tool.parameters["properties"]
    assert list(properties) == ["city", "days", "unit", "note"]
    assert properties["city"] == {"type": "string", "description": "Where: the city's name."}
    assert properties["days"] == {"type": "integer", "default": 3, "description": "How many."}
    assert properties["unit"]["default"] == "celsius"
    assert properties["note"] == {"default": None}  # no annotation: any JSON
    assert tool.parameters["$defs"]["Unit"]["enum"] == ["celsius", "fahrenheit"]
    assert "title" not in tool.parameters and "title" not in properties["city"]


def test_numpy_and_rest_docstrings():
    properties = Tool.of(numpy_style).parameters["properties"]
    assert properties["place"]["description"] == "The place meant."
    assert properties["level"]["description"] == "How hard."
    tool = Tool.of(rest_style)
    assert tool.description == "Add numbers."
    assert tool.parameters["properties"]["a"] == {"type": "number", "description": "the first of them"}
    assert tool.parameters["properties"]["b"] == {"type": "integer", "minimum": 1, "description": "from Field"}


def test_a_function_without_a_docstring_or_arguments():
    def bare():
        return 1

    tool = Tool.of(bare)
    assert tool.description == "" and tool.parameters["properties"] == {}


def test_what_a_template_is_given():
    spec = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    assert Tool.of(spec).for_template() == spec
    flat = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
    assert Tool.of(flat).for_template() == spec
    assert Tool.of(flat).strict is False and Tool.of(flat).argument_schema == {"type": "object"}
    assert Tool.of(Tool.of(spec)) is not None


def test_a_tool_without_parameters_takes_no_arguments():
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    for given in ({"name": "f"}, {"name": "f", "parameters": None}, {"name": "f", "parameters": {}}):
        assert Tool.of(given).parameters == nothing
    assert Tool("f", parameters={"properties": {"a": {}}}).parameters == {"type": "object", "properties": {"a": {}}}


async def test_calls_run_functions_with_checked_arguments():
    assert await Tool.of(google).call('{"city": "Paris", "unit": "fahrenheit"}') == "Paris 3 fahrenheit None"
    assert await Tool.of(numpy_style).call({"place": {"city": "Rome"}}) == Place(city="Rome")

    async def wait(x: int) -> int:
        return x + 1

    assert await Tool.of(wait).call('{"x": 1}') == 2

    def where() -> int:
        return threading.get_ident()

    assert await Tool.of(where).call("") != threading.get_ident()

    class Service:
        async def ask(self, x: int) -> int:
            return x

    assert await Tool.of(Service().ask).call({"x": 3}) == 3


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "JSON object"),
        ("{}", "city"),
        ('{"city": 3}', "city"),
        ('{"city": "x", "more": 1}', "more"),
        ('{"city": "x", "unit": "kelvin"}', "unit"),
    ],
)
async def test_wrong_arguments_are_told(arguments, said):
    with pytest.raises(InvalidRequestError, match=said) as caught:
        await Tool.of(google).call(arguments)
    assert caught.value.param == "arguments"


async def test_what_the_function_raises_comes_through():
    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await Tool.of(fails).call("{}")
    with pytest.raises(InvalidRequestError, match="no function"):
        await Tool("f").call("{}")


def _positional(a, /): ...


def _args(*a): ...


def _kwargs(**a): ...


def _unknown(a: Nowhere): ...  # noqa: F821


def _no_schema(a: threading.Lock): ...


@pytest.mark.parametrize(
    "thing, said",
    [
        (_positional, "positional-only"),
        (_args, "list"),
        (_kwargs, "dict"),
        (_unknown, "Nowhere"),
        (_no_schema, "_no_schema"),
        (lambda x: x, "lambda"),
        (Place, "must be a function"),
        (3, "must be a function"),
        ({"type": "web_search"}, "web_search"),
        ({"type": "function"}, "name"),
        ({"type": "function", "function": 3}, "name"),
        ({"name": "a b"}, "a b"),
        ({"name": ""}, "1 to 64"),
        ({"name": "x" * 65}, "1 to 64"),
        ({"name": "naïve"}, "1 to 64"),
        ({"name": "a\n"}, "1 to 64"),
        ({"name": 'a"'}, "1 to 64"),
        ({"name": 3}, "1 to 64"),
        ({"name": "f", "description": 3}, "description"),
        ({"name": "f", "strict": "yes"}, "strict"),
        ({"name": "f", "parameters": []}, "JSON schema"),
        ({"name": "f", "parameters": "x"}, "JSON schema"),
        ({"name": "f", "parameters": {"type": "string"}}, "object"),
        ({"name": "f", "parameters": {"type": ["object", "null"]}}, "object"),
    ],
)
def test_what_is_no_tool_is_refused(thing, said):
    with pytest.raises(InvalidRequestError, match=said) as caught:
        Tool.of(thing)
    assert caught.value.param == "tools"


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
MCP = {
    "title": "Weather",
    "annotations": {"title": "Weather", "readOnlyHint": True},
    "outputSchema": {"type": "object", "properties": {"degrees": {"type": "number"}}},
    "icons": None,
    "_meta": {"schema": {}},
}


@pytest.mark.parametrize(
    "given",
    [
        {"inputSchema": SCHEMA},
        {"inputSchema": SCHEMA, "parameters": None, **MCP},
        {"input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}, "input_examples": [{"city": "Rome"}]},
        {"type": "custom", "input_schema": SCHEMA},
        {"parameters": SCHEMA, "output_schema": {"type": "object"}, "args": {"x": 1}},
    ],
)
def test_the_dicts_of_mcp_and_anthropic(given):
    tool = Tool.of({"name": "f", "description": "d", **given})
    assert (tool.name, tool.description, tool.parameters) == ("f", "d", SCHEMA)


def test_other_keys_of_a_dict_are_left_alone():
    assert Tool.of({"name": "f", **MCP}) == Tool("f")
    wrapped = {"type": "function", "id": 3, "function": {"name": "f", "input_schema": SCHEMA, 4: {}}}
    assert Tool.of(wrapped).parameters == SCHEMA


@pytest.mark.parametrize(
    "given, said",
    [
        ({"parameters": {}, "inputSchema": SCHEMA}, "both 'parameters' and 'inputSchema'"),
        ({"inputSchema": SCHEMA, "input_schema": SCHEMA}, "both 'inputSchema' and 'input_schema'"),
        ({"paramaters": SCHEMA}, "'paramaters', which no tool has: if it is 'parameters'"),
        ({"params": {"city": "string"}}, "'parameters'"),
        ({"inputschema": SCHEMA}, "'inputSchema'"),
        ({"input_shema": SCHEMA}, "'input_schema'"),
        ({"json_schema": {}}, "'parameters'"),
        ({"parametersJsonSchema": {}}, "'parameters'"),
        ({"args": {"city": {"type": "string"}}}, "'parameters'"),
        ({"properties": {"city": {}}}, "'parameters'"),
        ({"takes": SCHEMA}, "'parameters'"),
        ({"parameters": SCHEMA, "desciption": "d"}, "'description'"),
    ],
)
def test_a_misspelt_key_is_refused(given, said):
    for thing in ({"name": "f", **given}, {"type": "function", "function": {"name": "f", **given}}):
        with pytest.raises(InvalidRequestError, match=said) as caught:
            Tool.of(thing)
        assert caught.value.param == "tools" and "'f'" in str(caught.value)


def test_parameters_in_the_wrong_place_are_refused():
    with pytest.raises(InvalidRequestError, match="belongs inside"):
        Tool.of({"type": "function", "function": {"name": "f"}, "parameters": SCHEMA})


def test_parameters_that_are_no_json_name_the_tool_and_the_place():
    with pytest.raises(GrammarError, match="'f'") as caught:
        Tool.of({"name": "f", "parameters": {"properties": {"a": {"default": object()}}}})
    assert (caught.value.kind, caught.value.path) == ("invalid", "$.properties.a.default")
    deep: dict = {}
    for _ in range(1000):
        deep = {"items": deep}
    with pytest.raises(GrammarError) as caught:
        Tool.of({"name": "f", "parameters": deep})
    assert caught.value.kind == "too_complex"


def test_lists_of_tools():
    assert tools_of(None) == () and tools_of([]) == ()
    assert [tool.name for tool in tools_of([google, {"name": "f"}, Tool("g")])] == ["google", "f", "g"]
    for wrong in ("f", {"name": "f"}, 3):
        with pytest.raises(InvalidRequestError, match="list"):
            tools_of(wrong)
    with pytest.raises(InvalidRequestError, match="two tools are named 'f'"):
        tools_of([Tool("f"), {"name": "f"}])
    with pytest.raises(InvalidRequestError, match="at most"):
        tools_of([Tool("f")] * 2000)


def test_tool_choice():
    tools = tools_of([Tool("f"), Tool("g")])
    assert ToolChoice.of(None, ()).mode == "none" and ToolChoice.of(None, tools).mode == "auto"
    for mode in ("none", "auto", "required"):
        assert ToolChoice.of(mode, tools) == ToolChoice(mode)
    named = ToolChoice("named", ("g",))
    for given in ("g", {"type": "function", "function": {"name": "g"}}, {"type": "function", "name": "g"}, named):
        assert ToolChoice.of(given, tools) == named
    assert [tool.name for tool in named.allowed(tools)] == ["g"]
    assert ToolChoice("none").allowed(tools) == () and ToolChoice("auto").allowed(tools) == tools


@pytest.mark.parametrize("name", ["auto", "none", "required"])
def test_a_tool_that_is_named_like_a_mode(name):
    tools = tools_of([Tool(name), Tool("f")])
    with pytest.raises(InvalidRequestError, match="tool of that name") as caught:
        ToolChoice.of(name, tools)
    assert caught.value.param == "tool_choice"
    assert ToolChoice.of({"type": "function", "function": {"name": name}}, tools) == ToolChoice("named", (name,))
    assert ToolChoice.of(ToolChoice("named", (name,)), tools).allowed(tools) == tools[:1]
    assert ToolChoice.of(ToolChoice(name), tools).mode == name and ToolChoice.of(None, tools).mode == "auto"


NAMES_F = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("any", ToolChoice("required")),
        (["f"], ToolChoice("required", ("f",))),
        (("h", "f"), ToolChoice("required", ("h", "f"))),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto")),
        ({"type": "tool", "name": "f"}, ToolChoice("named", ("f",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMES_F]}},
            ToolChoice("auto", ("f",)),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "h"}, NAMES_F]},
            ToolChoice("required", ("h", "f")),
        ),
        (ToolChoice("auto", ("g",)), ToolChoice("auto", ("g",))),
    ],
)
def test_a_choice_of_some_tools(given, expected):
    tools = tools_of([Tool("f"), Tool("g"), Tool("h")])
    choice = ToolChoice.of(given, tools)
    assert choice == expected
    assert {tool.name for tool in choice.allowed(tools)} == set(expected.names or "fgh")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMES_F]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": ["f"]},
        {"type": "allowed_tools", "tools": ["f"]},
        {"type": "something"},
        {"type": "tool", "name": "h"},
        ["f", "h"],
        [],
        ["f", 3],
        ToolChoice("auto", ("h",)),
        ToolChoice("named"),
        ToolChoice("named", ("f", "g")),
    ],
)
def test_a_choice_that_can_not_be(choice):
    with pytest.raises(InvalidRequestError) as caught:
        ToolChoice.of(choice, tools_of([Tool("f"), Tool("g")]))
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    "choice", ["h", {"function": {"name": "h"}}, {"type": "function"}, 3, [], ToolChoice("named", ("h",))]
)
def test_an_unknown_choice_is_refused(choice):
    with pytest.raises(InvalidRequestError) as caught:
        ToolChoice.of(choice, [Tool("f")])
    assert caught.value.param == "tool_choice" and ("there are: 'f'" in str(caught.value) or "'h'" in str(caught.value))
    with pytest.raises(InvalidRequestError, match="needs at least one tool"):
        ToolChoice.of("required", ())
