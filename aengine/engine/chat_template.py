"""Chat messages to prompt text, by the Jinja template that comes with a model.

Templates are written for Hugging Face's environment, so ours offers the same: a sandbox that can change nothing,
trimmed blocks, ``break`` and ``continue``, ``raise_exception``, ``strftime_now``, a ``tojson`` that escapes no HTML,
``{% generation %}``, and the special tokens by role (``bos_token``, ...).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import InvalidRequestError

if TYPE_CHECKING:
    import jinja2

__all__ = ["ChatTemplate"]


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
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._compiled.render(variables)
        except Exception as error:  # a template is a program: it may raise anything
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
