"""Chat templates in the manner of the well-known families, each over a small tokenizer with that family's flags."""

# ruff: noqa: E501

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizer_helpers import TEXTS, sentencepiece_vocab, smollm2, write_gguf
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from aengine.engine.tokenizer.tokenizer import Tokenizer

_WORDS = [*TEXTS, "system user assistant tool Evil Hello <|im_start|>|> [INST] [/INST] </s> tool_call think start end"]
_SPLIT = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Family:
    """``marks``: texts that are worth trying; ``has_tools``, ``has_system``: what the template shows."""

    tokenizer: Tokenizer
    has_tools: bool = True
    has_system: bool = True


def special(*names: str, **flags: bool) -> list[AddedToken]:
    return [
        AddedToken(name, special=True, normalized=flags.get("normalized", False), **_without(flags)) for name in names
    ]


def added(*names: str, **flags: bool) -> list[AddedToken]:
    return [
        AddedToken(name, special=False, normalized=flags.get("normalized", False), **_without(flags)) for name in names
    ]


def _without(flags: dict[str, bool]) -> dict[str, bool]:
    return {name: value for name, value in flags.items() if name != "normalized"}


def byte_level(tokens: Sequence[AddedToken], *, ignore_merges: bool = False, nfc: bool = False) -> tokenizers.Tokenizer:
    encoder = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if nfc:
        encoder.normalizer = normalizers.NFC()
    encoder.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    encoder.train_from_iterator(_WORDS, trainer)
    encoder.add_tokens(list(tokens))
    return encoder


def byte_fallback(tokens: Sequence[AddedToken], *, prefix: str) -> tokenizers.Tokenizer:
    """SentencePiece's BPE. ``prefix``: what puts a blank before a text: "normalizer" before each stretch of it,
    "metaspace" before the first one, "" nothing. Control tokens are in the model's own vocabulary, as there."""
    rows = [token for token, *_ in sentencepiece_vocab()]
    rows += [token.content for token in tokens if token.content not in rows]
    vocab = {token: i for i, token in enumerate(rows)}
    merges = [
        ("<", "/"),
        ("</", "s"),
        ("</s", ">"),
        ("<", "s"),
        ("<s", ">"),
        ("▁", "t"),
        ("h", "e"),
        ("i", "n"),
        ("e", "r"),
    ]
    for left, right in merges:
        vocab.setdefault(left, len(vocab))
        vocab.setdefault(right, len(vocab))
        vocab.setdefault(left + right, len(vocab))
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    encoder = tokenizers.Tokenizer(model)
    if prefix == "normalizer":
        encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif prefix == "metaspace":
        encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        encoder.normalizer = normalizers.Replace(" ", "▁")
    encoder.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    encoder.add_special_tokens(["<unk>", "<s>", "</s>"])
    encoder.add_tokens(list(tokens))
    bos = ("<s>", vocab["<s>"])
    encoder.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    return encoder


def unigram(tokens: Sequence[AddedToken]) -> tokenizers.Tokenizer:
    """With NFKC, and control tokens that are pieces of score 0, as in SentencePiece's."""
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((token.content, 0.0) for token in tokens)]
    words = {word for text in _WORDS for word in text.replace(" ", " ▁").split()}
    letters = {letter for text in _WORDS for letter in text if not letter.isspace()} | {"▁"}
    vocab += [(word, -8.0 - i / 100) for i, word in enumerate(sorted(words))]
    vocab += [(letter, -12.0 - i / 100) for i, letter in enumerate(sorted(letters - words))]
    encoder = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0))
    encoder.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    encoder.decoder = decoders.Metaspace(prepend_scheme="always")
    encoder.add_special_tokens(["<unk>", "<s>", "</s>"])
    encoder.add_tokens(list(tokens))
    return encoder


def lower_case(tokens: Sequence[AddedToken]) -> tokenizers.Tokenizer:
    """Markers that are looked for in the normalized text."""
    encoder = byte_level(())
    encoder.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    encoder.add_tokens(list(tokens))
    return encoder


