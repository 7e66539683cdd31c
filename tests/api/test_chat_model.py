"""Answers of chats, and log-probabilities, as a reader sees them: against what their tokens say."""

from __future__ import annotations

import asyncio
import pickle
import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from aengine.engine.chat.message_builder import MessageBuilder
from aengine.engine.chat.messages import ChatCompletion, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from aengine.engine.streams.chat_answers import ParsedAnswers, ReceivedAnswers, chat_completion
from aengine.engine.streams.chat_stream import ChatStream
from aengine.engine.streams.logprobs import Logprobs, LogprobTable
from aengine.engine.streams.prompt_logprobs import of_pieces
from aengine.engine.streams.token_stream import Mailbox, TokenStream
from aengine.errors import EngineError, InvalidRequestError
from aengine.outputs import FinishReason, Logprob, Token
from aengine.params import SamplingParams

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


async def test_deltas_of_another_process_make_the_same_messages() -> None:
    mailbox = Mailbox(final_only=False, num_choices=2)
    answers = ReceivedAnswers(mailbox)
    deltas: list[Any] = [ReasoningDelta("so"), TextDelta("a"), TextDelta("c", choice=1), TextDelta("b")]
    deltas += [ToolCallStart(0, "id", "f", choice=1), ToolCallDelta(0, "{}", choice=1)]
    assert answers.read(deltas) is deltas and list(answers.finish()) == [] and not answers.unread()
    answers.handed_out += deltas[:2]
    assert [message.content for message in answers.messages] == ["a", None]
    answers.handed_out += deltas[2:]
    for _ in range(2):
        first, second = answers.messages
        assert (first.content, first.reasoning, second.content) == ("ab", "so", "c")
        assert [(call.name, call.arguments) for call in second.tool_calls] == [("f", "{}")]
    for choice in mailbox.choices:
        choice.end(STOP)
    whole = answers.completion(mailbox.completion("r"))
    assert isinstance(whole, ChatCompletion) and [choice.text for choice in whole.choices] == ["ab", "c"]
    assert [choice.message for choice in whole.choices] == [first, second]
    said_whole = chat_completion(mailbox.completion("r"), whole.choices)
    assert answers.completion(said_whole) == said_whole

    class Told(Mailbox):
        def completion(self, request_id: str) -> Any:
            return said_whole

    told = ReceivedAnswers(ended := Told(final_only=False, num_choices=2))
    assert [message.content for message in told.messages] == [None, None], "it has not ended"
    for choice in ended.choices:
        choice.end(STOP)
    assert list(told.messages) == [first, second], "what came by no delta is in the whole"


class ScriptedParser:
    """Makes of each token what its letter says: reasoning, text, both, or nothing that is certain yet."""

    def __init__(self, at_the_end: list[Any]) -> None:
        self.at_the_end, self.builder = at_the_end, MessageBuilder(None, {})

    def feed(self, text: str, marker: Any) -> list[Any]:
        deltas = [ReasoningDelta("r")] * (text in ("r", "b")) + [TextDelta(text)] * (text not in ("r", "."))
        for delta in deltas:
            self.builder.add(delta)
        return deltas

    def finish(self) -> list[Any]:
        rest, self.at_the_end = self.at_the_end, []
        for delta in rest:
            self.builder.add(delta)
        return rest

    @property
    def message(self) -> Any:
        return self.builder.message


def scripted_plan(rest: list[Any], kind: str = "regex") -> Any:
    return SimpleNamespace(
        shape=SimpleNamespace(kind=kind),
        new_parser=lambda: ScriptedParser(rest),
        marker_of=lambda token_id, is_stop: None,
        has_call=lambda texts, token_ids: False,
        output_type=None,
    )


