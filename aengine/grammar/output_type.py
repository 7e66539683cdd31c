"""`OutputType`: a Python type as the shape of an answer: to a JSON schema, and back to a value. Needs pydantic.

    class Person(BaseModel): ...      OutputType.of(Person).schema  ->  grammar  ->  text  ->  .parse(text)  ->  Person

Anything that pydantic can describe will do: models, dataclasses, TypedDicts, enums, Literal, unions, lists, datetime.

The grammar narrows what the model can write, and pydantic has the last word: it also runs what no schema can say, such
as a field's validator. The schema is pydantic's own, changed where a grammar can't follow it or should be narrower:

* An object with ``properties`` that does not speak of others gets ``additionalProperties: false``. Pydantic ignores
  other keys by default, but a model that may invent keys rambles. Declare ``extra="allow"`` to let it.
* The tag of a discriminated union is required even where it has a default: pydantic can't choose without it.
  ``oneOf`` is written ``anyOf``.
* ``uniqueItems`` (pydantic drops what a set has twice), formats that no grammar library knows (``path``, ``binary``,
  ``password``, ...) and a pattern with a look-ahead beside a number (a Decimal's) are left out. A uuid4 is a pattern.
* The keys of ``dict[Literal["a", "b"], int]`` become optional properties.

Optional fields stay optional.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidRequestError
from ..params import shown
from .partial import PartialJson
from .schema_walk import pointed_at, walk

__all__ = ["OutputType"]

KNOWN_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""Those that llguidance turns into a grammar; it refuses others."""
_UUID = re.compile(r"uuid([1-8])")
_UUID_PATTERN = "^X{8}-X{4}-VX{3}-[89abAB]X{3}-X{12}$"


@dataclass(frozen=True, slots=True, eq=False)
class OutputType:
    """A type that an answer is to have. Made by `of`."""

    name: str
    schema_text: str
    """The JSON schema that holds the model to it."""
    adapter: Any
    """pydantic's TypeAdapter."""

    @classmethod
    def of(cls, wanted: Any) -> OutputType:
        """Of a type. The last ones are kept, so it is cheap for each request but the first: pydantic takes 0.4 s of
        Python for some hundreds of models.

        Raises:
            InvalidRequestError: ``wanted`` is no type, pydantic can't describe it, or pydantic is not installed.
        """
        found = cls.known(wanted)
        if found is None:
            found = _describe(wanted)
            _described.add(wanted, found)
        return found

    @classmethod
    def known(cls, wanted: Any) -> OutputType | None:
        """`of`, if it has been asked lately, and None otherwise. Raises InvalidRequestError for what is no type."""
        _check_is_type(wanted)
        return _described.get(wanted)

    @property
    def schema(self) -> dict[str, Any]:
        """A copy of the JSON schema."""
        schema: dict[str, Any] = json.loads(self.schema_text)
        return schema

    def parse(self, text: str) -> tuple[Any, Exception | None]:
        """The value that ``text`` is, and None; or None, and why it is none.

        It does not raise: an answer cut off by max_tokens is nobody's fault, and the error of a validator (pydantic's
        ValidationError, or whatever the type's own code raises) is for the caller of this one request.
        """
        try:
            return self.adapter.validate_json(text), None
        except Exception as error:
            return None, error

    def partial(self, text: str) -> Any:
        """What the beginning ``text`` of an answer says so far, in dicts, lists, strings, numbers; see `PartialJson`.

        None when nothing has begun, or the text is not JSON. Not of the type: a required field may not have come.
        One who reads a stream feeds a `PartialJson` of his own; this reads ``text`` from its beginning.
        """
        reader = PartialJson()
        try:
            reader.feed(text)
        except ValueError:
            return None
        return reader.value


class _Described:
    """Those used last. Safe in threads."""

    def __init__(self, most: int = 128) -> None:
        self._most = most
        self._types: OrderedDict[Any, OutputType] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, wanted: Any) -> OutputType | None:
        try:
            with self._lock:
                found = self._types.get(wanted)
                if found is not None:
                    self._types.move_to_end(wanted)
                return found
        except TypeError:  # not hashable, as Annotated[int, [...]]
            return None

    def add(self, wanted: Any, described: OutputType) -> None:
        try:
            with self._lock:
                self._types[wanted] = described
                if len(self._types) > self._most:
                    self._types.popitem(last=False)
        except TypeError:
            pass


_described = _Described()


