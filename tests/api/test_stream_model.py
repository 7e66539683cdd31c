"""Tokens, texts, ends and errors of a call in any order, read at any pace: against lists that say what must come."""

from __future__ import annotations

import asyncio
import gc
import pickle
import random
import threading
from array import array
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from aengine.engine.chat.message_builder import MessageBuilder
from aengine.engine.chat.messages import ChatCompletion, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from aengine.engine.streams.chat_answers import ParsedAnswers, ReceivedAnswers, chat_completion
from aengine.engine.streams.chat_stream import ChatStream
from aengine.engine.streams.cross_thread_stream import BlockingStream, CrossThreadStream, run_now
from aengine.engine.streams.logprobs import Logprobs, LogprobTable
from aengine.engine.streams.token_stream import ChoiceOutput, Mailbox, TokenStream
from aengine.errors import EngineError, InvalidRequestError
from aengine.outputs import Completion, FinishReason, Logprob, Token
from aengine.params import SamplingParams

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
END, LAST = 0, 25  # the model's end of sequence, and a stop token of the caller's


class Letters:
    """A detokenizer of letters, which holds a "y" back and stops at "yz"."""

    def __init__(self) -> None:
        self.stopped, self.held = False, ""

    @property
    def stop_string(self) -> str | None:
        return "yz" if self.stopped else None

    def put(self, token_id: int) -> str:
        said, self.held = self.held + chr(96 + token_id), ""
        if said.endswith("y"):
            said, self.held = said[:-1], "y"
        self.stopped = "yz" in said
        return said.partition("yz")[0]

    def flush(self) -> str:
        said, self.held = self.held, ""
        return said


class Call:
    """One user's call as the engine fills it, and what its reader must see."""

    def __init__(self, rng: random.Random, num_choices: int, *, has_text: bool, has_logprobs: bool) -> None:
        self.rng, self.num_ends, self.aborted = rng, 0, list[str]()
        self.mailbox = Mailbox(
            final_only=False, num_choices=num_choices, want_logprobs=has_logprobs, on_end=self._on_end
        )
        self.mailbox.stop_token_ids = frozenset({LAST})
        self.mailbox.num_prompt_tokens = 7
        self.stream = TokenStream("r", self.mailbox, asyncio.get_running_loop(), self._abort)
        self.has_text, self.has_logprobs = has_text, has_logprobs
        self.sent: list[Token] = []
        self.ids: list[list[int]] = [[] for _ in range(num_choices)]
        self.ends: list[tuple[FinishReason | None, Any]] = [(None, None)] * num_choices
        for choice in self.mailbox.choices if has_text else ():
            choice.begin(Letters())

    def _on_end(self) -> None:
        self.num_ends += 1

    def _abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.mailbox.abort()

    def put(self, choice: ChoiceOutput) -> None:
        i, rng = choice.index, self.rng
        ids = self.ids[i]
        token_id = rng.choice([END, LAST, 26, 1, 2, 25, 26]) if rng.random() < 0.5 else rng.randint(1, 26)
        ids.append(token_id)
        reason = STOP if token_id in (END, LAST) and rng.random() < 0.4 else LENGTH if len(ids) == 12 else None
        logprobs = (-0.5, array("i", [3, 4]), array("f", [-0.25, -2.0])) if self.has_logprobs else None
        said = "".join(chr(96 + token_id) for token_id in ids)
        is_stop_string = self.has_text and reason is not STOP and said.endswith("yz")
        stopped = choice.put(token_id, reason, logprobs)
        assert stopped == (is_stop_string and reason is None)
        if stopped:
            choice.end(STOP)
        reason = STOP if is_stop_string else reason
        if reason is not None:
            why = "yz" if is_stop_string else token_id if reason is STOP and token_id == LAST else None
            self.ends[i] = reason, why
        likeliest = (Logprob(3, -0.25), Logprob(4, -2.0)) if self.has_logprobs else ()
        logprob = -0.5 if self.has_logprobs else None
        self.sent.append(Token("", token_id, i, logprob, reason, len(ids) - 1, likeliest))

    def text(self, i: int) -> str:
        """What the reader of a completion has after its end."""
        if not self.has_text:
            return ""
        is_shown = self.ids[i][:-1] if self.ends[i][0] is STOP and self.ids[i][-1] in (END, LAST) else self.ids[i]
        text = "".join(chr(96 + token_id) for token_id in is_shown)
        return text.removesuffix("yz") if self.ends[i][1] == "yz" else text

    def check(self, read: list[Token], completion: Completion) -> None:
        assert [token._replace(text="") for token in read] == self.sent
        for choice, ids, (reason, why) in zip(completion.choices, self.ids, self.ends, strict=True):
            assert choice.token_ids == tuple(ids) and (choice.finish_reason, choice.stop_reason) == (reason, why)
            assert "".join(token.text for token in read if token.index == choice.index) == choice.text
            if reason in (STOP, LENGTH):
                assert choice.text == self.text(choice.index)
            if not self.has_logprobs:
                assert choice.logprobs is None
                continue
            rows = [(Logprob(token_id, -0.5), Logprob(3, -0.25), Logprob(4, -2.0)) for token_id in ids]
            assert choice.logprobs == rows
        usage = completion.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (7, sum(map(len, self.ids)))
        assert self.num_ends == 1


