"""Sessions in any order of turns, forks and ends, in a pool that has no room for all of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from conftest_api import core_of, settled, user_requests

from aengine import AsyncLLM, ContextLengthError, SamplingParams

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking")


class Agent:
    """One that uses a session, and knows what it must say."""

    def __init__(self, engine: AsyncLLM, rng: random.Random) -> None:
        self.engine, self.rng = engine, rng
        self.session = self.new_session([])
        self.known: list[int] = []  # tokens of the last turn, if nothing came after it
        self.num_turns = 0

    def new_session(self, messages: list[Any]) -> Any:
        keep = self.rng.choice((0, 0.01, 100))
        return self.engine.session("Be brief.", messages=messages, keep=keep, cache_salt=self.rng.choice((None, "one")))

    async def work(self) -> None:
        for _ in range(8):
            what = self.rng.choice((self.talk, self.talk, self.leave, self.cancel, self.fork, self.keep))
            history, num_turns = self.session.messages, len(self.session.usage.turns)
            try:
                await what()
            except ContextLengthError:
                assert self.session.messages == history and len(self.session.usage.turns) > num_turns
                await self.session.aclose()
                self.session, self.known = self.new_session(history[1:3]), []
            roles = [message["role"] for message in self.session.messages]
            assert roles == ["system"] + ["user", "assistant"] * (len(roles) // 2)
        self.num_turns += len(self.session.usage.turns)
        await self.session.aclose()

    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.rng.randrange(1, 40))

    async def talk(self) -> None:
        """A whole turn. Its prompt begins with the very tokens of the one before."""
        history = self.session.messages
        stream = self.session.stream("Hello", self.params())
        asked = user_requests(self.engine)[stream.request_id]
        await anext(stream)
        prompt = list(asked.requests[0].token_ids[: asked.requests[0].num_prompt_tokens])
        completion = await stream.wait()
        assert prompt[: len(self.known)] == self.known and len(prompt) == completion.usage.prompt_tokens
        said = completion.message.content or ""
        assert self.session.messages == [*history, message("user", "Hello"), message("assistant", said)]
        is_whole = "\ufffd" not in said  # no character is cut at the answer's end
        self.known = [*prompt, *completion.token_ids] if is_whole else []

    async def leave(self) -> None:
        """The answer as far as it has come is history."""
        history = self.session.messages
        async for _ in self.session.stream("Hi", self.params()):
            if self.rng.random() < 0.2:
                break
        assert self.session.messages[: len(history)] == history and len(self.session.messages) == len(history) + 2
        self.known = []

    async def cancel(self) -> None:
        """Nothing of it is, unless it had ended."""
        history = self.session.messages
        task = asyncio.create_task(self.session.chat("Hey", self.params()))
        await asyncio.sleep(self.rng.random() / 100)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            assert self.session.messages == history
        elif error := task.exception():
            raise error
        self.known = []

    async def fork(self) -> None:
        """Of a turn under way: both go on, each by itself; and this agent goes on with the fork."""
        stream = self.session.stream("Fork", self.params())
        await anext(stream)
        fork, before = self.session.fork(), self.session.messages
        assert fork.messages[:-1] == before[:-1]
        other = asyncio.create_task(fork.chat("And?", self.params()))
        whole, said = await asyncio.gather(stream.wait(), other)
        assert self.session.messages[-1]["content"] == whole.message.content
        assert fork.messages[-1]["content"] == said.message.content
        assert whole.message.content.startswith(fork.messages[len(before) - 1]["content"])
        self.num_turns += len(self.session.usage.turns)
        if self.rng.random() < 0.5:
            await self.session.aclose()
        self.session, self.known = fork, []

    async def keep(self) -> None:
        """For no time: what was said is forgotten too, and encoded anew."""
        seconds = self.rng.choice((0, 0.001, 50))
        await self.session.keep(seconds)
        self.known = self.known if seconds else []


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("num_blocks", [32, 200])
async def test_any_order_of_turns(make_engine: Make, rng: random.Random, num_blocks: int) -> None:
    """Answers are not cut into the tokens that encoding them gives: a token's text is chosen by its place alone."""
    fake = {"num_blocks": num_blocks, "max_model_len": 400, "delay": 0.0005}
    async with make_engine(fake=fake, max_num_seqs=6) as engine:
        agents = [Agent(engine, random.Random(rng.random())) for _ in range(8)]
        await asyncio.gather(*(agent.work() for agent in agents))
        await settled(engine)
        assert sum(agent.num_turns for agent in agents) > 20
        for replica in core_of(engine).replicas:
            assert replica.scheduler.rows.kv.pool.num_free == num_blocks
