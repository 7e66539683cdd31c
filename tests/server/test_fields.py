"""Fields of all bodies: null means not given, and errors name the field that was sent."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, ForwardRef, Literal, Union, get_args, get_origin

import httpx
import pytest
from pydantic import BaseModel

from aengine.server import create_app
from aengine.server.anthropic.requests import CountBody, MessagesBody, OtherBlock
from aengine.server.in_process import streaming_transport
from aengine.server.openai.embeddings import EmbeddingBody, RerankBody, ScoreBody
from aengine.server.openai.requests import (
    Body,
    ChatBody,
    CompletionBody,
    StructuredOutputsBody,
)
from aengine.server.openai.responses.body import ResponseBody
from aengine.server.openai.tokens import DetokenizeBody, TokenizeBody
from aengine.testing import FakeAsyncLLM

HELLO = [{"role": "user", "content": "hello"}]
ANTHROPIC = {"model": "fake", "messages": HELLO, "max_tokens": 4}
RIGHT: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": HELLO}),
    "/v1/completions": (CompletionBody, {"prompt": "hello"}),
    "/v1/responses": (ResponseBody, {"input": "hello"}),
    "/v1/responses/input_tokens": (ResponseBody, {"input": "hello"}),
    "/v1/messages": (MessagesBody, ANTHROPIC),
    "/v1/messages/count_tokens": (CountBody, {"model": "fake", "messages": HELLO}),
    "/tokenize": (TokenizeBody, {"prompt": "hello"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
    "/v1/embeddings": (EmbeddingBody, {"input": "hello"}),
    "/v1/rerank": (RerankBody, {"query": "a", "documents": ["b"]}),
    "/v1/score": (ScoreBody, {"text_1": "a", "text_2": "b"}),
}
each_path = pytest.mark.parametrize("path", RIGHT)


def models_of(kind: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models that a value of this type may be made of."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
        for field in kind.model_fields.values():
            yield from models_of(field.annotation)
    for part in get_args(kind):
        yield from models_of(part)


ALL = sorted(
    {model for body, _ in RIGHT.values() for model in models_of(body)} - {OtherBlock}, key=lambda m: m.__name__
)


@cache
def least(model: type[BaseModel]) -> dict[str, Any]:
    """A value of the model with nothing but what it must have."""
    needed = {field.alias or name: field for name, field in model.model_fields.items() if field.is_required()}
    return {name: value_of(field.annotation) for name, field in needed.items()}


def value_of(kind: Any) -> Any:
    if get_origin(kind) is Annotated:
        return value_of(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):
        return value_of(get_args(kind)[0])
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return least(kind)
    if get_origin(kind) is list:
        return [value_of(get_args(kind)[0])]
    assert not isinstance(kind, ForwardRef)
    return {str: "a", int: 1, bool: True}.get(kind, {})


def test_the_walk_finds_the_nested_ones() -> None:
    assert {"StreamOptions", "JSONSchemaFormat", "Reasoning", "TextFormat", "ToolBody", "ThinkingBody"} <= {
        model.__name__ for model in ALL
    }


@pytest.mark.parametrize("model", ALL, ids=lambda model: model.__name__)
def test_null_means_not_given(model: type[BaseModel]) -> None:
    without = model.model_validate(least(model))
    for name, field in model.model_fields.items():
        if not field.is_required():
            given = least(model) | {field.alias or name: None}
            assert model.model_validate(given) == without, name
            assert model.model_validate(given).model_fields_set == without.model_fields_set, name
    names = [field.alias or name for name, field in model.model_fields.items() if not field.is_required()]
    assert model.model_validate(least(model) | dict.fromkeys(names)) == without


NULLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"encoding_format": None, "dimensions": None, "user": None}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "x", "name": None},
                *HELLO,
                {"role": "assistant", "content": None, "refusal": None, "audio": None, "function_call": None}
                | {
                    "reasoning_content": None,
                    "tool_calls": [
                        {"id": "c", "type": "function"}
                        | {"function": {"name": "add", "arguments": "{}"}, "index": None}
                    ],
                },
                {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "c", "name": None},
                {"role": "tool", "content": None, "tool_call_id": "c"},
                {"role": "assistant", "content": "3", "tool_calls": None},
                {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": None}]},
            ],
            "tools": [
                {"type": "function", "strict": None}
                | {"function": {"name": "add", "description": None, "parameters": None, "strict": None}}
            ],
        },
    ),
    ("/tokenize", {"prompt": "a", "messages": None, "tools": None, "return_token_strs": None}),
    (
        "/v1/responses",
        {
            "input": [
                {"type": None, "role": "user", "content": "a", "id": None, "status": None},
                {"type": "reasoning", "id": None, "summary": [], "content": None, "encrypted_content": None},
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "id": None, "status": None},
                {"type": "function_call_output", "call_id": "c", "output": "1", "id": None, "status": None},
                {"role": "user", "content": [{"type": "input_text", "text": "b", "annotations": None}], "phase": None},
            ],
            "tools": [{"type": "function", "name": "add", "description": None, "parameters": None, "strict": None}],
            "text": {"format": {"type": "text", "name": None}, "verbosity": None},
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None, "citations": None}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}, "caller": None}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": None, "is_error": None}],
                },
            ],
            "tools": [
                {"name": "add", "input_schema": {"type": "object"}, "description": None, "type": None, "strict": None}
            ],
            "tool_choice": {"type": "auto", "name": None, "disable_parallel_tool_use": None},
            "output_config": {"effort": None, "format": None},
        },
    ),
]


@pytest.mark.parametrize(("path", "change"), NULLS, ids=lambda value: value if isinstance(value, str) else "")
async def test_nulls_inside_are_taken(path: str, change: dict[str, Any]) -> None:
    """Of what is no model: messages, items, tools."""
    async with FakeAsyncLLM("yes") as engine, client_of(engine) as client:
        for stream in (False, True) if "stream" in RIGHT[path][0].model_fields else (None,):
            answer = await client.post(path, json=RIGHT[path][1] | change | ({"stream": stream} if stream else {}))
            assert answer.status_code == 200, answer.text


NOTHING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"logprobs": False, "top_logprobs": 0, "logit_bias": {}, "stop": []}),
    ("/v1/chat/completions", {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": []}),
    ("/v1/completions", {"best_of": 1, "suffix": "", "echo": False, "logit_bias": {}, "stop": []}),
    ("/v1/responses", {"tools": [], "include": [], "top_logprobs": 0, "metadata": {}, "background": False}),
]


@pytest.mark.parametrize(("path", "change"), NOTHING, ids=lambda value: value if isinstance(value, str) else "")
async def test_fields_that_ask_for_nothing_are_taken(path: str, change: dict[str, Any]) -> None:
    async with FakeAsyncLLM("yes") as engine, client_of(engine) as client:
        answer = await client.post(path, json=RIGHT[path][1] | change)
        assert answer.status_code == 200, answer.text


WRONG: list[Any] = [-5, 0, 10**30, 0.5, "", "\ud800", [""], [10**30], {"": ""}, {"a": 1}, [{}], {"type": "x"}, True]


@each_path
async def test_errors_name_the_field_that_was_sent(path: str) -> None:
    """Each field with each of the values, whatever finds it wrong: pydantic, the server or the engine."""
    kind, right = RIGHT[path]
    num_errors = 0
    async with FakeAsyncLLM("yes", max_model_len=64) as engine, client_of(engine) as client:
        for name, field in kind.model_fields.items():
            sent = field.alias or name
            for value in WRONG:
                if isinstance(value, float) and "deadline" in sent:
                    continue
                base = {} if (path, sent) == ("/tokenize", "messages") else right  # in place of the prompt
                body = json.dumps(base | {sent: value})
                answer = await client.post(path, content=body, headers={"content-type": "application/json"})
                if answer.status_code not in (400, 404):
                    assert answer.status_code in (200, 504), answer.text
                    continue
                error, num_errors = answer.json()["error"], num_errors + 1
                if "param" in error and error["param"] is not None:
                    assert error["param"].startswith(sent), (value, error)
                if error.get("code") not in ("context_length_exceeded", "model_not_found"):
                    assert sent in error["message"] or error.get("param"), (sent, value, error)
                for other in ENGINES_OWN - kind.model_fields.keys():
                    assert not re.search(rf"\b{other}=", error["message"]), (sent, value, error)
    assert num_errors > 10 or path in ("/detokenize",)


ENGINES_OWN = {"stop", "max_tokens", "logprobs", "inputs", "structured_output", "ids", "messages", "text"}


@pytest.mark.parametrize(
    ("path", "change", "param", "words"),
    [
        ("/v1/messages", {"stop_sequences": [""]}, None, "stop_sequences="),
        ("/v1/messages", {"stop_sequences": ["stop="] * 100}, None, "stop_sequences=['stop=', 'stop='"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0"),
        ("/v1/responses", {"min_tokens": 5, "max_output_tokens": 3}, "min_tokens", "at most max_output_tokens, "),
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens=0"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens", "max_tokens=0"),
        ("/v1/chat/completions", {"structured_outputs": {}}, "structured_outputs", "structured_outputs needs"),
        ("/v1/completions", {"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "needs"),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": {"type": "no"}}}, None, "type"),
        ("/v1/embeddings", {"input": [[]]}, "input", "input"),
        ("/v1/rerank", {"documents": [""] * 5000}, "documents", ""),
    ],
)
async def test_names_and_words(path: str, change: dict[str, Any], param: str | None, words: str) -> None:
    async with FakeAsyncLLM("yes", max_model_len=64) as engine, client_of(engine) as client:
        answer = await client.post(path, json=RIGHT[path][1] | change)
        error = answer.json()["error"]
        assert answer.status_code == 400 and words in error["message"], error
        assert param is None or error["param"] in (param, None), error


async def test_stream_options_are_for_streams() -> None:
    async with FakeAsyncLLM("yes") as engine, client_of(engine) as client:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            body = RIGHT[path][1] | {"stream_options": {}}
            for stream in (False, None):
                answer = await client.post(path, json=body | {"stream": stream})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")
            assert (await client.post(path, json=body | {"stream": True})).status_code == 200
            assert (await client.post(path, json=body | {"stream_options": None})).status_code == 200


@pytest.mark.parametrize("options", [{"include_usage": False, "continuous_usage_stats": True}, {}, None])
async def test_no_usage_unless_it_is_included(options: dict[str, bool] | None) -> None:
    async with FakeAsyncLLM("yes") as engine, client_of(engine) as client:
        for path in ("/v1/chat/completions", "/v1/completions"):
            answer = await client.post(path, json=RIGHT[path][1] | {"stream": True, "stream_options": options})
            assert answer.status_code == 200 and '"usage"' not in answer.text


async def test_the_fingerprint_is_that_of_the_server() -> None:
    found = set()
    async with FakeAsyncLLM("yes") as engine, client_of(engine) as client:
        for path in ("/v1/chat/completions", "/v1/completions"):
            found.add((await client.post(path, json=RIGHT[path][1])).json()["system_fingerprint"])
            answer = await client.post(path, json=RIGHT[path][1] | {"stream": True})
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            found |= {json.loads(event)["system_fingerprint"] for event in events}
    (fingerprint,) = found
    assert fingerprint.startswith("fp_")


def client_of(engine: FakeAsyncLLM) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=streaming_transport(create_app(engine)), base_url="http://engine")


def test_open_objects_are_a_field_of_each_schema_and_strict_closes_them() -> None:
    schema = {"properties": {"a": {}}}
    given = {"schema": schema, "open_objects": True}
    for extra, is_open in (
        ({}, True),
        ({"strict": False}, True),
        ({"strict": True}, False),
        ({"open_objects": None}, False),
    ):
        asked = {"type": "json_schema", "json_schema": {**given, **extra}}
        wanted = ChatBody.model_validate({"messages": [], "response_format": asked}).shape()
        assert wanted is not None and wanted.open_objects is is_open
        text = ResponseBody.model_validate(
            {"input": "x", "text": {"format": {"type": "json_schema", **given, **extra}}}
        )
        wanted = text.params().structured_output
        assert wanted is not None and wanted.open_objects is is_open
    body = StructuredOutputsBody.model_validate({"json": schema, "open_objects": True})
    assert body.to_structured_output().open_objects