async def test_a_reader_gets_all_in_order_and_the_end_once(rng: random.Random) -> None:
    for _ in range(150):
        call = Call(rng, rng.randint(1, 3), has_text=rng.random() < 0.8, has_logprobs=rng.random() < 0.5)
        mailbox, stream, error, read = call.mailbox, call.stream, EngineError("the worker has died"), list[Token]()
        fate = rng.choice(["ends", "ends", "fails", "aborted"])

        async def reading(stream: TokenStream = stream, read: list[Token] = read) -> None:
            while tokens := await stream.read(rng.choice([None, 1, 2, 5])):
                read += tokens
                for _ in range(rng.randint(0, 4)):
                    await asyncio.sleep(0)

        task = asyncio.ensure_future(reading())
        while not mailbox.done:
            assert call.num_ends == 0
            call.put(rng.choice([choice for choice in mailbox.choices if choice.finish_reason is None]))
            assert stream.finish_reasons == tuple(reason for reason, _ in call.ends)
            if mailbox.done:
                break
            with pytest.raises(InvalidRequestError, match="has not ended yet"):
                stream.completion  # noqa: B018 - it raises
            if fate != "ends" and rng.random() < 0.1:
                reason = ABORT if fate == "aborted" else FinishReason.ERROR
                call.ends = [(ended or reason, why) for ended, why in call.ends]
                mailbox.abort() if fate == "aborted" else mailbox.fail(error)
                fate = f"was {fate}"
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
        mailbox.abort()
        mailbox.fail(ValueError("too late"))
        if fate == "was fails":
            with pytest.raises(EngineError) as caught:
                await task
            assert caught.value is error
        else:
            await task
            assert await stream.wait() == stream.completion
        assert mailbox.finish_reason is (
            FinishReason.ERROR if fate == "was fails" else ABORT if fate == "was aborted" else call.ends[0][0]
        )
        call.check(read, stream.completion)
        await stream.aclose()
        assert not call.aborted, "it has ended, and another request may have its id"


async def test_what_is_left_unread_is_known_and_dropped_when_it_is_closed(rng: random.Random) -> None:
    call = Call(rng, 2, has_text=True, has_logprobs=False)
    assert call.mailbox.oldest_unread() is None
    reader = asyncio.ensure_future(anext(call.stream))
    await asyncio.sleep(0)
    call.mailbox.choices[1].put(1, None)
    assert call.mailbox.oldest_unread() == Token("a", 1, 1), "its reader has been woken, and has not taken it yet"
    assert await reader == Token("a", 1, 1)
    call.mailbox.choices[0].put(2, None)
    assert call.mailbox.oldest_unread() == Token("b", 2, 0)
    await call.stream.aclose()
    assert call.aborted == ["r"] and call.num_ends == 1 and call.mailbox.oldest_unread() is None
    assert await call.stream.read() == [] and call.stream.finish_reasons == (ABORT, ABORT)


