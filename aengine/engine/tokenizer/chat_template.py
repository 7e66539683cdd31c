"""Chat messages to prompt text, by the Jinja template that comes with a model.

The environment is Hugging Face's (`template_environment.py`), with the special tokens by role (``bos_token``, ...).
Whatever is written in messages, tools and the caller's own variables is traced (`traced_text.py`), so that the prompt
tells the template's own markers from those that a message has in its text.

Messages come as OpenAI writes them, and templates differ in how they read an assistant's: arguments of calls as a
mapping or as text, calls only where the content is none, or no content but a string. They are rendered so that either
kind gets what it reads; arguments that are no object, as of a call that was cut off, also where only an object will do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...errors import InvalidRequestError
from .messages import WRITTEN_BY_MODEL, Messages
from .traced_text import Origin, TracedText, traced

if TYPE_CHECKING:
    import jinja2

_ROLE = re.compile(r"[\w.-]*")
"""A role is the caller's own word, and may be a part of a marker: "<|" + role + "|>". Others are text as any."""


class ChatTemplate:
    """One template. Compiled at its first use, or by `compile`; may be rendered from several threads."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], hides: Callable[[str], bool] | None = None
    ) -> None:
        """``hides``: whether a text is hidden from the template in messages of others than the assistant."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._hides = hides

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        trace: bool = True,
    ) -> TracedText:
        """Return the prompt; not ``trace``: as if all of it were the template's own.

        Raises InvalidRequestError when the template can't show the messages, or the last one can't be continued.
        """
        shown = [_as_templates_read(message) for message in messages]
        last = len(messages) - 1 if continue_final_message else None
        theirs = Origin(hides=self._hides if trace else None)
        variables = {"documents": None, **(extra or {}), "tools": list(tools) if tools else None}

        def rendered(messages: list[dict[str, Any]]) -> TracedText:
            from .template_bounds import bounded

            with bounded(len(messages)):
                text = self._compiled.render(
                    {
                        **self._special_tokens,
                        **_traced_within(variables, theirs),
                        "add_generation_prompt": add_generation_prompt,
                        "messages": [_traced_message(m, theirs, i == last) for i, m in enumerate(messages)],
                    }
                )
            assert isinstance(text, TracedText)
            return text

        try:
            text = rendered(shown)
        except Exception as error:  # a template is a program: it may raise anything
            for others in _other_forms(shown):
                with suppress(Exception):
                    text = rendered(others)
                    break
            else:
                raise InvalidRequestError(
                    f"the model's chat template refuses these messages: {error or type(error).__name__}",
                    param="messages",
                ) from error
        if continue_final_message:
            text = _up_to_continued(text)
        return text if trace else TracedText(text.plain())

    def compile(self) -> None:
        """Compile ahead of the first use, which raises what there is to raise."""
        with suppress(Exception):
            _ = self._compiled

    @cached_property
    def _compiled(self) -> jinja2.Template:
        from .template_bounds import check_source
        from .template_environment import TemplateEnvironment

        check_source(self.source)
        return TemplateEnvironment().from_string(self.source)


def _traced_message(message: Mapping[str, Any], theirs: Origin, is_continued: bool) -> dict[str, Any]:
    """Trace all of a message but its role; its own keys are OpenAI's, and stay as they are."""
    own = Origin(is_own=True, is_continued=is_continued)
    is_own = message["role"] == "assistant"
    return {
        key: value
        if key == "role" and _ROLE.fullmatch(value)
        else _traced_within(value, own if is_own and key in WRITTEN_BY_MODEL else theirs)
        for key, value in message.items()
    }


def _traced_within(value: Any, origin: Origin) -> Any:
    if isinstance(value, str):
        return traced(value, origin)
    if isinstance(value, _Arguments):
        return _Arguments(_traced_within(dict(value), origin))
    if isinstance(value, Mapping):
        return {_traced_within(key, origin): _traced_within(item, origin) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_traced_within(item, origin) for item in value]
    return value


def _up_to_continued(text: TracedText) -> TracedText:
    """Cut off what the template puts after the message that goes on."""
    end = max((end for _, end, origin in text.spans if origin.is_continued), default=None)
    if end is None:
        raise InvalidRequestError(
            "the model's chat template does not show the last message, so that it can't be continued",
            param="continue_final_message",
        )
    return text[:end]


class _Arguments(dict[str, Any]):
    """A call's arguments: a mapping for templates that go through it or dump it, JSON where one joins it to a text."""

    def __str__(self) -> str:
        from .template_environment import to_json

        return to_json(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def _as_templates_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message in the form that most templates read.

    The content of an assistant's message that says nothing is None beside calls, "" without. No calls: no such key.
    Parts of a text are one text, a line each, as most templates join nothing.
    """
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


def _with_mapping(call: Any, *, always: bool = False) -> Any:
    """Return the call with its arguments as a mapping; if they are none, as they are, unless ``always``."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_mapping(call["function"], always=always)}
    given = arguments = call.get("arguments")
    if isinstance(given, str):
        try:
            arguments = json.loads(given or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        if not always:
            return call
        arguments = {} if given is None else {"arguments": given}  # shown as the model wrote them
    return {**call, "arguments": _Arguments(arguments)}


def _other_forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages in forms that a template may take where it refuses them as they are."""
    with_objects = [
        {**m, "tool_calls": [_with_mapping(call, always=True) for call in m["tool_calls"]]}
        if isinstance(m.get("tool_calls"), list) and m["role"] == "assistant"
        else m
        for m in messages
    ]
    forms = [messages]
    if with_objects != messages:
        forms.append(with_objects)
        yield with_objects
    for form in forms:
        with_texts = [{**m, "content": ""} if m.get("content", "") is None else m for m in form]
        if with_texts != form:
            yield with_texts
