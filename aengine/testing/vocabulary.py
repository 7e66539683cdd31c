"""The tokenizer of a fake engine: a token is a byte, and its id is the byte's value."""

from __future__ import annotations

import functools

from ..engine.tokenizer.token_text import gpt2_bytes
from ..engine.tokenizer.tokenizer import Tokenizer

_TURN, _END = "<|im_start|>", "<|im_end|>"
END_OF_TURN = 257
"""The id of the token that ends an answer."""

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nYou may call these functions, by <tool_call> and </tool_call>:\\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
"""ChatML, with tool calls as Qwen's and Hermes models write them."""
REASONING_TEMPLATE = TEMPLATE + "{# An answer may begin with <think> and </think>. #}"


def ids_of(text: str) -> list[int]:
    """Return the ids of a text; names of special tokens in it are plain text."""
    return list(text.encode())


@functools.cache
def tokenizer(reasoning: bool) -> Tokenizer:
    """Return the fake model's tokenizer. ``reasoning``: its template is that of a model that may reason."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Encoder

    encoder = Encoder(models.BPE(gpt2_bytes(), []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken(name, normalized=False) for name in (_TURN, _END)])
    template = REASONING_TEMPLATE if reasoning else TEMPLATE
    return Tokenizer(encoder, special_tokens={"eos_token": _END}, chat_templates={"default": template})
