"""Bodies of OpenAI's requests, with the fields that vLLM has added to them.

A field that is not here is refused by name. Fields that change nothing in an answer of this engine (`Ignored`) are
taken and left alone; those that would, and that it does not have (`Refused`), are refused unless they ask for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ...limits.bounds import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_NAME_CHARACTERS,
    MAX_PROMPTS,
    MAX_TOOLS,
    MAX_VARIABLES,
)
from ...limits.retention import SECONDS, SHORT
from ...limits.values import is_unicode
from ...params import SamplingParams, StructuredOutput
from ..http import HTTPError
from .retention import Caller

RequestId = Annotated[str, Field(pattern=r"^[!-~]{1,128}$", description="1 to 128 visible ASCII characters.")]
T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list in a body. The first of its values that is wrong ends its validation: an error for each takes seconds."""
TokenIds = Many[Annotated[int, Field(strict=True)]]
"""Token ids: true, which Python takes for 1, is none."""
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
NumAlternatives = Annotated[
    int | None, Field(strict=True), BeforeValidator(lambda given: None if given is False else given)
]
"""A number of alternatives. False is none at all, as it is for `SamplingParams`."""
Ignored = Annotated[Any, Field(default=None, description="Taken, and without effect.")]


def _objects(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the JSON schema of a list of objects with these properties."""
    return {"type": "array", "items": {"type": "object", "required": [*required], "properties": properties}}


def _check_unicode(text: str) -> str:
    if not is_unicode(text):
        raise ValueError("it must be valid Unicode, and has a lone surrogate")
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]
"""A text for the model."""


def at_most(most: int, entries: str) -> BeforeValidator:
    """Return what refuses a dict or a list that is too long before any entry is looked at. A prompt of token ids is one
    entry, which the context bounds."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > most and not _is_ids(value):
            raise PydanticCustomError(
                "too_long", "it may have at most {most} {entries}", {"most": most, "entries": entries}
            )
        return value

    return BeforeValidator(check)


def _is_ids(value: dict[Any, Any] | list[Any]) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


Prompts = at_most(MAX_PROMPTS, "texts")
Variables = Annotated[dict[str, Any], at_most(MAX_VARIABLES, "variables")]
"""Variables of the chat template."""
LogitBias = Annotated[dict[int, float], Field(max_length=MAX_LOGIT_BIAS), at_most(MAX_LOGIT_BIAS, "tokens")]


def _refuse(value: Any) -> None:
    if value is not None and value is not False and value != [] and value != {}:
        raise PydanticCustomError("unsupported", "the engine does not have it")


Refused = Annotated[
    Any,
    AfterValidator(_refuse),
    WithJsonSchema({"type": "null", "description": "Not supported: null, or not there at all."}),
]
_STRING = {"type": "string"}
_TEXT_PARTS = _objects("type", "text", type={"const": "text"}, text=_STRING)
_MESSAGES = _objects(
    "role",
    "content",
    role={"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
    content={"anyOf": [_STRING, _TEXT_PARTS, {"type": "null"}]},
    tool_calls={"type": "array", "items": {"type": "object"}},
    tool_call_id=_STRING,
)
_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
        "description": _STRING,
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    },
}
_TOOLS = _objects("type", "function", type={"const": "function"}, function=_FUNCTION)
Messages = Annotated[Many[dict[str, Any]], WithJsonSchema(_MESSAGES)]
"""Chat messages, which the engine checks."""
Tools = Annotated[Many[dict[str, Any]], at_most(MAX_TOOLS, "tools"), WithJsonSchema(_TOOLS)]
"""OpenAI's functions, which the engine checks."""


class Body(BaseModel):
    """Parent of all bodies: no field of another name, no number for a string, and nothing but true and false for a
    boolean. Null for a field that may be left out means that it is: clients send it so."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def leave_out_nulls(cls, given: Any) -> Any:
        """Return the fields that are given; of very many those that there are, and one to refuse."""
        if not isinstance(given, dict):
            return given
        names, optional = _names_of(cls)
        if len(given) > len(names):
            unknown = next(name for name in given if name not in names)
            given = {name: value for name, value in given.items() if name in names or name == unknown}
        if None not in given.values():
            return given
        return {name: value for name, value in given.items() if value is not None or name not in optional}

    @property
    def place_of_shape(self) -> str:
        """The field that says which shape the answer has."""
        return "response_format"

    def field_names(self) -> dict[str, str]:
        """Return the fields of this body for what the engine calls otherwise."""
        return {}


@cache
def _names_of(body: type[Body]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of a body's fields, and of those that may be left out: asked for each block of a message."""
    fields = {field.alias or name: field for name, field in body.model_fields.items()}
    return frozenset(fields), frozenset(name for name, field in fields.items() if not field.is_required())


