"""Python types as output types: every schema compiles, and the answer comes back as the type."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import random
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
from grammar_helpers import accepts, allowed, backend_of, matcher_of, tiny, vocabulary
from pydantic import UUID4, AwareDatetime, BaseModel, ConfigDict, Field, HttpUrl, SecretStr
from typing_extensions import TypedDict

from aengine import InvalidRequestError, SamplingParams, StructuredOutput
from aengine.engine.structured import output_type
from aengine.engine.structured.output_type import AskedType, OutputType, with_output_type
from aengine.engine.structured.pydantic_schema import KNOWN_FORMATS
from aengine.engine.structured.spec import spec_of


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(default=9, ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Node(BaseModel):
    """A tree."""

    value: int
    children: list[Node] = []


class Aliased(BaseModel):
    model_config = ConfigDict(extra="forbid")
    first: str = Field(alias="First Name", description="given name", examples=["Ada"], min_length=1, max_length=20)
    born: datetime.date | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


@dataclass
class Point:
    x: float
    y: float = 0.0


class Options(TypedDict, total=False):
    a: int
    b: str


class Pair(NamedTuple):
    left: int
    right: str


class Everything(BaseModel):
    animal: Annotated[Cat | Dog, Field(discriminator="kind")]
    colours: dict[Colour, list[set[int]]]
    when: datetime.datetime
    took: datetime.timedelta
    tags: frozenset[str]
    path: pathlib.Path
    price: decimal.Decimal
    node: Node | None


PET = Annotated[Cat | Dog, Field(discriminator="kind")]
SAMPLES: list[tuple[Any, str, Any]] = [
    (int, "3", 3),
    (str, '"x"', "x"),
    (type(None), "null", None),
    (Any, "[1]", [1]),
    (list[int], "[1, 2]", [1, 2]),
    (int | None, "null", None),
    (Literal["a", "b"], '"a"', "a"),
    (Colour, '"blue"', Colour.BLUE),
    (Cat, '{"lives": 3}', Cat(lives=3)),
    (PET, '{"kind": "dog", "name": "Rex"}', Dog(name="Rex")),
    (list[PET], '[{"kind": "cat"}]', [Cat()]),
    (Node, '{"value": 1, "children": [{"value": 2}]}', Node(value=1, children=[Node(value=2)])),
    (Aliased, '{"First Name": "Ada"}', Aliased.model_validate({"First Name": "Ada"})),
    (Open, '{"a": 1}', Open(a=1)),
    (Point, '{"x": 1.5}', Point(1.5)),
    (Options, '{"b": "x"}', {"b": "x"}),
    (Pair, '[1, "x"]', Pair(1, "x")),
    (tuple[int, str], '[1, "x"]', (1, "x")),
    (set[int], "[1, 2]", {1, 2}),
    (dict[str, int], '{"a": 1}', {"a": 1}),
    (dict[Literal["a", "b"], int], '{"b": 1}', {"b": 1}),
    (dict[Colour, set[int]], '{"red": [1]}', {Colour.RED: {1}}),
    (bytes, '"x"', b"x"),
    (pathlib.Path, '"a/b"', pathlib.Path("a/b")),
    (uuid.UUID, '"6b9a5b6e-0000-4000-8000-000000000000"', uuid.UUID("6b9a5b6e-0000-4000-8000-000000000000")),
    (UUID4, '"6b9a5b6e-0000-4000-8000-000000000000"', uuid.UUID("6b9a5b6e-0000-4000-8000-000000000000")),
    (datetime.date, '"2026-11-21"', datetime.date(2026, 11, 21)),
    (datetime.timedelta, '"PT5S"', datetime.timedelta(seconds=5)),
    (AwareDatetime, '"2026-11-21T10:00:00Z"', datetime.datetime(2026, 11, 21, 10, tzinfo=datetime.UTC)),
    (decimal.Decimal, "1.5", decimal.Decimal("1.5")),
    (fractions.Fraction, '"1/3"', fractions.Fraction(1, 3)),
    (ipaddress.IPv4Network, '"10.0.0.0/8"', ipaddress.IPv4Network("10.0.0.0/8")),
    (SecretStr, '"x"', SecretStr("x")),
    (HttpUrl, '"https://a.b/"', HttpUrl("https://a.b/")),
    (Annotated[int, Field(multiple_of=3, gt=0, lt=10)], "6", 6),
    (Annotated[dict[str, int], Field(min_length=1, max_length=3)], '{"a": 1}', {"a": 1}),
    (Annotated[str, Field(pattern="^a+$"), ["unhashable"]], '"aa"', "aa"),
]
IDS = [str(getattr(wanted, "__name__", wanted))[:40] for wanted, _, _ in SAMPLES]


@pytest.fixture(scope="module")
def refusal() -> Callable[[str], str]:
    """What llguidance says against a schema; "" if nothing."""
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")

    def of(schema_text: str) -> str:
        options = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema_text, overrides=options)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        return matcher.get_error() if matcher.is_error() else ""

    return of


@pytest.mark.parametrize(("wanted", "text", "value"), SAMPLES, ids=IDS)
def test_to_a_schema_and_back(wanted: Any, text: str, value: Any, refusal: Callable[[str], str]) -> None:
    output = OutputType.of(wanted)
    spec = spec_of(StructuredOutput(json_schema=output.schema))
    assert refusal(spec.text) == ""
    parsed, error = output.parse(text)
    assert error is None and parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(("wanted", "text", "value"), SAMPLES, ids=IDS)
def test_the_sample_fits_its_own_schema(wanted: Any, text: str, value: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = OutputType.of(wanted).schema
    jsonschema.validate(json.loads(text), schema)


def test_a_large_model_compiles(refusal: Callable[[str], str]) -> None:
    assert refusal(OutputType.of(Everything).schema_text) == ""
    assert refusal(json.dumps(Everything.model_json_schema())) != "", "the changes are needed"


def test_extra_keys_are_forbidden_unless_declared() -> None:
    assert OutputType.of(Cat).schema["additionalProperties"] is False
    assert OutputType.of(Options).schema["additionalProperties"] is False
    assert OutputType.of(Point).schema["additionalProperties"] is False
    assert OutputType.of(Open).schema["additionalProperties"] is True
    assert OutputType.of(Node).schema["$defs"]["Node"]["additionalProperties"] is False
    assert OutputType.of(dict[str, int]).schema["additionalProperties"] == {"type": "integer"}


def test_optional_fields_stay_optional_and_ordered() -> None:
    schema = OutputType.of(Aliased).schema
    assert list(schema["properties"]) == ["First Name", "born"] and schema["required"] == ["First Name"]


def test_the_tag_of_a_union_is_required() -> None:
    schema = OutputType.of(PET).schema
    assert "oneOf" not in schema and len(schema["anyOf"]) == 2
    assert schema["$defs"]["Cat"]["required"] == ["kind"]
    assert sorted(schema["$defs"]["Dog"]["required"]) == ["kind", "name"]
    assert OutputType.of(PET).parse("{}")[1] is not None, "pydantic can't choose without it"


def test_the_keys_of_a_dict_are_listed() -> None:
    schema = OutputType.of(dict[Colour, set[int]]).schema
    assert list(schema["properties"]) == ["red", "blue"] and schema["additionalProperties"] is False
    assert schema["properties"]["red"] == {"items": {"type": "integer"}, "type": "array"}


def test_the_version_of_a_uuid_is_kept() -> None:
    import re

    pattern = OutputType.of(UUID4).schema["pattern"]
    assert re.search(pattern, str(uuid.uuid4())) and not re.search(pattern, str(uuid.uuid1()))


def test_known_formats_are_those_of_llguidance(refusal: Callable[[str], str]) -> None:
    for name in KNOWN_FORMATS:
        assert refusal(json.dumps({"type": "string", "format": name})) == ""


def test_the_schema_is_a_copy() -> None:
    OutputType.of(Cat).schema["properties"].clear()
    assert OutputType.of(Cat).schema["properties"]


def test_made_once() -> None:
    assert OutputType.of(Cat) is OutputType.of(Cat)


@pytest.mark.parametrize("text", ['{"lives": 3', "", "[]", '{"lives": "many"}', '{"lives": 99}', '"\ud800"'])
def test_an_answer_that_does_not_fit_is_no_exception(text: str) -> None:
    value, error = OutputType.of(Cat).parse(text)
    assert value is None and isinstance(error, ValueError)


def test_a_validator_may_raise_anything() -> None:
    class Strange(BaseModel):
        a: int

        @pydantic.field_validator("a")
        @classmethod
        def check(cls, value: int) -> int:
            raise KeyError("strange")

    value, error = OutputType.of(Strange).parse('{"a": 1}')
    assert value is None and isinstance(error, KeyError)


def test_partial() -> None:
    output = OutputType.of(Node)
    assert output.partial("") is None
    assert output.partial('{"value": 1, "children": [{"val') == {"value": 1, "children": [{}]}
    assert output.partial("garbage") is None


class Plain:
    pass


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"type": "object"}, "json_schema"),
        (True, "json_schema"),
        (None, "no type"),
        ("int", "string"),
        (5, "a value"),
        ([int], "a value"),
        (lambda x: x, "function"),
        (len, "function"),
        (Plain, "can't be described"),
        (Plain(), "can't be described"),
        (Cat(), "instance of Cat"),
        (Point(1.0), "instance of Point"),
        (Colour.RED, "can't be described"),
        (Callable[[int], str], "can't be described"),
        (list[Plain], "can't be described"),
        (type, "can't be described"),
        (list[type[int]], "a class, which no JSON is"),
        (Literal[b"x"], "a Literal of bytes, which no JSON is"),
        (int.__add__, "function"),
        (list["Nowhere"], "can't be described"),  # noqa: F821
    ],
    ids=lambda value: repr(value).split(" at 0x")[0],  # each of several test processes must see the same names
)
def test_what_is_no_type_is_refused(wanted: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as error:
        OutputType.of(wanted)
    assert error.value.param == "output_type"
    assert "\n" not in str(error.value)


def test_a_type_whose_own_hook_fails_is_refused() -> None:
    class Broken:
        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
            raise ZeroDivisionError("hook")

    with pytest.raises(InvalidRequestError, match="Broken can't be described by a JSON schema: hook"):
        OutputType.of(Broken)


def test_a_default_that_json_can_not_say_is_no_warning() -> None:
    class Strange(BaseModel):
        a: Any = Plain()

    assert "default" not in OutputType.of(Strange).schema["properties"]["a"]


def test_without_pydantic() -> None:
    code = """
