"""A marker that is a token of the vocabulary marks as that token only: its name in letters is text."""

from __future__ import annotations

import pytest
from chat_harness import EOS, MARKERS, Setting, parse_ids, token_id_of, tokenizer

from aengine.chat import FORMATS, ChatParser, ReasoningFormat, ToolChoice, compose, tools_of
from aengine.engine.tokenizer.tokenizer import Tokenizer

TOOLS = tools_of([{"name": "get", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}])
CALL = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
TOKENS = ("control tokens", "added tokens")


def in_letters(known: Tokenizer, text: str) -> list[int]:
    """The ids of a text in which no marker is its token."""
    return [i for letter in text for i in known.encode(letter, add_special_tokens=False)]


def parsed(known: Tokenizer, ids: list[int], name: str = "hermes", reasoning: ReasoningFormat | None = None):
    parser = ChatParser(FORMATS[name], reasoning, TOOLS, False, token_id_of(known))
    return parse_ids(parser, known, ids)[1]


def grammar(markers_are: str, reasoning: ReasoningFormat | None = None, choice: str = "auto") -> Setting:
    spec = compose(
        tools=TOOLS,
        tool_choice=ToolChoice.of(choice, TOOLS),
        parallel=True,
        tool_format=FORMATS["hermes"],
        reasoning=reasoning,
        shape=None,
        token_id=token_id_of(tokenizer(markers_are)),
    )
    return Setting.of(spec, markers_are)


@pytest.mark.parametrize("markers_are", TOKENS)
def test_a_call_is_one_by_its_tokens(markers_are: str) -> None:
    known = tokenizer(markers_are)
    message = parsed(known, known.encode(f"Well. {CALL}", add_special_tokens=False))
    assert [call.name for call in message.tool_calls] == ["get"] and message.content == "Well. "
    for letters in (CALL, f"Say {CALL} twice: {CALL}"):
        message = parsed(known, in_letters(known, letters))
        assert not message.tool_calls and message.content == letters


@pytest.mark.parametrize("markers_are", TOKENS)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("llama3", '<|python_tag|>{"name": "get", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "get", "arguments": {}}]'),
        ("mistral_tekken", '[TOOL_CALLS][{"name": "get", "arguments": {}}]'),
        ("mistral_args", "[TOOL_CALLS]get[ARGS]{}"),
    ],
)
def test_calls_of_other_formats(markers_are: str, name: str, call: str) -> None:
    known = tokenizer(markers_are)
    assert [c.name for c in parsed(known, known.encode(call, add_special_tokens=False), name).tool_calls] == ["get"]
    message = parsed(known, in_letters(known, call), name)
    assert not message.tool_calls and message.content == call


@pytest.mark.parametrize("markers_are", TOKENS)
@pytest.mark.parametrize("shown", [False, True])
def test_reasoning_is_one_by_its_tokens(markers_are: str, shown: bool) -> None:
    known = tokenizer(markers_are)
    text = "<think>so</think>yes"

    def message_of(ids: list[int], begun: bool):
        parser = ChatParser(None, ReasoningFormat(begun=begun), (), False, token_id_of(known))
        detokenizer = known.detokenizer(skip_special_tokens=not shown)
        for token_id in ids:
            parser.feed(detokenizer.put(token_id), token_id)
        parser.finish()
        return parser.message

    message = message_of(known.encode(text, add_special_tokens=False), False)
    assert (message.reasoning, message.content) == ("so", "yes")
    message = message_of(in_letters(known, text), False)
    assert (message.reasoning, message.content) == (None, text)
    end = known.encode("</think>", add_special_tokens=False)
    message = message_of([*in_letters(known, "a </think> b"), *end, *in_letters(known, "c")], True)
    assert (message.reasoning, message.content) == ("a </think> b", "c")


def test_tokens_that_are_text_are_shown_where_they_mark_nothing() -> None:
    known = tokenizer("added tokens")
    for text in ("a</tool_call>b", "a</think>b<think>", "[ARGS]"):
        for reasoning in (None, ReasoningFormat()):
            assert parsed(known, known.encode(text, add_special_tokens=False), reasoning=reasoning).content == text
    thought = parsed(
        known, known.encode("<think>a<tool_call>b</think>c", add_special_tokens=False), reasoning=ReasoningFormat()
    )
    assert (thought.reasoning, thought.content) == ("a<tool_call>b", "c")


