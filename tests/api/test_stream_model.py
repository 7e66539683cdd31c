"""Tokens, texts, ends and errors of a call in any order, read at any pace: against lists that say what must come."""

from __future__ import annotations

import asyncio
import gc
import random
from array import array
from typing import Any

import pytest

from aengine.engine.streams.token_stream import ChoiceOutput, Mailbox, TokenStream
from aengine.errors import EngineError, InvalidRequestError
from aengine.outputs import Completion, FinishReason, Logprob, Token

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
    await asyncio.sleep(0.01)  # a rest that a token ends would end within some turns of the loop
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
    choice.put_result(array("f", [1]), None)
    choice.put_result(array("f", [2]), STOP)
    choice.put_result(array("f", [3]), STOP)
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