class StreamOptions(Body):
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_obfuscation: Ignored = None

    @property
    def has_usage_so_far(self) -> bool:
        """Whether each chunk has the usage up to it."""
        return self.include_usage and self.continuous_usage_stats


class PromptCacheOptions(Body):
    ttl: Literal["30m", "12h"] | None = None
    mode: Ignored = None
    comparison_response_id: Ignored = None


class JSONSchemaFormat(Body):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None
    open_objects: StrictBool | None = None
    """aengine's own: as `StructuredOutput.open_objects`; ``strict`` closes them in any case."""

    def to_structured_output(self) -> StructuredOutput:
        return StructuredOutput(
            json_schema=self.schema_,
            on_unsupported="error" if self.strict else "relax",
            open_objects=bool(self.open_objects) and not self.strict,
        )


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None

    @property
    def is_strict(self) -> bool:
        return self.json_schema is not None and bool(self.json_schema.strict)


class StructuredOutputsBody(Body):
    """vLLM's ``structured_outputs``: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: StrictBool | None = None
    open_objects: StrictBool | None = None
    whitespace_pattern: Ignored = None
    disable_any_whitespace: Ignored = None
    disable_additional_properties: Ignored = None

    @property
    def place(self) -> str:
        """The one that is given, as a place in the body."""
        names = ("regex", "choice", "grammar", "json_object")
        given = [name for name in names if name in self.model_fields_set]
        return f"structured_outputs.{(given or ['json'])[0]}"

    def to_structured_output(self) -> StructuredOutput:
        return StructuredOutput(
            json_schema=self.json_,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            json_object=bool(self.json_object),
            open_objects=bool(self.open_objects),
        )


def structured_output_of(
    kind: str, wanted: JSONSchemaFormat | None, structured: StructuredOutputsBody | None, *, param: str, place: str
) -> StructuredOutput | None:
    """Return the shape that a body asks for: by ``param``, which is of that kind and has its schema at ``place``, or by
    vLLM's field. Raises HTTPError 400 and InvalidRequestError."""
    if kind == "text":
        return None if structured is None else structured.to_structured_output()
    if structured is not None:
        raise HTTPError(400, f"give {param} or structured_outputs, not both", param="structured_outputs")
    if kind == "json_object":
        return StructuredOutput(json_object=True)
    if wanted is None or wanted.schema_ is None:
        raise HTTPError(400, f"{place} is missing: the JSON schema of the answer", param=place)
    return wanted.to_structured_output()


_PARAMS = {field.name for field in fields(SamplingParams)}


class ModelBody(Body):
    """A body whose model may be an adapter."""

    _adapter: str | None = PrivateAttr(None)
    _caller: Caller = PrivateAttr(Caller())

    def take_caller(self, caller: Caller) -> None:
        """Note who has sent it."""
        self._caller = caller

    @property
    def adapter(self) -> str | None:
        """The adapter that the body asks for as its model."""
        return self._adapter

    def take_as_adapter(self, name: str) -> None:
        """Note that the model which the body asks for is an adapter."""
        self._adapter = name


class RequestBody(ModelBody):
    """The engine's own options of a request, in all interfaces."""

    priority: int = 0
    cache_salt: str | None = None
    deadline: float | None = None
    first_token_deadline: float | None = None

    @property
    def session(self) -> str | None:
        """What the caller calls the session whose turn it is."""
        return None

    @property
    def wanted_keep(self) -> float | None:
        """Seconds for which its KV is to be kept, if it asks for that."""
        return None

    @property
    def keep(self) -> float | None:
        """Seconds for which its KV is kept."""
        return self._caller.seconds(self.wanted_keep)

    def request_options(self) -> dict[str, Any]:
        """Return them as of `AsyncLLM.stream`."""
        given = {name: getattr(self, name) for name in RequestBody.model_fields} | {"lora": self._adapter}
        return given | self._caller.options(self.cache_salt, self.session, self.wanted_keep)