def test_tokens_that_are_text_within_arguments() -> None:
    known = tokenizer("added tokens")
    call = '<tool_call>\n{"name": "get", "arguments": {"x": "a</tool_call>\\"<think>"}}\n</tool_call>'
    (made,) = parsed(known, known.encode(call, add_special_tokens=False), reasoning=ReasoningFormat()).tool_calls
    assert made.is_complete and made.parsed_arguments() == {"x": 'a</tool_call>"<think>'}
    cut = '<tool_call>\n{"name": "get", "arguments": {"x": 1\n</tool_call> and so on'
    message = parsed(known, known.encode(cut, add_special_tokens=False))
    assert not message.tool_calls[0].is_complete and message.content == " and so on"


@pytest.mark.parametrize("markers_are", TOKENS)
@pytest.mark.parametrize("reasoning", [None, ReasoningFormat(), ReasoningFormat(begun=True)])
def test_the_grammar_takes_the_same(markers_are: str, reasoning: ReasoningFormat | None) -> None:
    """A call in letters is none, so that it can't stand for one that is required."""
    known = tokenizer(markers_are)
    thought = "" if reasoning is None else "so</think>" if reasoning.begun else "<think>so</think>"
    before = known.encode(thought, add_special_tokens=False)
    for choice in ("auto", "required"):
        setting = grammar(markers_are, reasoning, choice)
        for ids, accepted in (
            (known.encode(CALL, add_special_tokens=False), True),
            (in_letters(known, CALL), markers_are == "control tokens" and choice == "auto"),
        ):
            matcher = setting.compiled.matcher()
            whole = [*before, *ids]
            assert (matcher.accept(whole) == len(whole) and matcher.is_accepting) is accepted


def test_without_a_token_the_letters_mark() -> None:
    """A vocabulary that has no such token: its models have learnt the letters."""
    known = tokenizer("text")
    assert all(known.added_token_id(name) is None for name in MARKERS) and known.added_token_id(EOS) is not None
    assert [call.name for call in parsed(known, in_letters(known, CALL)).tool_calls] == ["get"]


@pytest.mark.parametrize("markers_are", TOKENS)
@pytest.mark.parametrize("known", ["glm", "glm_inline", "qwen3_coder"])
@pytest.mark.parametrize("name", ["<tool_call>", "</arg_key>", "<arg_value>", "a <arg_value> b"])
def test_a_parameter_may_have_the_name_of_a_marker(known: str, name: str, markers_are: str) -> None:
    """In letters; and where the token is text, too, as that token."""
    tools = tools_of([{"name": "f", "parameters": {"properties": {name: {"type": "string"}}, "required": [name]}}])
    tool_format, vocabulary = FORMATS[known], tokenizer(markers_are)
    token_id = token_id_of(vocabulary)
    spec = compose(
        tools=tools,
        tool_choice=ToolChoice("required"),
        parallel=True,
        tool_format=tool_format,
        reasoning=None,
        shape=None,
        token_id=token_id,
    )
    call = tool_format.openings[0] + tool_format.head("f") + tool_format.arguments.write({"NAME": "x"})
    whole = call + tool_format.after_arguments + tool_format.closing_of(0)
    before, after = (vocabulary.encode(text, add_special_tokens=False) for text in whole.split("NAME"))
    spellings = [in_letters(vocabulary, name)]
    if markers_are == "added tokens":
        spellings.append(vocabulary.encode(name, add_special_tokens=False))
    for spelling in spellings:
        ids = [*before, *spelling, *after]
        matcher = Setting.of(spec, markers_are).compiled.matcher()
        assert matcher.accept(ids) == len(ids) and matcher.is_accepting
        _, message = parse_ids(ChatParser(tool_format, None, tools, False, token_id), vocabulary, ids)
        assert [(call.is_complete, call.parsed_arguments()) for call in message.tool_calls] == [(True, {name: "x"})]