def _describe(wanted: Any) -> OutputType:
    try:
        import pydantic
    except ImportError:
        raise _refused("output_type needs pydantic: pip install aengine[pydantic]") from None
    name = getattr(wanted, "__name__", None) or repr(wanted)
    try:
        adapter = pydantic.TypeAdapter(wanted)
        schema = adapter.json_schema(by_alias=True, mode="validation", schema_generator=_generator())
        _adapt(schema)
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except Exception as error:  # a type's own hooks may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _refused(f"output_type={name:.80} can't be described by a JSON schema: {reason}") from error
    return OutputType(name, text, adapter)


@functools.lru_cache(maxsize=1)
def _generator() -> Any:
    from pydantic.json_schema import GenerateJsonSchema

    class Quiet(GenerateJsonSchema):
        """A default that JSON can't say is left out, as always, but without a warning for each request."""

        ignored_warning_kinds = {"skipped-choice", "non-serializable-default", "skipped-discriminator"}  # noqa: RUF012

    return Quiet


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="output_type")


def _check_is_type(wanted: Any) -> None:
    """What pydantic would take, and describe as something that was not meant, is refused here."""
    if isinstance(wanted, Mapping | bool):
        raise _refused(
            "output_type is a Python type; for a JSON schema use "
            "SamplingParams(structured_output=StructuredOutput(json_schema=...))"
        )
    if wanted is None:
        raise _refused("output_type=None asks for no type; if the answer is to be null, use type(None)")
    if isinstance(wanted, str):
        raise _refused(f"output_type={wanted[:80]!r} is a string; pass the type itself")
    if inspect.isroutine(wanted) or isinstance(wanted, functools.partial):
        raise _refused("output_type is a function; pass a type, as the class of what the function takes")
    if isinstance(wanted, int | float | complex | bytes | list | tuple | set | frozenset):
        raise _refused(f"output_type={shown(wanted)} is a value, not a type")
    own = type(wanted)
    if hasattr(own, "model_fields") or (hasattr(own, "__dataclass_fields__") and not isinstance(wanted, type)):
        raise _refused(f"output_type is an instance of {own.__name__}; pass the class {own.__name__} itself")


def _adapt(schema: dict[str, Any]) -> None:
    """Change pydantic's schema as the top of the file says."""
    parts = [part for _, part in walk(schema) if isinstance(part, dict)]
    merged = any(len(part.get("allOf", ())) > 1 for part in parts)  # a false in one would forbid the other's properties
    for part in reversed(parts):  # members first: `_adapt_keys` copies them
        part.pop("uniqueItems", None)
        _adapt_format(part)
        _adapt_union(part, schema)
        _adapt_keys(part, schema)
        if "properties" in part and not merged and "patternProperties" not in part:
            part.setdefault("additionalProperties", False)


def _adapt_format(part: dict[str, Any]) -> None:
    name = part.get("format")
    version = _UUID.fullmatch(name) if isinstance(name, str) else None
    if version:
        part["pattern"] = _UUID_PATTERN.replace("V", version[1]).replace("X", "[0-9a-fA-F]")
    if "format" in part and name not in KNOWN_FORMATS:
        del part["format"]


def _adapt_union(part: dict[str, Any], root: dict[str, Any]) -> None:
    discriminator = part.get("discriminator")
    if isinstance(discriminator, dict):
        for member in part.get("oneOf", ()):
            target = _resolved(member, root)
            tag = discriminator.get("propertyName")
            if tag in target.get("properties", ()) and tag not in target.get("required", ()):
                target["required"] = [*target.get("required", ()), tag]
    if "oneOf" in part and "anyOf" not in part:
        renamed = {"anyOf" if keyword == "oneOf" else keyword: value for keyword, value in part.items()}
        part.clear()
        part.update(renamed)
    members = part.get("anyOf")
    if isinstance(members, list) and any(isinstance(m, dict) and m.get("type") == "number" for m in members):
        part["anyOf"] = [m for m in members if not (isinstance(m, dict) and "(?" in m.get("pattern", ""))]


def _adapt_keys(part: dict[str, Any], root: dict[str, Any]) -> None:
    """The names of a dict's keys, where they are listed; otherwise pydantic alone checks them."""
    names = _resolved(part.pop("propertyNames", {}), root)
    options = [names["const"]] if "const" in names else names.get("enum")
    if options and "properties" not in part and all(isinstance(option, str) for option in options):
        values = part.get("additionalProperties", True)
        part["properties"] = {option: json.loads(json.dumps(values)) for option in options}
        part["additionalProperties"] = False


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """``schema``, or the one that it refers to; {} if that is none."""
    target = schema
    if isinstance(schema, dict) and str(schema.get("$ref", "")).startswith("#/"):
        found = pointed_at(root, schema["$ref"])
        target = found[1] if found else {}
    return target if isinstance(target, dict) else {}
