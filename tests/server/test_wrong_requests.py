"""What is wrong with a request, by each of OpenAI's interfaces: 400 and the field, streamed or not, others unharmed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from aengine.server import create_app
from aengine.server.in_process import streaming_transport
from aengine.testing import FakeAsyncLLM

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
FUNCTION: dict[str, Any] = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
CHAT_TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
TOOL: dict[str, Any] = {"type": "function", **FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}

RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
}
WRONG: list[tuple[str, list[tuple[dict[str, Any], str | None]]]] = [
    (
        "/v1/chat/completions",
        [
            ({"model": "other"}, "model"),
            ({"messages": []}, "messages"),
            ({"temperature": -1}, "temperature"),
            ({"temperature": "warm"}, "temperature"),
            ({"logprobs": "true"}, "logprobs"),
            ({"stream": 1}, "stream"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"colour": 1}, "colour"),
            ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
            ({"messages": [*HELLO, {"role": "tool", "tool_call_id": "x", "content": "3"}]}, "messages[1].tool_call_id"),
            ({"messages": [{"role": "tool", "tool_call_id": [], "content": "3"}]}, "messages[0].tool_call_id"),
            ({"messages": [{"role": "assistant", "tool_calls": 3}, *HELLO]}, "messages"),
            ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {}}]}, *HELLO]}, "messages"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": [CHAT_TOOL], "tool_choice": "colour"}, "tool_choice"),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
            ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "colour"}}}]}, "tools"),
            ({"functions": [{"name": "a"}]}, "functions"),
            ({"audio": {"voice": "x"}}, "audio"),
            ({"modalities": ["audio"]}, "modalities[0]"),
            ({"n": 0}, "n"),
            ({"logit_bias": {"x": 1}}, "logit_bias.x"),
            ({"stop": "\ud800"}, "stop"),
            ({"max_tokens": 10**30}, "max_tokens"),
            ({"seed": 10**30}, "seed"),
            ({"deadline": 10**400}, "deadline"),
            ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_output"),
        ],
    ),
    (
        "/v1/completions",
        [
            ({"prompt": None}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": ""}, "prompt"),
            ({"prompt": [[]]}, "prompt"),
            ({"prompt": [1, "a"]}, "prompt"),
            ({"prompt": [True]}, "prompt"),
            ({"prompt": [[1], [True]]}, "prompt"),
            ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
            ({"prompt": [100_000]}, "prompt"),
            ({"prompt": [10**30]}, "prompt"),
            ({"prompt": ["a"] * 3000}, "prompt"),
            ({"best_of": 3}, "best_of"),
            ({"prompt": ["a"] * 1000, "n": 10}, "n"),
            ({"suffix": "end"}, "suffix"),
            ({"echo": True, "logprobs": 1, "stream": True}, "logprobs"),
            ({"echo": True, "max_tokens": 0, "stream": True}, "max_tokens"),
            ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
            ({"echo": "yes"}, "echo"),
            ({"speculation": 0}, "speculation"),
            ({"prompt_logprobs": 65}, "prompt_logprobs"),
            ({"prompt_logprobs": -1}, "prompt_logprobs"),
            ({"prompt_logprobs": True}, "prompt_logprobs"),
            ({"prompt_logprobs": "1"}, "prompt_logprobs"),
            ({"prompt_logprobs": 1.0}, "prompt_logprobs"),
            ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
            ({"prompt_logprobs": 64, "prompt": [1] * 32_700}, "prompt_logprobs"),
            ({"echo": True, "logprobs": 64, "prompt": [1] * 32_700}, "logprobs"),
            ({"logprobs": 1000}, "logprobs"),
            ({"vllm_xargs": {"x": 1}}, "vllm_xargs"),
            ({"vllm_xargs": [1]}, "vllm_xargs"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"stop": [1]}, "stop"),
            ({"stream_options": {"colour": 1}}, "stream_options.colour"),
            ({"request_id": "ä"}, "request_id"),
            ({"prompt": "a" * 200_000}, None),
        ],
    ),
    (
        "/v1/responses",
        [
            ({"input": []}, "input"),
            ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
            (
                {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
                "input[0].content[0]",
            ),
            ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
            ({"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}, "input[0].call_id"),
            ({"input": [{"type": "function_call", "call_id": 3}]}, "input[0].call_id"),
            ({"input": "a" * 200_000}, None),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"top_logprobs": 100}, "top_logprobs"),
            ({"tools": [{"type": "web_search"}]}, "tools"),
            ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
            (
                {"tools": [TOOL | {"parameters": {"type": "object", "properties": {"a": {"type": "colour"}}}}]},
                "tools.properties.a",
            ),
            ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
            ({"background": True}, "background"),
            ({"conversation": "conv_1"}, "conversation"),
            ({"metadata": {"a": 1}}, "metadata.a"),
            ({"colour": 1}, "colour"),
        ],
    ),
]
CASES = [(path, change, param) for path, cases in WRONG for change, param in cases]


@pytest.mark.parametrize(("path", "change", "param"), CASES, ids=lambda value: str(value)[:50])
async def test_what_is_wrong_is_named(path: str, change: dict[str, Any], param: str | None) -> None:
    """``param``: what the error's begins with."""
    headers = {"content-type": "application/json"}
    async with FakeAsyncLLM("yes") as engine:
        transport = streaming_transport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            for stream in (False, True):
                body = json.dumps(RIGHT[path] | {"stream": stream} | change)  # httpx writes no halves of surrogates
                answer = await client.post(path, content=body, headers=headers)
                assert answer.status_code == (404 if "model" in change else 400), answer.text
                assert str(answer.json()["error"]["param"]).startswith(str(param)), answer.text
            assert engine.statistics().num_running == 0
            right = await client.post(path, json=RIGHT[path])
            assert right.status_code == 200 and "yes" in right.text
