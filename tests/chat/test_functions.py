"""Python functions as tools: what their signatures and docstrings become, and how their arguments are read."""

from __future__ import annotations

import asyncio
import functools
import math
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from chat_harness import Setting, shape_of
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from aengine.chat import Tool
from aengine.engine.chat.docstrings import read_docstring
from aengine.errors import InvalidRequestError

LOCK = threading.Lock()


def schema_of(function: Any) -> dict[str, Any]:
    return Tool.of(function).parameters["properties"]


def first_of(rows: list[int]) -> int:
    return next(row for row in rows if row > 9)


async def first_of_later(rows: list[int]) -> int:
    return next(row for row in rows if row > 9)


class First:
    async def __call__(self, rows: list[int]) -> int:
        return first_of(rows)


@pytest.mark.parametrize("function", [first_of, first_of_later, First(), functools.partial(First())])
async def test_stop_iteration_hangs_nothing(function):
    tool = Tool.of(function)
    assert await tool.call({"rows": [1, 10]}) == 10
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        await asyncio.wait_for(tool.call({"rows": [1]}), timeout=20)
    assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize("function", [first_of_later, First()])
async def test_what_is_async_runs_on_the_loop(function, monkeypatch):
    monkeypatch.setattr("aengine.engine.chat.tools.run_in_thread", None)
    assert await Tool.of(function).call({"rows": [1, 10]}) == 10


def with_fields(
    city: str = Field(description="Its name."),
    days: int = Field(default=5, ge=1, le=9),
    tags: list[str] = Field(default_factory=list),
    level: Annotated[int, Field(ge=2, description="How hard.")] = Field(3, alias="theLevel"),
    limit: float = Field(default=math.inf),
):
    """Forecast.

    Args:
        city: not this
        days: How many.
    """
    return city, days, tags, level, limit


async def test_a_field_as_the_default():
    tool = Tool.of(with_fields)
    assert tool.parameters["required"] == ["city"]
    assert tool.parameters["properties"] == {
        "city": {"type": "string", "description": "Its name."},
        "days": {"type": "integer", "default": 5, "minimum": 1, "maximum": 9, "description": "How many."},
        "tags": {"type": "array", "items": {"type": "string"}},
        "theLevel": {"type": "integer", "default": 3, "minimum": 2, "description": "How hard."},
        "limit": {"type": "number"},
    }
    assert await tool.call('{"city": "Rome"}') == ("Rome", 5, [], 3, math.inf)
    assert await tool.call({"city": "Rome", "days": 9, "theLevel": 2, "limit": 1}) == ("Rome", 9, [], 2, 1.0)
    for wrong in ({}, {"city": "Rome", "days": 10}, {"city": "Rome", "theLevel": 1}):
        with pytest.raises(InvalidRequestError):
            await tool.call(wrong)


async def test_the_default_in_the_signature_beats_one_in_annotated():
    def f(x: Annotated[int, Field(default=5)], y: Annotated[int, Field(default=5)] = 7):
        return x, y

    assert [said["default"] for said in schema_of(f).values()] == [5, 7]
    assert await Tool.of(f).call({}) == (5, 7)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"


class Shelf(BaseModel):
    where: Path
    limit: float = math.inf


def rich(
    tags: set[str],
    path: Path,
    data: bytes,
    secret: SecretStr,
    counts: dict[Literal["a"], int],
    pet: Annotated[Cat | Dog, Field(discriminator="kind")],
    shelf: Shelf,
):
    return tags, path, data, secret.get_secret_value(), counts, pet, shelf


async def test_types_whose_own_schema_no_grammar_holds():
    tool = Tool.of(rich)
    properties, models = tool.parameters["properties"], tool.parameters["$defs"]
    assert "uniqueItems" not in properties["tags"]
    assert not any("format" in properties[name] for name in ("path", "data", "secret"))
    assert "anyOf" in properties["pet"] and models["Dog"]["required"] == ["kind"]
    assert models["Shelf"]["additionalProperties"] is False and "default" not in models["Shelf"]["properties"]["limit"]
    text = '{"tags": ["x", "x"], "path": "/x", "data": "y", "secret": "z", "counts": {"a": 1}, '
    text += '"pet": {"kind": "dog"}, "shelf": {"where": "."}}'
    setting = Setting.of(shape_of(json_schema=dict(tool.parameters)), "text")
    assert setting.accepts(text) and not setting.accepts(text.replace('"kind": "dog"', ""))
    shelf = Shelf(where=Path("."))
    assert await tool.call(text) == ({"x"}, Path("/x"), b"y", "z", {"a": 1}, Dog(), shelf)


