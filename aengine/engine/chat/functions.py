"""Python functions as tools: their arguments' JSON schema by pydantic, and arguments checked against it.

A function's parameters become a typed dict, one key each. A parameter without an annotation takes any JSON value. What
is said of a parameter is its description in the schema: by a ``Field``, else by the docstring, else by a string in
``Annotated``. A ``Field`` as a parameter's default is the field, as in a model of pydantic's.

Besides functions and methods these are taken: a `functools.partial`, without the parameters that it fills in, and an
object with ``__call__``, which is named like its class.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, get_args, get_origin

from ...errors import InvalidRequestError
from ..structured.pydantic_schema import adapt, schema_generator
from .docstrings import read_docstring

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_UNUSABLE = {
    inspect.Parameter.POSITIONAL_ONLY: "is positional-only, but arguments come by name: remove the '/'",
    inspect.Parameter.VAR_POSITIONAL: "takes any number of values: take one list instead",
    inspect.Parameter.VAR_KEYWORD: "takes any names: name the parameters, or take one dict",
}
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def name_of(function: Callable[..., Any]) -> str:
    """Return its own name, or its class's in snake_case if it is an object with ``__call__``.

    Raises InvalidRequestError for a lambda.
    """
    inner = _unwrapped(function)
    if _is_object(inner):
        return _WORD_START.sub("_", type(inner).__name__).lower()
    name: str = inner.__name__
    if name == "<lambda>":
        raise _invalid("a lambda has no name that a model could call: give it one by Tool(name=..., function=...)")
    return name


def describe(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """Return its description, and the JSON schema of its arguments. Raises InvalidRequestError."""
    _check_pydantic()
    try:
        schema = _adapter(function).json_schema(schema_generator=_generator())
        adapt(schema)
    except InvalidRequestError:
        raise
    except Exception as error:  # pydantic has several, and annotations may raise anything
        reason = str(error).partition(" If you got this error")[0].partition("\n")[0]
        raise _invalid(f"the parameters of {_called(function)} have no JSON schema: {reason}") from error
    schema.pop("title", None)
    return _documented(function)[0], schema


def bind(name: str, function: Callable[..., Any], arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """Convert the arguments to the annotated types. Raises InvalidRequestError, worded for the model too."""
    _check_pydantic()
    from pydantic import ValidationError

    values = _read(name, arguments)
    adapter = _adapter(function)
    text = arguments if isinstance(arguments, str) and arguments else _as_json(values)
    try:
        # A strict model takes a date or an enum's member from JSON only as a string; from Python values never so.
        bound: dict[str, Any] | None = _from_json(adapter, text) if text is not None else None
        return adapter.validate_python(values) if bound is None else bound
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
        raise InvalidRequestError(f"wrong arguments for {name!r}: {faults}", param="arguments") from None


def _read(name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    value: object = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the arguments of {name!r} are not JSON: {error}", param="arguments") from None
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"the arguments of {name!r} must be a JSON object", param="arguments")
    return dict(value)


def _as_json(values: dict[str, Any]) -> str | None:
    """Return the values as JSON; None if JSON can't express them, such as a mapping with dates."""
    try:
        return json.dumps(values)
    except (TypeError, ValueError, RecursionError):
        return None


def _from_json(adapter: TypeAdapter[Any], text: str) -> dict[str, Any] | None:
    """Validate the text; None if pydantic can't read it: less deep than Python, and no halves of surrogate pairs."""
    from pydantic import ValidationError

    try:
        bound: dict[str, Any] = adapter.validate_json(text)
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            return None
        raise
    return bound


def _adapter(function: Callable[..., Any]) -> TypeAdapter[Any]:
    try:
        return _cached_adapter(function)
    except TypeError as error:
        if "unhashable" in str(error):
            return _new_adapter(function)
        raise


def _new_adapter(function: Callable[..., Any]) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter
    from typing_extensions import TypedDict  # pydantic takes that of typing only from Python 3.12 on

    descriptions = _documented(function)[1]
    members = {item.name: _member(item, descriptions.get(item.name)) for item in _parameters(function)}
    arguments = TypedDict("Arguments", members)  # type: ignore[misc]
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return TypeAdapter(arguments)


