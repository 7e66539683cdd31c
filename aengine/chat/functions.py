"""Python functions as tools: their arguments' JSON schema by pydantic, and arguments checked against it.

A function's parameters become a typed dict, one key each. A parameter without an annotation takes any JSON value. What
a docstring says about a parameter is its description in the schema.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from ..errors import InvalidRequestError
from ..params import shown
from .docstrings import read_docstring

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["bind", "describe"]

_UNUSABLE = {
    inspect.Parameter.POSITIONAL_ONLY: "is positional-only, but arguments come by name: remove the '/'",
    inspect.Parameter.VAR_POSITIONAL: "takes any number of values: take one list instead",
    inspect.Parameter.VAR_KEYWORD: "takes any names: name the parameters, or take one dict",
}


def describe(function: Callable[..., Any]) -> tuple[str, str, dict[str, Any]]:
    """Name, description and JSON schema of the arguments. Raises InvalidRequestError."""
    from pydantic.json_schema import GenerateJsonSchema

    class WithoutTitles(GenerateJsonSchema):
        """Titles repeat the names, and cost the model tokens."""

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        raise _invalid(f"{shown(function)} has no name: wrap it in a function, or make a Tool(name=..., function=...)")
    try:
        schema = _adapter(function).json_schema(schema_generator=WithoutTitles)
    except InvalidRequestError:
        raise
    except Exception as error:  # pydantic has several, and annotations may raise anything
        raise _invalid(f"the parameters of {name!r} have no JSON schema: {error}") from error
    schema.pop("title", None)
    return name, read_docstring(inspect.getdoc(function) or "")[0], schema


def bind(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the function's annotations say. Raises InvalidRequestError, in words for the model too."""
    from pydantic import ValidationError

    try:
        bound: dict[str, Any] = _adapter(function).validate_python(dict(arguments))
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
        raise InvalidRequestError(f"wrong arguments for {name!r}: {faults}", param="arguments") from None
    return bound


def _adapter(function: Callable[..., Any]) -> TypeAdapter[Any]:
    try:
        return _cached_adapter(function)
    except TypeError as error:
        if "unhashable" in str(error):
            return _new_adapter(function)
        raise


def _new_adapter(function: Callable[..., Any]) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, Field, TypeAdapter
    from typing_extensions import TypedDict  # pydantic takes that of typing only from Python 3.12 on

    name = getattr(function, "__name__", shown(function))
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, SyntaxError) as error:
        raise _invalid(f"the annotations of {name!r} can't be read where it is defined: {error}") from error
    except (TypeError, ValueError) as error:
        raise _invalid(f"{name!r} has no signature that Python can read: {error}") from error
    descriptions = read_docstring(inspect.getdoc(function) or "")[1]
    members: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind in _UNUSABLE:
            raise _invalid(f"the parameter {parameter.name!r} of {name!r} {_UNUSABLE[parameter.kind]}")
        annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
        description = descriptions.get(parameter.name)
        if description:
            annotation = Annotated[annotation, Field(description=description)]
        if parameter.default is not parameter.empty:
            annotation = NotRequired[_with_default(annotation, parameter.default)]
        members[parameter.name] = annotation
    arguments = TypedDict("Arguments", members)  # type: ignore[misc]
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return TypeAdapter(arguments)


_cached_adapter = functools.lru_cache(maxsize=256)(_new_adapter)


def _with_default(annotation: Any, default: object) -> Any:
    """The default is for the model to read; Python supplies it."""
    from pydantic import Field
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        shown = to_jsonable_python(default)
    except PydanticSerializationError:
        return annotation
    return Annotated[annotation, Field(json_schema_extra={"default": shown})]


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="tools")
