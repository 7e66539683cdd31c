"""The list of bounds is whole: each field of each request that can be large is in it, and the docs have it."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pydantic
import pytest

from aengine import (
    AsyncLLM,
    ContextLengthError,
    GrammarError,
    InvalidRequestError,
    SamplingParams,
    StructuredOutput,
    TokenizerView,
)
from aengine.engine.chat.plan import ChatRequest
from aengine.engine.pooling.requests import PoolingOptions, PoolingRequest
from aengine.engine.structured.spec import check_schema_size
from aengine.engine.tokenizer_view import AsyncTokenizer
from aengine.limits.checks import check_num_messages, check_num_values, is_long, size_of
from aengine.params import ChatOptions, RenderOptions, RequestOptions
from aengine.remote.serving import _Session
from aengine.server import app  # noqa: F401  # imports every interface, and so every body
from aengine.server.openai import requests

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

from bounds_table import BOUNDS, as_markdown  # noqa: E402

NAMED = {name for row in BOUNDS for name in row.fields.split()}


def below(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from below(child)


BODIES = sorted({body for body in below(pydantic.BaseModel) if body.__module__.startswith("aengine.server")}, key=str)


def can_be_large(annotation: Any) -> bool:
    """Whether a value of this type may be large, or multiply work."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return can_be_large(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return any(map(can_be_large, get_args(annotation)))
    if origin is Literal or annotation in (bool, float, type(None)):
        return False
    if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
        return False  # its own fields are walked
    return not (isinstance(annotation, type) and issubclass(annotation, float | bool))


def has_no_effect(field: pydantic.fields.FieldInfo) -> bool:
    """Whether it is taken or refused without a look at its value."""
    refuses = [one for one in field.metadata if getattr(one, "func", None) is requests._refuse]
    return bool(refuses) or field.description == "Taken, and without effect."


def fields_of_bodies() -> Iterator[tuple[str, str]]:
    for body in BODIES:
        for name, field in body.model_fields.items():
            if can_be_large(field.annotation) and not has_no_effect(field):
                yield body.__name__, name


def fields_of_dataclasses() -> Iterator[tuple[str, str]]:
    for kind in (SamplingParams, StructuredOutput, PoolingRequest, ChatRequest):
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.init and can_be_large(hints[field.name]):
                yield kind.__name__, field.name
    for options in (RequestOptions, ChatOptions, RenderOptions, PoolingOptions):
        for name, hint in typing.get_type_hints(options).items():
            if can_be_large(hint):
                yield options.__name__, name


CALLS = ("stream", "generate", "chat", "stream_chat", "embed", "score", "rerank", "classify", "abort")
NOT_LARGE = ("bool", "float", "OnUnsupported")


def arguments_of_calls() -> Iterator[tuple[str, str]]:
    calls = [getattr(AsyncLLM, name) for name in CALLS]
    for view in (TokenizerView, AsyncTokenizer):
        calls += [one for name, one in vars(view).items() if inspect.isfunction(one) and not name.startswith("_")]
    calls += [getattr(_Session, f"_{kind}") for kind in ("begin", "more", "end", "abort", "call")]
    for call in calls:
        for parameter in list(inspect.signature(call).parameters.values())[1:]:
            if not str(parameter.annotation).startswith(NOT_LARGE):
                yield call.__qualname__, parameter.name


def test_the_bodies_are_found() -> None:
    assert {"ChatBody", "CompletionBody", "ResponseBody", "MessagesBody", "EmbeddingBody", "TokenizeBody"} <= {
        body.__name__ for body in BODIES
    }


@pytest.mark.parametrize("found", [fields_of_bodies, fields_of_dataclasses, arguments_of_calls])
def test_what_can_be_large_is_in_the_list(found: Any) -> None:
    fields = list(found())
    assert len(fields) > 20
    missing = {f"{owner}.{name}" for owner, name in fields if not NAMED & {name, f"{owner}.{name}"}}
    assert not missing, "name each in a row of scripts/bounds_table.py, and bound it before any work that grows with it"


def lists_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Schemas of lists in a schema of pydantic's core."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for part in schema:
            yield from lists_of(part)


def test_the_first_wrong_value_of_a_list_ends_its_validation() -> None:
    """An error for each of 300,000 values takes seconds, in which a thread keeps the GIL."""
    lists = [(body.__name__, one) for body in BODIES for one in lists_of(body.__pydantic_core_schema__)]
    assert len(lists) > 20
    assert not [(name, one["items_schema"]) for name, one in lists if not one.get("fail_fast")], "use `Many`"


def test_each_name_in_the_list_is_there() -> None:
    known = [*fields_of_bodies(), *fields_of_dataclasses(), *arguments_of_calls()]
    names = {name for _, name in known} | {f"{owner}.{name}" for owner, name in known}
    assert names >= NAMED


def test_a_new_field_must_be_named() -> None:
    class Body(requests.Body):
        files: list[str] | None = None
        is_new: bool = False
        count: int = 0
        mode: Literal["a", "b"] | None = None
        ignored: requests.Ignored = None
        refused: requests.Refused = None

    large = [name for name, one in Body.model_fields.items() if can_be_large(one.annotation) and not has_no_effect(one)]
    assert large == ["files", "count"] and not NAMED & set(large)


class Unlooked(list[Any]):
    """A list whose values must not be looked at."""

    def __iter__(self) -> Iterator[Any]:
        pytest.fail("its values were looked at")


def test_what_has_too_many_values_is_not_looked_at() -> None:
    large = Unlooked([0] * 400_000)
    part, call = ({key: large} for key in ("content", "tool_calls"))
    for messages in ([part], [call], [part, "x", call]):
        with pytest.raises(ContextLengthError, match=r"at least [48]00000 tokens"):
            check_num_messages(4096, messages)
    with pytest.raises(InvalidRequestError, match="more than 300000 values"):
        check_num_values([{"a": large}, {"a": [large]}, large])
    assert not is_long("x", {"a": 1}) and is_long({"a": large}) and is_long(large)
    with pytest.raises(GrammarError, match="larger than 1024 KiB"):
        check_schema_size({"enum": [*[0] * 900_000, large]})


def test_the_size_of_data() -> None:
    shared = ["ab", {"key": ["c", None, 1.5]}]
    assert size_of(shared, 100, node=10) == 2 + 3 + 1 + 10 * (2 + 1 + 3)
    assert size_of([shared, shared], 100, character=0) == 2 + 2 * 6
    endless: list[Any] = []
    endless += [endless, endless]
    assert size_of(endless, 1000) > 1000


def test_the_docs_have_the_list() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert f"## Limits\n\n{as_markdown()}\n" in page