async def test_a_default_that_json_cannot_say_is_left_out():
    def f(a: float = math.inf, b: float = math.nan, c=LOCK, d: dict = {"x": -math.inf}, e: float = 1.5):
        return a

    parameters = Tool.of(f).parameters
    assert "required" not in parameters
    assert [name for name, said in parameters["properties"].items() if "default" in said] == ["e"]
    assert await Tool.of(f).call({}) == math.inf


class Color(Enum):
    RED = "red"


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)

    day: date
    color: Color
    pair: tuple[int, int]
    id: uuid.UUID


async def test_strict_models_take_what_json_says():
    def f(x: Strict, more: Any = None) -> Strict:
        return x

    tool, key = Tool.of(f), uuid.UUID(int=1)
    right = Strict(day=date(2024, 1, 2), color=Color.RED, pair=(1, 2), id=key)
    said = f'{{"day": "2024-01-02", "color": "red", "pair": [1, 2], "id": "{key}"}}'
    plain = {"day": "2024-01-02", "color": "red", "pair": [1, 2], "id": str(key)}
    values = {"day": date(2024, 1, 2), "color": Color.RED, "pair": (1, 2), "id": key}
    for given in ('{"x": ' + said + "}", {"x": plain}, {"x": values}, {"x": right}):
        assert await tool.call(given) == right
    for wrong in ({"x": {**plain, "day": "soon"}}, {"x": {**values, "pair": "12"}}):
        with pytest.raises(InvalidRequestError, match="wrong arguments") as caught:
            await tool.call(wrong)
        assert caught.value.param == "arguments"


@pytest.mark.parametrize(
    "given, value",
    [
        ('{"x": "\\ud800"}', "\ud800"),
        ({"x": "\ud800"}, "\ud800"),
        ('{"x": 1, "x": 2}', 2),
        ('{"x": 123456789012345678901234567890}', 123456789012345678901234567890),
        ({"x": Color.RED}, Color.RED),
        ('{"x": ' + "[" * 300 + "]" * 300 + "}", functools.reduce(lambda inner, _: [inner], range(299), [])),
    ],
)
async def test_what_pydantic_cannot_read_as_json_is_read_by_python(given, value):
    def f(x):
        return x

    assert await Tool.of(f).call(given) == value


def search(connection: threading.Lock, query: str, limit: int = 3, *, language: str = "en"):
    """Search the archive.

    Args:
        query: What for.
    """
    return query, limit, language


async def test_a_partial_takes_what_is_left():
    for function in (functools.partial(search, LOCK, limit=9), functools.partial(search, connection=LOCK, limit=9)):
        tool = Tool.of(function)
        assert (tool.name, tool.description) == ("search", "Search the archive.")
        assert tool.parameters["required"] == ["query"]
        assert tool.parameters["properties"] == {
            "query": {"type": "string", "description": "What for."},
            "language": {"type": "string", "default": "en"},
        }
        assert await tool.call({"query": "x"}) == ("x", 9, "en")
        with pytest.raises(InvalidRequestError, match="limit"):
            await tool.call({"query": "x", "limit": 1})


class WebSearch:
    """Search the web.

    Args:
        site: of the object
        query: not this
    """

    def __init__(self, site: str = "any") -> None:
        self.site = site

    def __call__(self, query: str, limit: int = 3):
        """
        Args:
            query: What for.
        """
        return self.site, query, limit


@dataclass
class HTTPGet:
    timeout: float = 1.0

    async def __call__(self, url: str) -> str:
        """Fetch a page."""
        return url


@dataclass
class Plain:
    def __call__(self) -> int:
        return 1


async def test_an_object_with_call_is_named_like_its_class():
    tool = Tool.of(WebSearch("s"))
    assert (tool.name, tool.description) == ("web_search", "Search the web.")
    assert tool.parameters["properties"]["query"] == {"type": "string", "description": "What for."}
    assert await tool.call({"query": "q"}) == ("s", "q", 3)
    assert list(schema_of(functools.partial(WebSearch(), "q"))) == ["limit"]
    tool = Tool.of(HTTPGet())
    assert (tool.name, tool.description) == ("http_get", "Fetch a page.")
    assert await tool.call({"url": "u"}) == "u"
    assert (Tool.of(Plain()).name, Tool.of(Plain()).description) == ("plain", "")


