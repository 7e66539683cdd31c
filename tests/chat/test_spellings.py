"""`ChatParser` on what models write without a grammar: calls in other spellings, and calls that can't be read."""

from __future__ import annotations

import pytest
from chat_harness import MARKERS

from aengine.chat import FORMATS, ChatMessage, ChatParser, tools_of
from aengine.engine.chat import spellings
from aengine.engine.chat.formats import (
    GRANITE,
    HARMONY,
    HERMES,
    KIMI_K2,
    LFM2,
    LLAMA3,
    LLAMA_PYTHONIC,
    MISTRAL,
    markers_of,
)
from aengine.engine.chat.syntax.scan import squeezed

TOOLS = tools_of([
    {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}},
    {"name": "g"},
])  # fmt: skip
IDS = {name: 100 + i for i, name in enumerate(MARKERS)}
EVERY = [*FORMATS.values(), HARMONY]
GROUPS = [known for known in EVERY if known.is_group]
by_name = {"ids": lambda value: getattr(value, "name", "")}


def read(known, text, token_id=lambda name: None, **options) -> tuple[str | None, list[tuple[str, str, bool]]]:
    """Read the text in one piece, or token by token, and letter by letter."""
    messages: list[ChatMessage] = []
    encoded = markers_of(known, None, token_id).encode(text)
    for pieces in [encoded, *([[text]] if encoded == text else [])]:
        parser = ChatParser(known, None, TOOLS, options.get("has_shape", False), token_id)
        ids = markers_of(known, None, token_id).ids
        for piece in pieces:
            if "\ud800" <= piece[:1] <= "\udfff":
                parser.feed("", ids[ord(piece) - 0xD800][1])
            else:
                parser.feed(piece)
        parser.finish()
        messages.append(parser.message)
    said = [(m.content, [(c.name, c.arguments, c.is_complete) for c in m.tool_calls]) for m in messages]
    assert said[0] == said[-1]
    return said[0]


def _call(known, arguments=None) -> str:
    """Two arguments, without the end of the call."""
    return known.head("f") + known.arguments.write(arguments or {"a": 7, "s": "x"})


@pytest.mark.parametrize("known, text", [
    (HERMES, '<tool_call>{"name":"f","arguments":{"a":7}}</tool_call>'),
    (HERMES, '<tool_call>\n{\n    "name": "f",\n    "arguments": {"a":7}\n}\n</tool_call>\n'),
    (HERMES, '<tool_call>\n{"name": "f", "parameters": {"a":7}}\n</tool_call>'),
    (LLAMA3, '{"name": "f", "arguments": {"a":7}}'),
    (LLAMA3, '<|python_tag|>{"name":"f","parameters":{"a":7}}'),
    (GRANITE, '<|tool_call|> [{"name": "f", "arguments": {"a":7}}]'),
    (MISTRAL, '[TOOL_CALLS]\n[\n  {"name":"f","arguments":{"a":7}}\n]'),
    (KIMI_K2, "<|tool_calls_section_begin|>\n<|tool_call_begin|>functions.f: 0 <|tool_call_argument_begin|>"
              '{"a":7}<|tool_call_end|>\n<|tool_calls_section_end|>'),
], **by_name)  # fmt: skip
def test_a_spelling_that_counts_as_the_same(known, text):
    for token_id in (lambda name: None, IDS.get):
        assert read(known, text, token_id) == (None, [("f", '{"a":7}', True)])


@pytest.mark.parametrize("known", GROUPS, **by_name)
def test_blanks_between_the_calls_of_a_group(known):
    for blanks in ("", " \n "):
        separator = blanks if not known.separator.strip() else known.separator.strip() + blanks
        again = f"{blanks}{separator}{known.head('g')}{known.arguments.write({})}{known.after_arguments}"
        text = known.openings[0] + _call(known) + known.after_arguments + again + blanks + known.closing_of(0)
        calls = [("f", '{"a": 7, "s": "x"}', True), ("g", "{}", True)]
        assert read(known, text) == read(known, text, IDS.get) == (None, calls)


@pytest.mark.parametrize("known", [known for known in EVERY if known.name not in ("olmo3", "harmony")], **by_name)
def test_where_an_answer_has_a_shape_the_spelling_is_exact(known):
    """A grammar may allow an answer that is a call but for its spelling."""
    opening = known.openings[0] + known.head("f")
    text = opening[: -len(known.before_arguments) or None] + " " + known.before_arguments + "{}"
    assert read(known, text, has_shape=True)[1] == []


