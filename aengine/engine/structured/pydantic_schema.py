"""The JSON schema of a Python type: pydantic's own, changed where a grammar can't follow it or should be narrower.

* An object with ``properties`` that does not speak of others gets ``additionalProperties: false``. Pydantic ignores
  other keys by default, but a model that may invent keys rambles. Declare ``extra="allow"`` to let it.
* The tag of a discriminated union is required even where it has a default: pydantic can't choose without it.
  ``oneOf`` is written ``anyOf``.
* A Decimal is a number, of as many digits as it may have; pydantic would take any string, too.
* The keys of a dict are what can be read as them: ``dict[Literal["a", "b"], int]`` has two optional properties, and
  ``dict[int, str]`` a pattern. Keys with a pattern of their own are held to it. (Other constraints of keys are checked
  by pydantic alone.)
* A uuid4 is a pattern, and so is an HttpUrl with its schemes.
* An IPv4Interface, Base64, a FileUrl, and bytes of limited length, as ASCII, are patterns in an output type.
* Dates, times, durations and complex numbers of an output type are patterns, by which every text is one that pydantic
  reads: no 29 February of a common year, no second 60, a zone only where there may be one, durations of bounded length.
  A tool's schema, which the model is shown, keeps their formats (but a NaiveDatetime, as the format demands a zone).
* ``uniqueItems`` (pydantic drops what a set has twice) and formats that no grammar library knows (``path``, ``binary``,
  ``password``, ...) are left out.

Optional fields stay optional.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from .schema_walk import pointed_at, walk

KNOWN_FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""Values of ``format`` that llguidance turns into a grammar; it refuses others."""
_UUID = re.compile(r"uuid([1-8])")
_UUID_PATTERN = "^X{8}-X{4}-VX{3}-[89abAB]X{3}-X{12}$"
_HEX = "[0-9a-fA-F]"
_DATE = (
    "([1-9][0-9]{3}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    "|([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)-02-29)"
)
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?"
_ZONE = {"naive": "", "aware": "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])", None: "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])?"}
"""Patterns of the time zone behind a time, by pydantic's ``tz_constraint``."""
_SECONDS = "[0-9]{1,4}(\\.[0-9]{1,6})?S"
_DAYS = "([0-9]{1,3}Y([0-9]{1,3}M)?([0-9]{1,4}D)?|[0-9]{1,3}M([0-9]{1,4}D)?|[0-9]{1,6}D|[0-9]{1,4}W)"
_HOURS = f"T([0-9]{{1,4}}H([0-9]{{1,4}}M)?({_SECONDS})?|[0-9]{{1,4}}M({_SECONDS})?|{_SECONDS})"
_DURATION = f"^-?P({_DAYS}({_HOURS})?|{_HOURS})$"
_REAL = "(0|[1-9][0-9]{0,14})(\\.[0-9]{1,15})?([eE][+-]?[0-9]{1,2})?"
_MOST_PLACES = 10
_MOST_WHOLE_DIGITS = 15
"""Digits of a Decimal. llguidance refuses a ``multipleOf`` and bounds of some more: pydantic alone counts those."""
_WEB = frozenset(("http", "https", "ws", "wss"))
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HOST = f"(([a-zA-Z0-9]+[.-])*[a-zA-Z][a-zA-Z0-9]*|{_OCTET}([.]{_OCTET}){{3}})"
"""A host that ends with a number is an address, or none."""
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4})"
_URL_LETTER = r"[!#-;=?-\[\]_a-z~]"
_FORMATS = {
    "base64": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base64url": "^([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$",
    "ipv4interface": f"^{_OCTET}([.]{_OCTET}){{3}}(/([12]?[0-9]|3[0-2]))?$",
}
"""Patterns of what formats of pydantic's allow."""
_MOST_BYTES = 1000
_KEYS = {
    "bool": "^(true|false)$",
    "date": f"^{_DATE}$",
    "float": "^-?(0|[1-9][0-9]{0,14})(\\.[0-9]{1,15})?$",
    "int": "^(0|-?[1-9][0-9]{0,17})$",
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
}
"""Patterns of the keys of dicts, by pydantic's name of their type."""


@functools.cache
def schema_generator(*, narrow: bool = False) -> Any:
    """Make a class for pydantic's ``json_schema``. What it makes is still to be given to `adapt`.

    ``narrow``: patterns stand for the formats of times, which a model that is shown the schema would not read easily.
    """
    from pydantic.json_schema import GenerateJsonSchema

    class Generator(GenerateJsonSchema):
        # A default that JSON can't say is left out, as always, but without a warning for each request.
        ignored_warning_kinds = {"skipped-choice", "non-serializable-default", "skipped-discriminator"}  # noqa: RUF012

        def decimal_schema(self, schema: Any) -> Any:
            made = super().decimal_schema(schema)
            numbers = [part for part in made.get("anyOf", ()) if part.get("type") == "number"]
            return _limited(numbers[0], schema.get("max_digits"), schema.get("decimal_places")) if numbers else made

        def dict_schema(self, schema: Any) -> Any:
            made = super().dict_schema(schema)
            name = schema.get("keys_schema", {}).get("type")
            if name in _KEYS and "patternProperties" not in made:
                made.pop("propertyNames", None)
                made["patternProperties"] = {_KEYS[name]: made.pop("additionalProperties", True)}
            if "patternProperties" in made or (narrow and name in ("complex", "datetime", "time", "timedelta")):
                made["additionalProperties"] = False
            return made

        def url_schema(self, schema: Any) -> Any:
            made = super().url_schema(schema)
            schemes = schema.get("allowed_schemes")
            if schemes and _WEB.issuperset(schemes):
                # pydantic's maxLength of 2,083 is left out: each mask would take a hundred times as long.
                pattern = f"^({'|'.join(sorted(schemes))})://{_HOST}(:{_PORT})?([/?#]{_URL_LETTER}*)?$"
                return {"type": "string", "pattern": pattern}
            if narrow and schemes == ["file"]:
                return {"type": "string", "pattern": f"^file:///{_URL_LETTER}*$"}
            return made

        def bytes_schema(self, schema: Any) -> Any:
            made = super().bytes_schema(schema)
            most = schema.get("max_length")
            if not narrow or most is None or most > _MOST_BYTES:
                return made
            return {"type": "string", "pattern": f"^[ -~]{{{schema.get('min_length', 0)},{most}}}$"}  # a byte each

        def literal_schema(self, schema: Any) -> Any:
            texts = [value for value in schema["expected"] if not isinstance(value, bytes)]
            if narrow and not texts:
                return self.handle_invalid_for_json_schema(schema, "a Literal of bytes, which no JSON is")
            kept: Any = {**schema, "expected": texts} if narrow else schema
            return super().literal_schema(kept)

        def is_subclass_schema(self, schema: Any) -> Any:
            if narrow:
                return self.handle_invalid_for_json_schema(schema, "a class, which no JSON is")
            return super().is_subclass_schema(schema)

        def datetime_schema(self, schema: Any) -> Any:
            zone = schema.get("tz_constraint")
            pattern = f"^{_DATE}T{_TIME}{_zone(zone)}$"
            return _narrowed(super().datetime_schema(schema), pattern, narrow or zone == "naive")

        def date_schema(self, schema: Any) -> Any:
            return _narrowed(super().date_schema(schema), f"^{_DATE}$", narrow)

        def time_schema(self, schema: Any) -> Any:
            return _narrowed(super().time_schema(schema), f"^{_TIME}{_zone(schema.get('tz_constraint'))}$", narrow)

        def timedelta_schema(self, schema: Any) -> Any:
            return _narrowed(super().timedelta_schema(schema), _DURATION, narrow)

        def complex_schema(self, schema: Any) -> Any:
            return _narrowed(super().complex_schema(schema), f"^-?{_REAL}(j|[+-]{_REAL}j)?$", narrow)

    return Generator


def _zone(constraint: object) -> str:
    return _ZONE[constraint] if constraint in ("naive", "aware") else _ZONE[None]


def _narrowed(made: dict[str, Any], pattern: str, narrow: bool) -> dict[str, Any]:
    """Return the schema of a text with ``pattern`` instead of its format; a number, as pydantic may ask for, stays."""
    if not narrow or made.get("type") != "string":
        return made
    return {**{key: value for key, value in made.items() if key != "format"}, "pattern": pattern}


def _limited(number: dict[str, Any], max_digits: int | None, decimal_places: int | None) -> dict[str, Any]:
    """Return the schema of a number of at most so many digits, of which at most so many after the point."""
    if decimal_places is not None and decimal_places <= _MOST_PLACES and "multipleOf" not in number:
        number["multipleOf"] = 1 if decimal_places == 0 else float(f"1e-{decimal_places}")
    whole_digits = None if max_digits is None else max(0, max_digits - (decimal_places or 0))
    if whole_digits is not None and whole_digits <= _MOST_WHOLE_DIGITS:
        limit = 10**whole_digits
        if "maximum" not in number and number.get("exclusiveMaximum", limit) >= limit:
            number["exclusiveMaximum"] = limit
        if "minimum" not in number and number.get("exclusiveMinimum", -limit) <= -limit:
            number["exclusiveMinimum"] = -limit
    return number


def adapt(schema: dict[str, Any], *, narrow: bool = False) -> None:
    """Change pydantic's schema as the top of the file says. ``narrow``: as of `schema_generator`."""
    parts = [part for _, part in walk(schema) if isinstance(part, dict)]
    merged = any(len(part.get("allOf", ())) > 1 for part in parts)  # a false in one would forbid the other's properties
    for part in reversed(parts):  # members first: `_adapt_keys` copies them
        part.pop("uniqueItems", None)
        _adapt_format(part, narrow)
        _adapt_union(part, schema)
        _adapt_keys(part, schema)
        if "properties" in part and not merged and "patternProperties" not in part:
            part.setdefault("additionalProperties", False)


def _adapt_format(part: dict[str, Any], narrow: bool) -> None:
    name = part.get("format")
    if narrow and isinstance(name, str) and name in _FORMATS:
        part.setdefault("pattern", _FORMATS[name])
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


def _adapt_keys(part: dict[str, Any], root: dict[str, Any]) -> None:
    """List the keys of a dict as properties where its type lists them; otherwise pydantic alone checks them."""
    names = _resolved(part.pop("propertyNames", {}), root)
    options = [names["const"]] if "const" in names else names.get("enum")
    if options and "properties" not in part and all(type(option) in (str, int) for option in options):
        values = part.get("additionalProperties", True)
        part["properties"] = {str(option): json.loads(json.dumps(values)) for option in options}
        part["additionalProperties"] = False


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Return ``schema``, or the schema that it refers to; {} if that is no schema."""
    target = schema
    if isinstance(schema, dict) and str(schema.get("$ref", "")).startswith("#/"):
        found = pointed_at(root, schema["$ref"])
        target = found[1] if found else {}
    return target if isinstance(target, dict) else {}