def test_tokens_of_reasoning_are_those_from_its_first_to_its_last(rng: random.Random) -> None:
    """And each delta says whose it is, and of which tokens it was made."""
    for _ in range(300):
        letters = rng.choices("rtb.", k=rng.randint(0, 8))
        rest: list[Any] = rng.choice([[], [ReasoningDelta("r")], [TextDelta("t")]])
        has_logprobs = rng.random() < 0.5
        answers = ParsedAnswers(scripted_plan(rest), SamplingParams(n=2, logprobs=1 if has_logprobs else None))
        tokens = [Token(letter, i, 1) for i, letter in enumerate(letters)]
        deltas = answers.read(tokens)
        assert answers.unread() == {0, 1}
        deltas += [delta for delta in answers.finish() if delta.choice == 1]
        places = [i for i, letter in enumerate(letters) if letter in "rb"]
        is_reasoning_last = bool(rest) and isinstance(rest[0], ReasoningDelta)
        last = len(letters) - 1 if is_reasoning_last else places[-1] if places else 0
        assert answers._answers[1].num_reasoning_tokens == (last - places[0] + 1 if places else 0)
        kinds = [kind for letter in letters for kind in {"b": "rb", ".": ""}.get(letter, letter)]
        if has_logprobs and letters and letters[-1] == "." and not rest:
            kinds.append("")  # left over: a delta without text
        assert ["r" if isinstance(d, ReasoningDelta) else d.text for d in deltas] == kinds + [d.text for d in rest]
        assert all(delta.choice == 1 for delta in deltas)
        assert [token for delta in deltas for token in delta.tokens] == (tokens if has_logprobs and deltas else [])
        (ended,) = answers.read([Token("t", 9, 0, None, LENGTH)])[:1]
        assert ended.choice == 0 and answers.unread() == {1}


async def test_a_chat_is_the_deltas_of_its_tokens() -> None:
    for kind, whole in (("json_schema", 12), ("regex", None)):
        mailbox = Mailbox(final_only=False, num_choices=2)
        stream = TokenStream("r", mailbox, asyncio.get_running_loop(), lambda request_id: mailbox.abort())
        chat = ChatStream(stream, SamplingParams(n=2))
        assert [message.content for message in chat.messages] == [None, None] and chat.partial is None
        assert chat.finish_reasons == (None, None) and chat.message.content is None
        mailbox.plan = scripted_plan([], kind)
        for token_id, (text, index) in enumerate((("r", 0), ("1", 0), ("9", 1), ("2", 0), (".", 0))):
            mailbox.choices[index].token_ids.append(token_id)
            mailbox.pending.append(Token(text, token_id, index))
        assert isinstance(await anext(chat), ReasoningDelta) and chat.message.content is None
        assert isinstance(await anext(chat), TextDelta) and chat.message.content == "1" and chat.partial is None
        assert [(delta.choice, delta.text) for delta in await chat.read()] == [(1, "9"), (0, "2")]
        with pytest.raises(InvalidRequestError, match="has not been read to its end"):
            chat.completion  # noqa: B018 - it raises
        resting = asyncio.ensure_future(chat.rest(60))
        await asyncio.sleep(0)
        mailbox.choices[0].end(STOP)
        await asyncio.sleep(0)
        assert not resting.done() and chat.finish_reasons == (None, None), "tokens of it may be unread"
        mailbox.choices[1].end(LENGTH)
        async with asyncio.timeout(30):
            await resting
        assert await chat.read() == [] and chat.finish_reasons == (STOP, LENGTH) and chat.partial == whole
        assert [choice.message.content for choice in (await chat.wait()).choices] == ["12", "9"]
        assert chat.completion is chat.completion and chat.usage.completion_tokens == 5


async def test_a_chat_that_is_closed_says_what_was_held_back_too() -> None:
    mailbox = Mailbox(final_only=False, num_choices=1)
    stream = TokenStream("r", mailbox, asyncio.get_running_loop(), lambda request_id: mailbox.abort())
    chat = ChatStream(stream, SamplingParams())
    mailbox.plan = scripted_plan([TextDelta("<")])
    mailbox.pending += [Token("1", 1, 0), Token("2", 2, 0)]
    assert (await anext(chat)).choice == 0 and chat.message.content == "1"
    await chat.aclose()
    assert chat.completion.message.content == chat.message.content == "1<"
    assert await chat.read() == [] and chat.finish_reasons == (FinishReason.ABORT,)


