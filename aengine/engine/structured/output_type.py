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
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import InvalidRequestError
from ...limits.values import shown
from ...params import OnUnsupported, SamplingParams, StructuredOutput
from .partial_json import partial_json
from .pydantic_schema import adapt, schema_generator


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
            with suppress(TypeError):
                _described[wanted] = found
                if len(_described) > _MOST_KEPT:
                    _described.popitem(last=False)
        return found

    @classmethod
    def known(cls, wanted: Any) -> OutputType | None:
        """Return what `of` returned lately for this type, else None. Raises InvalidRequestError for what is no type."""
        _check_is_type(wanted)
        try:
            found = _described.pop(wanted, None)
        except TypeError:  # the type is not hashable, as Annotated[int, [...]]
            return None
        if found is not None:
            _described[wanted] = found
        return found

    @property
    def schema(self) -> dict[str, Any]:
        """A copy of the JSON schema."""
        schema: dict[str, Any] = json.loads(self.schema_text)
        return schema

    def parse(self, text: str) -> tuple[Any, Exception | None]:
        """Return (the value of ``text``, None), or (None, the reason why it has none).

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


_MOST_KEPT = 128
_described: OrderedDict[Any, OutputType] = OrderedDict()
"""The types used last. Each operation on it is atomic; a type that is not there is described anew."""


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


class AskedType(NamedTuple):
    """A type whose schema has not been made yet: that may take too long for the loop."""

    wanted: Any
    on_unsupported: OnUnsupported

    def described(self) -> tuple[OutputType, StructuredOutput]:
        """Return the type and the constraint made of it; to be called in a thread. Raises InvalidRequestError."""
        try:
            known = OutputType.of(self.wanted)
        except (SystemExit, KeyboardInterrupt) as error:  # a type's own hooks may raise these, too
            raise InvalidRequestError(f"output_type can't be described: {error!r}", param="output_type") from error
        return known, constraint_of(known, self.on_unsupported)


def with_output_type(
    params: SamplingParams | None, output_type: Any, on_unsupported: OnUnsupported
) -> tuple[SamplingParams, dict[str, Any]]:
    """Return the parameters, and the arguments of `Admission.submit` that say the output type.

    Raises InvalidRequestError.
    """
    if params is None:
        params = SamplingParams()
    check_on_unsupported(on_unsupported)
    if output_type is None and on_unsupported != "error":
        raise InvalidRequestError(
            "on_unsupported is about output_type, and there is none; a StructuredOutput has its own",
            param="on_unsupported",
        )
    if output_type is None or not isinstance(params, SamplingParams):  # params of a wrong type are refused later
        return params, {}
    known = OutputType.known(output_type)
    if not params.detokenize:
        raise InvalidRequestError("output_type needs the text: detokenize must be True", param="detokenize")
    if params.structured_output is not None:
        raise InvalidRequestError("give output_type or params.structured_output, not both", param="output_type")
    if known is None:  # the type is described later, in a thread
        return params, {"asked_type": AskedType(output_type, on_unsupported)}
    return params.replace(structured_output=constraint_of(known, on_unsupported)), {"output_type": known}


def constraint_of(known: OutputType, on_unsupported: OnUnsupported) -> StructuredOutput:
    return StructuredOutput(json_schema=known.schema_text, on_unsupported=on_unsupported)


def check_on_unsupported(value: object) -> None:
    """Raise InvalidRequestError unless the value is one that ``on_unsupported`` can have."""
    if value not in ("error", "relax"):
        raise InvalidRequestError(
            f"on_unsupported={shown(value)} is not valid: it must be 'error' or 'relax'", param="on_unsupported"
        )
