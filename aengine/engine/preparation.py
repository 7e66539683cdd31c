"""`Preparation`: all that is done for a request between its registration and the step loop.

    chat       plan (a thread) ──> its grammar, compiled ──┐
    other      type, if any, described ──> its grammar, compiled ──> prompt encoded ──> its adapter ──> Prepared

The grammar comes first, so that a prompt is not encoded for a request that is refused; and the adapter last, since a
request that waits for a slot should have nothing else to wait for. One coroutine prepares a
request; cancelling it, at any await, leaves nothing behind: work that no thread has begun is taken back, and what runs
was bounded before it began. Long prompts have a lane of their own (`aengine.limits.bounds.is_long`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ..errors import EngineOverloadedError, GrammarError
from ..limits.bounds import MAX_QUEUED_CALLS
from ..limits.checks import check_num_characters, check_num_messages, is_long
from ..params import SamplingParams
from .adapters.adapters import Adapters
from .sampling_extras import check_num_results, encode_bad_words
from .sessions.said_tokens import SaidTokens
from .structured.service import GrammarService
from .threads.lanes import Lanes
from .threads.pools import ThreadPool
from .tokenizer.prompt import MessagesPart, TextPart, TokensPart, check_token_ids
from .tokenizer.tokenizer import Tokenizer
from .tokenizer_view import TokenizerView
from .user_request import Limits, Phase, Prepared, UserRequest

T = TypeVar("T")


class Preparation:
    """Prepares the requests of one engine, on its loop."""

    def __init__(
        self, tokenizer: Tokenizer | None, grammars: GrammarService | None, limits: Limits, adapters: Adapters
    ) -> None:
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._limits = limits
        self.adapters = adapters
        self._lanes = Lanes("prompt", 2)
        self._said = SaidTokens()

    async def prepare(self, request: UserRequest) -> Prepared:
        """Make the request's token ids and its grammar. Updates its `phase`.

        Raises InvalidRequestError, ContextLengthError, GrammarError, EngineOverloadedError, EngineClosedError.
        """
        words = request.params.bad_words
        sequences: list[list[int]] = []
        if words:
            request.phase = Phase.ENCODING
            assert self._tokenizer is not None
            sequences = await self.run(encode_bad_words, self._tokenizer, words, is_long=False)
        prepared = replace(await self._prepare_prompt(request), bad_words=sequences)
        if request.adapter is not None:
            request.phase = Phase.LOADING
            request.share = await self.adapters.share(request.adapter)
        return prepared

    async def _prepare_prompt(self, request: UserRequest) -> Prepared:
        prompt = request.prompt
        assert prompt is not None
        if prompt.kind == "chat":
            return await self._plan(request)
        grammar = None
        if request.constraint is not None or request.asked_type is not None:
            request.phase = Phase.COMPILING
            grammars = self._grammar_service()
            if request.asked_type is not None:
                described = await grammars.run(request.asked_type.described)
                request.mailbox.output_type, request.constraint = described
                request.asked_type = None
            assert request.constraint is not None
            grammar = await grammars.prepare(request.constraint)
        if isinstance(prompt, TokensPart):
            return Prepared(prompt.token_ids, grammar)
        request.phase = Phase.ENCODING
        assert isinstance(prompt, TextPart | MessagesPart) and self._tokenizer is not None
        ids = await self.run(prompt.encode, self._tokenizer, self._limits.max_model_len, is_long=prompt.is_long)
        return Prepared(self.check_ids(ids, request.params), grammar, begins_text=isinstance(prompt, MessagesPart))

    async def _plan(self, request: UserRequest) -> Prepared:
        from .chat import plan  # imported late: it imports all of the chat package

        chat, max_model_len = request.prompt, self._limits.max_model_len
        assert self._tokenizer is not None and isinstance(chat, plan.ChatRequest)
        request.phase = Phase.PLANNING
        grammars = self._grammar_service()
        turn = self._said.turn(request.session)
        asked = await self.run(plan.plan_chat, self._tokenizer, chat, max_model_len, turn.encode, is_long=chat.is_long)
        grammar = None if asked.spec is None else await grammars.prepare(asked.spec)
        request.mailbox.plan = asked
        turn.begin(request.mailbox.choices[0].token_ids)
        begins_text = not chat.continue_final_message
        return Prepared(self.check_ids(asked.prompt, request.params), grammar, asked.marker_ids, begins_text)

    def end_turn(self, request: UserRequest) -> None:
        """Remember what a request has generated that has ended, if a session's next turn may begin with it."""
        self._said.end(request.session, request.mailbox.choices[0].token_ids)

    def end_session(self, session_id: str, cache_salt: str | None) -> None:
        """Forget what a session has said."""
        self._said.forget(((cache_salt or "").encode(), session_id))

    def check_ids(self, ids: Sequence[int], params: SamplingParams) -> list[int]:
        """Return the ids of a prompt, checked to be the model's and to leave room for what the parameters ask for.
        Raises as `check_num_results` and `check_token_ids`."""
        check_num_results(params, len(ids))
        limits, generates = self._limits, params.max_tokens != 0
        return check_token_ids(ids, limits.vocab_size, limits.max_model_len, generates=generates)

    def run(self, function: Callable[..., T], *args: Any, is_long: bool) -> asyncio.Future[T]:
        """Call ``function`` in a thread; ``is_long``: in the lane for long prompts, so that short ones need not
        wait."""
        return self._lanes.run(function, *args, is_long=is_long)

    async def ask_tokenizer(self, method: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Make one of `AsyncTokenizer`'s calls. Raises as that says."""
        max_model_len = self._limits.max_model_len
        if isinstance(given := args[0], str):  # the length of a text is checked at once, without a thread
            check_num_characters(len(given), max_model_len)
        elif method != "decode":
            check_num_messages(max_model_len, *args)
        tokenizer = TokenizerView(self._tokenizer, self._limits.vocab_size, max_model_len)
        is_slow = is_long(args, options)
        if self._lanes.num_queued(is_long=is_slow) >= MAX_QUEUED_CALLS:
            message = f"{MAX_QUEUED_CALLS} calls of the tokenizer wait for a thread: try again soon"
            raise EngineOverloadedError(message, retry_after=1.0)
        return await self.run(partial(getattr(tokenizer, method), *args, **options), is_long=is_slow)

    def _grammar_service(self) -> GrammarService:
        if self._grammars is None:
            raise GrammarError("a grammar needs a tokenizer: start without skip_tokenizer=True", kind="unsupported")
        return self._grammars

    def close(self) -> tuple[ThreadPool, ...]:
        """Begin no more work. Returns the pools, whose threads may be waited for. From any thread."""
        return self._lanes.close()

    def drop_tables(self) -> None:
        """Free the tokenizer and the grammars, after `close`, when no request is left."""
        self._tokenizer = self._grammars = None
