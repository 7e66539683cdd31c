"""Prompts of each form, checked, copied and encoded; texts that get vectors, cut; results in the order of calls."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from aengine.engine.tokenizer.messages import call_id_of, checked_messages
from aengine.engine.tokenizer.pooled_texts import EncodedText, YesNoPrompt, encode_texts
from aengine.engine.tokenizer.prompt import MessagesPart, TextPart, TokensPart, check_token_ids, part_of
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.engine.tokenizer_view import CALLS, AsyncTokenizer
from aengine.errors import ContextLengthError, InvalidRequestError
from aengine.limits.bounds import LONG_TEXT, MAX_MESSAGES

HELLO = {"role": "user", "content": "a b"}
WORDS = ["a", "b", "c", "d", "[U]", "<s>", "</s>", "yes", "no"]
A, B, C, D, _, BEGIN, END, YES, NO = range(len(WORDS))


def words(template: str = "{{ messages[0].content }}", *, without: str = "") -> Tokenizer:
    """A token for each word, between two special ones; a pair has a third between its texts."""
    vocabulary = {word: i for i, word in enumerate(WORDS) if word != without}
    encoder = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[U]"))
    encoder.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder.add_special_tokens(["<s>", "</s>"])
    encoder.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", BEGIN), ("</s>", END)]
    )
    return Tokenizer(encoder, special_tokens={"eos_token": "</s>"}, chat_templates={"default": template})


class Name(str, enum.Enum):  # noqa: UP042 - a StrEnum shows its value
    A = "a b"


def test_a_prompt_of_each_form() -> None:
    known = words()
    for text in ("a b", Name.A):
        part = part_of(text, 8)
        assert isinstance(part, TextPart) and part.encode(known, 8) == [BEGIN, A, B, END]
    messages = [HELLO.copy()]
    part = part_of(messages, 8)
    messages.clear()
    assert isinstance(part, MessagesPart) and part.encode(known, 8) == [A, B], "the template writes special tokens"
    assert part_of([3, 1]) == TokensPart([3, 1])
    assert [TextPart("").kind, TokensPart([]).kind, part.kind] == ["text", "token_ids", "messages"]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "at least one character"),
        ([], "at least one token or message"),
        (b"a", "not bytes"),
        ({"role": "user"}, "not dict"),
        (3, "not int"),
        ([True], "a list of bool"),
        (["a"], "one prompt"),
        ([b"a"], "a list of bytes"),
        ([{"role": "user"}], "no 'content'"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        part_of(prompt)


def test_what_can_not_fit_is_not_encoded() -> None:
    longest = "a" * 2 * LONG_TEXT
    assert isinstance(part_of(longest, 8), TextPart) and isinstance(part_of(longest + "a"), TextPart)
    known = words("{{ messages[0].content }}" + " " * (LONG_TEXT + 1))
    for ask in (
        lambda: part_of(longest + "a", 8),
        lambda: TextPart(longest + "a").encode(known, 8),
        lambda: part_of([HELLO] * 8, 8),
        lambda: MessagesPart([{"role": "user", "content": longest}]).encode(known, 8),
        lambda: MessagesPart([{"role": "user", "content": longest[LONG_TEXT:]}]).encode(known, 8),
    ):
        with pytest.raises(ContextLengthError):
            ask()
    assert len(part_of([HELLO] * 7, 8).messages) == 7  # type: ignore[union-attr]


def test_long_ones_are_told_apart() -> None:
    for text, is_long in (("a" * LONG_TEXT, False), ("a" * (LONG_TEXT + 1), True)):
        assert TextPart(text).is_long is is_long
    for content, is_long in (("a", False), ("a" * LONG_TEXT, True)):
        assert MessagesPart([{"role": "user", "content": content}]).is_long is is_long


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no tokens"):
        part_of([{"role": "user", "content": ""}]).encode(words(), 8)  # type: ignore[union-attr]
    with pytest.raises(InvalidRequestError, match="no tokens"):
        check_token_ids([], 9, 8)


def test_token_ids_are_those_of_the_model_and_leave_room() -> None:
    assert check_token_ids((0, 8), 9, 3) == [0, 8]
    with pytest.raises(ContextLengthError):
        check_token_ids([0, 8], 9, 2)
    for wrong in (-1, 9, 2**40, 1.0, "a", None):
        with pytest.raises(InvalidRequestError, match=r"prompt\[1\]=.* from 0 to 8"):
            check_token_ids([3, wrong, 3], 9, 8)  # type: ignore[list-item]


# -- messages


def calling(*ids: object) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": i} for i in ids]}


def result(call_id: object, content: str | None) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([calling("x", "y"), ("y", 1), ("x", 2)], ["x2", "y1"]),
        ([calling("x", "y", "z"), ("z", 1), HELLO, ("x", 2), ("y", 3)], ["x2", "", "y3", "z1"]),
        ([calling("x", "x", "y"), ("y", 1), ("x", 2), ("x", 3)], ["x2", "x3", "y1"]),
        ([calling("x", "y"), ("x", 1), ("y", 2), ("x", 3)], ["x1", "x3", "y2"]),
        ([calling("x", "y"), ("y", 1), (None, 2), ("q", 3), ("x", 4)], ["x4", "None2", "q3", "y1"]),
        ([calling("x", "y"), ("y", 1), ("x", 2), calling("y", "x"), ("x", 3), ("y", 4)], ["x2", "y1", "", "y4", "x3"]),
        ([calling("x", "y"), calling("z"), ("y", 1), ("x", 2)], ["", "x2", "y1"]),
        ([calling("x"), ("x", 1), calling("y"), ("x", 2), ("y", 3)], ["x1", "", "x2", "y3"]),
        ([calling("x"), ("x", 1), calling("y"), calling("z"), ("z", 2), ("y", 3)], ["x1", "", "", "y3", "z2"]),
        ([calling(None, 5, "y"), ("y", 1), (5, 2)], ["52", "y1"]),
        ([{"role": "assistant", "content": "a", "tool_calls": 3}, ("x", 1)], ["x1"]),
        ([{"role": "assistant", "content": "a", "tool_calls": [3]}, ("x", 1)], ["x1"]),
    ],
)
def test_results_come_in_the_order_of_their_calls(before: list[Any], after: list[str]) -> None:
    messages = [result(one[0], f"{one[0]}{one[1]}") if isinstance(one, tuple) else one for one in before]
    shown = [one["content"] if one["role"] == "tool" else "" for one in checked_messages(messages)[1:]]
    assert shown == after


def test_messages_are_copies_in_plain_texts() -> None:
    (tool, parts) = checked_messages([result("x", None), {"role": Name.A, "content": [{"type": "text", "text": "a"}]}])
    assert tool["content"] == "" and parts["role"] == "a b" and type(parts["role"]) is str
    for name in ("text", "input_text", "output_text"):
        assert checked_messages([{"role": "user", "content": [{"type": name, "text": "a"}]}])
    (said,) = checked_messages([{"role": "assistant", "tool_calls": []}])
    assert said == {"role": "assistant", "tool_calls": []}
    assert call_id_of({"id": "x"}) == "x" and call_id_of({"id": []}) is None and call_id_of({"call": 3}, "call") == 3


def test_the_arguments_of_calls_are_mappings_for_templates() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": "b"}'}}
    part = part_of([{"role": "assistant", "content": None, "tool_calls": [call]}])
    known = words("{{ messages[0].tool_calls[0].function.arguments.a }}")
    assert part.encode(known, 8) == [B]  # type: ignore[union-attr]
    cut = part_of([{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "b"}}]}])
    known = words("{{ messages[0].tool_calls[0].function.arguments }}")
    assert cut.encode(known, 8) == [B], "what is no JSON is shown as it is"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "content",
    [
        {"type": "text", "text": "a"},
        b"a",
        3,
        ["a"],
        [{"type": "image_url"}],
        [{"type": "text", "text": "a"}, {"type": "text", "text": 3}],
        [{"type": "text", "text": ""}] * (MAX_MESSAGES + 1),
    ],
)
def test_contents_that_are_no_text_are_refused(content: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content"):
        checked_messages([{"role": "user", "content": content}])


def test_messages_and_their_parts_are_bounded() -> None:
    most = [{"role": "user", "content": ""}] * MAX_MESSAGES
    assert len(checked_messages(most)) == MAX_MESSAGES
    for no_list in ("hello", b"hello", HELLO, 3):
        with pytest.raises(InvalidRequestError, match="a list of messages"):
            checked_messages(no_list)
    assert checked_messages([{"role": "user", "content": [{"type": "text", "text": ""}] * MAX_MESSAGES}])
    two = {"role": "user", "content": [{"type": "text", "text": ""}] * (MAX_MESSAGES // 2)}
    assert checked_messages([two] * 2)
    for messages in ([*most, HELLO], [two, two, {"role": "assistant", "content": None, "tool_calls": [{}]}]):
        with pytest.raises(InvalidRequestError, match=f"there may be {MAX_MESSAGES}"):
            checked_messages(messages)


# -- texts that get vectors or scores


def test_a_text_that_is_too_long_is_cut_before_its_last_special_token() -> None:
    known = words()
    texts = ["a b c d", "a"]
    assert encode_texts(known, texts, 6, truncate=False) == [
        EncodedText([BEGIN, A, B, C, D, END]),
        EncodedText([BEGIN, A, END]),
    ]
    with pytest.raises(ContextLengthError):
        encode_texts(known, texts, 5, truncate=False)
    for most, ids in ((5, [BEGIN, A, B, C, END]), (3, [BEGIN, A, END]), (1, [BEGIN, END])):
        assert encode_texts(known, texts[:1], most, truncate=True) == [EncodedText(ids)]


def test_of_a_pair_the_longer_text_is_cut() -> None:
    known = words()
    for pair, most, ids, num_first in (
        (("a b", "c d"), 7, [BEGIN, A, B, END, C, D, END], 4),
        (("a", "b c d"), 6, [BEGIN, A, END, B, C, END], 3),
        (("b c d", "a"), 6, [BEGIN, B, C, END, A, END], 4),
        (("a b c", "b c d a"), 6, [BEGIN, A, END, B, C, END], 3),  # the shorter keeps up to half
        (("a b c", "b c d a"), 7, [BEGIN, A, B, END, B, C, END], 4),
        (("a b", "c d"), 2, [BEGIN, END, END], 2),
    ):
        assert encode_texts(known, [pair], most, truncate=True) == [EncodedText(ids, num_first)]
    with pytest.raises(ContextLengthError):
        encode_texts(known, [("a", "b c d")], 6, truncate=False)


def test_texts_that_are_no_unicode_or_none_at_all_are_refused() -> None:
    known = words()
    for inputs, place in ((["a", "\ud800"], 1), ([("a", "b"), ("a", "\ud800")], 1), ([("\ud800", "b")], 0)):
        with pytest.raises(InvalidRequestError, match=rf"inputs\[{place}\] is not valid Unicode"):
            encode_texts(known, inputs, 9, truncate=False)  # type: ignore[arg-type]
    known.encoder.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    with pytest.raises(InvalidRequestError, match="no tokens"):
        encode_texts(known, [""], 9, truncate=False)


def test_the_question_whose_answer_is_yes_or_no() -> None:
    known = words()
    prompt = YesNoPrompt(known, "d")
    assert prompt.answers == (YES, NO)
    num_around = len(known.encode(_around(prompt, 0), False)) + len(known.encode(_around(prompt, 1), False))
    (whole,) = prompt.encode([("b", "c d")], 1000, truncate=False)
    assert whole.num_first_tokens == 0 and [i for i in whole.token_ids if i in (A, B, C, D)] == [D, B, C, D]
    num_body = len(whole.token_ids) - num_around
    assert prompt.encode([("b", "c d")], len(whole.token_ids), truncate=False) == [whole]
    with pytest.raises(ContextLengthError):
        prompt.encode([("b", "c d")], len(whole.token_ids) - 1, truncate=False)
    (cut,) = prompt.encode([("b", "c d")], len(whole.token_ids) - 1, truncate=True)
    begin = len(known.encode(_around(prompt, 0), False)) + num_body
    assert cut.token_ids == whole.token_ids[: begin - 1] + whole.token_ids[begin:], "the document's last token is gone"
    (least,) = prompt.encode([("b", "c d")], 1, truncate=True)
    assert len(least.token_ids) == num_around
    (usual,) = YesNoPrompt(known, None).encode([("b", "c")], 1000, truncate=False)
    assert [i for i in usual.token_ids if i in (A, B, C, D)] == [A, B, C], "given a web search"
    for word in ("yes", "no"):
        with pytest.raises(InvalidRequestError, match="use a reranker"):
            YesNoPrompt(words(without=word), None)


def _around(prompt: YesNoPrompt, part: int) -> str:
    begin = f"<|im_start|>system\n{prompt._SYSTEM}<|im_end|>\n<|im_start|>user\n"
    return (begin, "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")[part]


async def test_each_call_is_asked_of_the_engine() -> None:
    asked: list[tuple[Any, ...]] = []

    async def ask(name: str, args: Any, options: Any) -> Any:
        asked.append((name, [*args], dict(options)))
        return name

    known: Any = AsyncTokenizer(ask)
    answers = [
        await known.encode("a", allow_special=False),
        await known.decode([1], skip_special_tokens=False),
        await known.count("a", add_generation_prompt=False),
        await known.render([HELLO], [1]),
        await known.render_ids([HELLO]),
    ]
    assert answers == [*CALLS]
    assert asked == [
        ("encode", ["a"], {"add_special_tokens": True, "allow_special": False}),
        ("decode", [[1]], {"skip_special_tokens": False}),
        ("count", ["a", None], {"add_generation_prompt": False}),
        ("render", [[HELLO], [1]], {}),
        ("render_ids", [[HELLO], None], {}),
    ]
