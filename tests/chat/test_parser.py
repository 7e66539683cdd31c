"""`ChatParser` on texts that keep to no format, on texts cut off anywhere, and on every way to split them."""

from __future__ import annotations

import json

import pytest
from chat_harness import merged, parse
from hypothesis import given
from hypothesis import strategies as st

from aengine.chat import (
    FORMATS,
    ChatParser,
    ReasoningDelta,
    ReasoningFormat,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    tools_of,
)
from aengine.engine.chat.formats import HARMONY, HERMES, JSON, LLAMA3, MISTRAL, markers_of
from aengine.errors import InvalidRequestError

TOOLS = tools_of([{"name": "f"}, {"name": "g"}])
NO_TOKENS = lambda name: None  # noqa: E731
MARKER_IDS = {name: 100 + i for i, name in enumerate(sorted({m for f in FORMATS.values() for m in f.markers}))}
MARKER_IDS |= {"<think>": 1, "</think>": 2}


def new(tool_format=HERMES, reasoning=None, *, has_shape=False, token_id=NO_TOKENS, tools=TOOLS) -> ChatParser:
    return ChatParser(tool_format, reasoning, tools, has_shape, token_id)


PIECES = st.sampled_from(
    [
        "<think>", "</think>", "<tool_call>", "\n", " ",
        '{"name": "', "f", '", "arguments": ', '", "parameters": ', "g",
        '{"x": "}"}', "{", "}", "{}", "\n</tool_call>", "[TOOL_CALLS]", " [", "[", "]", "[ARGS]", "; ", ", ", "]}",
        '{"tool_calls": [', "<|python_tag|>", '"', "\\", "é", "\ufffd",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    ]
)  # fmt: skip
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=25).map("".join)


@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 60), max_size=8),
    name=st.sampled_from(sorted(FORMATS)),
    reasoning=st.sampled_from([None, ReasoningFormat(), ReasoningFormat(begun=True)]),
    has_shape=st.booleans(),
)
def test_the_split_makes_no_difference_and_nothing_raises(text, cuts, name, reasoning, has_shape):
    def parsed(pieces):
        parser = new(FORMATS[name], reasoning, has_shape=has_shape)
        deltas, message = parse(parser, pieces)
        return (
            merged(deltas),
            message.content,
            message.reasoning,
            [(c.name, c.arguments, c.is_complete) for c in message.tool_calls],
        )

    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    whole = parsed([text])
    assert parsed([text[a:b] for a, b in zip(places, places[1:])]) == whole
    assert parsed(list(text)) == whole
    for _, arguments, is_complete in whole[3]:
        if is_complete:
            assert isinstance(json.loads(arguments), dict)


@given(data=st.data(), name=st.sampled_from(sorted(FORMATS)), shown=st.booleans())
def test_with_control_tokens_in_any_order(data, name, shown):
    """``shown``: skip_special_tokens=False, so that the tokens come as text too."""
    ids = {marker: MARKER_IDS[marker] for marker in (*FORMATS[name].markers, "<think>", "</think>")}
    symbols = data.draw(st.lists(PIECES | st.sampled_from(sorted(ids)), max_size=20))
    parser, by_letter = (new(FORMATS[name], ReasoningFormat(), token_id=ids.get) for _ in range(2))
    first, second = [], []
    for symbol in symbols:
        if symbol in ids:
            first += parser.feed(symbol if shown else "", ids[symbol])
            second += by_letter.feed("", ids[symbol])
        else:
            first += parser.feed(symbol, 5)
            for letter in symbol:
                second += by_letter.feed(letter, 5)
    assert merged(first + parser.finish()) == merged(second + by_letter.finish())
    message = parser.message
    said = [message.content or "", message.reasoning or "", *(call.arguments for call in message.tool_calls)]
    assert not any("\ud800" <= letter <= "\udfff" for text in said for letter in text)


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'


