"""The Jinja environment that chat templates run in: Hugging Face's, and one that follows `TracedText`.

Templates are written for Hugging Face's environment, so this one offers the same: a sandbox that can change nothing,
trimmed blocks, ``break`` and ``continue``, ``raise_exception``, ``strftime_now``, a ``tojson`` that escapes no HTML,
and ``{% generation %}``.

Jinja joins, prints and filters strings by functions that know of plain ones only. Each of them is replaced here: what
a template prints, ``~``, ``%``, ``.format``, methods of plain strings with a traced argument, and every filter that
makes a text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_environment

from .traced_text import TracedText, concatenated, origin_within, percent, text_of, traced

__all__ = ["TemplateEnvironment", "to_json"]

_TEXT_FILTERS = (
    "capitalize", "center", "e", "escape", "filesizeformat", "forceescape", "format", "indent", "lower", "pprint",
    "safe", "string", "striptags", "title", "truncate", "upper", "urlencode", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip
"""Filters that make a text, without those that are written anew below."""


class _Compiler(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Compile ``a ~ b``, which Jinja would join to a plain string."""
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _GenerationBlock(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what the model wrote, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment that this file's head describes. It may compile several templates, in several threads."""

    code_generator_class = _Compiler
    concat = staticmethod(concatenated)
    intercepted_binops = frozenset(["%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock], finalize=text_of
        )
        self.filters |= {name: _followed(self.filters[name]) for name in _TEXT_FILTERS}
        self.filters |= {"join": _join, "replace": _replace, "tojson": to_json, "trim": _trim}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def joined(self, values: Iterable[Any]) -> TracedText:
        return concatenated(map(text_of, values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return percent(left, right) if isinstance(left, str) else super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, str):
            if attribute in ("format", "format_map"):
                return functools.partial(self._format if attribute == "format" else self._format_map, obj)
            if attribute == "encode":  # bytes can't be followed
                return self.unsafe_undefined(obj, attribute)
            if type(obj) is str and hasattr(TracedText, attribute):
                obj = TracedText(obj)  # its arguments may be traced
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, str) and isinstance(argument, str):
            return self.getattr(obj, argument)
        return super().getitem(obj, argument)

    def _format(self, template: str, *args: Any, **kwargs: Any) -> TracedText:
        """Return ``template.format(...)``. With nothing but {} in it, character by character."""
        pieces = TracedText(template, getattr(template, "spans", ())).split("{}")
        if len(pieces) == len(args) + 1 and not kwargs and not any(brace in "".join(pieces) for brace in "{}"):
            return concatenated(text for pair in zip(pieces, [*map(text_of, args), ""], strict=True) for text in pair)
        text = SandboxedFormatter(self).vformat(str.__str__(template), args, kwargs)
        return traced(text, origin_within((template, args, kwargs)))

    def _format_map(self, template: str, values: Mapping[str, Any]) -> TracedText:
        return self._format(template, **values)


def _followed(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter: its text, unless traced by itself, comes wholly from what its arguments come from."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        text = make(*args, **kwargs)
        if not isinstance(text, str) or isinstance(text, TracedText):
            return text
        origin = origin_within((args, kwargs))
        return text if origin is None else traced(str.__str__(text), origin)

    return made


@pass_environment
def _join(environment: TemplateEnvironment, value: Iterable[Any], d: Any = "", attribute: Any = None) -> TracedText:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    separator = text_of(d)
    return TracedText(separator, getattr(separator, "spans", ())).join(map(text_of, value))


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> TracedText:
    text = text_of(s)
    return TracedText(text, getattr(text, "spans", ())).replace(
        text_of(old), text_of(new), -1 if count is None else count
    )


def _trim(value: Any, chars: str | None = None) -> str:
    return text_of(value).strip(chars)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON, as chat templates' ``tojson``. What has any of a message in it is the message's as a whole."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    origin = origin_within(value)
    return text if origin is None else traced(text, origin)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
