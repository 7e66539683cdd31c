"""Parameters of a request: how to sample, when to stop, what shape the answer must have; and the options of its call.

stream, generate(prompt, params, output_type=..., **options: Unpack[RequestOptions])
chat, stream_chat(messages, params, output_type=..., **options: Unpack[ChatOptions])
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict

from .errors import InvalidRequestError
from .limits.bounds import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_COMPLETIONS,
    MAX_EXTRA_ARGS,
    MAX_KEEP,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PROCESSORS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from .limits.checks import check_name, size_of
from .limits.values import (
    check_choices,
    checked_integer,
    checked_number,
    choices_of,
    is_unicode,
    not_valid,
    refuses_unknown_names,
    shown,
    unknown_name,
)
from .settings import described

__all__ = [
    "CallOptions",
    "ChatOptions",
    "GenerateOptions",
    "OnUnsupported",
    "Progress",
    "RenderOptions",
    "RequestOptions",
    "SamplingParams",
    "Show",
    "StructuredOutput",
    "chat_options",
    "check_options",
    "check_params",
    "generate_options",
    "request_options",
]

_INT32_MAX = 2**31 - 1
_MAX_DEADLINE = 1e8  # seconds; three years, which every event loop's timers can hold


@refuses_unknown_names
@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A shape that the completion must have. Give exactly one of the first five.

    Raises:
        InvalidRequestError: none or several constraints given, or one of a wrong type.
    """

    json_schema: Mapping[str, Any] | str | bool | None = None
    """JSON that this JSON schema allows; the schema as a mapping or as JSON."""
    regex: str | None = None
    """A text that this regular expression matches as a whole."""
    choice: Sequence[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A text of this grammar, in EBNF or Lark."""
    json_object: bool = False
    """Any JSON object."""

    backend: str = "auto"
    """The library that holds the completion to its shape. "auto": llguidance; or one that a package has added by an
    entry point of the group "aengine.grammar_backends"."""
    on_unsupported: Literal["error", "relax"] = "error"
    """What becomes of a keyword of the schema that can't be held: a GrammarError, or with "relax" a warning on the
    completion."""
    whitespace: Literal["compact", "any"] = "compact"
    """White space of JSON: none but after commas and colons, or any that JSON allows, within bounds."""
    open_objects: bool = False
    """Whether an object of the schema that names properties, and says nothing of others, may have others. By default it
    has none, as if the schema had ``unevaluatedProperties: false`` there."""

    @property
    def is_json(self) -> bool:
        """Whether the completion will be JSON."""
        return self.json_schema is not None or self.json_object

    def __post_init__(self) -> None:
        for name in ("json_object", "open_objects"):
            if not isinstance(getattr(self, name), bool):
                raise not_valid(name, getattr(self, name), "True or False")
        kinds = ("json_schema", "regex", "choice", "grammar")
        given = [name for name in kinds if getattr(self, name) is not None]
        if self.json_object:
            given.append("json_object")
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_output needs exactly one of {', '.join(kinds)} or json_object=True, "
                f"but has {' and '.join(given) or 'none'}",
                param="structured_output",
            )
        asked: object = self.json_schema
        if isinstance(asked, type):
            name = asked.__name__
            raise InvalidRequestError(
                f"json_schema is the class {name}: give output_type={name} instead, or its JSON schema",
                param="json_schema",
            )
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise not_valid(name, value, "a string")
        if self.choice is not None:
            options = self.choice
            is_list = isinstance(options, Collection) and not isinstance(options, str)
            if not is_list or not options or not all(isinstance(c, str) for c in options):
                raise not_valid("choice", options, "a non-empty list of strings")
        if not isinstance(self.backend, str) or not self.backend:
            raise not_valid("backend", self.backend, "the name of a grammar backend")
        check_choices(self, _SHAPE_CHOICES)


_SHAPE_CHOICES = choices_of(StructuredOutput)


class DefaultFloat(float):
    """A value that the caller did not give: a checkpoint's generation_config.json may say another."""

    __slots__ = ()


class DefaultInt(int):
    """An integer that the caller did not give, as `DefaultFloat`."""

    __slots__ = ()


DEFAULT_TYPES = (DefaultFloat, DefaultInt)


@refuses_unknown_names
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling and stopping of one request; names and meanings as OpenAI's and vLLM's.

    Where ``temperature``, ``top_p``, ``top_k``, ``min_p`` or ``repetition_penalty`` is not given, the checkpoint's
    generation_config.json has a say, unless the engine has ``generation_config="none"``. A value that is given is never
    changed, also if it is the default.

    The order in which the parameters act on the logits of a position: ``logit_bias`` and ``min_tokens``;
    ``allowed_token_ids``; ``bad_words``; repetition, frequency and presence penalties; the processors of
    ``extra_args``; ``temperature``; ``top_k``; ``top_p``; ``min_p``.
    ``logprobs`` are those of the model itself, before any of these, unless the engine's ``logprobs_mode`` is another.

    Raises:
        InvalidRequestError: a value of a wrong type or out of range; ``param`` names it.
    """

    max_tokens: int | None = None
    """Most tokens to generate, >= 1. None: until the model ends its answer, at most to the end of its context
    (``max_model_len``). With ``prompt_logprobs`` also 0: none is."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is sampled before this many tokens, and a stop string that is complete by then
    ends nothing."""
    temperature: float = DefaultFloat(1.0)
    """0, or 1e-10 to 10000; 0 is greedy: the likeliest token, whatever top_k, top_p and min_p say. Below 1e-5 it counts
    as 1e-5, at which only tokens whose logits are as good as equal differ from that."""
    top_p: float = DefaultFloat(1.0)
    """Nucleus sampling, 0 < top_p <= 1: the smallest set of likeliest tokens whose probability reaches top_p.
    Holtzman et al. 2020, https://arxiv.org/abs/1904.09751."""
    top_k: int = DefaultInt(0)
    """Only the k likeliest tokens; 0 or -1: all."""
    min_p: float = DefaultFloat(0.0)
    """Only tokens at least min_p times as likely as the likeliest, 0 <= min_p <= 1.
    Nguyen et al. 2024, https://arxiv.org/abs/2407.01082."""
    seed: int | None = None
    """Same seed, same prompt, same tokens: whatever else is in the batch, after a preemption, after a restart.
    -2**63 <= seed < 2**63. None: a fresh one for each request."""
    stop: str | Sequence[str] = ()
    """The completion ends before the first of these strings; they never appear in it. At most 64, of at most 1024
    characters."""
    stop_token_ids: Sequence[int] = ()
    """Ends the completion, besides the model's own end-of-sequence tokens; at most 1024 of them."""
    ignore_eos: bool = False
    """Goes on past end-of-sequence tokens. stop_token_ids still stop."""
    include_stop_str_in_output: bool = False
    """Keeps the stop string at the end of the text."""
    presence_penalty: float = 0.0
    """-2 to 2: subtracted once from the logit of each token already generated."""
    frequency_penalty: float = 0.0
    """-2 to 2: subtracted from a token's logit for each time that it was generated."""
    repetition_penalty: float = DefaultFloat(1.0)
    """0.0001 to 10000: divides positive logits, and multiplies negative ones, of tokens in prompt or completion.
    Keskar et al. 2019, https://arxiv.org/abs/1909.05858."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id to a number added to its logit, -100 to 100; at most 1024 of them."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens, at most 16384 of them; None: all. Without an end-of-sequence token among them a completion
    goes on until max_tokens."""
    bad_words: Sequence[str] = ()
    """The completion has none of these, with or without a blank before: the token that would complete one is not
    sampled. At most 256, of at most 256 characters and 32 tokens."""
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the engine's ``logits_processors``, by name: plain data as each describes it, of 16384 characters as
    JSON. A processor that is not named does nothing to this request."""
    logprobs: int | None = None
    """With each token, the log-probability of it and of this many of the likeliest, 0 to 64. True means 1."""
    prompt_logprobs: int | None = None
    """With each token of the prompt, the log-probability of it and of this many of the likeliest, 0 to 64:
    `Completion.prompt_logprobs`. True means 1. Of at most 2097152 tokens in all, these included. What the prefix cache
    has of the prompt is computed again."""
    n: int = 1
    """How many completions of the same prompt; they share its KV. Seeds are seed, seed + 1, ..."""
    structured_output: StructuredOutput | None = None
    """A shape that the text must have."""
    detokenize: bool = True
    """False: no text, only token ids (stop strings are then refused)."""
    skip_special_tokens: bool = True
    """False: the text shows special tokens, as <|im_end|>."""
    speculation: bool = True
    """False: no tokens are guessed for this request, whatever the engine's setting of that name says."""

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            # Most are left as they are, and a request can't wait for 20 checks. (A copy's defaults are other objects.)
            if value is not _DEFAULTS[name] and type(value) not in DEFAULT_TYPES:
                object.__setattr__(self, name, check(name, value))
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", param="stop")
        if self.max_tokens == 0 and (self.prompt_logprobs is None or self.n > 1 or self.structured_output is not None):
            wanted = (
                f"an integer from 1 to {_INT32_MAX}, or None; or 0 with prompt_logprobs, n=1 and no shape of a text"
            )
            raise not_valid("max_tokens", 0, wanted)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise not_valid("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping, as out of a JSON body. Raises InvalidRequestError naming an unknown key."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidRequestError(unknown_name(name, known), param=str(name))
        return cls(**values)

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with some values changed, checked like a new one."""
        return replace(self, **changes)


StructuredOutput.__doc__ = described(StructuredOutput.__doc__, StructuredOutput)
SamplingParams.__doc__ = described(SamplingParams.__doc__, SamplingParams)


def _stop_strings(param: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    wanted = f"a string of 1 to {MAX_STOP_CHARACTERS} characters, or a list of at most {MAX_STOP_STRINGS} of them"
    if not isinstance(strings, Sequence) or len(strings) > MAX_STOP_STRINGS:
        raise not_valid(param, value, wanted)
    if not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARACTERS for s in strings):
        raise not_valid(param, value, wanted)
    if not all(map(is_unicode, strings)):
        raise not_valid(param, value, "valid Unicode: it has a lone surrogate")
    return tuple(strings)


def _token_ids(param: str, value: object, most: int = MAX_STOP_TOKEN_IDS) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > most:
        raise not_valid(param, value, f"a list of at most {most} token ids")
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= _INT32_MAX:  # quick, for thousands
        return tuple(value)
    return tuple(
        checked_integer(param, v, 0, _INT32_MAX, f"a list of token ids, each from 0 to {_INT32_MAX}") for v in value
    )


def _allowed_token_ids(param: str, value: object) -> tuple[int, ...] | None:
    token_ids = None if value is None else _token_ids(param, value, MAX_ALLOWED_TOKEN_IDS)
    if token_ids == ():
        raise not_valid(param, value, "a list of one token id at least, or None for all")
    return token_ids


def _bad_words(param: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    wanted = f"a list of at most {MAX_BAD_WORDS} words, each of 1 to {MAX_BAD_WORD_CHARACTERS} characters"
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > MAX_BAD_WORDS:
        raise not_valid(param, value, wanted)
    if not all(isinstance(word, str) and word.strip() and len(word) <= MAX_BAD_WORD_CHARACTERS for word in value):
        raise not_valid(param, value, f"{wanted}, not all of them blanks")
    if not all(map(is_unicode, value)):
        raise not_valid(param, value, "valid Unicode: it has a lone surrogate")
    return tuple(value)


def _logit_bias(param: str, value: object) -> dict[int, float]:
    wanted = f"a mapping of at most {MAX_LOGIT_BIAS} token ids to numbers from -100 to 100"
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_LOGIT_BIAS:
        raise not_valid(param, value, wanted)
    bias: dict[int, float] = {}
    for key, number in value.items():
        # JSON has only string keys, and OpenAI's clients send them so.
        token_id = int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= 10 else key
        bias[checked_integer(param, token_id, 0, _INT32_MAX, wanted)] = checked_number(param, number, -100, 100, wanted)
    return bias


def _extra_args(param: str, value: object) -> dict[str, Any]:
    """Return a copy of what is plain data, with lists for tuples."""
    if value is None:
        return {}
    wanted = f"a mapping of at most {MAX_PROCESSORS} names to plain data, of {MAX_EXTRA_ARGS} characters as JSON"
    if isinstance(value, Mapping) and len(value) <= MAX_PROCESSORS and all(isinstance(name, str) for name in value):
        try:
            size = size_of(value, MAX_EXTRA_ARGS)
            text = json.dumps(dict(value), allow_nan=False) if size <= MAX_EXTRA_ARGS else ""
        except (TypeError, ValueError, RecursionError):  # no plain data, NaN, an integer of thousands of digits
            text = ""
        if 0 < len(text) <= MAX_EXTRA_ARGS:
            copy: dict[str, Any] = json.loads(text)
            return copy
    raise not_valid(param, value, wanted)


def _temperature(param: str, value: object) -> float:
    """Return the temperature if it is 0, or if a float32 logit can be divided by it without becoming infinite."""
    wanted = "0, or a number from 1e-10 to 10000"
    number = checked_number(param, value, 0, 1e4, wanted)
    return number and checked_number(param, value, 1e-10, 1e4, wanted)


def _boolean(param: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise not_valid(param, value, "True or False")
    return value


def _num_logprobs(param: str, value: object) -> int | None:
    if value is None or value is False:
        return None
    wanted = f"an integer from 0 to {MAX_LOGPROBS}, or None"
    return checked_integer(param, 1 if value is True else value, 0, MAX_LOGPROBS, wanted)


def _structured(param: str, value: object) -> StructuredOutput | None:
    if value is None or isinstance(value, StructuredOutput):
        return value
    raise not_valid(param, value, "a StructuredOutput")


_CHECKS: dict[str, Any] = {
    "max_tokens": lambda p, v: (
        None if v is None else checked_integer(p, v, 0, _INT32_MAX, f"an integer from 1 to {_INT32_MAX}, or None")
    ),
    "min_tokens": lambda p, v: checked_integer(p, v, 0, _INT32_MAX, f"an integer from 0 to {_INT32_MAX}"),
    "temperature": _temperature,
    "top_p": lambda p, v: checked_number(p, v, 0, 1, "a number above 0 and at most 1", open_low=True),
    "top_k": lambda p, v: max(
        0, checked_integer(p, v, -1, _INT32_MAX, f"an integer from 1 to {_INT32_MAX}, or 0 or -1 for all tokens")
    ),
    "min_p": lambda p, v: checked_number(p, v, 0, 1, "a number from 0 to 1"),
    "seed": lambda p, v: None if v is None else checked_integer(p, v, -(2**63), 2**63 - 1, "a 64-bit integer, or None"),
    "stop": _stop_strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "include_stop_str_in_output": _boolean,
    "presence_penalty": lambda p, v: checked_number(p, v, -2, 2, "a number from -2 to 2"),
    "frequency_penalty": lambda p, v: checked_number(p, v, -2, 2, "a number from -2 to 2"),
    "repetition_penalty": lambda p, v: checked_number(p, v, 1e-4, 1e4, "a number from 0.0001 to 10000"),
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "bad_words": _bad_words,
    "extra_args": _extra_args,
    "logprobs": _num_logprobs,
    "prompt_logprobs": _num_logprobs,
    "n": lambda p, v: checked_integer(p, v, 1, MAX_COMPLETIONS, f"an integer from 1 to {MAX_COMPLETIONS}"),
    "structured_output": _structured,
    "detokenize": _boolean,
    "skip_special_tokens": _boolean,
    "speculation": _boolean,
}

_DEFAULTS = {f.name: f.default for f in fields(SamplingParams)}


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
    lora: str | None
    """The adapter with which the request is computed, one of the setting `loras` or of `AsyncLLM.add_lora`."""
    tenant: str | None
    """Who asks: tenants get fair shares of the engine (docs/tenants.md)."""
    keep: float | None
    """Seconds after its end for which its KV is kept for a next turn, before KV that nobody asked to keep: 0 to 86400,
    None is 0. No request is kept waiting for that (docs/memory.md)."""
    session_id: str | None
    """The name of what the request is a turn of: what was kept for the turn before is kept while it waits and runs, and
    its own replaces it at its end. Requests of another ``cache_salt`` have other sessions."""


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


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What `RequestOptions` says of one call, whole: the value that goes from the call to the scheduler."""

    on_unsupported: OnUnsupported = "error"
    deadline: float | None = None
    first_token_deadline: float | None = None
    priority: int = 0
    request_id: str | None = None
    cache_salt: str | None = None
    lora: str | None = None
    tenant: str | None = None
    keep: float | None = None
    session_id: str | None = None

    @property
    def adapter(self) -> str | None:
        """Name of what changes the model's weights for this request."""
        return self.lora


_OF_REQUEST = {field.name for field in fields(CallOptions)}
_SAMPLING_NAMES = {field.name for field in fields(SamplingParams)}
_OF_CHAT = {"on_unsupported"} | (ChatOptions.__annotations__.keys() - _OF_REQUEST)


def request_options(given: RequestOptions) -> CallOptions:
    """Return the options of a request. Raises InvalidRequestError for an unknown name."""
    _check_names(given, _OF_REQUEST)
    return CallOptions(**given)


def chat_options(given: ChatOptions) -> tuple[dict[str, Any], CallOptions]:
    """Return the options of the chat that are given, and those of its request. Raises InvalidRequestError for an
    unknown name."""
    _check_names(given, ChatOptions.__annotations__.keys())
    chat = {name: value for name, value in given.items() if name in _OF_CHAT}
    request: dict[str, Any] = {name: value for name, value in given.items() if name not in _OF_CHAT}
    return chat, CallOptions(**request)  # on_unsupported is the chat's


def generate_options(given: GenerateOptions) -> tuple[CallOptions, Progress, bool]:
    """Return the options of each request, then progress and return_exceptions. Raises InvalidRequestError for an
    unknown name."""
    _check_names(given, GenerateOptions.__annotations__.keys())
    request: dict[str, Any] = {name: value for name, value in given.items() if name in _OF_REQUEST}
    return CallOptions(**request), given.get("progress", False), given.get("return_exceptions", False)


def _check_names(given: Mapping[str, Any], known: Any) -> None:
    for name in given.keys() - known:
        if name in _SAMPLING_NAMES:
            message = f"{name} is a sampling parameter: give it as SamplingParams({name}=...), after the prompt"
        elif name in _OF_CHAT:
            message = f"{name} is an option of chat() and stream_chat() only: call one of these"
        else:
            message = unknown_name(name, {*known, "output_type"})
        raise InvalidRequestError(message, param=name)


def check_params(params: object) -> None:
    """Raise InvalidRequestError for what are no parameters."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams, not {type(params).__name__}", param="params")


def checked_keep(param: str, seconds: object) -> float:
    """Return for how many seconds KV is to be kept. Raises InvalidRequestError."""
    return checked_number(param, seconds, 0, MAX_KEEP, f"a number of seconds from 0 to {MAX_KEEP}")


def check_options(options: CallOptions) -> None:
    """Raise InvalidRequestError for options that no engine can take."""
    for name, limit in (("deadline", options.deadline), ("first_token_deadline", options.first_token_deadline)):
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit <= _MAX_DEADLINE
        ):
            raise InvalidRequestError(
                f"{name} must be a number of seconds above 0 and at most {_MAX_DEADLINE:g}", param=name
            )
    priority: object = options.priority
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
        raise not_valid("priority", priority, "an integer of 64 bits")
    if options.keep is not None:
        checked_keep("keep", options.keep)
    for name in ("request_id", "cache_salt", "lora", "tenant", "session_id"):
        value = getattr(options, name)
        if value is None:
            continue
        if not isinstance(value, str) or not value:
            raise not_valid(name, value, "a non-empty string")
        check_name(name, value)
        if not is_unicode(value):
            cause = "it has half of a surrogate pair, which is no character; remove it, or give another name"
            raise InvalidRequestError(f"{name}={shown(value)} is not valid: {cause}", param=name)