async def test_a_tool_of_a_function_without_parameters_takes_its_signature():
    tool = Tool("add", function=lambda x, y=2: x + y)
    assert tool.parameters["required"] == ["x"] and tool.parameters["properties"] == {"x": {}, "y": {"default": 2}}
    assert await tool.call({"x": 1}) == 3
    tool = Tool("find", function=functools.partial(search, LOCK))
    assert tool.description == "Search the archive." and "query" in tool.parameters["properties"]
    assert Tool("find", "mine", function=search_all).description == "mine"
    told = {"type": "object", "properties": {"query": {"type": "string"}}}
    tool = Tool("find", parameters=told, function=search_all)
    assert (tool.description, tool.parameters) == ("", told)


def search_all(query: str):
    """Search everywhere."""
    return query


class Service:
    def ask(self, x: int) -> int:
        return x

    @staticmethod
    def tell(x: int) -> int:
        return x


async def test_a_method_without_its_object_is_refused():
    for function in (Service.ask, functools.partial(Service.ask, x=1)):
        with pytest.raises(InvalidRequestError, match=r"give the method of an object, as Service\(\)\.ask") as caught:
            Tool.of(function)
        assert caught.value.param == "tools"
    for function in (Service().ask, Service.tell, functools.partial(Service.ask, Service())):
        assert await Tool.of(function).call({"x": 1}) == 1

    def free(self: int) -> int:
        return self

    assert await Tool.of(free).call({"self": 1}) == 1


def test_a_string_in_annotated_is_the_description():
    def f(
        city: Annotated[str, "Its name."],
        days: Annotated[int, "not this", Field(ge=1, description="How many.")],
        level: Annotated[int, ..., "not this"] = 3,
    ):
        """Forecast.

        Args:
            level: How hard.
        """

    assert [said["description"] for said in schema_of(f).values()] == ["Its name.", "How many.", "How hard."]
    assert schema_of(f)["days"]["minimum"] == 1 and schema_of(f)["level"]["default"] == 3


def test_all_before_the_sections_is_the_description():
    def google():
        """One,
        in two lines.

        :class:`Two` is:
        - a
          list

        Returns:
            Nothing.
        """

    def numpy():
        """One.

        Two.

        Returns
        -------
        None
        """

    def rest():
        """One.

        Two.
        :returns: nothing

        Three.
        """

    assert Tool.of(google).description == "One, in two lines.\n\n:class:`Two` is:\n- a\n  list"
    assert Tool.of(numpy).description == Tool.of(rest).description == "One.\n\nTwo."


GOOGLE = """F.

Args:
    a (int): One,
        two.
    *b: Three.

    c:
      Four.
  d: five.
    - six
Returns:
    x: no
"""
NUMPY = """F.

Parameters
----------
a : int
    One,

    two.
b, *c
    Three.
Other Parameters
---
d
    Four.
Parameters
--
x
    no

Returns
-------
y : int
    no
"""
REST = """F.

:param int a: One,
    two.
:arg *b: Three.

    not this
:keyword c: Four
not this
:returns: x
  no
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOGLE, {"a": "One, two.", "b": "Three.", "c": "Four.", "d": "five. - six"}),
        (GOOGLE.replace("Args:", "Args: "), {"a": "One, two.", "b": "Three.", "c": "Four.", "d": "five. - six"}),
        (NUMPY, {"a": "One, two.", "b": "Three.", "c": "Three.", "d": "Four."}),
        ("F.\n\nParameters\n---\na\n  One.\nand so on, you see!\nb\n  Two.", {"a": "One."}),
        (REST, {"a": "One, two.", "b": "Three.", "c": "Four"}),
        ("F.\n\nArgs:\nx: no\n", {}),
        ("F.\n\nArgs:\n  a:\n\n  not: ", {}),
        ("Parameters", {}),
        ("", {}),
    ],
)
def test_what_is_said_of_each_parameter(text: str, said: dict[str, str]) -> None:
    assert read_docstring(text) == ("F." if text.startswith("F.") else text, said)


def test_without_pydantic():
    code = """
import sys
sys.modules["pydantic"] = None
from aengine.chat import Tool
from aengine.errors import InvalidRequestError
Tool.of({"name": "f"})
try:
    Tool("f", function=lambda: 1)
except InvalidRequestError as error:
    assert "pip install pydantic" in str(error) and error.param == "tools", error
else:
    raise SystemExit("not refused")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
