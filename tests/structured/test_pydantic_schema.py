"""What the schema of a type allows, pydantic takes: numbers of so many digits, keys that are no strings, times."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import json
import re
import uuid
from decimal import Decimal
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import (
    AnyHttpUrl,
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    Base64UrlBytes,
    Field,
    FileUrl,
    HttpUrl,
    NaiveDatetime,
    TypeAdapter,
    WebsocketUrl,
)

from aengine import StructuredOutput
from aengine.engine.structured.llguidance.backend import LLGuidanceBackend
from aengine.engine.structured.output_type import OutputType
from aengine.engine.structured.pydantic_schema import adapt, schema_generator
from aengine.engine.structured.spec import spec_of
from aengine.engine.structured.vocabulary import Vocabulary


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


def test_a_decimal_is_a_number_of_so_many_digits() -> None:
    assert OutputType.of(Decimal).schema == {"type": "number"}
    money = OutputType.of(Annotated[Decimal, Field(max_digits=5, decimal_places=2)]).schema
    assert money == {"type": "number", "multipleOf": 0.01, "exclusiveMinimum": -1000, "exclusiveMaximum": 1000}
    whole = OutputType.of(Annotated[Decimal, Field(max_digits=3, decimal_places=0, ge=0, lt=50)]).schema
    assert whole == {"type": "number", "multipleOf": 1, "minimum": 0, "exclusiveMaximum": 50}
    wide = OutputType.of(Annotated[Decimal, Field(max_digits=2, lt=5000, multiple_of=5)]).schema
    assert wide == {"type": "number", "multipleOf": 5, "exclusiveMinimum": -100, "exclusiveMaximum": 100}
    part = OutputType.of(Annotated[Decimal, Field(max_digits=2, decimal_places=2, le=3)]).schema
    assert part == {"type": "number", "multipleOf": 0.01, "exclusiveMinimum": -1, "maximum": 3}
    for digits, limits in ((15, {"exclusiveMinimum": -(10**15), "exclusiveMaximum": 10**15}), (16, {})):
        assert OutputType.of(Annotated[Decimal, Field(max_digits=digits)]).schema == {"type": "number", **limits}


@pytest.mark.parametrize("digits", [12, 15, 16, 20, 25, 38, 60])
@pytest.mark.parametrize("places", [0, 1, 10, 11, 18, 40])
def test_a_decimal_of_many_digits_is_no_error(places: int, digits: int) -> None:
    output = OutputType.of(Annotated[Decimal, Field(decimal_places=places, max_digits=max(digits, places + 2))])
    letters = (*(bytes([i]) for i in range(128)), b"")
    backend = LLGuidanceBackend(Vocabulary(129, letters, (128,), frozenset({128})))
    matcher = backend.compile(spec_of(StructuredOutput(json_schema=output.schema))).matcher()
    assert matcher.accept(list(b"17")) == 2 and matcher.is_accepting
    assert output.schema.get("multipleOf") == ((1 if places == 0 else float(f"1e-{places}")) if places <= 10 else None)


@pytest.mark.parametrize("key", [int, float, bool, uuid.UUID, datetime.date])
def test_keys_that_are_no_strings(key: Any) -> None:
    output = OutputType.of(dict[key, str])
    schema = output.schema
    assert schema["additionalProperties"] is False and "propertyNames" not in schema
    ((pattern, values),) = schema["patternProperties"].items()
    assert values == {"type": "string"}

    @given(st.dictionaries(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True), st.text(), max_size=3))
    def check(value: dict[str, str]) -> None:
        parsed, error = output.parse(json.dumps(value))
        assert error is None and all(type(k) is key for k in parsed), (value, error)

    check()
    assert re.search(pattern, str(OUT_OF_EACH[key]).lower())


OUT_OF_EACH = {
    int: -17,
    float: 2.5,
    bool: True,
    uuid.UUID: uuid.UUID(int=5),
    datetime.date: datetime.date(2024, 12, 31),
}


def test_keys_with_a_pattern_have_it() -> None:
    schema = OutputType.of(dict[Annotated[str, Field(pattern="^k_")], int]).schema
    assert schema["patternProperties"] == {"^k_": {"type": "integer"}} and schema["additionalProperties"] is False


def test_keys_that_are_listed() -> None:
    schema = OutputType.of(dict[Size, int]).schema
    assert schema["properties"] == {"1": {"type": "integer"}, "2": {"type": "integer"}}
    assert OutputType.of(dict[Size, int]).parse('{"1": 3}') == ({Size.SMALL: 3}, None)


def test_a_dict_of_strings_stays_open() -> None:
    assert OutputType.of(dict[str, int]).schema == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert "patternProperties" in OutputType.of(dict[Annotated[str, Field(pattern="^a")], int]).schema


@pytest.mark.parametrize("kind", [HttpUrl, AnyHttpUrl, WebsocketUrl])
def test_a_url_has_a_scheme_that_it_may_have(kind: Any) -> None:
    output = OutputType.of(kind)
    pattern = re.compile(output.schema["pattern"], re.ASCII)
    scheme = "ws" if kind is WebsocketUrl else "http"
    for rest in (
        "://example.com",
        "s://Sub-domain.Example.co.uk:8080/a/b.html?x=1&y=[2]#top",
        "://localhost/~me/%20;v",
    ):
        assert pattern.search(scheme + rest)
    for rest in ("://3com.com:50051", "://127.0.0.1:10080/", "://255.255.255.255"):
        assert pattern.search(scheme + rest)
    assert not pattern.search(scheme + "://256.1.1.1") and not pattern.search(scheme + "://a.1")
    assert output.schema.keys() == {"type", "pattern"}  # a length beside it makes each mask slow
    assert not pattern.search("ftp://example.com") and not pattern.search(scheme + ":example")

    @given(st.from_regex(pattern, fullmatch=True).filter(lambda text: len(text) < 2000))
    def check(text: str) -> None:
        assert output.parse(json.dumps(text))[1] is None, text

    check()
    assert "pattern" not in OutputType.of(AnyUrl).schema


@pytest.mark.parametrize("kind, texts, others", [
    (ipaddress.IPv4Interface, ["10.1.2.3/12", "10.1.2.3"], ["10.1.2.3/33", "10.1.2/8"]),
    (Base64Bytes, ["aGk=", ""], ["aGk", "a-k="]),
    (Base64UrlBytes, ["a-k=", "aGkx"], ["a/k="]),
    (FileUrl, ["file:///etc/hosts"], ["http://a"]),
    (Annotated[bytes, Field(max_length=3, min_length=1)], ["abc"], ["abcd", "", "é"]),
])  # fmt: skip
def test_texts_that_pydantic_would_refuse_are_kept_out(kind: Any, texts: list[str], others: list[str]) -> None:
    output = OutputType.of(kind)
    pattern = re.compile(output.schema["pattern"], re.ASCII)
    assert all(pattern.search(text) and output.parse(json.dumps(text))[1] is None for text in texts)
    assert not any(map(pattern.search, others))

    @settings(max_examples=50)
    @given(st.from_regex(pattern, fullmatch=True))
    def check(text: str) -> None:
        assert output.parse(json.dumps(text))[1] is None, text

    check()
    letters = (*(bytes([i]) for i in range(128)), b"")
    backend = LLGuidanceBackend(Vocabulary(129, letters, (128,), frozenset({128})))
    spec = spec_of(StructuredOutput(json_schema=output.schema))
    assert backend.is_quick(spec)
    matcher = backend.compile(spec).matcher()
    text = json.dumps(texts[0]).encode()
    assert matcher.accept(list(text)) == len(text) and matcher.is_accepting
    assert "pattern" not in TypeAdapter(kind).json_schema(schema_generator=schema_generator())  # as a model is shown it


def test_bytes_of_no_length_or_a_great_one_are_any_text() -> None:
    for kind, has_pattern in (
        (bytes, False),
        (Annotated[bytes, Field(max_length=1001)], False),
        (Annotated[bytes, Field(max_length=1000)], True),
    ):
        schema = OutputType.of(kind).schema
        assert re.search(schema.get("pattern", ""), "")
        assert schema["type"] == "string" and ("pattern" in schema) is has_pattern


def test_a_time_without_a_zone() -> None:
    output = OutputType.of(NaiveDatetime)
    pattern = re.compile(output.schema["pattern"], re.ASCII)

    @given(st.from_regex(pattern, fullmatch=True))
    def check(text: str) -> None:
        assert output.parse(json.dumps(text))[1] is None

    check()
    day = datetime.datetime(2023, 1, 1, 23, 59, 59)
    for _ in range(365):
        assert pattern.search(day.isoformat())
        day += datetime.timedelta(days=1)
    assert not pattern.search("2023-02-29T00:00:00") and not pattern.search("2023-01-01T00:00:00Z")
    aware = TypeAdapter(AwareDatetime).json_schema(schema_generator=schema_generator())
    assert aware == {"type": "string", "format": "date-time"}  # as a model is shown it


def test_a_union_is_any_of_its_members_and_says_all_else() -> None:
    members = [{"type": "string"}, {"type": "integer"}]
    schema: dict[str, Any] = {"title": "T", "oneOf": members, "default": 1}
    adapt(schema)
    assert schema == {"title": "T", "anyOf": members, "default": 1}
    both = {"oneOf": members, "anyOf": members}
    adapt(both)
    assert both == {"oneOf": members, "anyOf": members}, "one keyword can't stand for two"


@pytest.mark.parametrize(("num_parts", "is_closed"), [(1, True), (2, False)])
def test_objects_are_closed_unless_several_are_merged(num_parts: int, is_closed: bool) -> None:
    parts = [{"properties": {str(i): {"type": "string"}}} for i in range(num_parts)]
    adapt({"allOf": parts})
    assert all(part.get("additionalProperties", True) is (not is_closed) for part in parts)