async def test_a_chat_that_fails_has_what_had_come_as_a_chats_completion() -> None:
    for has_begun in (True, False):
        mailbox = Mailbox(final_only=False, num_choices=1)
        mailbox.times.scheduled = 1.0 if has_begun else None
        stream = TokenStream("r", mailbox, asyncio.get_running_loop(), lambda request_id: mailbox.abort())
        chat = ChatStream(stream, SamplingParams())
        mailbox.plan = scripted_plan([])
        mailbox.pending.append(Token("t", 1, 0))
        error = EngineError("the worker has died")
        mailbox.fail(error)
        assert chat.finish_reasons == (None,) and (await anext(chat)).choice == 0
        with pytest.raises(EngineError, match="has died"):
            await chat.read()
        assert chat.finish_reasons == (FinishReason.ERROR,)
        if has_begun:
            assert isinstance(error.completion, ChatCompletion) and error.completion.choices[0].message.content == "t"
        else:
            assert error.completion is None
        async with chat:
            pass
        assert chat.completion.choices[0].message.content == "t"


def test_log_probabilities_are_sequences_of_sequences(rng: random.Random) -> None:
    for _ in range(100):
        table, rows = LogprobTable(), list[tuple[Logprob, ...]]()
        for i in range(rng.randint(0, 6)):
            if rng.random() < 0.2:
                assert table.append(i, None) == ()
                rows.append(())
                continue
            likeliest = [Logprob(rng.randint(0, 9), -rng.randint(0, 8) / 4) for _ in range(rng.randint(0, 4))]
            ids, values = array("i", [one[0] for one in likeliest]), array("f", [one[1] for one in likeliest])
            top: Any = table.append(i, (-0.5, ids, values))
            rows.append((Logprob(i, -0.5), *likeliest))
            _same(top, likeliest, rng)
        _same(Logprobs(table, range(len(rows))), rows, rng)


def test_log_probabilities_of_a_prompt_are_those_of_its_pieces(rng: random.Random) -> None:
    """They come in order; one may begin within what the last had, and there may be none of a prompt's ends."""
    for _ in range(100):
        length, num_top = rng.randint(0, 8), rng.randint(0, 3)
        end = first = rng.randint(0, length)
        rows: list[Any] = [None] * first
        numbers = array("f")
        for _ in range(rng.randint(0, 3)):
            begin, end = rng.randint(first, end), rng.randint(end, length)
            rows += [
                tuple(Logprob(rng.randint(0, 9), -rng.randint(0, 8) / 4) for _ in range(1 + num_top))
                for _ in range(end - len(rows))
            ]
            numbers.frombytes(array("i", [begin, end - begin, num_top]).tobytes())
            for own, *top in rows[begin:end]:
                numbers.frombytes(array("i", [own[0]]).tobytes() + array("f", [own[1]]).tobytes())
                numbers.frombytes(array("i", [one[0] for one in top]).tobytes())
                numbers.extend(one[1] for one in top)
        _same(of_pieces(numbers, length), rows + [None] * (length - len(rows)), rng)


def _same(found: Any, elements: list[Any], rng: random.Random) -> None:
    """Whether it is those elements, whatever is asked of it."""
    assert len(found) == len(elements) and list(found) == elements and found == elements and found == tuple(elements)
    assert hash(found) == hash(tuple(elements)) and found != [*elements, 1] and found != "x"
    for copied in (found, pickle.loads(pickle.dumps(found))):
        for place in range(-len(elements), len(elements)):
            assert copied[place] == elements[place] and copied != [*elements[:place], 1, *elements[place:]][:-1]
        for _ in range(5):
            part = slice(*(rng.choice([None, *range(-5, 6)]) for _ in "ab"), rng.choice([None, 1, 2, -1, -2]))
            assert copied[part] == elements[part] and pickle.loads(pickle.dumps(copied[part])) == elements[part]
        with pytest.raises(IndexError):
            copied[len(elements)]
    shown = ", ".join([*map(repr, elements[:4]), *([f"... {len(elements) - 4} more"] if len(elements) > 4 else [])])
    assert repr(found) == f"{type(found).__name__}([{shown}])"
