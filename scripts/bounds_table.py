"""Writes the table of docs/operations.md: all that a caller can make large, and what bounds it.

    python scripts/bounds_table.py            # write it
    python scripts/bounds_table.py --check    # exit status 1 if the page has another table

The numbers are those of aengine/limits/bounds.py; tests/test_bounds.py finds each field of each request in the table.
A field is named by a row, as ``name`` or as ``Class.name``, unless its type can't be large (a bool, a float, a Literal)
or it has no effect.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aengine.limits.bounds import (  # noqa: E402
    CHARACTERS_PER_TOKEN,
    HOLDER_VALUES,
    LONG_TEXT,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_COMPLETIONS,
    MAX_EXTRA_ARGS,
    MAX_INPUTS,
    MAX_KEEP,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_NAME_CHARACTERS,
    MAX_PROCESSORS,
    MAX_PROMPT_LOGPROBS,
    MAX_PROMPTS,
    MAX_QUEUED_CALLS,
    MAX_SAID_SESSIONS,
    MAX_SAID_TOKENS,
    MAX_SCORED_COMPLETIONS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOOLS,
    MAX_VALUES,
    MAX_VARIABLES,
)

PAGE = ROOT / "docs" / "operations.md"
HEAD = "## Limits\n\n"


class Bound(NamedTuple):
    """A row: what is bounded, by what, and the error beyond it."""

    what: str
    bound: str
    beyond: str
    fields: str = ""
    """Fields of requests that it bounds, divided by blanks."""


_CONTEXT = "`ContextLengthError` (400)"
_INVALID = "`InvalidRequestError` (400)"
_GRAMMAR = "`GrammarError` (400)"

BOUNDS = (
    Bound("requests that run", "`max_num_seqs`, KV memory", "they wait"),
    Bound(
        "requests that wait",
        "`max_num_queued_requests`",
        '`EngineOverloadedError` (429), or waiting with `admission="wait"`',
    ),
    Bound("a request's time", "`deadline`, `first_token_deadline`: 0 to 1e8 s", "`DeadlineExceededError` (504)"),
    Bound("seconds for which KV is kept for a next turn", f"`keep`: 0 to {MAX_KEEP:,}", _INVALID),
    Bound("KV that is kept for next turns", "`kept_kv_fraction` of the KV blocks", "what is longest ago gives way"),
    Bound(
        "tokens of a prompt, given as ids; ids to decode",
        "`max_model_len`",
        _CONTEXT,
        "ids DetokenizeBody.tokens token_id",
    ),
    Bound(
        "tokens of a completion",
        "`max_tokens`, `max_model_len`",
        'finish reason "length"',
        "max_tokens max_completion_tokens max_output_tokens min_tokens",
    ),
    Bound("tokens that nobody reads", "`unread_timeout`", "the request ends"),
    Bound(
        "messages of a chat and its tools; text parts and calls in the messages",
        f"fewer than `max_model_len`; {MAX_MESSAGES:,} of each, {MAX_TOOLS:,} tools",
        f"{_CONTEXT}, {_INVALID}",
        "messages tools ResponseBody.input content",
    ),
    Bound(
        "characters of a text, of all of a chat, of its tools and its template's variables",
        f"{CHARACTERS_PER_TOKEN} for each token of `max_model_len`, {2 * LONG_TEXT:,} at least",
        _CONTEXT,
        "prompt TokenizeBody.prompt CompletionBody.prompt suffix system text thinking description input_schema "
        "ToolUseBlock.input ToolUseBlock.id ToolUseBlock.name ToolBody.name ToolChoiceBody.name tool_use_id "
        "instructions chat_template_kwargs options args query documents queries text_1 text_2 instruction",
    ),
    Bound("variables of a chat template", f"{MAX_VARIABLES:,}", _INVALID, "chat_template_kwargs"),
    Bound(
        "a JSON schema, also of a type; the tools' together; a list of choices",
        "1 MiB, 124 levels, 2 s to compile ([structured.md](structured.md#limits))",
        _GRAMMAR,
        "json_schema json_ schema_ choice output_type structured_output",
    ),
    Bound("a pattern, a grammar", "64 KiB, 2 s to compile", _GRAMMAR, "regex grammar"),
    Bound(
        "which tools may be called",
        f"the names of the tools there are, {MAX_TOOLS:,} at most",
        _INVALID,
        "tool_choice backend",
    ),
    Bound("completions of a prompt", f"`n` {MAX_COMPLETIONS:,}", _INVALID, "n best_of"),
    Bound(
        "prompts of one call of `/v1/completions`, times `n`",
        f"{MAX_PROMPTS:,}",
        "400",
        "CompletionBody.prompt",
    ),
    Bound("log-probabilities of a token", f"{MAX_LOGPROBS}", _INVALID, "logprobs top_logprobs"),
    Bound(
        "log-probabilities of a prompt: its tokens, and `prompt_logprobs` to each",
        f"{MAX_PROMPT_LOGPROBS:,} in all, {MAX_LOGPROBS} to each",
        _INVALID,
        "prompt_logprobs",
    ),
    Bound("`logit_bias`", f"{MAX_LOGIT_BIAS:,} tokens", _INVALID, "logit_bias"),
    Bound("`allowed_token_ids`", f"{MAX_ALLOWED_TOKEN_IDS:,}", _INVALID, "allowed_token_ids"),
    Bound(
        "`bad_words`",
        f"{MAX_BAD_WORDS}, of {MAX_BAD_WORD_CHARACTERS} characters and {MAX_BAD_WORD_TOKENS} tokens",
        _INVALID,
        "bad_words",
    ),
    Bound(
        "`extra_args`, over HTTP `vllm_xargs`: names, and all as JSON",
        f"{MAX_PROCESSORS}, {MAX_EXTRA_ARGS:,} characters",
        _INVALID,
        "extra_args vllm_xargs",
    ),
    Bound(
        "stop strings",
        f"{MAX_STOP_STRINGS}, of {MAX_STOP_CHARACTERS:,} characters",
        _INVALID,
        "stop stop_sequences",
    ),
    Bound("`stop_token_ids`", f"{MAX_STOP_TOKEN_IDS:,}", _INVALID, "stop_token_ids"),
    Bound(
        "texts of one call for vectors or scores",
        f"{MAX_PROMPTS:,} over HTTP, else {MAX_INPUTS:,}; computed some at a time",
        _INVALID,
        "inputs EmbeddingBody.input documents queries text_1 text_2 top_n",
    ),
    Bound("completions of one call of `score_completions`", f"{MAX_SCORED_COMPLETIONS:,}", _INVALID),
    Bound("elements of a vector", "`dimensions`: the model's", _INVALID, "dimensions"),
    Bound(
        "calls of the tokenizer that wait: `async_tokenizer`, `/tokenize`, counts of tokens",
        f"{MAX_QUEUED_CALLS} short and {MAX_QUEUED_CALLS} long ones",
        "`EngineOverloadedError` (429)",
    ),
    Bound(
        "a name: `request_id`, `session_id`, `cache_salt`, `prompt_cache_key`, `lora`, `tenant`, `user`, "
        "of a prompt, a model, a response; 16 of `metadata`",
        f"{MAX_NAME_CHARACTERS:,} characters; `request_id` over HTTP 128",
        f"{_INVALID}, or it is not found (404)",
        "request_id session_id cache_salt prompt_cache_key lora tenant prompt_name model previous_response_id name "
        "effort reasoning_effort user metadata",
    ),
    Bound(
        "tokens of sessions that are remembered, so that the next turn begins with the same",
        f"{MAX_SAID_TOKENS:,}, of {MAX_SAID_SESSIONS:,} sessions",
        "the sessions whose last turn is longest ago are forgotten",
    ),
    Bound(
        "numbers that no work grows with",
        "32 bits, `seed` and `priority` 64",
        _INVALID,
        "top_k seed priority",
    ),
    Bound(
        "a body over HTTP",
        "`--max-body-bytes`, `max_body_bytes`: 32 MiB",
        "413",
        "include modalities type mcp_servers container compaction thread",
    ),
    Bound(
        "values in a body, by its commas and brackets", f"{MAX_VALUES:,}; a bracket counts as {HOLDER_VALUES}", "413"
    ),
    Bound("stored responses", "1,000, 256 MiB", "the oldest are forgotten"),
    Bound(
        "a message between processes of one user (`connect`, `--workers`)",
        f"{MAX_VALUES:,} values, 4 GiB; what it asks for is bounded as above",
        f"{_INVALID}",
        "number method params trace num_reads",
    ),
    Bound("`tags` to wake", "2", _INVALID, "tags"),
    Bound(
        "an adapter, or weights, that a request loads: name or version, path, files of the folder",
        "256 and 4,096 characters, 1,000 files",
        _INVALID,
        "lora_name lora_path path weight_version",
    ),
    Bound("connections, slow uploads", "none", "a proxy, `ulimit -n`"),
)


def as_markdown() -> str:
    """Return the table in Markdown."""
    rows = ["| what | bound | beyond it |", "|---|---|---|"]
    return "\n".join(rows + [f"| {row.what} | {row.bound} | {row.beyond} |" for row in BOUNDS]) + "\n"


def main() -> int:
    page = PAGE.read_text()
    before, _, rest = page.partition(HEAD)
    written = before + HEAD + as_markdown() + rest[rest.index("\n\n") + 1 :]
    if "--check" in sys.argv:
        return int(page != written)
    PAGE.write_text(written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
