"""Chat messages to prompt text, by the Jinja template that comes with a model.

Templates are written for Hugging Face's environment, so ours offers the same: a sandbox that can change nothing,
trimmed blocks, ``break`` and ``continue``, ``raise_exception``, ``strftime_now``, a ``tojson`` that escapes no HTML,
``{% generation %}``, and the special tokens by role (``bos_token``, ...).

Messages come as OpenAI writes them, and templates differ in how they read an assistant's: arguments of calls as a
mapping or as text, calls only where the content is none, or no content but a string. They are rendered so that either
kind gets what it reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import InvalidRequestError
from ..params import shown as shortly

if TYPE_CHECKING:
    import jinja2

__all__ = ["ChatTemplate"]

_TEXT_PARTS = ("text", "input_text", "output_text")
"""As chat completions name them, and as responses do."""


class ChatTemplate:
    """One template. Compiled at its first use; may be rendered from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Any] | None,
        extra: Mapping[str, Any],
    ) -> str:
        """Raises InvalidRequestError when the messages are none, or none that this template can show."""
        check_messages(messages)
        variables = {
            **self._special_tokens,
            "tools": list(tools) if tools else None,
            "documents": None,
            **extra,
            "add_generation_prompt": add_generation_prompt,
        }
        shown = [_as_templates_read(message) for message in messages]
        with_texts = [{**m, "content": ""} if m.get("content", "") is None else m for m in shown]
        try:
            return self._compiled.render({**variables, "messages": shown})
        except Exception as error:  # a template is a program: it may raise anything
            if with_texts != shown:
                with suppress(Exception):
                    return self._compiled.render({**variables, "messages": with_texts})
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error or type(error).__name__}", param="messages"
            ) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_block()]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self.source)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidRequestError unless these are messages, each with a role."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a list of at least one message", param="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                f"messages[{i}] must be a mapping with role and content, not {type(message).__name__}",
                param="messages",
            )
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"messages[{i}] has no role ('user', 'assistant', 'system', ...)", param="messages"
            )
        _check_content(message.get("content"), f"messages[{i}].content")


def _check_content(content: object, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise InvalidRequestError(
            f"{where} must be a text, a list of text parts, or None, not {type(content).__name__}", param="messages"
        )
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"{where}[{i}] must be {{'type': 'text', 'text': '...'}}, not of type {shortly(kind)}: "
                "the engine reads text only",
                param="messages",
            )


class _Arguments(dict[str, Any]):
    """A call's arguments: a mapping for templates that go through it or dump it, JSON where one joins it to a text."""

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def _as_templates_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's message that says nothing: its content is None beside calls, "" without. No calls: no such key.
    Parts of a text are one text, a line each, as most templates join nothing."""
    shown = dict(message)
    if not isinstance(shown.get("content"), str | None):
        shown["content"] = "\n".join(part["text"] for part in shown["content"])
    if shown["role"] != "assistant":
        return shown
    calls = shown.pop("tool_calls", None)
    if calls:
        shown["tool_calls"] = [_with_mapping(call) for call in calls] if isinstance(calls, Sequence) else calls
    if not shown.get("content"):
        shown["content"] = None if calls else ""
    return shown


def _with_mapping(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_mapping(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return call
    return {**call, "arguments": _Arguments(arguments)} if isinstance(arguments, Mapping) else call


def _generation_block() -> type[jinja2.ext.Extension]:
    """``{% generation %} ... {% endgeneration %}`` marks what the model wrote, for training; here it is its content."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlock(Extension):
        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationBlock


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
