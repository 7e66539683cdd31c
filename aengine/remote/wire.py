"""Values as plain data for msgpack, and back: dataclasses and named tuples become lists of their fields, and
log-probabilities the bytes of their columns."""

from __future__ import annotations

import dataclasses
import types
from array import array
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from .. import errors
from ..chat import (
    ChatCompletion,
    Delta,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    ToolChoice,
)
from ..engine.pooling.requests import PoolingRequest, PoolingResult
from ..engine.streams.logprobs import Logprobs, TopLogprobs, of_columns, of_likeliest
from ..engine.streams.prompt_logprobs import PromptLogprobs, of_words
from ..errors import AEngineError, InternalError, InvalidRequestError
from ..outputs import Completion, FinishReason, Token, Usage
from ..params import DEFAULT_TYPES, SamplingParams, StructuredOutput

T = TypeVar("T")
Decoder = Callable[[Any], Any]

_BIG_INTEGER, _LOGPROBS, _TOP_LOGPROBS, _PROMPT_LOGPROBS = 1, 2, 3, 4


def pack(value: object) -> bytes:
    """Pack a value as msgpack. Raises InvalidRequestError for what can't be sent, such as a function."""
    try:
        packed: bytes = msgpack.packb(value, default=_plain, unicode_errors="surrogatepass")
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        message = f"the request can't be sent to the engine's process, which takes plain data only: {error}"
        raise InvalidRequestError(message) from None
    return packed


def first_not_plain(values: Mapping[str, Any]) -> str | None:
    """Return the name of the first value that `pack` refuses."""
    for name, value in values.items():
        try:
            pack(value)
        except InvalidRequestError:
            return name
    return None


def _plain(value: object) -> object:
    if isinstance(value, int):  # msgpack has integers of at most 64 bits
        return msgpack.ExtType(_BIG_INTEGER, hex(value).encode())
    if isinstance(value, TopLogprobs):
        return msgpack.ExtType(_TOP_LOGPROBS, b"".join(value.columns()))
    if isinstance(value, Logprobs):
        return msgpack.ExtType(_LOGPROBS, msgpack.packb([column.tobytes() for column in value.columns()]))
    if isinstance(value, PromptLogprobs):
        return msgpack.ExtType(_PROMPT_LOGPROBS, msgpack.packb(value.columns()))
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a value of the type {type(value).__name__}")


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(
        data, ext_hook=_extended, object_pairs_hook=_mapping, unicode_errors="surrogatepass", strict_map_key=False
    )


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    try:
        return dict(pairs)
    except TypeError:  # a key was a tuple, and is a list now
        return {_key(key): value for key, value in pairs}


def _key(value: Any) -> Any:
    return tuple(map(_key, value)) if isinstance(value, list | dict) else value


def _extended(code: int, data: bytes) -> object:
    if code == _BIG_INTEGER:
        return int(data, 16)
    if code == _TOP_LOGPROBS:
        half = len(data) // 2
        return of_likeliest(array("i", data[:half]), array("f", data[half:]))
    if code == _LOGPROBS:
        token_ids, values, ends = msgpack.unpackb(data)
        return of_columns(array("i", token_ids), array("f", values), array("q", ends))
    if code == _PROMPT_LOGPROBS:
        return of_words(*msgpack.unpackb(data))
    raise ValueError(f"unknown extension {code}")


# -- by type


