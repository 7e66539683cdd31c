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
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import pass_environment

from .template_bounds import (
    BOUNDED_METHODS,
    check_lengths,
    check_operation,
    check_percent,
    check_replace,
    check_text_method,
    counted,
    counted_filter,
    counted_test,
    cut,
    spend,
    spend_on,
    spend_on_call,
    spend_on_length,
    weighed,
)
from .traced_text import TracedText, concatenated, origin_within, percent, text_of, traced

_TEXT_FILTERS = (
    "capitalize", "center", "e", "escape", "filesizeformat", "forceescape", "format", "indent", "lower", "pprint",
    "safe", "string", "striptags", "title", "truncate", "upper", "urlencode", "urlize", "wordwrap", "xmlattr",
)  # fmt: skip
"""Filters that make a text, without those that are written anew below."""


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _shown(value: Any) -> str:
    """Return `text_of` the value; counts the size of lists and mappings against the template's bounds first."""
    if not isinstance(value, str):
        spend_on(value)
    return text_of(value)


def _joined(parts: Iterable[str]) -> TracedText:
    texts = list(parts)
    check_lengths(map(len, texts))
    return concatenated(texts)


_COMPARING_TESTS = (
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower", "lt",
    "ne", "upper",
)  # fmt: skip


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
    concat = staticmethod(_joined)
    intercepted_binops = frozenset(["%", "+", "*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock], finalize=_shown
        )
        self.filters |= {name: _followed(self.filters[name]) for name in _TEXT_FILTERS}
        self.filters |= {"join": _join, "replace": _replace, "tojson": to_json, "trim": _trim}
        self.filters = {name: counted_filter(name, make) for name, make in self.filters.items()}
        self.filters |= {"counted": counted, "weighed": weighed, "cut": cut}
        self.tests |= {name: counted_test(cast(Any, self.tests[name])) for name in _COMPARING_TESTS}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]  # random text of any length

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Compile a template whose loops count their rounds; comparisons, literals and slices their values."""
        for node in source.find_all((nodes.For, nodes.Compare, nodes.List, nodes.Tuple, nodes.Pair, nodes.Getitem)):
            match node:
                case nodes.For():
                    node.iter = _filtered(node.iter, "counted")
                case nodes.Compare():
                    node.expr = _filtered(node.expr, "weighed")
                    for operand in node.ops:
                        operand.expr = _filtered(operand.expr, "weighed")
                case nodes.List() | nodes.Tuple(ctx="load"):
                    node.items = [_filtered(item, "weighed") for item in node.items]
                case nodes.Pair():
                    node.key, node.value = _filtered(node.key, "weighed"), _filtered(node.value, "weighed")
                case nodes.Getitem(arg=nodes.Slice()):
                    node.node = _filtered(node.node, "cut")
        return super()._generate(source, *args, **kwargs)

    def joined(self, values: Iterable[Any]) -> TracedText:
        return _joined(map(_shown, values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            check_percent(left, right)
            return percent(left, right)
        check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a function or a method. The names are Jinja's, since any may be an argument's."""
        spend_on_call(__obj, (*args, *kwargs.values()))
        if isinstance(__obj, LoopContext) and args:  # a recursive loop goes down
            args = (counted(args[0]), *args[1:])
        result = super().call(__context, __obj, *args, **kwargs)
        spend_on_length(result)
        return result

    def getattr(self, obj: Any, attribute: str) -> Any:
        if attribute in BOUNDED_METHODS and isinstance(obj, str | int):
            return functools.partial(self._bounded_method, obj, attribute)
        if isinstance(obj, str):
            if attribute in ("format", "format_map"):
                return functools.partial(self._format if attribute == "format" else self._format_map, obj)
            if attribute == "encode":  # bytes can't be followed
                return self.unsafe_undefined(obj, attribute)
            if attribute == "join":
                return functools.partial(_join_by, obj)
            if type(obj) is str and hasattr(TracedText, attribute):
                obj = TracedText(obj)  # its arguments may be traced
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            spend_on(argument)
        if isinstance(obj, str) and isinstance(argument, str):
            return self.getattr(obj, argument)
        return super().getitem(obj, argument)

    def _bounded_method(self, obj: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        check_text_method(name, obj, args, kwargs)
        return getattr(TracedText(obj, getattr(obj, "spans", ())) if isinstance(obj, str) else obj, name)(
            *args, **kwargs
        )

    def _format(self, template: str, *args: Any, **kwargs: Any) -> TracedText:
        """Return ``template.format(...)``. With nothing but {} in it, character by character."""
        pieces = TracedText(template, getattr(template, "spans", ())).split("{}")
        if len(pieces) == len(args) + 1 and not kwargs and not any(brace in "".join(pieces) for brace in "{}"):
            return concatenated(text for pair in zip(pieces, [*map(text_of, args), ""], strict=True) for text in pair)
        text = _Formatter(self).vformat(str.__str__(template), args, kwargs)
        return traced(text, origin_within((template, args, kwargs)))

    def _format_map(self, template: str, values: Mapping[str, Any]) -> TracedText:
        return self._format(template, **values)


class _Formatter(SandboxedFormatter):
    """``str.format`` without attributes that lead out of the sandbox, and without great widths."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{6}", format_spec):
            raise TemplateError("the template was stopped: it formats a text to a great width")
        spend_on(value)
        text = super().format_field(value, format_spec)
        spend(1 + len(text) // 256)
        return text


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


def _join_by(separator: str, values: Iterable[Any]) -> TracedText:
    texts = list(counted(values))
    check_lengths([len(separator) * len(texts), *(len(text) for text in texts if isinstance(text, str))])
    return TracedText(separator, getattr(separator, "spans", ())).join(texts)


@pass_environment
def _join(environment: TemplateEnvironment, value: Iterable[Any], d: Any = "", attribute: Any = None) -> TracedText:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    separator, texts = text_of(d), [_shown(part) for part in counted(value)]
    check_lengths([len(separator) * len(texts), *map(len, texts)])
    return TracedText(separator, getattr(separator, "spans", ())).join(texts)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> TracedText:
    text, old, new = text_of(s), text_of(old), text_of(new)
    check_replace(text, old, new)
    return TracedText(text, getattr(text, "spans", ())).replace(old, new, -1 if count is None else count)


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