CHATML = """
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nanswer within <tool_call></tool_call> tags:\\n<tool_call>\\n{}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first)
    or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>' + message.role }}{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

REASONING = """
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.searching and message.role == 'user' and message.content is string and not
    (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.searching = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for tool in tools or [] %}{{- '<|im_start|>system\\n' + (tool | tojson(indent=2)) + '<|im_end|>\\n' }}{%- endfor %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
{%- if message.role == 'assistant' %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or (not loop.last and reasoning)) %}
{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

XML_TOOLS = """
{%- macro extra(fields, known) %}{%- if fields is mapping %}{%- for key in fields %}{%- if key not in known %}
{%- if fields[key] is mapping or (fields[key] is sequence and fields[key] is not string) %}
{{- '\\n<' ~ key ~ '>' ~ (fields[key] | tojson | safe) ~ '</' ~ key ~ '>' }}
{%- else %}{{- '\\n<' ~ key ~ '>' ~ (fields[key] | string) ~ '</' ~ key ~ '>' }}{%- endif %}
{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}
{%- for tool in tools or [] %}{%- set tool = tool.function if tool.function is defined else tool %}
{{- '<|im_start|>system\\n<function>\\n<name>' ~ tool.name ~ '</name>' }}
{%- if tool.description is defined %}{{- '\\n<description>' ~ (tool.description | trim) ~ '</description>' }}{%- endif %}
{%- for name, fields in tool.parameters.properties | items %}
{{- '\\n<name>' ~ name ~ '</name>' }}{{- extra(fields, ['name']) }}{%- endfor %}
{{- extra(tool.parameters, ['type', 'properties']) }}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') | trim }}
{%- for call in message.tool_calls or [] %}{{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}
{%- for name, value in call.function.arguments | items %}{{- '<parameter=' ~ name ~ '>\\n' }}
{%- set value = value | tojson | safe if value is mapping else value | string %}{{- value }}{{- '\\n</parameter>' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{{- 'Today: 26 Jul 2024\\n\\n' }}
{%- for tool in tools or [] %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{{- system }}{{- '<|eot_id|>' }}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls | length == 1 %}{{- raise_exception('one tool call at once') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}{{- '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

INST = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"""

MISTRAL = """
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set user_messages = rest | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in rest %}
{%- if message['role'] == 'user' %}
{%- if tools is not none and (message == user_messages[-1]) %}{{- '[AVAILABLE_TOOLS]BLANK[' }}
{%- for tool in tools %}{%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
{%- for key, val in tool.items() if key != 'return' %}
{%- if val is string %}{{- '"' + key + '": "' + val + '"' }}{%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- '}}' }}
{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' }}{%- endif %}{%- endfor %}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- if loop.last and system is defined %}{{- '[INST]BLANK' + system + '\\n\\n' + message['content'] + '[/INST]' }}
{%- else %}{{- '[INST]BLANK' + message['content'] + '[/INST]' }}{%- endif %}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- '[TOOL_CALLS]BLANK[' }}
{%- for call in message.tool_calls %}{%- set out = call.function | tojson %}{{- out[:-1] }}
{%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{%- endif %}
{{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}
{%- endfor %}
{%- elif message['role'] == 'assistant' %}{{- 'BLANK' + message['content'] | trim + eos_token }}
{%- elif message['role'] == 'tool' %}
{%- set content = message.content.content if message.content.content is defined else message.content %}
{{- '[TOOL_RESULTS]BLANK{"content": ' + content | string + ', ' }}{{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate') }}{% endif %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

PHI3 = """{% for message in messages %}
{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{% else %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK = """{% set ns = namespace(system='', first=true) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system = ns.system + message['content'] %}
{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}{%- if loop.first %}{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{%- else %}{{- '\\n' }}{%- endif %}
{{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' }}
{{- tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'assistant' %}
{%- set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}
{%- if message['role'] == 'tool' %}
{{- '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}
{%- endif %}{%- endfor -%}
{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

HARMONY = """
{%- macro type_of(spec) -%}
{%- if spec.type == 'array' -%}{{- type_of(spec['items']) + '[]' }}
{%- elif spec.type == 'object' and spec.properties is defined -%}{{- '{\\n' }}
{%- for name, field in spec.properties.items() -%}
{%- if field.description is defined %}{{- '// ' ~ field.description + '\\n' }}{%- endif -%}
{{- name }}{%- if name not in (spec.required or []) -%}{{- '?' }}{%- endif -%}{{- ': ' }}{{- type_of(field) }}{{- ',\\n' }}
{%- endfor -%}{{- '}' }}
{%- elif spec.enum is defined -%}{{- '"' + spec.enum | join('" | "') + '"' }}
{%- elif spec.type == 'integer' -%}{{- 'number' }}{%- else -%}{{- 'string' }}{%- endif -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if messages[0].role in ['developer', 'system'] %}{%- set instructions = messages[0].content %}{%- endif %}
{%- if tools or instructions %}{{- '<|start|>developer<|message|>' }}
{%- if instructions %}{{- '# Instructions\\n\\n' ~ instructions ~ '\\n\\n' }}{%- endif %}
{%- if tools %}{{- '# Tools\\n\\nnamespace functions {\\n\\n' }}{%- for tool in tools %}{%- set tool = tool.function %}
{{- '// ' + tool.description + '\\n' }}{{- 'type ' + tool.name + ' = (_: ' }}{{- type_of(tool.parameters) }}{{- ') => any;\\n\\n' }}
{%- endfor %}{{- '} // namespace functions' }}{%- endif %}{{- '<|end|>' }}{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.tool_calls %}
{%- if message.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary ' }}{{- 'json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}{%- set last.name = call.name %}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + (last.name or 'unknown') }}{{- ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
{%- elif message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif -%}
"""

JOINED = """{% set parts = [] %}{% set ns = namespace(text='') %}
{% for m in messages %}{% set ns.text = ns.text ~ '<|%s|>\\n%s<|end|>' % (m.role, m.content or '') %}
{% if m.tool_calls %}{% set ns.text = ns.text + '<|call|>{}<|end|>'.format(m.tool_calls) %}{% endif %}{% endfor %}
{% filter trim %}{{ ns.text }}{{ '<|tools|>T<|end|>'.replace('T', tools | map(attribute='function.name') | join(', ')) if tools }}
{{ ['<|note|>', messages[-1].content | upper | title, '<|end|>'] | join }}{% endfilter %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def _family(encoder: tokenizers.Tokenizer, template: str, bos: str = "", eos: str = "", **what: Any) -> Family:
    roles = {role: text for role, text in (("bos_token", bos), ("eos_token", eos)) if text}
    return Family(Tokenizer(encoder, special_tokens=roles, chat_templates={"default": template}), **what)


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CALLS = ("<tool_call>", "</tool_call>")
_MISTRAL = (
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
_PHI = ("<|endoftext|>", "<|assistant|>", "<|system|>", "<|user|>", "<|end|>", "<|tool|>", "<|/tool|>")
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
    "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
)  # fmt: skip
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>")


def _llama3() -> Family:
    tokens = special("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    encoder = byte_level([*tokens, *special("<|python_tag|>")], ignore_merges=True)
    return _family(encoder, LLAMA3, "<|begin_of_text|>", "<|eot_id|>")


def _gguf_llama(folder: Path) -> Tokenizer:
    from aengine.engine.tokenizer.tokenizer import Tokenizer

    rows = [*sentencepiece_vocab(), ("[", -70.0, 1), ("]", -71.0, 1), ("/", -72.0, 1), ("<", -73.0, 1), (">", -74.0, 1)]
    rows += [
        ("</", -75.0, 1),
        ("s>", -76.0, 1),
        ("[/", -77.0, 1),
        ("INST]", -78.0, 1),
        *((n, 0.0, 3) for n in _MISTRAL),
    ]
    tokens, scores, types = zip(*rows, strict=True)
    metadata = {
        "ggml.model": "llama", "ggml.tokens": list(tokens), "ggml.scores": list(scores), "ggml.token_type": list(types),
        "ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0,
        "chat_template": MISTRAL.replace("BLANK", " "),
    }  # fmt: skip
    return Tokenizer.load(write_gguf(folder / "llama.gguf", metadata))


def _gguf_byte_level(folder: Path) -> Tokenizer:
    """Control tokens in the BPE model's vocabulary, which takes whole words from there."""
    encoder = byte_level(())
    vocab = sorted(encoder.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab] + [*_CHATML, *_CALLS, "EOT"]
    types = [1] * len(vocab) + [3] * len(_CHATML) + [4] * len(_CALLS) + [3]
    metadata = {
        "ggml.model": "gpt2", "ggml.pre": "llama-bpe", "ggml.tokens": tokens, "ggml.token_type": types,
        "ggml.merges": [" ".join(pair) for pair in json.loads(encoder.to_str())["model"]["merges"]], "ggml.eos_token_id": len(vocab) + 2, "chat_template": CHATML,
    }  # fmt: skip
    return Tokenizer.load(write_gguf(folder / "gpt2.gguf", metadata))


def _in_folder(make: Callable[[Path], Tokenizer]) -> Tokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return make(Path(folder))


_FAMILIES: dict[str, Callable[[], Family]] = {
    "smollm2": lambda: Family(smollm2(), has_tools=False),
    "qwen2.5": lambda: _family(
        byte_level([*special(*_CHATML), *added(*_CALLS, "<|fim_prefix|>")], nfc=True), CHATML, eos="<|im_end|>"
    ),
    "qwen3": lambda: _family(
        byte_level(
            [*special(*_CHATML), *added(*_CALLS, "<tool_response>", "</tool_response>", "<think>", "</think>")],
            nfc=True,
        ),
        REASONING,
        eos="<|im_end|>",
    ),
    "qwen3-coder": lambda: _family(byte_level([*special(*_CHATML), *added(*_CALLS)]), XML_TOOLS, eos="<|im_end|>"),
    "hermes": lambda: _family(byte_level(special(*_CHATML)), CHATML, eos="<|im_end|>"),
    "llama3": _llama3,
    "mistral-v1": lambda: _family(
        byte_fallback([], prefix="normalizer"), INST, "<s>", "</s>", has_tools=False, has_system=False
    ),
    "mistral-v3": lambda: _family(
        byte_fallback(special(*_MISTRAL), prefix="metaspace"), MISTRAL.replace("BLANK", " "), "<s>", "</s>"
    ),
    "mistral-tekken": lambda: _family(
        byte_level(special("<s>", "</s>", *_MISTRAL), ignore_merges=True), MISTRAL.replace("BLANK", ""), "<s>", "</s>"
    ),
    "gemma": lambda: _family(
        byte_fallback(
            [*special("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), *added("\n\n", "<table>", "▁▁▁")],
            prefix="",
        ),
        GEMMA,
        "<bos>",
        "<eos>",
        has_tools=False,
        has_system=False,
    ),
    "phi3": lambda: _family(
        byte_fallback(special(*_PHI, rstrip=True), prefix="normalizer"), PHI3, "<s>", "<|endoftext|>", has_tools=False
    ),
    "phi4-mini": lambda: _family(
        byte_level(special(*_PHI, lstrip=True, rstrip=True)), PHI3, eos="<|endoftext|>", has_tools=False
    ),
    "deepseek": lambda: _family(
        byte_level([*special("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), *added(*_DEEPSEEK)]),
        DEEPSEEK,
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "gpt-oss": lambda: _family(byte_level(special(*_HARMONY)), HARMONY, eos="<|return|>"),
    "unigram": lambda: _family(unigram(special(*_CHATML)), CHATML, eos="<|im_end|>"),
    "lower-case": lambda: _family(lower_case(special(*_CHATML, normalized=True)), CHATML, eos="<|im_end|>"),
    "single-words": lambda: _family(
        byte_level([*special(*_CHATML), *added("system", single_word=True)]), CHATML, eos="<|im_end|>"
    ),
    "joined": lambda: _family(byte_level(special(*_PHI, *_HARMONY, "<|tools|>", "<|note|>")), JOINED, eos="<|end|>"),
    "gguf-llama": lambda: Family(_in_folder(_gguf_llama)),
    "gguf-gpt2": lambda: Family(_in_folder(_gguf_byte_level)),
}
NAMES = sorted(_FAMILIES)


@functools.cache
def family(name: str) -> Family:
    return _FAMILIES[name]()