def to_wire(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [to_wire(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return [to_wire(part) for part in value]
    return None if isinstance(value, Exception) else value


def from_wire(kind: type[T], data: Any) -> T:
    """Return a value of the type, from what `to_wire` made of one."""
    decode: Decoder = _decoder(kind)  # type: ignore[arg-type]  # a class is hashable
    value: T = decode(data)
    return value


@cache
def _decoder(kind: Any) -> Decoder:
    origin = get_origin(kind)
    if origin is tuple:
        part = _decoder(get_args(kind)[0])
        return lambda data: tuple(map(part, data))
    if origin in (Union, types.UnionType):
        inner = [_decoder(one) for one in get_args(kind) if one is not type(None)]
        return (lambda data: None if data is None else inner[0](data)) if len(inner) == 1 else _same
    kind = origin or kind
    if not isinstance(kind, type):
        return _same
    if issubclass(kind, Enum):
        return kind
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _record(kind, kind._fields)
    if dataclasses.is_dataclass(kind):
        return _record(kind, tuple(field.name for field in dataclasses.fields(kind)))
    return _same


def _record(kind: type, names: tuple[str, ...]) -> Decoder:
    hints = get_type_hints(kind)
    parts = [(name, _decoder(hints[name])) for name in names]
    return lambda data: kind(**{name: part(value) for (name, part), value in zip(parts, data, strict=True)})


def _same(data: Any) -> Any:
    return data


# -- what comes often


def tokens_from_wire(data: Any) -> list[Token]:
    """Return tokens of ``data``, lists as msgpack writes them."""
    return [
        Token(text, token_id, index, logprob, None if reason is None else FinishReason(reason), position, top or ())
        for text, token_id, index, logprob, reason, position, top in data
    ]


_DELTAS: list[type] = [TextDelta, ReasoningDelta, ToolCallStart, ToolCallDelta, ToolCallEnd]
_CODES = {kind: code for code, kind in enumerate(_DELTAS)}


def delta_to_wire(delta: Delta) -> Any:
    if type(delta) is TextDelta and not delta.tokens and not delta.choice:
        return delta.text
    return [_CODES[type(delta)], *to_wire(delta)]


def deltas_from_wire(data: Any) -> list[Delta]:
    return [TextDelta(one) if isinstance(one, str) else from_wire(_DELTAS[one[0]], one[1:]) for one in data]


def pooling_from_wire(data: Any) -> PoolingRequest:
    request = from_wire(PoolingRequest, data)
    if request.task not in ("score", "completions"):
        return request
    return dataclasses.replace(request, inputs=[tuple(pair) for pair in request.inputs])


def pooled_to_wire(result: PoolingResult) -> Any:
    return [result.values.tobytes(), result.values.shape, to_wire(result.usage)]


def pooled_from_wire(data: Any) -> PoolingResult:
    import numpy as np

    values, shape, usage = data
    return PoolingResult(np.frombuffer(values, dtype=np.float32).reshape(shape), from_wire(Usage, usage))


# -- parameters and errors


def params_to_wire(params: SamplingParams | None) -> dict[str, Any]:
    """Return the parameters that are not the defaults: those leave a checkpoint's own a say."""
    if params is None:
        return {}
    given = _given(params)
    if params.structured_output is not None:
        given["structured_output"] = _given(params.structured_output)
    return given


def _given(value: SamplingParams | StructuredOutput) -> dict[str, Any]:
    given = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if type(part) in DEFAULT_TYPES:
            continue
        if type(field.default) in DEFAULT_TYPES or part != field.default:
            given[field.name] = part
    return given


def params_from_wire(data: dict[str, Any]) -> SamplingParams:
    given = dict(data)
    if "structured_output" in given:
        given["structured_output"] = StructuredOutput(**given["structured_output"])
    return SamplingParams(**given)


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat's options as plain data. Raises InvalidRequestError and GrammarError for tools."""
    plain = dict(options)
    if isinstance(tools := plain.get("tools"), list | tuple):
        plain["tools"] = [tool if isinstance(tool, Mapping) else _definition(Tool.of(tool)) for tool in tools]
    if isinstance(choice := plain.get("tool_choice"), ToolChoice):
        plain["tool_choice"] = _choice(choice)
    return plain


def _definition(tool: Tool) -> dict[str, Any]:
    definition = tool.for_template()
    definition["function"]["strict"] = tool.strict
    return definition


def _choice(choice: ToolChoice) -> Any:
    named = [{"type": "function", "function": {"name": name}} for name in choice.names]
    if choice.mode == "named":
        return named[0]
    if named:
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": named}}
    return choice.mode


def error_to_wire(error: AEngineError) -> list[Any]:
    attributes = {name: value for name, value in vars(error).items() if name != "completion"}
    completion, kind = error.completion, type(error).__name__
    is_chat = isinstance(completion, ChatCompletion)
    return [kind, str(error), attributes, None if completion is None else to_wire(completion), is_chat]


def error_from_wire(data: list[Any]) -> AEngineError:
    name, message, attributes, completion, is_chat = data
    kind: type[AEngineError] = getattr(errors, name) if name in errors.__all__ else InternalError
    error = kind.__new__(kind, message)
    error.args = (message,)
    vars(error).update(attributes)
    if completion is not None:
        error.completion = from_wire(ChatCompletion if is_chat else Completion, completion)
    return error