_cached_adapter = functools.lru_cache(maxsize=256)(_new_adapter)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that arguments are wanted for."""
    try:
        signature = inspect.signature(function, eval_str=True)
    except (NameError, SyntaxError) as error:
        raise _invalid(f"the annotations of {_called(function)} can't be read where it is defined: {error}") from error
    except (TypeError, ValueError) as error:
        raise _invalid(f"{_called(function)} has no signature that Python can read: {error}") from error
    filled = _filled_in(function)
    parameters = [item for item in signature.parameters.values() if item.name not in filled]
    _check_has_self(function, parameters)
    for item in parameters:
        if item.kind in _UNUSABLE:
            raise _invalid(f"the parameter {item.name!r} of {_called(function)} {_UNUSABLE[item.kind]}")
    return parameters


def _check_has_self(function: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    inner = _unwrapped(function)
    owner, _, method = getattr(inner, "__qualname__", "").rpartition(".")
    if owner and not owner.endswith("<locals>") and parameters and parameters[0].name == "self":
        owner = owner.rpartition(".")[2]
        raise _invalid(
            f"{owner}.{method} is a method without an object (its first parameter is 'self'): "
            f"give the method of an object, as {owner}().{method}"
        )


def _member(parameter: inspect.Parameter, documented: str | None) -> Any:
    """Return the parameter's annotation, with what else is said of it, as that of a typed dict's key."""
    from pydantic import Field
    from pydantic.fields import FieldInfo

    annotation: Any = Any if parameter.annotation is parameter.empty else parameter.annotation
    said: list[Any] = []
    if get_origin(annotation) is Annotated:
        annotation, *said = get_args(annotation)
    description = documented or next((item for item in said if isinstance(item, str)), None)
    if description:
        said.insert(0, Field(description=description))  # placed first, since pydantic uses the last description
    default = parameter.default
    if default is not parameter.empty and any(isinstance(item, FieldInfo) and not item.is_required() for item in said):
        # This default takes precedence over one in Annotated.
        default = default if isinstance(default, FieldInfo) else Field(default=default)
    if isinstance(default, FieldInfo):
        return Annotated[(annotation, *said, default)]
    if default is not parameter.empty:
        # Python supplies it; it is in the schema for the model to read.
        said += [Field(json_schema_extra={"default": value}) for value in _default_in_json(default)]
    whole = Annotated[(annotation, *said)] if said else annotation
    return whole if default is parameter.empty else NotRequired[whole]


def _default_in_json(default: object) -> list[Any]:
    """Return a list with the default; [] if JSON can't express it, such as an infinite number or most objects."""
    from pydantic_core import to_jsonable_python

    try:
        value = to_jsonable_python(default)
        json.dumps(value, allow_nan=False)
    except Exception:  # pydantic's own, and whatever the object's code raises
        return []
    return [value]


@functools.lru_cache(maxsize=1)
def _generator() -> Any:
    """Return a class for pydantic's ``json_schema``."""
    from pydantic_core import PydanticSerializationError

    base: Any = schema_generator()

    class Generator(base):
        def field_title_should_be_set(self, schema: Any) -> bool:
            return False  # titles repeat the names, and cost the model tokens

        def encode_default(self, dft: Any) -> Any:
            found = _default_in_json(dft)
            if not found:
                raise PydanticSerializationError("JSON can't say it")  # pydantic leaves the default out
            return found[0]

    return Generator


def _unwrapped(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _filled_in(function: Callable[..., Any]) -> set[str]:
    """Return the keywords given to `functools.partial`. Its positional values are left out of the signature already."""
    filled: set[str] = set()
    while isinstance(function, functools.partial):
        filled |= function.keywords.keys()
        function = function.func
    return filled


def _is_object(inner: Any) -> bool:
    """Return whether the callable has no name of its own, only its class's ``__call__``."""
    return not isinstance(getattr(inner, "__name__", None), str)


def _documented(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return a function's description, and the description of each parameter, from its docstring."""
    inner = _unwrapped(function)
    if not _is_object(inner):
        return read_docstring(inspect.getdoc(inner) or "")
    # `getdoc` is not used: it would take the docstring of a base class, which is not about this one.
    of_class, of_call = (inspect.cleandoc(thing.__doc__ or "") for thing in (type(inner), type(inner).__call__))
    if of_class.startswith(f"{type(inner).__name__}("):  # a dataclass's signature, where it has no docstring
        of_class = ""
    (general, parameters), (description, more) = read_docstring(of_class), read_docstring(of_call)
    return description or general, parameters | more


def _called(function: Callable[..., Any]) -> str:
    """Return the name of the function for error messages."""
    inner = _unwrapped(function)
    return repr(type(inner).__name__ if _is_object(inner) else inner.__name__)


def _check_pydantic() -> None:
    try:
        import pydantic  # noqa: F401
    except ImportError:
        raise _invalid("functions as tools need pydantic: pip install pydantic") from None


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="tools")
