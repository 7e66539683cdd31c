"""What bounds the things that a caller can make large: the numbers here, the checks that several doors share in
`checks.py`. The list of docs/operations.md is written by scripts/bounds_table.py.

Each bound is checked before any work that grows with what it bounds. tests/test_bounds.py finds each field of each
request in the list.
"""

from __future__ import annotations

MAX_MESSAGES = 16_384
"""Messages of a chat, and text parts and calls in all of them: they are looked at one by one."""
CHARACTERS_PER_TOKEN = 32
"""A text of more characters for each token of the context is not read: it could hardly fit, and encoding takes a second
for each MB, and a hundred times its memory."""
LONG_TEXT = 50_000
"""Characters from which on a text is a matter of many milliseconds. Up to twice as many are always read."""
MAX_LOGPROBS = 64
MAX_PROMPT_LOGPROBS = 1 << 21
"""Tokens of a prompt, and the alternatives to each of them: 16 MB of ids and log-probabilities."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256
MAX_BAD_WORD_TOKENS = 32
"""Tokens of one bad word, written alone and after a blank: each of the two may have so many."""
MAX_PROCESSORS = 16
"""Logits processors of an engine, and those that a request names."""
MAX_EXTRA_ARGS = 16_384
"""Characters of the JSON of a request's ``extra_args``."""
MAX_COMPLETIONS = 1024
"""Completions of one prompt."""
MAX_NAME_CHARACTERS = 1024
"""Characters of a request_id, a cache_salt, the name of a prompt."""
MAX_KEEP = 86_400
"""Seconds for which KV is kept for a session's next turn."""
MAX_TENANTS = 10_000
"""Tenants that the settings name."""
MAX_REMEMBERED_TENANTS = 1024
"""Other tenants whose counters are kept while they ask for nothing."""
MAX_TOOLS = 1024
MAX_VARIABLES = 1024
"""Variables of a chat template."""
MAX_PROMPTS = 2048
"""Over HTTP: prompts of one call, choices of all of them together, and texts for vectors or scores. Each is a request
of the engine, and so many of these are held at once."""
MAX_INPUTS = 1 << 20
"""Texts of one call for vectors or scores."""
MAX_SCORED_COMPLETIONS = 16_384
"""Completions of one prompt that are scored in one call: they are looked at one by one."""
MAX_VALUES = 300_000
"""Values of a body, counted by commas and brackets. A bracket counts as `HOLDER_VALUES`."""
HOLDER_VALUES = 4
"""Values that a list or a mapping counts as: Python's garbage collector visits each, and all else waits for it."""
MAX_QUEUED_CALLS = 64
"""Calls of the tokenizer that wait for a thread, short and long ones each."""
MAX_SAID_TOKENS = 1 << 22
"""Tokens of all sessions' last turns that are remembered, answers included: 16 MiB, of prompts twice as much, and the
prompts' texts. Answers under way are not counted."""
MAX_SAID_SESSIONS = 16_384
"""Sessions of which tokens are remembered."""