@pytest.mark.parametrize("markers_are", ["text", "tokens"])
@pytest.mark.parametrize("known", EVERY, **by_name)
def test_a_call_behind_one_that_can_not_be_read(known, markers_are):
    """What is left of the broken one is no text."""
    token_id = IDS.get if markers_are == "tokens" else lambda name: None
    end, closing = known.after_arguments, known.closing_of(0)
    again = known.separator + known.head("g") + known.arguments.write({}) + end if known.parallel else ""
    called = [("g", "{}", True)] if known.parallel else []
    broken = _call(known).replace("7", "07")
    content, calls = read(known, known.openings[0] + broken + end + again + closing + "\nSo.", token_id)
    assert ((content or "").strip(), calls[1:]) == ("So.", called)
    assert calls[0][0] == "f" and (not calls[0][2] or '"07"' in calls[0][1])


@pytest.mark.parametrize("known", [known for known in EVERY if known.after_arguments], **by_name)
def test_a_call_whose_end_is_missing_leaves_nothing(known):
    for token_id in (lambda name: None, IDS.get):
        for rest in (known.closing_of(0), "," + known.after_arguments + known.closing_of(0)):
            content, calls = read(known, known.openings[0] + _call(known) + rest, token_id)
            assert (content, calls[0][0]) == (None, "f")


@pytest.mark.parametrize("known", [known for known in EVERY if known.after_arguments], **by_name)
def test_what_is_left_of_a_call_is_one_text_without_marks(known):
    end, closing = known.after_arguments, known.closing_of(0)
    for token_id in (lambda name: None, IDS.get):
        text = known.openings[0] + _call(known) + end + " and so\n" + end + closing
        content, calls = read(known, text, token_id)
        assert calls == [("f", '{"a": 7, "s": "x"}', True)]
        if known.is_group:
            assert content is not None and content.startswith("and so")
            assert not any(mark in content for mark in (*MARKERS, "<", "|"))


@pytest.mark.parametrize("known, text, content, calls", [
    (LFM2, "<|tool_call_start|>[f(a=07)]<|tool_call_end|>", None, [("f", "", False)]),
    (LFM2, "<|tool_call_start|>[f(a=7]<|tool_call_end|>Hi", "Hi", [("f", "", False)]),
    (LFM2, "<|tool_call_start|>[f(a=7<|tool_call_end|>Hi", "Hi", [("f", "", False)]),
    (LFM2, "<|tool_call_start|>[f(7, a=7), g()]<|tool_call_end|>", None, [("f", "", False), ("g", "{}", True)]),
    (LFM2, "<|tool_call_start|>[f(a = 7,),]<|tool_call_end|>", None, [("f", '{"a": 7}', True)]),
    (LFM2, "<|tool_call_start|>[g(), h(b=1)]<|tool_call_end|>", "h(b=1)", [("g", "{}", True)]),
    (LLAMA_PYTHONIC, "[f(a=7),f(a=8)]", None, [("f", '{"a": 7}', True), ("f", '{"a": 8}', True)]),
    (LLAMA_PYTHONIC, "[f(a=07),f(a=8)]", None, [("f", "", False), ("f", '{"a": 8}', True)]),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 7\n</tool_call>\nHi', "Hi", [("f", '{"a": 7\n', False)]),
    (HERMES, '<tool_call>\n{"name": "g", "arguments": {}, "b": 1}\n</tool_call> Hi', '"b": 1 Hi', [("g", "{}", False)]),
    (FORMATS["glm_inline"], "<tool_call>fg</tool_call>", "<tool_call>fg</tool_call>", []),
], **by_name)  # fmt: skip
def test_broken_calls(known, text, content, calls):
    said, read_calls = read(known, text)
    assert (said and said.strip(), read_calls) == (content, calls)


def test_spellings_are_made_once_for_all_tools(monkeypatch):
    """They are made for each request."""
    made = []
    monkeypatch.setattr(spellings, "squeezed", lambda text: made.append(text) or squeezed(text))
    tools = tools_of([{"name": f"tool_{i}"} for i in range(500)])
    ChatParser(HERMES, None, tools, False, lambda name: None)
    assert 0 < len(made) < 50