def test_deltas_of_a_call_as_they_come():
    parser = new(reasoning=ReasoningFormat())
    assert parser.feed("<think>\nA") == [ReasoningDelta("A")]
    assert parser.feed(" b \n</thi") == [ReasoningDelta(" b")]
    assert parser.feed("nk>\n\nSo") == [TextDelta("So")]
    assert parser.feed("\n<tool") == [TextDelta("\n")]
    assert parser.feed('_call>\n{"name": "f", "arguments": ') == []
    start, arguments = parser.feed('{"a"')
    assert isinstance(start, ToolCallStart) and (start.index, start.name) == (0, "f") and start.id.startswith("call_")
    assert arguments == ToolCallDelta(0, '{"a"')
    assert parser.feed(': "}') == [ToolCallDelta(0, ': "}')]
    assert parser.feed('"}}\n</tool') == [ToolCallDelta(0, '"}')]
    assert not parser.message.tool_calls[0].is_complete
    assert parser.feed("_call>") == [ToolCallEnd(0)]
    assert parser.finish() == []
    call = parser.message.tool_calls[0]
    assert call.is_complete and call.parsed_arguments() == {"a": "}"}


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax"])
def test_marked_arguments_that_are_cut_off(name):
    """What may have become a mark is no text of the answer."""
    known = FORMATS[name]
    tools = tools_of([{"name": "f", "parameters": {"properties": {"x": {"type": "string"}, "n": {"type": "integer"}}}}])
    text = known.openings[0] + known.head("f") + known.arguments.write({"x": "a<b", "n": 3}) + known.after_arguments
    text = text.rstrip()  # the last line end may be missing
    for end in range(len(known.openings[0] + known.head("f")), len(text)):
        for pieces in ([text[:end]], list(text[:end])):
            _, message = parse(new(known, tools=tools), pieces)
            (call,) = message.tool_calls
            assert message.content is None and not call.is_complete
            assert '{"x": "a<b", "n": 3}'.startswith(call.arguments)


@pytest.mark.parametrize("known", [*FORMATS.values(), HARMONY], ids=lambda known: known.name)
@pytest.mark.parametrize("ids", [{}, MARKER_IDS], ids=["text", "tokens"])
def test_a_call_that_is_cut_off_behind_its_name_is_a_call(known, ids):
    """Of heads as of separators: the name is whole, and no tool with a longer one can be meant."""
    tools = tools_of([{"name": "get"}, {"name": "get_time"}])
    markers = markers_of(known, None, ids.get)

    def feed(parser, text):
        for letter in text:
            parser.feed("", ids[markers.ids[ord(letter) - 0xD800][0]]) if "\ud800" <= letter <= "\udfff" else (
                parser.feed(letter)
            )
        parser.finish()
        return parser.message

    for name in ("get", "get_time"):
        for number, before in enumerate((known.openings[0], known.separator)):
            if number and not known.parallel:
                continue
            first = known.openings[0] + known.head("get") + known.arguments.write({}) + known.after_arguments
            whole = markers.encode(first * number + before + known.head(name))
            named = markers.encode(first * number + before + known.before_name + name)
            if name == "get":  # or "get_time", which goes on
                message = feed(new(known, tools=tools, token_id=ids.get), named)
                assert len(message.tool_calls) == number
            for end in range(len(named) + (name == "get"), len(whole)):
                message = feed(new(known, tools=tools, token_id=ids.get), whole[:end])
                if known.names_trigger and not number:  # an answer may end with this as its text
                    assert (message.content is not None, message.tool_calls) == (True, ()), whole[:end]
                    continue
                calls = [(c.name, c.arguments, c.is_complete) for c in message.tool_calls]
                assert (message.content, calls[number:]) == (None, [(name, "", False)]), whole[:end]


def test_a_call_that_is_cut_off_is_not_complete():
    start, named = CALL.index('{"a"'), CALL.index('", "arg')
    for length in range(len(CALL)):
        deltas, message = parse(new(), [CALL[:length]])
        assert not any(isinstance(delta, ToolCallEnd) for delta in deltas)
        assert not any(call.is_complete for call in message.tool_calls)
        if length >= named:
            assert message.tool_calls[0].arguments == CALL[start : min(length, start + len('{"a": [1]}'))]
            assert message.content is None
            with pytest.raises(InvalidRequestError, match="max_tokens"):
                message.tool_calls[0].parsed_arguments()
        else:
            assert (message.content or "") == CALL[:length]  # text that begins like a call


