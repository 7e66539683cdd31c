"""`OutputType`: a Python type as the shape of an answer: to a JSON schema, and back to a value. Needs pydantic.

    class Person(BaseModel): ...      OutputType.of(Person).schema  ->  grammar  ->  text  ->  .parse(text)  ->  Person

Anything that pydantic can describe will do: models, dataclasses, TypedDicts, enums, Literal, unions, lists, datetime.

The grammar narrows what the model can write (`pydantic_schema` says how), and pydantic has the last word: it also runs
what no schema can say, such as a field's validator.
"""

from __future__ import annotations

import functools
import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidRequestError
from ...params import shown
from .partial_json import partial_json
from .pydantic_schema import adapt, schema_generator

__all__ = ["OutputType"]


@dataclass(frozen=True, slots=True, eq=False)
class OutputType:
    """A type that an answer is to have. Made by `of`."""

    name: str
    schema_text: str
    """The JSON schema that holds the model to it."""
    adapter: Any
    """pydantic's TypeAdapter."""
    wanted: Any
    """The type itself."""

    @classmethod
    def of(cls, wanted: Any) -> OutputType:
        """Describe a type. The last ones are kept, so it is cheap for each request but the first: pydantic takes 0.4 s
        of Python for some hundreds of models.

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
        """Parse the beginning ``text`` of an answer to dicts, lists, strings, numbers; see `partial_json`.

        None when nothing has begun, or the text is not JSON. Not of the type: a required field may not have come.
        """
        try:
            return partial_json(text)
        except InvalidRequestError:
            return None


class _Described:
    """Cache of the types used last, at most ``most``. Thread-safe."""

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
        except TypeError:  # the type is not hashable, as Annotated[int, [...]]
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
        raise _refused("output_type needs pydantic: pip install pydantic") from None
    name = getattr(wanted, "__name__", None) or repr(wanted)
    try:
        adapter = pydantic.TypeAdapter(wanted)
        schema = adapter.json_schema(by_alias=True, mode="validation", schema_generator=schema_generator(narrow=True))
        adapt(schema, narrow=True)
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except Exception as error:  # a type's own hooks may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _refused(f"output_type={name:.80} can't be described by a JSON schema: {reason}") from error
    return OutputType(name, text, adapter, wanted)


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="output_type")


def _check_is_type(wanted: Any) -> None:
    """Refuse what pydantic would accept, and describe as something that was not meant."""
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
