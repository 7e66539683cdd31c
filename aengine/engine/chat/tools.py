"""`Tool`: something that a model may call, and `ToolChoice`: whether it may, must, or must not."""

from __future__ import annotations

import contextvars
import difflib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ...errors import GrammarError, InvalidRequestError
from ...limits.bounds import MAX_TOOLS
from ...limits.values import shown
from ...params import StructuredOutput
from ..structured.spec import spec_of
from ..threads.pools import run_in_thread

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MODES: dict[str, Literal["none", "auto", "required"]] = {
    "none": "none",
    "auto": "auto",
    "required": "required",
    "any": "required",
}
_SCHEMA_KEYS = ("parameters", "inputSchema", "input_schema")
"""Names of the arguments' schema in a dict, by OpenAI, MCP and Anthropic."""
_KNOWN_KEYS = ("type", "function", "name", "description", "strict", *_SCHEMA_KEYS)
_RESULT_KEY = re.compile(r"_*(output|return|response|result)", re.IGNORECASE)
_LIKE_SCHEMA = re.compile(r"(schema|param|parameter|arg|argument|input)s?|properties", re.IGNORECASE)
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function as a model sees it. `Tool.of` makes one of whatever describes it.

    With a ``function`` and no ``parameters`` they are those of its signature, and so is the description that of its
    docstring, if none is given. That needs pydantic.

    Raises:
        InvalidRequestError: the name, the parameters or the function can't be used; ``param`` is "tools".
        GrammarError: ``parameters`` is no JSON schema; ``path`` says where.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of an object: the arguments. Empty, and without a function: there are none."""
    function: Callable[..., Any] | None = None
    """What `call` runs."""
    strict: bool = True
    """The arguments follow the schema. False: they are any JSON object."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise _invalid(f"the tool's name {shown(self.name)} must be 1 to 64 of the characters A-Z a-z 0-9 _ . -")
        if not isinstance(self.description, str):
            raise _invalid(f"the description of the tool {self.name!r} must be a string")
        if not isinstance(self.strict, bool):
            raise _invalid(f"strict of the tool {self.name!r} must be True or False")
        if self.function is not None and self.parameters == {}:
            from .functions import describe

            description, parameters = describe(self.function)
            object.__setattr__(self, "description", self.description or description)
            object.__setattr__(self, "parameters", parameters)
        object.__setattr__(self, "parameters", _object_schema(self.name, self.parameters))

    @classmethod
    def of(cls, thing: Tool | Mapping[str, Any] | Callable[..., Any]) -> Tool:
        """Make a tool of a Python function (by signature and docstring), or a dict as OpenAI's, MCP's or Anthropic's.

        A method, a `functools.partial` or an object with ``__call__`` is a function too. Functions need pydantic.

        Raises InvalidRequestError and GrammarError as Tool itself, and for a dict whose parameters are misspelt.
        """
        if isinstance(thing, Tool):
            return thing
        if isinstance(thing, Mapping):
            return _from_dict(thing)
        if callable(thing) and not isinstance(thing, type):
            from .functions import name_of

            return cls(name_of(thing), function=thing)
        raise _invalid(f"a tool must be a function, a dict as OpenAI's, or a Tool, not {type(thing).__name__}")

    @property
    def argument_schema(self) -> Mapping[str, Any]:
        """The schema that the grammar closes, and holds the arguments to; the model is shown ``parameters``."""
        return self.parameters if self.strict else {"type": "object"}

    def for_template(self) -> dict[str, Any]:
        """Return it as OpenAI writes it, which is what chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    async def call(self, arguments: str | Mapping[str, Any]) -> Any:
        """Run the function with these arguments, checked and converted by pydantic. A function that is not async runs
        in a thread.

        Raises InvalidRequestError when the arguments are wrong or there is no function; else what the function raises,
        but a RuntimeError for StopIteration, as generators do: no future can hold it.
        """
        if self.function is None:
            raise _invalid(f"the tool {self.name!r} has no function to call: it was given as a schema")
        from .functions import bind

        bound = bind(self.name, self.function, arguments)
        if _is_async(self.function):
            return await self.function(**bound)
        run = partial(contextvars.copy_context().run, _run, self.name, self.function, bound)
        result = await run_in_thread("tool", run)
        return await result if inspect.isawaitable(result) else result


def tools_of(things: Sequence[Any] | None) -> tuple[Tool, ...]:
    """Return the tools of a list, each of what `Tool.of` takes. Raises InvalidRequestError if two have one name."""
    if things is None:
        return ()
    if isinstance(things, str | Mapping) or not isinstance(things, Sequence):
        raise _invalid(f"tools must be a list, not {type(things).__name__}")
    if len(things) > MAX_TOOLS:
        raise _invalid(f"there are {len(things)} tools; at most {MAX_TOOLS} can be used")
    tools = tuple(Tool.of(thing) for thing in things)
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise _invalid(f"two tools are named {tool.name!r}: give one of them another name")
        seen.add(tool.name)
    return tools


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools an answer may or must call."""

    mode: Literal["none", "auto", "required", "named"]
    """"required": at least one call. "named": one call, no more."""
    names: tuple[str, ...] = ()
    """The tools that may be called; of the mode "named", one. Empty: all."""

    @classmethod
    def of(cls, value: object, tools: Sequence[Tool]) -> ToolChoice:
        """Read a caller's tool choice.

        Args:
            value: "none", "auto", "required" (or "any", which means the same), a tool's name, a list of names (at least
                one call of these), or a dict as OpenAI's, in which a list may be restricted to "auto", or Anthropic's.
                None: "auto" if there are tools.
            tools: all that the model is shown.

        A tool that is named like a mode is chosen by a list or a dict; the string is an error then.

        Raises InvalidRequestError naming ``tool_choice``.
        """
        choice = _choice_of(value, tools)
        if choice.mode == "required" and not tools:
            raise InvalidRequestError("tool_choice='required' needs at least one tool", param="tool_choice")
        known = {tool.name for tool in tools}
        if not known.issuperset(choice.names) or (choice.mode == "named" and len(choice.names) != 1):
            raise _invalid_choice(value, tools)
        return choice

    def allowed(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return the tools that the answer may call."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in tools if not self.names or tool.name in self.names)


def _choice_of(value: object, tools: Sequence[Tool]) -> ToolChoice:
    """Read each form of it; whether there are such tools is not checked here."""
    if isinstance(value, ToolChoice):
        return value
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(value, str):
        mode = _mode(value)
        if mode is None:
            return ToolChoice("named", (value,))
        if any(tool.name == value for tool in tools):
            raise InvalidRequestError(
                f"tool_choice={value!r} may mean the tool of that name: give "
                f"{{'type': 'function', 'function': {{'name': {value!r}}}}} for it, ToolChoice({mode!r}) for the mode",
                param="tool_choice",
            )
        return ToolChoice(mode)
    if isinstance(value, Mapping):
        return _choice_of_dict(value, tools)
    if isinstance(value, Sequence) and value and all(isinstance(name, str) for name in value):
        return ToolChoice("required", tuple(value))
    raise _invalid_choice(value, tools)


def _mode(name: object) -> Literal["none", "auto", "required"] | None:
    return _MODES.get(name) if isinstance(name, str) else None


def _choice_of_dict(value: Mapping[str, Any], tools: Sequence[Tool]) -> ToolChoice:
    """Read a choice as OpenAI's interfaces and Anthropic's have it.

    ``{"type": "function", "function": {"name": ...}}``, ``{"type": "allowed_tools", "allowed_tools": {"mode": ...,
    "tools": [...]}}``, ``{"type": "tool", "name": ...}``, ``{"type": "any"}``.
    """
    kind = value.get("type", "function")
    if kind == "allowed_tools":
        inner = value.get("allowed_tools", value)
        mode = _mode(inner.get("mode", "auto")) if isinstance(inner, Mapping) else None
        listed = inner.get("tools") if isinstance(inner, Mapping) else None
        if mode in ("auto", "required") and isinstance(listed, Sequence) and listed:
            return ToolChoice(mode, tuple(_name_in(tool, value, tools) for tool in listed))
    elif kind in ("function", "tool"):
        return ToolChoice("named", (_name_in(value, value, tools),))
    elif (mode := _mode(kind)) is not None:
        return ToolChoice(mode)
    raise _invalid_choice(value, tools)


def _name_in(thing: object, value: object, tools: Sequence[Tool]) -> str:
    """Return the name in a dict that names a function."""
    inner = thing.get("function", thing) if isinstance(thing, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise _invalid_choice(value, tools)
    return name


def _invalid_choice(value: object, tools: Sequence[Tool]) -> InvalidRequestError:
    known = ", ".join(repr(tool.name) for tool in tools[:20]) or "none"
    return InvalidRequestError(
        f"tool_choice={shown(value)} is not valid: it must be 'none', 'auto', 'required', the name of a tool or a list "
        f"of names (there are: {known})",
        param="tool_choice",
    )


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="tools")


def _from_dict(thing: Mapping[str, Any]) -> Tool:
    kind = thing.get("type", "function")
    if kind == "custom" and "input_schema" in thing:  # Anthropic's word for a function; OpenAI's custom tools take text
        kind = "function"
    if kind != "function":
        raise _invalid(f"a tool of type {shown(kind)} can't be used: only functions can")
    inner = thing.get("function", thing)
    if not isinstance(inner, Mapping) or "name" not in inner:
        raise _invalid("a tool needs a name: {'type': 'function', 'function': {'name': ..., 'parameters': {...}}}")
    strict = inner.get("strict")
    return Tool(
        name=inner["name"],
        description="" if inner.get("description") is None else inner["description"],
        parameters=_parameters_of(thing, inner),
        strict=True if strict is None else strict,
    )


def _parameters_of(thing: Mapping[str, Any], inner: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema in ``inner``, which is ``thing`` or what it has under 'function'.

    Other keys than Tool's are left to whoever wrote them: MCP has several. But a model that is shown no parameters
    calls without arguments, so a misspelling is refused.
    """
    name = shown(inner["name"])
    given = [key for key in _SCHEMA_KEYS if inner.get(key) is not None]
    if len(given) > 1:
        raise _invalid(f"the tool {name} has both {given[0]!r} and {given[1]!r}: give one of them")
    for key in _SCHEMA_KEYS if inner is not thing else ():
        if thing.get(key) is not None:
            raise _invalid(f"the tool {name} has {key!r} beside 'function': it belongs inside, where the name is")
    for key, value in inner.items():
        meant = None if key in _KNOWN_KEYS or value is None else _meant(str(key), value, has_schema=bool(given))
        if meant is not None:
            raise _invalid(f"the tool {name} has {shown(key)}, which no tool has: if it is {meant!r}, write that")
    return inner[given[0]] if given else {}


def _meant(key: str, value: object, *, has_schema: bool) -> str | None:
    """Return the key that this unknown one seems to be a misspelling of; None if there is none."""
    if _RESULT_KEY.match(key):
        return None
    near = difflib.get_close_matches(key.lower().replace("-", "_"), [known.lower() for known in _KNOWN_KEYS], 1, 0.8)
    if near:
        return next(known for known in _KNOWN_KEYS if known.lower() == near[0])
    if has_schema or not isinstance(value, Mapping):
        return None
    is_schema = value.get("type") == "object" or isinstance(value.get("properties"), Mapping)
    return "parameters" if is_schema or _LIKE_SCHEMA.fullmatch(re.split(r"[_-]|(?<=[a-z])(?=[A-Z])", key)[-1]) else None


def _object_schema(name: str, parameters: object) -> dict[str, Any]:
    if not isinstance(parameters, Mapping):
        raise _invalid(f"the parameters of the tool {name!r} must be a JSON schema (a dict), not {shown(parameters)}")
    try:
        schema: dict[str, Any] = json.loads(spec_of(StructuredOutput(json_schema=parameters, open_objects=True)).text)
    except GrammarError as error:
        raise GrammarError(f"the tool {name!r}: {error}", kind=error.kind, path=error.path, tool=name) from None
    if not schema:
        return dict(_NO_ARGUMENTS)
    if schema.get("type", "object") != "object":
        raise _invalid(
            f"the parameters of the tool {name!r} must be the schema of an object, but their type is "
            f"{shown(schema['type'])}: name each argument under 'properties'"
        )
    return {"type": "object", **schema}


def _run(name: str, function: Callable[..., Any], bound: Mapping[str, Any]) -> Any:
    try:
        return function(**bound)
    except StopIteration as error:
        raise RuntimeError(f"the function of the tool {name!r} raised StopIteration") from error


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