async def test_one_task_reads_and_its_end_is_the_requests(rng: random.Random) -> None:
    call = Call(rng, 1, has_text=True, has_logprobs=False)
    reader = asyncio.ensure_future(anext(call.stream))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match="already being read by another task"):
        await anext(call.stream)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert call.aborted == ["r"] and call.mailbox.finish_reason is ABORT
    rester = Call(rng, 1, has_text=True, has_logprobs=False)
    task = asyncio.ensure_future(rester.stream.rest(60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rester.aborted == ["r"]


async def test_a_rest_ends_with_the_call_and_not_with_a_token(rng: random.Random) -> None:
    call = Call(rng, 1, has_text=True, has_logprobs=False)
    task = asyncio.ensure_future(call.stream.rest(60))
    await asyncio.sleep(0)
    call.mailbox.choices[0].put(1, None)
    await asyncio.sleep(0.01)
    assert not task.done()
    call.mailbox.choices[0].put(2, LENGTH)
    async with asyncio.timeout(30):
        await task
        await call.stream.rest(60)
    assert [token.token_id for token in await call.stream.read()] == [1, 2]


async def test_a_call_that_was_never_made_fails_once(rng: random.Random) -> None:
    ends: list[None] = []
    mailbox = Mailbox(final_only=True, on_end=lambda: ends.append(None))
    stream = TokenStream("r", mailbox, asyncio.get_running_loop(), lambda request_id: None)
    waiting = asyncio.ensure_future(stream.wait())
    await asyncio.sleep(0)
    error = EngineError("no room")
    mailbox.fail(error)
    mailbox.fail(EngineError("again"))
    with pytest.raises(EngineError, match="no room"):
        await waiting
    assert len(ends) == 1 and mailbox.done and error.completion is None, "nothing had begun"


async def test_a_result_in_place_of_tokens(rng: random.Random) -> None:
    call = Call(rng, 1, has_text=False, has_logprobs=False)
    (choice,) = call.mailbox.choices
    choice.put_result(array("f", [1, 2]))
    choice.put_result(array("f", [3]))
    assert choice.numbers == array("f", [1, 2]) and call.stream.finish_reasons == (STOP,) and call.num_ends == 1


async def test_a_dropped_stream_ends_its_call_and_one_that_has_ended_does_not(rng: random.Random) -> None:
    dropped, ended = (Call(rng, 1, has_text=True, has_logprobs=False) for _ in "ab")
    ended.mailbox.choices[0].put(1, LENGTH)
    for call in (dropped, ended):
        del call.stream
    gc.collect()
    for _ in range(3):
        await asyncio.sleep(0)
    assert (dropped.aborted, ended.aborted) == (["r"], [])


async def test_one_completions_error_is_the_calls(rng: random.Random) -> None:
    call = Call(rng, 2, has_text=True, has_logprobs=False)
    first, second = call.mailbox.choices
    second.put(1, LENGTH)
    second.fail(EngineError("too late"))
    assert call.mailbox.error is None
    assert call.stream.usage.completion_tokens == 1
    async with call.stream as stream:
        assert (await anext(stream)).token_id == 1
        first.fail(EngineError("the row has failed"))
        with pytest.raises(EngineError, match="the row has failed"):
            await anext(stream)
    assert call.stream.finish_reasons == (FinishReason.ERROR, LENGTH) and not call.aborted and call.num_ends == 1


async def test_what_a_json_text_says_so_far_is_the_first_completions() -> None:
    for first, second, whole in ((STOP, LENGTH, 12), (LENGTH, STOP, None)):
        mailbox = Mailbox(final_only=False, num_choices=2, is_json=True)
        stream = TokenStream("r", mailbox, asyncio.get_running_loop(), lambda request_id: None)
        mailbox.choices[0].texts, mailbox.choices[1].texts = ["1", "2"], ["3"]
        mailbox.choices[0].end(first)
        assert stream.partial is None, "a number may go on while the call does"
        mailbox.choices[1].end(second)
        assert stream.partial == whole
    unasked = Mailbox(final_only=False, num_choices=1)
    unasked.choices[0].texts = ["1"]
    unasked.choices[0].end(STOP)
    unmade = Mailbox(final_only=False, is_json=True)
    for mailbox in (unasked, unmade):
        assert TokenStream("r", mailbox, asyncio.get_running_loop(), lambda request_id: None).partial is None


class Turns:
    """Stands for the engine's thread: what is posted to it, and what it does at the end of a turn, when told to."""

    is_foreign = False

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.posted: list[Callable[[], object]] = []
        self.deferred: list[Callable[[], object]] = []

    def post(self, call: Callable[[], object]) -> None:
        self.posted.append(call)

    def defer(self, call: Callable[[], object]) -> None:
        self.deferred.append(call)

    def check_process(self) -> None:
        pass

    def turn(self) -> None:
        for calls in (self.posted, self.deferred):
            while calls:
                calls.pop(0)()

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.wait(work)

    def wait(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        steps = work()
        steps.send(None)
        self.turn()
        with pytest.raises(StopIteration):
            steps.send(None)


def begun(kind: type[CrossThreadStream], thread: Any, aborted: list[str]) -> tuple[Any, Mailbox]:
    """A stream whose request the engine has."""
    stream, made = kind(thread, None, "r"), list[Mailbox]()

    def submit(buffer: Any) -> Mailbox:
        made.append(Mailbox(final_only=False, num_choices=2, buffer=buffer))
        return made[0]

    def abort(request_id: str) -> None:
        aborted.append(request_id)
        made[0].abort()

    stream.begin(submit, abort)
    return stream, made[0]


async def test_a_reader_elsewhere_gets_each_turn_of_the_engine_whole(rng: random.Random) -> None:
    for _ in range(100):
        thread, aborted = Turns(), list[str]()
        stream, mailbox = begun(CrossThreadStream, thread, aborted)
        read, put, is_shown = list[Token](), list[int](), 0

        async def reading(stream: Any = stream, read: list[Token] = read) -> None:
            while tokens := await stream.read(rng.choice([None, 1, 3])):
                read += tokens

        task = asyncio.ensure_future(reading())
        await asyncio.sleep(0)  # it waits
        is_closed = rng.random() < 0.3
        for i in range(rng.randint(0, 8)):
            put.append(i)
            mailbox.choices[i % 2].put(i, None)
            with pytest.raises(InvalidRequestError, match="has not ended yet"):
                stream.completion  # noqa: B018 - it raises
            if rng.random() < 0.5:
                thread.turn()
                is_shown = len(put)
            for _ in range(rng.randint(0, 4)):
                await asyncio.sleep(0)
            assert len(read) <= is_shown
        if is_closed and not task.done():
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            thread.turn()
            assert aborted == ["r"] and stream.completion.finish_reason is ABORT
            await stream.aclose()
            assert await stream.read() == []
        else:
            for choice in mailbox.choices:
                choice.end(LENGTH)
            thread.turn()
            async with asyncio.timeout(30):
                await task
                assert await stream.wait() == stream.completion
            assert [token.token_id for token in read] == put and not aborted
        assert stream.completion.choices == mailbox.completion("r").choices


@pytest.mark.parametrize("kind", [CrossThreadStream, BlockingStream])
async def test_a_stream_elsewhere_is_ended_and_fails_as_any_other(kind: type[CrossThreadStream]) -> None:
    def now(work: Coroutine[Any, Any, Any]) -> Any:
        """Nothing here waits: what is read has come."""
        return run_now(work)

    thread, aborted = Turns(), list[str]()
    refused = kind(thread, None, "r")  # type: ignore[arg-type]
    refused.begin(lambda buffer: int("no number"), print)  # type: ignore[arg-type, return-value]
    thread.turn()
    for ask in (lambda: refused.completion, lambda: now(refused.wait()), lambda: now(refused.read())):
        with pytest.raises(ValueError, match="no number"):
            ask()
    stream, mailbox = begun(kind, thread, aborted)
    mailbox.choices[0].put(5, None)
    thread.turn()
    assert mailbox.oldest_unread() == Token("", 5, 0) and mailbox.finish_reason is None
    mailbox.fail(EngineError("the worker has died"))
    thread.turn()
    assert [token.token_id for token in now(stream.read())] == [5] and mailbox.oldest_unread() is None
    with pytest.raises(EngineError, match="has died"):
        now(stream.read())
    assert stream.completion.choices[0].token_ids == (5,) and not aborted
    stream, mailbox = begun(kind, thread, aborted)
    mailbox.choices[0].put(5, None)
    thread.turn()
    now(stream.aclose())
    now(stream.aclose())
    assert aborted == ["r"] and now(stream.read()) == [] and stream.completion.finish_reason is ABORT
    told: list[str] = []
    BlockingStream.when_ended(stream, lambda: told.append("at once"))
    del stream
    thread.turn()
    assert told == ["at once"] and aborted == ["r"], "it has ended: another request may have its id"
    dropped, _ = begun(kind, thread, aborted)
    del dropped
    gc.collect()
    thread.turn()
    assert aborted == ["r", "r"]


async def test_a_reader_that_went_with_its_loop_ends_the_request() -> None:
    thread, aborted = Turns(), list[str]()
    stream, mailbox = begun(CrossThreadStream, thread, aborted)
    for is_closed in (False, True):
        stream._buffer.loop = loop = asyncio.new_event_loop()  # as while it waits; a reader can't be left there else
        if is_closed:
            loop.close()
        mailbox.choices[0].put(1, None)
        thread.turn()
        thread.turn()
        assert aborted == ["r"] * is_closed
        loop.close()


async def test_a_coroutine_that_must_not_suspend_and_does_is_closed() -> None:
    ended: list[bool] = []

    async def suspends() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            ended.append(True)

    with pytest.raises(AssertionError, match="must not suspend"):
        run_now(suspends())
    assert ended == [True]


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
    assert answers.completion(chat_completion(mailbox.completion("r"))).choices[0].message.content is None


def test_a_stream_that_was_never_made_is_dropped_without_a_word() -> None:
    for kind in (TokenStream, CrossThreadStream, BlockingStream):
        kind.__new__(kind)  # as where its constructor was interrupted; an error in `__del__` is a warning
    gc.collect()


async def test_two_threads_can_not_wait_for_one_stream() -> None:
    thread = Turns()
    stream, mailbox = begun(BlockingStream, thread, [])
    read: list[Token] = []
    reader = threading.Thread(target=lambda: read.append(run_now(anext(stream))))
    reader.start()
    while stream._buffer.wake is None:  # it is about to sleep
        await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match="already being read by another task"):
        run_now(anext(stream))
    mailbox.choices[0].put(7, None)
    thread.turn()
    await asyncio.to_thread(reader.join, 30)
    assert [token.token_id for token in read] == [7]


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
        return self.at_the_end

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