import sys
sys.modules["pydantic"] = None
from aengine.engine.structured.output_type import OutputType
try:
    OutputType.of(int)
except Exception as error:
    print(type(error).__name__, error.param, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "InvalidRequestError output_type output_type needs pydantic: pip install pydantic\n"


TIMES: list[Any] = [
    *(datetime.datetime, datetime.time, datetime.timedelta, datetime.date, complex),
    *(pydantic.NaiveDatetime, AwareDatetime, dict[datetime.date, int], dict[datetime.datetime, int]),
]


@pytest.mark.parametrize("wanted", TIMES, ids=str)
def test_every_time_that_can_be_written_is_one(wanted: Any, rng: random.Random) -> None:
    """29 February, second 60, an endless duration could once be written, and a time without a zone could not."""
    backend = backend_of("tiny")
    output = OutputType.of(wanted)
    compiled = backend.compile(spec_of(StructuredOutput(json_schema=output.schema_text)))
    ends = set(vocabulary("tiny").eos_ids)
    for _ in range(60):
        matcher, text = compiled.matcher(), b""
        while not ends & (may := allowed(backend, matcher)) or len(may) > len(ends) and rng.random() < 0.9:
            token_id = rng.choice(sorted(may - ends))
            assert matcher.accept([token_id]) == 1
            text += vocabulary("tiny").token_bytes[token_id]
            if len(text) > 150 and isinstance(wanted, type(dict[str, int])):
                break  # any number of keys
        else:
            assert output.parse(text.decode())[1] is None, text


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (datetime.datetime, ["2024-02-29T10:00:00", "2023-01-01T10:00:00.5+01:00"], ["2023-02-29T10:00:00"]),
        (datetime.time, ["23:59:59", "23:59:59Z"], ["23:59:60", "24:00:00"]),
        (datetime.date, ["2000-02-29"], ["1900-02-29", "0000-01-01", "2023-04-31"]),
        (datetime.timedelta, ["PT1.5S", "P1DT2H", "-P2W", "P1Y2M3D"], ["P", "PT", "P99999999D", ""]),
        (AwareDatetime, ["2024-01-01T10:00:00Z"], ["2024-01-01T10:00:00"]),
        (complex, ["1+2j", "-1.5e3-2j", "3", "2j"], ["abc", "1+j2", ""]),
    ],
    ids=str,
)
def test_the_texts_of_times(wanted: Any, right: list[str], wrong: list[str]) -> None:
    spec = spec_of(StructuredOutput(json_schema=OutputType.of(wanted).schema_text))
    for text in right + wrong:
        assert accepts(matcher_of(backend_of("tiny"), spec), tiny(), f'"{text}"') == (text in right), text


