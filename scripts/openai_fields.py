"""Writes the tables of docs/openai.md: each field of OpenAI's bodies, and what becomes of it.

    python scripts/openai_fields.py            # write docs/openai.md
    python scripts/openai_fields.py --check    # exit status 1 if it is not what would be written

The fields are those of the package openai; what becomes of them is in the models of the bodies (`Ignored`, `Refused`).
A field of OpenAI's that a body does not have is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aengine.server.openai.requests import ChatBody, CompletionBody  # noqa: E402
from aengine.server.openai.responses.body import ResponseBody  # noqa: E402

PAGE = ROOT / "docs" / "openai.md"
MARK = "<!-- The rest is written by scripts/openai_fields.py: edit the models of the bodies, or NOTES there. -->\n"

SAMPLING = {
    "model": "a name under which the model is served; null: that one; others are 404",
    "stop": "at most 64 (OpenAI: 4)",
    "seed": "same seed, same tokens, whatever else is in the batch",
    "logit_bias": "at most 1024",
    "allowed_token_ids": "at most 16384",
    "bad_words": "at most 256, of at most 32 tokens",
    "vllm_xargs": "arguments of the engine's logits processors, by name",
    "user": "",
    "request_id": "in the answer's id and in `X-Request-Id`; two requests may have the same",
    "speculation": "false: no tokens are guessed for the request",
    "top_k": "0 or -1: all",
    "structured_outputs": "one of `json`, `regex`, `choice`, `grammar`, `json_object`; `open_objects` beside it",
    "deadline": "seconds for the whole answer; then 504",
    "first_token_deadline": "seconds for the first token; then 504",
    "priority": "lower is served earlier",
    "cache_salt": "prefixes are shared among requests of equal salt",
    "prompt_cache_key": "names a [session](sessions.md#over-http) of this API key and `cache_salt`, whose KV is kept "
    "for 300 s, or as the next two say; at most 1024 characters",
    "prompt_cache_options": "`ttl`; all else is ignored",
    "prompt_cache_retention": '`"in_memory"`: 300 s, `"24h"`: at most `create_app(max_keep=3600)`',
}
STREAM_OPTIONS = "with `stream`: `include_usage`; vLLM's `continuous_usage_stats`; `include_obfuscation` is ignored"
TOOLS = "functions, also `strict`; other types are refused"
NOTES: dict[str, dict[str, str]] = {
    "ChatBody": {
        "messages": "text only: images, audio and files are refused; `developer` is `system`; "
        "`content: null` of a tool is an empty text, as for vLLM",
        "tools": TOOLS,
        "tool_choice": 'also `"required"`, one function, `allowed_tools`',
        "response_format": "together with tools, too; with `strict`, what can't be held is refused, else left out; "
        "objects are [closed](structured.md#objects-are-closed) unless `json_schema.open_objects` is true (aengine's "
        "own; without `strict` only)",
        "reasoning_effort": 'a variable of the chat template; `"none"` also sets `enable_thinking` to false',
        "modalities": '`["text"]`',
        "logprobs": "",
        "top_logprobs": "at most 64 (OpenAI: 20)",
        "stream_options": STREAM_OPTIONS,
        "store": "nothing is stored",
        "include_reasoning": "false: no `reasoning_content`",
    },
    "CompletionBody": {
        "prompt": "a text, token ids, or a list of either: at most 2048, times `n`",
        "max_tokens": "16 unless given, as OpenAI's",
        "best_of": "refused unless it is `n`",
        "suffix": "refused unless it is empty",
        "echo": "with `logprobs` those of the prompt, too; these are not streamed",
        "logprobs": "at most 64 (OpenAI: 5)",
        "stream_options": STREAM_OPTIONS,
    },
    "ResponseBody": {
        "input": "messages (text only), `function_call`, `function_call_output`, `reasoning`, "
        "`item_reference` to an item of an answer in this process' memory; other items are refused",
        "instructions": "of this response only, before all else",
        "previous_response_id": "of a response in this process' memory; they are a [session](sessions.md#over-http)",
        "store": "true unless given: the latest 1000, at most 256 MiB, in this process' memory",
        "tools": "functions, also `strict`, alone and in namespaces; beside them tools that OpenAI runs (`web_search`, "
        "`file_search`, `code_interpreter`, `image_generation`) are left out, and the answer's `warnings` says so; "
        "other types are refused",
        "tool_choice": 'also `"required"`, one function, `allowed_tools`',
        "text": "`format`, also with `open_objects`; `verbosity` is ignored",
        "reasoning": "`effort`, a variable of the chat template; all else is ignored",
        "include": "`message.output_text.logprobs`; all else brings nothing",
        "truncation": "an input is never cut: one that is too long is an error",
        "max_tool_calls": "counts built-in tools, of which there are none",
        "top_logprobs": "at most 64 (OpenAI: 20)",
        "background": "`false` is taken",
        "client_metadata": "Codex's",
        "metadata": "16 entries of 1,024 characters, repeated in the answer",
        "user": "repeated in the answer",
        "stream_options": "`include_obfuscation` is ignored",
    },
}


class Interface(NamedTuple):
    title: str
    params: Any
    """OpenAI's fields, as a TypedDict."""
    body: type[BaseModel]


INTERFACES = (
    Interface("Chat completions", chat_create_params.CompletionCreateParamsStreaming, ChatBody),
    Interface("Completions", completion_create_params.CompletionCreateParamsStreaming, CompletionBody),
    Interface("Responses", response_create_params.ResponseCreateParamsStreaming, ResponseBody),
)


def openai_fields(interface: Interface) -> set[str]:
    return set(get_type_hints(interface.params))


def treatments(body: type[BaseModel]) -> dict[str, str]:
    """Return what becomes of each field: "honoured", "ignored" or "refused"."""
    words = {"Taken, and without effect.": "ignored", "Not supported: null, or not there at all.": "refused"}
    properties = body.model_json_schema(by_alias=False)["properties"]
    return {name: words.get(schema.get("description", ""), "honoured") for name, schema in properties.items()}


def rows(interface: Interface) -> Iterator[str]:
    """Yield the table's rows, OpenAI's fields first. Raises ValueError for one that the body does not have."""
    theirs, ours = openai_fields(interface), treatments(interface.body)
    if theirs - ours.keys():
        raise ValueError(f"{interface.body.__name__} lacks {', '.join(sorted(theirs - ours.keys()))}")
    notes = SAMPLING | NOTES[interface.body.__name__]
    for is_theirs in (True, False):
        for name in sorted(name for name in ours if (name in theirs) == is_theirs):
            yield f"| `{name}` | {'OpenAI' if is_theirs else 'more'} | {ours[name]} | {notes.get(name, '')} |"


def page() -> str:
    """Return the page, with tables as they are to be."""
    before = PAGE.read_text().partition(MARK)[0]
    tables = [
        f"\n### {interface.title}\n\n| field | | | |\n|---|---|---|---|\n" + "\n".join(rows(interface)) + "\n"
        for interface in INTERFACES
    ]
    return before + MARK + "".join(tables)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
