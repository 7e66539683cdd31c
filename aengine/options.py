"""The options of a request, spelt once for every method that begins one.

stream, generate(prompt, params, output_type=..., **options: Unpack[RequestOptions])
chat, stream_chat(messages, params, output_type=..., **options: Unpack[ChatOptions])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, TypedDict

from .errors import InvalidRequestError
from .params import SamplingParams, unknown_name

__all__ = [
    "ChatOptions",
    "GenerateOptions",
    "OnUnsupported",
    "Progress",
    "RenderOptions",
    "RequestOptions",
    "Show",
    "chat_options",
    "generate_options",
    "request_options",
]

OnUnsupported = Literal["error", "relax"]
Show = Callable[[int, int], object]
Progress = bool | Show


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of `AsyncLLM.stream` and `AsyncLLM.generate`."""

    on_unsupported: OnUnsupported
    """What becomes of a keyword of the output_type's schema that can't be enforced: "error" (the default) is a
    GrammarError, "relax" a warning on the completion. Of a chat: of its tools' schemas, too."""
    deadline: float | None
    """Seconds from now by which the whole completion must be there."""
    first_token_deadline: float | None
    """Seconds from now by which its first token must be there (of n completions: of any)."""
    priority: int
    """Lower is served earlier; equal ones in order of arrival. Default: 0."""
    request_id: str | None
    """A name of yours for `AsyncLLM.abort` and for logs; must not be in use."""
    cache_salt: str | None
    """Prefix KV is shared only among requests of equal salt, so that tenants can't find out about each other's prompts
    by timing."""


class RenderOptions(TypedDict, total=False):
    """How chat messages become a prompt: keyword arguments of `TokenizerView.render`, and part of `ChatOptions`."""

    chat_template_kwargs: Mapping[str, Any] | None
    """Variables of the model's chat template, such as ``{"enable_thinking": False}``."""
    add_generation_prompt: bool | None
    """End the prompt with the beginning of an answer. None: yes, unless continue_final_message is True."""
    continue_final_message: bool
    """The last message, an assistant's, is the beginning of the answer; the completion is what follows it."""


class ChatOptions(RequestOptions, RenderOptions, total=False):
    """The keyword arguments of `AsyncLLM.chat` and `AsyncLLM.stream_chat`."""

    tools: Sequence[Any] | None
    """Python functions, OpenAI's dicts, or `Tool`\\ s."""
    tool_choice: Any
    """"none", "auto" (the default), "required", a tool's name, a list of names (at least one call of these), or a dict
    as OpenAI's."""
    parallel_tool_calls: bool | None
    """Several calls in one answer. None: as the model's chat template allows."""


class GenerateOptions(RequestOptions, total=False):
    """The keyword arguments of `SyncLLM.generate`. A request_id is for one prompt."""

    progress: Progress
    """Show how far a list of prompts is. True: by a line on stderr, if that is a terminal; or a function of yours,
    called in this thread with the numbers of completions that are done and of all."""
    return_exceptions: bool
    """What an error does among a list of prompts. True: it takes the place of its completion. False: the first ends the
    others, and is raised."""


_REQUEST: dict[str, Any] = {
    "on_unsupported": "error",
    "deadline": None,
    "first_token_deadline": None,
    "priority": 0,
    "request_id": None,
    "cache_salt": None,
}
_SAMPLING_NAMES = {field.name for field in fields(SamplingParams)}
_OF_CHAT = {"on_unsupported"} | (ChatOptions.__annotations__.keys() - _REQUEST.keys())


def request_options(given: RequestOptions) -> dict[str, Any]:
    """All options of a request, those that are not given by their defaults. Raises InvalidRequestError."""
    _check_names(given, _REQUEST.keys())
    return {**_REQUEST, **given}


def chat_options(given: ChatOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that are given of the chat, and all of the request that it makes. Raises InvalidRequestError."""
    _check_names(given, ChatOptions.__annotations__.keys())
    chat = {name: value for name, value in given.items() if name in _OF_CHAT}
    request = {name: given.get(name, default) for name, default in _REQUEST.items()}
    return chat, request | {"on_unsupported": "error", "output_type": None}  # those are the chat's


def generate_options(given: GenerateOptions) -> tuple[dict[str, Any], Progress, bool]:
    """All options of each request, then progress and return_exceptions. Raises InvalidRequestError."""
    _check_names(given, GenerateOptions.__annotations__.keys())
    request = {name: given.get(name, default) for name, default in _REQUEST.items()}
    return request, given.get("progress", False), given.get("return_exceptions", False)


def _check_names(given: Mapping[str, Any], known: Any) -> None:
    for name in given.keys() - known:
        if name in _SAMPLING_NAMES:
            message = f"{name} is a sampling parameter: give it as SamplingParams({name}=...), after the prompt"
        elif name in _OF_CHAT:
            message = f"{name} is an option of chat() and stream_chat() only: call one of these"
        else:
            message = unknown_name(name, {*known, "output_type"})
        raise InvalidRequestError(message, param=name)