def test_an_output_type_beside_parameters() -> None:
    class Fresh(BaseModel):
        x: int

    class Interrupting(BaseModel):
        @classmethod
        def __get_pydantic_json_schema__(cls, *args: Any) -> Any:
            raise KeyboardInterrupt

    given = SamplingParams(max_tokens=3)
    assert with_output_type(None, None, "error") == (SamplingParams(), {})
    assert with_output_type(given, None, "error") == (given, {})
    wrong: Any = 5
    assert with_output_type(wrong, Fresh, "error") == (5, {}), "it is refused later"
    params, asked = with_output_type(given, Fresh, "relax")
    assert params is given and asked == {"asked_type": AskedType(Fresh, "relax")}
    known, constraint = asked["asked_type"].described()
    assert known is OutputType.known(Fresh)
    assert constraint == StructuredOutput(json_schema=known.schema_text, on_unsupported="relax")
    assert with_output_type(given, Fresh, "relax") == (
        given.replace(structured_output=constraint),
        {"output_type": known},
    )
    how: Any
    for params, wanted, how, param in (
        (given, None, "relax", "on_unsupported"),
        (given, Fresh, "ignore", "on_unsupported"),
        (given, "x", "error", "output_type"),
        (SamplingParams(detokenize=False), Fresh, "error", "detokenize"),
        (given.replace(structured_output=constraint), Fresh, "error", "output_type"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            with_output_type(params, wanted, how)
        assert caught.value.param == param
    with pytest.raises(InvalidRequestError, match="can't be described: KeyboardInterrupt"):
        AskedType(Interrupting, "error").described()


def test_the_types_asked_for_last_are_kept() -> None:
    kinds = [Literal[i] for i in range(1000, 1003 + output_type._MOST_KEPT)]  # type: ignore[valid-type]
    for kind in kinds:
        OutputType.of(kind)
        OutputType.of(kinds[1])  # asked for again and again
    kept = [kind for kind in kinds if OutputType.known(kind) is not None]
    assert kept == [kinds[1], *kinds[len(kinds) + 1 - output_type._MOST_KEPT :]]