class SamplingBody(RequestBody):
    """How to sample and when to stop, in all interfaces."""

    model: str | None = None
    stream: StrictBool = False
    temperature: float | None = None
    top_p: float | None = None
    # fields that have no effect here
    user: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    # sessions, see retention.py
    prompt_cache_key: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    # fields of OpenAI's completions and chat completions, and of vLLM's other interfaces
    stop: str | Many[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    # fields of vLLM's
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Many[str] | None = None
    vllm_xargs: Variables | None = None
    ignore_eos: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    speculation: StrictBool | None = None
    request_id: RequestId | None = None
    structured_outputs: StructuredOutputsBody | None = None
    # fields of vLLM that are not supported
    prompt_logprobs: Refused = None
    return_token_ids: Refused = None
    return_tokens_as_token_ids: Refused = None
    truncate_prompt_tokens: Refused = None
    use_beam_search: Refused = None

    @property
    def session(self) -> str | None:
        return self.prompt_cache_key

    @property
    def wanted_keep(self) -> float | None:
        least = None if self.prompt_cache_options is None else self.prompt_cache_options.ttl
        known = [SECONDS[one] for one in (self.prompt_cache_retention, least) if one is not None]
        return max(known, default=None if self.session is None else SHORT)

    def sampling_params(self, **others: Any) -> SamplingParams:
        """Return what is given of the parameters, and ``others``. Raises HTTPError 400 and InvalidRequestError."""
        if not self.stream and getattr(self, "stream_options", None) is not None:
            raise HTTPError(400, "stream_options needs stream: true", code="invalid_value", param="stream_options")
        given = {name: getattr(self, name) for name in _PARAMS & SamplingBody.model_fields.keys()} | others
        given["extra_args"] = self.vllm_xargs
        if given["top_k"] == -1:  # vLLM's "all"
            del given["top_k"]
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def field_names(self) -> dict[str, str]:
        place = self.place_of_shape
        names = {} if self.structured_outputs is None else {"choice": place, "json_schema": "json"}
        return {"structured_output": place.rpartition(".")[0], "extra_args": "vllm_xargs", **names}


class _ChoicesBody(SamplingBody):
    """What completions and chat completions have in common."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    prompt_logprobs: NumAlternatives = None
    response_format: ResponseFormat | None = None
    metadata: Ignored = None
    store: Ignored = None

    @property
    def place_of_shape(self) -> str:
        """The field that says which shape the answer has."""
        shape = self.structured_outputs
        return "response_format.json_schema.schema" if shape is None else shape.place

    def not_streamed(self, num_prompt_logprobs: int | None) -> int | None:
        """Return the number. Raises HTTPError 400 if there is one, and the answer is to be streamed."""
        if self.stream and num_prompt_logprobs is not None:
            param = self.field_names().get("prompt_logprobs", "prompt_logprobs")
            message = "a prompt's log-probabilities are not streamed: ask for a whole answer, without stream: true"
            raise HTTPError(400, message, param=param)
        return num_prompt_logprobs

    def shape(self) -> StructuredOutput | None:
        """Return the shape that the answer has. Raises HTTPError 400 and InvalidRequestError."""
        wanted, place = self.response_format or ResponseFormat(type="text"), "response_format.json_schema.schema"
        schema, structured = wanted.json_schema, self.structured_outputs
        return structured_output_of(wanted.type, schema, structured, param="response_format", place=place)


class CompletionBody(_ChoicesBody):
    """The body of a completion."""

    prompt: Annotated[str | TokenIds | Many[str] | Many[TokenIds], Prompts]
    echo: StrictBool = False
    logprobs: NumAlternatives = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Each prompt."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        prompts: Sequence[str | list[int]] = [prompt] if is_one else prompt
        return prompts

    @property
    def echoed_logprobs(self) -> int | None:
        """The number of alternatives to each token of the prompt that is repeated; None: its text alone is."""
        return self.logprobs if self.echo else None

    def field_names(self) -> dict[str, str]:
        name = "logprobs" if self.echo else "echo"
        return super().field_names() | ({"prompt_logprobs": name} if self.prompt_logprobs is None else {})

    def params(self) -> SamplingParams:
        """Return the sampling parameters of the body. Raises HTTPError 400 and InvalidRequestError."""
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise HTTPError(400, "best_of must be as n: choose the best of n completions yourself", param="best_of")
        if len(self.prompts) * (self.n or 1) > MAX_PROMPTS:
            raise HTTPError(400, f"prompts times n is more than {MAX_PROMPTS}: ask several times", param="n")
        if self.suffix:
            raise HTTPError(
                400, "suffix is not supported: write the model's own fill-in-the-middle prompt", param="suffix"
            )
        if isinstance(self.prompt, list) and not self.prompt:
            raise HTTPError(400, "there is no prompt: give at least one", param="prompt")
        if self.echo and self.max_tokens == 0 and self.stream:
            message = "a prompt alone is not streamed: ask for a whole answer, without stream: true"
            raise HTTPError(400, message, param="max_tokens")
        computed = 0 if self.echo and self.max_tokens == 0 else None  # the prompt again, and nothing more, is an answer
        asked = [number for number in (self.prompt_logprobs, self.echoed_logprobs, computed) if number is not None]
        return self.sampling_params(
            prompt_logprobs=self.not_streamed(max(asked, default=None)),
            max_tokens=16 if self.max_tokens is None else self.max_tokens,  # OpenAI's default
            n=self.n,
            logprobs=self.logprobs,
            structured_output=self.shape(),
        )


class ChatBody(_ChoicesBody):
    """The body of a chat completion."""

    messages: Messages
    max_completion_tokens: int | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    logprobs: StrictBool | None = None
    top_logprobs: TopLogprobs | None = None
    reasoning_effort: str | None = None
    modalities: Many[Literal["text"]] | None = None
    # fields of vLLM's
    chat_template_kwargs: Variables | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    include_reasoning: StrictBool = True
    # fields that have no effect here
    verbosity: Ignored = None
    prediction: Ignored = None
    # fields that are not supported
    audio: Refused = None
    chat_template: Refused = None
    documents: Refused = None
    echo: Refused = None
    function_call: Refused = None
    functions: Refused = None
    moderation: Refused = None
    web_search_options: Refused = None

    def params(self) -> SamplingParams:
        """Return the sampling parameters of the body. Raises HTTPError 400 and InvalidRequestError."""
        if self.top_logprobs and not self.logprobs:
            raise HTTPError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return self.sampling_params(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            n=self.n,
            prompt_logprobs=self.not_streamed(self.prompt_logprobs),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            structured_output=self.shape(),
        )

    def field_names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return super().field_names() | {"max_tokens": limit, "logprobs": "top_logprobs"}

    def chat_options(self) -> dict[str, Any]:
        """Return the options of the chat, as of `AsyncLLM.stream_chat`."""
        options = {
            "tools": self.tools,
            "tool_choice": tool_choice_of(self.tool_choice, self.tools),
            "parallel_tool_calls": self.parallel_tool_calls if self.tools else None,
            "chat_template_kwargs": template_variables(self.chat_template_kwargs, self.reasoning_effort),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "on_unsupported": "error" if self.is_strict else "relax",
        }
        return options | self.request_options()

    @property
    def names_function(self) -> bool:
        """Whether one function is to be called, which ``tool_choice`` names as OpenAI's."""
        choice = self.tool_choice
        return isinstance(choice, dict) and choice.get("type", "function") == "function"

    @property
    def is_strict(self) -> bool:
        """Whether a schema that can't be held as a whole is an error: the caller has asked for it to be strict."""
        return any_strict(self.tools) or (self.response_format is not None and self.response_format.is_strict)


def any_strict(tools: Sequence[dict[str, Any]] | None) -> bool:
    """Return whether one of the tools says ``"strict": true``."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return any(isinstance(function, dict) and function.get("strict") is True for function in functions)


def tool_choice_of(choice: Any, tools: Sequence[dict[str, Any]] | None) -> Any:
    """Return the choice, of a body without tools None. Raises HTTPError 400 if it asks for a call of tools that are not
    there."""
    if tools or choice in (None, "none", "auto"):
        return choice if tools else None
    raise HTTPError(400, "tool_choice asks for a call, and there are no tools", param="tool_choice")


def template_variables(given: dict[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any] | None:
    """Return the chat template's variables, with those by which templates know how much to reason."""
    variables = dict(given or {})
    if reasoning_effort is not None:
        variables.setdefault("reasoning_effort", reasoning_effort)
        if reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables or None