@pytest.mark.parametrize(
    "tool_format, text",
    [
        (HERMES, '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": " f", "arguments": {}}\n</tool_call>'),
        (HERMES, "<tool_call>" + " " * 40 + '{"name": "f", "arguments": {}}\n</tool_call>'),
        (HERMES, "<tool_call><tool_call"),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": 3}\n</tool_call>'),
        (LLAMA3, ' {"name": "f", "parameters": {}}'),
        (LLAMA3, '{"name":"f","parameters":{}}'),
        (MISTRAL, "[TOOL_CALLS] []"),
        (JSON, '{"tool_calls": [{"name": "h", "arguments": {}}]}'),
    ],
)
def test_what_keeps_to_no_format_is_text(tool_format, text):
    _, message = parse(new(tool_format), list(text))
    assert (message.content, message.tool_calls) == (text, ())


def test_a_call_after_a_broken_one():
    broken = '<tool_call>\n{"name": "f", "arguments": {} oh'
    _, message = parse(new(), list(f"{broken} {CALL}"))
    assert [(c.arguments, c.is_complete) for c in message.tool_calls] == [("{}", False), ('{"a": [1]}', True)]
    assert message.content == "oh"


def test_a_call_after_one_that_a_control_token_broke():
    """Whether it comes alone, or in one piece with the backslash before it."""
    for separate in (True, False):
        parser = new(token_id=MARKER_IDS.get)

        def call(arguments: str, end: str, *, parser=parser, separate=separate) -> None:
            parser.feed("", MARKER_IDS["<tool_call>"])
            parser.feed('\n{"name": "f", "arguments": ')
            if separate:
                parser.feed(arguments)
            parser.feed(end if separate else arguments + end, MARKER_IDS["</tool_call>"])

        call('{"a": "\\', "")
        call("{}", "}\n")
        parser.finish()
        calls = [(c.arguments, c.is_complete) for c in parser.message.tool_calls]
        assert calls == [('{"a": "\\', False), ("{}", True)]


def test_arguments_that_are_no_json_are_never_given_as_complete():
    _, message = parse(new(), [CALL.replace("[1]", "[1,,]")])
    assert [c.is_complete for c in message.tool_calls] == [False]


def test_without_tools_everything_is_text():
    assert parse(new(tools=()), [CALL])[1].content == CALL
    assert parse(ChatParser(None, None, (), False, NO_TOKENS), [CALL])[1].content == CALL


def test_text_that_spells_a_control_token_is_text():
    parser = new(token_id=MARKER_IDS.get)
    assert parse(parser, [CALL])[1].content == CALL


def test_mistral_wants_ids_of_nine_characters():
    _, message = parse(new(MISTRAL), ['[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'])
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 2 and all(len(i) == 9 and i.isalnum() for i in ids)


def test_a_lone_surrogate_of_the_text_is_no_token():
    _, message = parse(new(token_id=MARKER_IDS.get), ["a\ud800b"])
    assert message.content == "a\ufffdb"


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call" * 2_000,
        " " * 20_000,
        "<tool_call>\n" * 2_000,
        '<tool_call>\n{"name": "f", "arguments": {"a": "' + "\\x" * 6_000,
        "<think>" + "\n" * 10_000 + "</thin" * 1_000,
    ],
)
@pytest.mark.parametrize("in_one_piece", [True, False])
def test_the_work_is_linear(text, in_one_piece):
    """No step looks at more than a bounded buffer, and there is a bounded number of steps for each character."""
    steps = []

    class Watched(ChatParser):
        def _go(self, state, rest):
            steps.append(len(rest))
            return super()._go(state, rest)

    parser = Watched(HERMES, ReasoningFormat(), TOOLS, False, NO_TOKENS)
    for piece in [text] if in_one_piece else text:
        parser.feed(piece)
        assert len(parser._buffer) < 100
    parser.finish()
    assert max(steps) < 2000 and len(steps) <= 3 * len(text)
